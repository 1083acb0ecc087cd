"""PyTorch's pipeline schedules: the rank of each stage, and the number of micro-batches."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from harness.cli import fail
from harness.world import gather_objects

SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,  # all forward, then all backward (Huang et al. 2019)
    "1f1b": pipelining.Schedule1F1B,  # backward as early as possible: fewer activations
    "interleaved": pipelining.ScheduleInterleaved1F1B,  # two stages per rank: less idle time
    "zbv": pipelining.ScheduleZBVZeroBubble,  # weight gradients in idle time
    "dualpipev": pipelining.ScheduleDualPipeV,  # overlaps forward and backward
}


class PipelineStage(pipelining.PipelineStage):
    """PyTorch's. With NCCL, since PyTorch 2.14, activations and their gradients have communicators
    of their own, since 2.15 for each pair of ranks. With gloo it sends nothing before the first
    step: 2.11 would to the own rank."""

    def __init__(self, module, number: int, count: int, device: torch.device, *ends, group=None):
        config = getattr(torch.distributed, "config", None)
        for option in ("pipeline_per_direction_p2p", "pipeline_per_edge_p2p"):
            if device.type == "cuda" and hasattr(config, option):
                setattr(config, option, True)
        super().__init__(module, number, count, device, *ends, group=group)

    def _get_init_p2p_neighbors_ops(self) -> list:
        return [] if self.device.type == "cpu" else super()._get_init_p2p_neighbors_ops()


IN_A_V = "zbv", "dualpipev"  # two stages per rank, split backward


def ranks_of_stages(schedule: str, ranks: int) -> list[int]:
    """The rank of each stage: one per rank, or two in a loop (0 1 0 1) or in a V (0 1 1 0)."""
    once = list(range(ranks))
    if schedule in IN_A_V:
        return once + once[::-1]
    return once + once if schedule == "interleaved" else once


def divide(args, layers: int, ranks: int, batch: int = 0) -> tuple[list[int], int]:
    """The rank of each stage, and the number of micro-batches. Reject what would fail on one rank
    while the others wait for it. ``batch``: samples per pass, if not ``--batch-size``."""
    schedule = args.pipeline_schedule
    whole = args.batch_size
    batch = batch or whole
    owners = ranks_of_stages(schedule, ranks)
    if layers < len(owners):
        needs = f"--pipeline-schedule {schedule} needs {len(owners)} stages on {ranks} ranks"
        has = f"--model {args.model} has {layers} layers"
        fail(f"{has}, and {needs}; use fewer ranks, or more layers")
    fit = fitting_microbatches(schedule, batch, ranks)
    microbatches = args.microbatches or default_microbatches(schedule, batch, ranks) or batch
    if microbatches not in fit:
        part = f"{batch} samples of --batch-size {whole} at once"
        whole_or_part = f"--batch-size {batch}" if batch == whole else part
        use = " or ".join([*map(str, fit), "another --batch-size"])
        with_these = f"--pipeline-schedule {schedule} with {whole_or_part} on {ranks} ranks"
        fail(f"--microbatches {microbatches} is not for {with_these}; use {use}")
    return owners, microbatches


def fitting_microbatches(schedule: str, batch: int, ranks: int) -> list[int]:
    least = {"1f1b": ranks, "dualpipev": 2 * ranks}.get(schedule, 1)
    fit = [n for n in range(least, batch + 1) if batch % n == 0]
    if schedule == "interleaved":  # needs rounds of equal size
        fit = [n for n in fit if n % max(1, n // ranks) == 0]
    return fit


def default_microbatches(schedule: str, batch: int, ranks: int) -> int | None:
    """At least two per rank, if the batch has as many; ``None`` if it cannot be divided."""
    fit = fitting_microbatches(schedule, batch, ranks)
    return next((n for n in fit if n >= 2 * ranks), max(fit, default=None))


def make_shapes(
    size: tuple[int, ...], width: int, classes: int, parts: int = 1, dtype=None
) -> list[torch.Tensor]:
    """Shapes of a micro-batch's tokens (``size``), of activations between stages, of ``dtype`` and
    with positions split into ``parts``, and of logits. Without them PyTorch would infer the shapes
    by a forward, which would use random numbers."""
    batch, *_, time = size
    with torch.device("meta"):
        tokens = torch.empty(size, dtype=torch.int64)
        hidden = torch.empty(batch, time // parts, width, dtype=dtype, requires_grad=True)
        return [tokens, hidden, torch.empty(batch, time, classes, requires_grad=True)]


def gather_weights(model: nn.Module, group) -> dict[str, torch.Tensor]:
    """The weights of all stages on the CPU of rank 0, sent one at a time: as one object they would
    be there several times. All ranks call it, with a ``group`` of gloo."""
    own = model.state_dict()
    rank = dist.get_rank()
    sizes = {name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}
    found = {}
    for owner, theirs in enumerate(gather_objects(sizes)):
        for name, (shape, dtype) in theirs.items():
            if rank == owner == 0:
                found[name] = own[name].cpu()
            elif rank == owner:
                dist.send(own[name].cpu(), 0, group=group)
            elif rank == 0:
                found[name] = torch.empty(shape, dtype=dtype)
                dist.recv(found[name], owner, group=group)
    return found
