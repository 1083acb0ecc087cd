"""PyTorch's pipeline schedules: which rank holds which stage, and which micro-batches they take."""

import argparse

import torch
from torch.distributed import pipelining

from harness.command_line import fail

SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,  # all forward, then all back (Huang et al. 2019)
    "1f1b": pipelining.Schedule1F1B,  # back as soon as can be: fewer activations are kept
    "interleaved": pipelining.ScheduleInterleaved1F1B,  # two stages a rank: shorter waits
    "zbv": pipelining.ScheduleZBVZeroBubble,  # and gradients of weights where it would wait
    "dualpipev": pipelining.ScheduleDualPipeV,  # forward of one micro-batch, backward of another
}
IN_A_V = "zbv", "dualpipev"  # of two stages a rank; they take backward apart


def ranks_of_stages(schedule: str, ranks: int) -> list[int]:
    """The rank that holds each stage: each one, two in a loop (0 1 0 1), or in a V (0 1 1 0)."""
    once = list(range(ranks))
    if schedule in IN_A_V:
        return once + once[::-1]
    return once + once if schedule == "interleaved" else once


def divide(
    args: argparse.Namespace, layers: int, ranks: int, batch: int = 0
) -> tuple[list[int], int]:
    """The rank of each stage, and how many micro-batches: ``--microbatches``, or at least two for
    each rank. What would let one rank raise an error, and the others wait for it, is refused.

    Args:
        batch: that goes through the pipeline at once, if not ``--batch-size``.
    """
    schedule, whole = args.pipeline_schedule, args.batch_size
    batch = batch or whole
    owners = ranks_of_stages(schedule, ranks)
    if layers < len(owners):
        fail(
            f"--model {args.model} has {layers} layers, and --pipeline-schedule {schedule} makes "
            f"{len(owners)} stages of them on {ranks} ranks; use fewer ranks, or more layers"
        )
    fit = fitting_microbatches(schedule, batch, ranks)
    microbatches = args.microbatches or default_microbatches(schedule, batch, ranks) or batch
    if microbatches not in fit:
        whole_or_part = f"--batch-size {batch}"
        if batch != whole:
            whole_or_part = f"{batch} samples of --batch-size {whole} at once"
        use = " or ".join([*map(str, fit), "another --batch-size"])
        fail(
            f"--microbatches {microbatches} is not for --pipeline-schedule {schedule} with "
            f"{whole_or_part} on {ranks} ranks; use {use}"
        )
    return owners, microbatches


def fitting_microbatches(schedule: str, batch: int, ranks: int) -> list[int]:
    least = {"1f1b": ranks, "dualpipev": 2 * ranks}.get(schedule, 1)
    fit = [n for n in range(least, batch + 1) if batch % n == 0]
    if schedule == "interleaved":  # which takes them in equal rounds
        fit = [n for n in fit if n % max(1, n // ranks) == 0]
    return fit


def default_microbatches(schedule: str, batch: int, ranks: int) -> int | None:
    """At least two for each rank, if the batch has as many; ``None`` if it cannot be divided."""
    fit = fitting_microbatches(schedule, batch, ranks)
    return next((n for n in fit if n >= 2 * ranks), max(fit, default=None))


def make_shapes(
    size: tuple[int, int], width: int, classes: int, parts: int = 1, dtype=None
) -> list[torch.Tensor]:
    """Of a micro-batch's tokens ``size``, of what stages send each other, and of logits; without
    them a first forward would find them out, and draw dropout for it.

    Args:
        parts: into which positions are cut between stages.
        dtype: of what is sent, and of logits.
    """
    batch, time = size
    with torch.device("meta"):
        tokens = torch.empty(size, dtype=torch.int64)
        hidden = torch.empty(batch, time // parts, width, dtype=dtype, requires_grad=True)
        return [tokens, hidden, torch.empty(batch, classes, time, dtype=dtype, requires_grad=True)]
