"""--trace N: the last steps of a run as a Chrome trace, a file for each rank."""

import argparse
import atexit
import gzip
import json
import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from harness import trace_rows
from harness.clock import WARMUP_STEPS
from harness.command_line import fail
from harness.cpu_memory import AllocatorProfile
from harness.ranks import RANK
from harness.remote import local_folder


class Tracer:
    """Looks at the last steps in the place of the clock: after one in which the profiler warms up,
    and but for the very last, which is another, as it shows the loss.

    Args:
        steps: how many of them.
        folder: where each rank writes its file, named as TensorBoard looks for it.
    """

    def __init__(self, steps: int, folder: Path):
        self.steps, self.lasts, self.ended = steps, steps + 2, 0
        self.path = folder / f"rank{RANK}.pt.trace.json.gz"
        self.found = None  # what trace_rows.measure() makes of the trace

    def start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own lines on the screen
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self.profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=self.steps, repeat=1),
            on_trace_ready=self.write,
            record_shapes=True,  # which tell the bytes of a collective
        )
        self.profiler.start()
        atexit.register(self.give_up)

    def give_up(self) -> None:
        """A run that was stopped has no trace; a profiler that still runs would crash its exit."""
        if self.ended <= self.steps:
            self.profiler.on_trace_ready = None
            self.profiler.stop()

    def tick(self, clock) -> None:
        """A step has ended. In those that are traced, phases are ranges."""
        self.ended += 1
        if self.ended <= self.steps + 1:
            self.profiler.step()
        clock.phases.traced = self.ended <= self.steps
        if self.ended == self.steps + 1:
            self.profiler.stop()

    def write(self, profiler) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        raw = self.path.with_name(f".{self.path.name}.part")
        profiler.export_chrome_trace(str(raw))
        trace = json.loads(raw.read_text())
        rows = trace_rows.make_rows(trace["traceEvents"], RANK)
        self.found = trace_rows.measure(rows, self.steps)
        trace["traceEvents"] += rows
        raw.write_bytes(gzip.compress(json.dumps(trace).encode()))
        os.replace(raw, self.path)


def closer_look(args: argparse.Namespace, total: int, per_epoch: int):
    """What is to look at the last steps: the tracer, --profile-memory, or nothing.

    Args:
        total: steps of the run.
        per_epoch: of which the last epoch may have fewer.
    """
    if args.trace:
        in_last_epoch = total - (total - 1) // per_epoch * per_epoch
        settled = total - max(1, min(WARMUP_STEPS, total // 2))
        most = min(in_last_epoch - 1, settled - 2)
        if args.trace > most:
            room = f"use --trace {most}" if most > 0 else "use a longer run"
            fail(
                f"--trace {args.trace}: this run has {max(most, 0)} steps to trace, in the last "
                f"epoch, after the warm-up and one for the profiler, and before the last; {room}"
            )
        return Tracer(args.trace, local_folder(args.output_dir) / "trace")
    if args.profile_memory and args.device == "cpu":
        return AllocatorProfile()
    return None
