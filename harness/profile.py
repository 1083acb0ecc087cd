"""Profiles the last steps with PyTorch's profiler, for ``--trace`` and ``--profile-memory``."""

import atexit
import gc
import gzip
import itertools
import json
import os
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import Dataset

from harness import trace_rows
from harness.cli import fail
from harness.clock import WARMUP_STEPS
from harness.storage import local_folder
from harness.world import world


class Look:
    """A profiler that replaces the clock in the last ``lasts`` steps, with its options."""

    def __init__(self, lasts: int, **options):
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # hides the profiler's own messages
        self.lasts = lasts
        self.profiler = profile(**options)
        self.found = None  # result of trace_rows.sum_up()

    def start(self) -> None:
        self.profiler.start()
        atexit.register(self.profiler.stop)  # if the run is stopped: it would crash at exit

    def stop(self) -> None:
        """Once a vote (see stop.py) has ended: its end would be noted in memory that was freed."""
        if dist.is_initialized() and dist.get_backend() == "gloo":
            dist.barrier()  # gloo: after all that its group began before
        atexit.unregister(self.profiler.stop)
        self.profiler.stop()


class Tracer(Look):
    """Traces steps: after one in which the profiler warms up, and before the last one, which
    differs because it prints the loss. Files are named as TensorBoard expects it."""

    def __init__(self, steps: int, folder: Path):
        when = schedule(wait=0, warmup=1, active=steps, repeat=1)
        super().__init__(steps + 2, schedule=when, record_shapes=True)  # which give the bytes
        self.steps = steps
        self.ended = 0
        self.path = folder / f"rank{world().rank}.pt.trace.json.gz"

    def tick(self, clock) -> None:
        """End a step. In traced ones, phases are ranges. After the last, write trace and rows."""
        self.ended += 1
        clock.traced = self.ended <= self.steps
        if clock.traced:
            self.profiler.step()
        if self.ended == self.steps + 1:
            self.stop()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_name(f".{self.path.name}.part")
            self.profiler.export_chrome_trace(str(part))
            trace = json.loads(part.read_text())
            rows = trace_rows.make_rows(trace["traceEvents"], world().rank)
            self.found = trace_rows.sum_up(rows, self.steps)
            trace["traceEvents"] += rows
            part.write_bytes(gzip.compress(json.dumps(trace).encode()))
            os.replace(part, self.path)


class AllocatorProfile(Look):
    """Peak bytes of this process's tensors in the last step. The profiler records each allocation
    and each free in it; what was there before still is at the end, so that is added."""

    def __init__(self):
        super().__init__(1, activities=[ProfilerActivity.CPU], profile_memory=True)

    def tick(self, clock) -> None:
        """Stop, and note the peak, without datasets."""
        self.stop()
        events = self.profiler.profiler.kineto_results.events()
        blocks = [event for event in events if event.name() == "[memory]"]
        blocks.sort(key=lambda event: event.start_ns())
        taken = [0, *itertools.accumulate(event.nbytes() for event in blocks)]
        clock.peak_memory["allocated"] = (bytes_of_tensors() + max(taken) - taken[-1]) / 2**30


def bytes_of_tensors() -> int:
    """Memory of all tensors of this process on the CPU, except those of datasets."""
    objects = gc.get_objects()  # type(): isinstance() would trigger lazy proxies
    tensors = [found for found in objects if issubclass(type(found), Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages = [t.untyped_storage() for t in tensors if not hasattr(t, "to_local")]  # of a DTensor
    sizes = {s.data_ptr(): s.nbytes() for s in storages if s.device.type == "cpu"}
    held = (v for d in objects if issubclass(type(d), Dataset) for v in vars(d).values())
    for tensor in (value for value in held if isinstance(value, Tensor)):
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


def closer_look(args, total: int, per_epoch: int) -> Look | None:
    """The profiler of the last steps that a flag asks for, if any; the run has ``total`` steps."""
    if args.trace:
        in_last_epoch = min((total - 1) % n + 1 for n in (per_epoch, args.eval_every or per_epoch))
        settled = total - max(1, min(WARMUP_STEPS, total // 2))
        most = max(0, min(in_last_epoch - 1, settled - 2))
        if args.trace > most:
            use = f"use --trace {most}" if most else "use a longer run"
            why = f"only {most} steps of the last epoch can be traced, not the warm-up, the step "
            why += "after it, which starts the profiler, nor the last step"
            fail(f"--trace {args.trace}: {why}; {use}")
        return Tracer(args.trace, local_folder(args.output_dir) / "trace")
    return AllocatorProfile() if args.profile_memory and args.device == "cpu" else None
