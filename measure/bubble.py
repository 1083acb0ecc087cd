"""Measure the bubble of a pipeline: the share of a step in which a rank computes nothing.

    python measure/bubble.py

Trains with each schedule of pytorch_PP.py on two ranks, and writes results/bubble.json: the shares,
averaged over the ranks, by the formula; as counted in the schedule's order, where backward takes
twice as long as forward, and each half of it as long as forward; and medians of the measured
shares, by the clock, and by the time that each part of the work had a core, as if nothing else ran
and communication took no time. The clock needs an idle machine with a core for each rank.
"""

import collections
import contextlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from fractions import Fraction
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.measure import git_commit, hardware, versions  # noqa: E402
from parallel.pipelining import SCHEDULES, ranks_of_stages  # noqa: E402

RANKS, SAMPLES, WARMUP = 2, 4, 3  # samples of a micro-batch, and steps that do not count
JOB = (
    "--device cpu --model gpt-8x8x256 --context 64 --dataset synthetic --train-samples 1024 "
    "--eval-samples 8 --epochs 1 --max-steps 15 --print-freq 100"
)
UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}  # forward, backward; its halves, for inputs and weights


def formula(schedule: str, ranks: int, microbatches: int) -> Fraction:
    """Narayanan et al. 2021 (arXiv:2104.04473), section 2.2, for v stages a rank: of (p - 1) / m of
    the work, 1 / v. With those in a V what is left is p - 1 forwards of a stage, of six parts for
    each micro-batch, from 2 * p - 1 (dualpipev: 2 * p) micro-batches on."""
    works = {"interleaved": 2, "zbv": 6, "dualpipev": 6}.get(schedule, 1)
    return Fraction(ranks - 1, microbatches * works + ranks - 1)


def order_of_1f1b(ranks: int, microbatches: int) -> list[list[tuple]]:
    """As its ``_step_microbatches`` does it. (Its ``pipeline_order`` is for drawings, and leaves
    out the last rank's first forward, in PyTorch 2.11 and 2.15.)"""
    order = []
    for rank in range(ranks):
        ahead = min(microbatches, ranks - rank)
        forward = [("F", rank, number) for number in range(microbatches)]
        backward = [("B", rank, number) for number in range(microbatches)]
        in_turn = [part for pair in zip(backward, forward[ahead:], strict=False) for part in pair]
        order.append([*forward[:ahead], *in_turn, *backward[microbatches - ahead :]])
    return order


def plan(schedule: str, ranks: int, microbatches: int):
    """PyTorch's schedule, as the first of so many ranks makes it."""
    owners = ranks_of_stages(schedule, ranks)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        own = [number for number, owner in enumerate(owners) if owner == 0]
        among = len(owners), torch.device("cpu")
        parts = [PipelineStage(nn.Identity(), number, *among) for number in own]
        return SCHEDULES[schedule](parts if len(parts) > 1 else parts[0], microbatches)
    finally:
        dist.destroy_process_group()


def order_of(schedule: str, ranks: int, microbatches: int) -> list[list[tuple]]:
    """What each rank computes, in PyTorch's order: kind, stage, micro-batch."""
    if schedule == "1f1b":
        return order_of_1f1b(ranks, microbatches)
    order, planned = [], plan(schedule, ranks, microbatches).pipeline_order
    for rank in range(ranks):
        names = " ".join(map(str, planned[rank]))  # such as 0F1, or two in a bracket; None is a gap
        parts = re.findall(r"\b(\d+)([FBIW])(\d+)\b", names)
        order.append([(kind, int(stage), int(number)) for stage, kind, number in parts])
    return order


def end_times(order: list[list[tuple]], seconds) -> dict[tuple, float]:
    """Of each part, if each rank begins its next part as soon as it can and messages take no time.
    ``seconds``: of a part (kind, stage, micro-batch)."""
    last = max(stage for parts in order for _, stage, _ in parts)
    ends, clocks, left = {}, [0] * len(order), [collections.deque(parts) for parts in order]

    def needed(kind, stage, number):
        if kind == "W":
            return {("I", stage, number)}
        if kind == "F":
            return {("F", stage - 1, number)} if stage else set()
        after = {("B", stage + 1, number)} if stage < last else set()
        return {("F", stage, number)} | after

    while any(left):
        ready = [r for r, parts in enumerate(left) if parts and needed(*parts[0]) <= ends.keys()]
        assert ready, "each waits for another"
        for rank in ready:
            kind, stage, number = part = left[rank].popleft()
            begin = max([clocks[rank], *(ends[wait] for wait in needed(*part))])
            clocks[rank] = ends[part] = begin + seconds(part)
            if kind == "I":  # what the stage before waits for
                ends["B", stage, number] = clocks[rank]
    return ends


