"""Measure the overhead of a training script's own code.

    torchrun --standalone --nproc_per_node=2 measure/overhead.py marks pytorch_DDP.py ...
    torchrun --standalone --nproc_per_node=2 measure/overhead.py saves \\
        pytorch_checkpoint.py --async-save --snapshot-every 5 --model gpt-6x6x384 ...

marks  measures how long the calls of the breakdown (harness/clock.py) take.
saves  alternates synchronous and asynchronous checkpoints of DCP: how long the call takes, from
       when all ranks have arrived. Writes results/saves.json.
"""

import json
import runpy
import statistics
import sys
import time
from argparse import REMAINDER, ArgumentParser, RawDescriptionHelpFormatter
from functools import partial
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import common  # noqa: E402
from harness.clock import WARMUP_STEPS, StepClock  # noqa: E402
from harness.measure import git_commit, hardware, launch_command, versions  # noqa: E402
from report.fresh import files_of  # noqa: E402


def time_marks() -> str:
    tick, mark, clocks = StepClock.tick, StepClock.mark, set()
    spent = [0.0]  # seconds of each step

    def timed_mark(clock, phase):
        began = time.perf_counter()
        mark(clock, phase)
        spent[-1] += time.perf_counter() - began

    def note(clock):
        tick(clock)
        spent.append(0.0)
        clocks.add(clock)

    StepClock.mark, StepClock.tick = timed_mark, note
    runpy.run_path(sys.argv[0], run_name="__main__")
    [clock] = clocks
    step = statistics.median(clock.seconds[WARMUP_STEPS:])
    own = statistics.median(spent[WARMUP_STEPS:-1])
    return f"the marks of a step take {own * 1e6:.0f} µs, {own / step:.3%} of {step * 1e3:.2f} ms"


def compare_saves() -> str:
    async_save, seconds, whole_after = dcp.async_save, {"save": [], "async_save": []}, []

    def take_turns(tensors, async_stager=None, **where):
        kind = "async_save" if len(seconds["save"]) > len(seconds["async_save"]) else "save"
        dist.barrier()
        began = time.perf_counter()
        save = partial(async_save, async_stager=async_stager) if kind == "async_save" else dcp.save
        writing = save(tensors, **where)
        seconds[kind].append(time.perf_counter() - began)
        if kind == "async_save":
            writing.add_done_callback(lambda _: whole_after.append(time.perf_counter() - began))
            return writing

    dcp.async_save = take_turns
    runpy.run_path(sys.argv[0], run_name="__main__")
    seconds = {kind: spent[1:] for kind, spent in seconds.items()}  # the first of each warms up
    found = {
        "seconds": seconds, "whole_after": whole_after[1:], "hardware": hardware(),
        "versions": versions(), "git_commit": git_commit(), "command": launch_command(),
    }  # fmt: skip
    if common.world().rank == 0:
        found["files"] = files_of(ROOT, [launch_command()])
        (ROOT / "results" / "saves.json").write_text(json.dumps(found, indent=1) + "\n")
    return f"{len(seconds['save'])} saves of each kind are in results/saves.json"


KINDS = {"marks": time_marks, "saves": compare_saves}

if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("script", help="a training script, and its flags after it")
    parser.add_argument("flags", nargs=REMAINDER)
    args = parser.parse_args()
    sys.argv = [str(ROOT / args.script), *args.flags]
    common.print0(KINDS[args.kind]())
