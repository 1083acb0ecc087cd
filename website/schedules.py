"""When each rank of a pipeline computes what, and how long it is idle: the bubble.

By the formula, and as counted in PyTorch's order of a schedule, where backward takes twice as long
as forward, each half of it as long as forward, and messages no time.
"""

import collections
import contextlib
import itertools
import re
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel.pipelining import SCHEDULES, ranks_of_stages

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
        device = torch.device("cpu")
        parts = [PipelineStage(nn.Identity(), number, len(owners), device) for number in own]
        return SCHEDULES[schedule](parts if len(parts) > 1 else parts[0], microbatches)
    finally:
        dist.destroy_process_group()


def order_of(schedule: str, ranks: int, microbatches: int) -> list[list[tuple]]:
    """What each rank computes, in PyTorch's order: kind, stage, micro-batch."""
    if schedule == "1f1b":
        return order_of_1f1b(ranks, microbatches)
    order = []
    planned = plan(schedule, ranks, microbatches).pipeline_order
    for rank in range(ranks):
        names = " ".join(map(str, planned[rank]))  # such as 0F1, or two in a bracket; None is a gap
        parts = re.findall(r"\b(\d+)([FBIW])(\d+)\b", names)
        order.append([(kind, int(stage), int(number)) for stage, kind, number in parts])
    return order


def end_times(order: list[list[tuple]], seconds) -> dict[tuple, float]:
    """Of each part, if each rank begins its next part as soon as it can and messages take no time.
    ``seconds``: of a part (kind, stage, micro-batch)."""
    last = max(stage for parts in order for _, stage, _ in parts)
    ends = {}
    clocks = [0] * len(order)
    left = [collections.deque(parts) for parts in order]

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


def timetable(schedule: str, ranks: int, microbatches: int) -> dict:
    """When each rank computes what, in UNITS: of each part its kind, stage, micro-batch, begin and
    length; and the bubble, as counted and by the formula."""
    order = order_of(schedule, ranks, microbatches)
    ends = end_times(order, lambda part: UNITS[part[0]])
    length = max(ends.values())
    busy = sum(UNITS[kind] for parts in order for kind, *_ in parts)
    rows = []
    for parts in order:
        rows.append([[*part, ends[part] - UNITS[part[0]], UNITS[part[0]]] for part in parts])
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