def idle_shares(order: list[list[tuple]], seconds) -> list:
    """Of each rank, with the times of :func:`end_times`."""
    last = max(end_times(order, seconds).values())
    return [1 - sum(map(seconds, parts)) / last for parts in order]


def timetable(schedule: str, ranks: int, microbatches: int) -> dict:
    """When each rank computes what, in UNITS: of each part its kind, stage, micro-batch, begin and
    length; and the bubble, as counted and by the formula."""
    order = order_of(schedule, ranks, microbatches)
    ends = end_times(order, lambda part: UNITS[part[0]])
    length = max(ends.values())
    rows = [[[*part, ends[part] - UNITS[part[0]], UNITS[part[0]]] for part in row] for row in order]
    busy = sum(part[-1] for row in rows for part in row)
    return {
        "schedule": schedule, "ranks": ranks, "microbatches": microbatches, "length": length,
        "bubble": 1 - busy / length / ranks,
        "formula": float(formula(schedule, ranks, microbatches)), "rows": rows,
    }  # fmt: skip


def timetables() -> list[dict]:
    """Of each schedule that PyTorch has, where it supports the sizes."""
    found = []
    for sizes in itertools.product(SCHEDULES, (2, 4, 8), (4, 8, 16)):
        with contextlib.suppress(ValueError, AssertionError, RuntimeError):
            found.append(timetable(*sizes))
    return found


def read_steps(folder: Path) -> list[tuple]:
    """Of each step, by rank, what the hook `parts` of tests/hooks.py wrote."""
    files = sorted(folder.glob("parts-*.json"))
    return list(zip(*(json.loads(file.read_text()) for file in files), strict=True))


def measure_idle(step: tuple) -> tuple[float, float]:
    """Mean of the ranks in a step: by the clock, and by the time on a core."""
    begin = min(part["begin"] for parts in step for part in parts)
    seconds = max(part["end"] for parts in step for part in parts) - begin
    busy = [sum(part["end"] - part["begin"] for part in parts) for parts in step]
    order = [[tuple(part["what"]) for part in parts] for parts in step]
    cores = {tuple(part["what"]): part["core"] for parts in step for part in parts}
    return 1 - statistics.mean(busy) / seconds, statistics.mean(idle_shares(order, cores.get))


def measure(schedule: str, microbatches: int) -> tuple[float, float]:
    """Medians of the steps of a run."""
    with tempfile.TemporaryDirectory() as folder:
        command = (
            f"torchrun --standalone --nproc_per_node={RANKS} tests/hooks.py pytorch_PP.py "
            f"{JOB} --pipeline-schedule {schedule} --microbatches {microbatches} "
            f"--batch-size {SAMPLES * microbatches} --output-dir {folder}"
        )
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HOOKS": "parts"}
        subprocess.run(command.split(), cwd=ROOT, env=env, check=True, capture_output=True)
        steps = [measure_idle(step) for step in read_steps(Path(folder))[WARMUP:]]
    return tuple(map(statistics.median, zip(*steps, strict=True)))


def main():
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    rows = []
    for schedule in SCHEDULES:
        for microbatches in (4, 8, 16):
            counted = timetable(schedule, RANKS, microbatches)
            row = {name: counted[name] for name in ("schedule", "microbatches", "formula")}
            clock, core = measure(schedule, microbatches)
            rows.append(row | {"order": counted["bubble"], "clock": clock, "core": core})
            print(json.dumps(rows[-1]), flush=True)
    about = {"hardware": hardware(), "versions": versions(), "git_commit": git_commit()}
    found = json.dumps({"rows": rows} | about, indent=1)
    (ROOT / "results" / "bubble.json").write_text(found + "\n")


if __name__ == "__main__":
    main()
