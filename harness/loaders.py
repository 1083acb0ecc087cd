"""Load batches of any data: resume within an epoch, report unreadable files, end the workers."""

import itertools
import multiprocessing
import signal
from collections.abc import Iterator

from torch.utils.data import BatchSampler, DataLoader

from harness.command_line import fail


class Unreadable(Exception):
    """A file that cannot be decoded; the message names the file and the fix."""


class Batches(BatchSampler):
    """Batches of indices. A run that resumes within an epoch skips the first ``begin``."""

    begin = 0

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(super().__iter__(), self.begin, None)


def share_of(loader: DataLoader) -> tuple[int, int]:
    """Which part of the global batch the loader has, and the number of parts."""
    sampler = loader.batch_sampler.sampler
    return getattr(sampler, "rank", 0), getattr(sampler, "num_replicas", 1)


def hand_on(batch):
    """A ``collate_fn`` for datasets that return whole batches."""
    return batch


def batches_of(loader: DataLoader) -> Iterator:
    """The loader's batches; fail at a file that cannot be read."""
    try:
        yield from loader
    except Unreadable as error:  # a worker process puts its traceback before the message
        fail(str(error).rpartition(f"{type(error).__name__}: ")[2])


def ignore_signals(worker: int) -> None:
    """A DataLoader's ``worker_init_fn``. Terminals and launchers also send their signals to the
    workers, without which the rank would fail. :func:`kill_loaders` ends them instead."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def kill_loaders() -> None:
    """To be called at exit: after an exception, Python would wait for the worker processes, and the
    launcher for this rank."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's would report an error
    for process in multiprocessing.active_children():
        process.kill()
