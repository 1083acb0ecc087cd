"""Memory on a CPU that means something: what tensors take, and a process without what is free."""

import contextlib
import ctypes
import gc
import json
import os
import tempfile
from pathlib import Path

from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset


class AllocatorProfile:
    """Peak bytes of this process's tensors, from :meth:`start` until :meth:`peak_bytes`.

    PyTorch's profiler sees each block that the allocator hands out and gets back, but not those
    handed out before. These are still there at the end, so what is there at the end is added.
    """

    lasts, found = 1, None  # step, the last one, and nothing of a trace: see StepClock

    def __init__(self):
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own lines on the screen
        self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def start(self) -> None:
        self.profiler.start()

    def tick(self, clock) -> None:
        """The step has ended, of which the clock is to know the peak."""
        clock.peak_memory["allocated"] = self.peak_bytes() / 2**30

    def peak_bytes(self) -> int:
        """Stop counting. Datasets are no part of it."""
        self.profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            self.profiler.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text())["traceEvents"]
        blocks = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
        taken = [0] + [e["args"]["Total Allocated"] for e in blocks]
        return bytes_of_tensors() + max(taken) - taken[-1]


def keep_no_free_memory() -> None:
    """Have the C library give freed blocks back to the system at once, so that the process is only
    as large as it needs to be. It keeps them to be fast: a step may take twice as long now."""
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(-3, 65536)  # bytes; M_MMAP_THRESHOLD of malloc.h


def bytes_of_tensors() -> int:
    """Memory behind all tensors of this process on the CPU, but for those of datasets."""
    objects = gc.get_objects()  # type(): isinstance() would wake those that pretend to be others
    tensors = [found for found in objects if issubclass(type(found), Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages = {s.data_ptr(): s.nbytes() for s in map(storage_on_cpu, tensors) if s}
    for dataset in (found for found in objects if issubclass(type(found), Dataset)):
        for held in vars(dataset).values():
            if isinstance(held, Tensor):
                storages.pop(held.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def storage_on_cpu(tensor: Tensor):
    """``None`` of a tensor that has no numbers of its own on the CPU."""
    if hasattr(tensor, "to_local"):  # a DTensor: its shard is another of the tensors
        return None
    storage = tensor.untyped_storage()
    return storage if storage.device.type == "cpu" else None
