"""The interface of the harness and a data set, and its loader, which resumes within an epoch."""

import itertools
import json
import multiprocessing
import signal
import zlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset

from harness.cli import fail
from harness.settings import flags_of, spelled
from harness.stop import SIGNALS
from harness.storage import is_url
from harness.world import gather_objects

# Each machine may have values of its own of these flags.
BY_MACHINE = {"data_dir", "weights", "adapter", "output_dir", "resume", "store"}
BY_MACHINE |= {"device", "workers", "timeout"}


class TaskData(Dataset):
    """Base class of data sets. Subclasses also have ``classes``: their names, or the vocabulary."""

    unit = "sample"  # for the progress bar
    units = "samples"
    name = ""  # the data set that --dataset selected
    tensors: tuple[str, ...] = ()  # names of the attributes that hold the data
    workers = 0  # default of --workers
    bytes_on_gpu = 0  # of all data sets of this process
    density = 1.0  # of the global batch: the share of positions that have a label

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        """A batch for the loader: the indices of its samples, ``[batch]``."""
        return (torch.tensor(indices),)

    def keep_on_gpu(self) -> None:
        """Move the data to the current GPU if that leaves nine tenths of its free memory. A batch
        is then gathered there, from its indices. Worker processes cannot use this."""
        held = [getattr(self, name) for name in self.tensors]
        needed = sum(tensor.nbytes for tensor in held)
        free, _ = torch.cuda.mem_get_info()
        if not any(tensor.is_cuda for tensor in held) and needed <= free / 10:
            for name, tensor in zip(self.tensors, held, strict=True):
                setattr(self, name, tensor.cuda())
            TaskData.bytes_on_gpu += needed

    def prepare(
        self, batch, device, seed: int, epoch: int, step: int, dtype=None, share=(0, 1)
    ) -> tuple[Tensor, Tensor]:
        """This rank's training batch on its device, inputs and labels: by default not augmented.
        Seed, epoch and step determine the augmentation. Inputs that are not integers have the
        ``dtype``; ``share``: which part of the global batch this is, and the number of parts."""
        return self.prepare_evaluation(batch, device, dtype)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The cross-entropy of a batch, a scalar. The mean of these losses over ranks and over
        equally large micro-batches is the mean over all labels of the global batch.

        Args:
            logits: ``[batch, classes]`` of images, ``[batch, context, vocabulary]`` of text.
            labels: ``[batch]`` or ``[batch, context]``; -100 where there is none.
        """
        total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
        return total / labels.numel() / self.density

    def prepare_evaluation(self, batch, device, dtype=None) -> tuple[Tensor, Tensor]:
        """An evaluation batch on its device, without augmentation."""
        raise NotImplementedError

    def count_labels(self) -> int:
        """Number of predictions that an evaluation scores."""
        return len(self)

    def example(self, n: int) -> Tensor:
        """Example inputs of the model, n of them."""
        raise NotImplementedError

    def rates(self, samples_per_second: float) -> dict[str, float]:
        """Throughput in all reported units; the last one is printed."""
        return {f"{self.units}_per_second": samples_per_second}

    def describe(self) -> dict:
        """The description of the data in ``result.json``, which a resumed run must have, too."""
        return {"dataset": self.name, "train_samples": len(self), "classes": self.classes}


def compare_flags(args) -> None:
    """Refuse flags that are not the same on every rank: ranks would wait for each other, or train
    different models. All ranks call it, before their first collective that depends on a flag."""
    own = {}
    for name in sorted(field.name for field in flags_of(args)):
        value = getattr(args, name)
        if name in BY_MACHINE:
            own[f"{spelled(name)} is a URL"] = is_url(value)  # which all ranks fetch together
        else:
            own[spelled(name)] = value
    check_alike(own)


def compare_data(args, train_set: TaskData, eval_set: TaskData) -> None:
    """Refuse data and initial weights that are not the same on every rank, as on machines that have
    disks of their own. All ranks call it."""
    own = {"checksum of --weights": args.checksum}
    for split, dataset in {"training": train_set, "evaluation": eval_set}.items():
        for name, value in dataset.describe().items():
            own[f"{name.removeprefix('train_')} of the {split} set"] = value
    check_alike(own)


def check_alike(own: dict) -> None:
    """Refuse values that differ from those of the same name on another rank. All ranks call it."""
    texts = {name: json.dumps(value, default=str) for name, value in own.items()}
    sums = {n: t if len(t) < 50 else f"checksum {zlib.crc32(t.encode())}" for n, t in texts.items()}
    first, *others = gather_objects(sums)
    for rank, theirs in enumerate(others, 1):
        differ = [name for name, value in first.items() if theirs.get(name, value) != value]
        if differ:
            both = [f"{n}: {first[n]} on rank 0 and {theirs[n]} on rank {rank}" for n in differ]
            fail(f"{'; '.join(both)}; start all ranks with the same flags and the same files")


def how_many(args, split: str, available: int) -> int:
    """Number of samples: ``--train-samples`` or ``--eval-samples``, or all available."""
    wanted = getattr(args, f"{split}_samples") or available
    if wanted > available:
        fail(f"--{split}-samples {wanted}: only {available} exist; use no more")
    return wanted


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


def batches_of(loader: DataLoader) -> Iterator:
    """The loader's batches; fail at a file that cannot be read."""
    try:
        yield from loader
    except Unreadable as error:  # a worker process puts its traceback before the message
        fail(str(error).rpartition(f"{type(error).__name__}: ")[2])


def ignore_signals(worker: int) -> None:
    """A DataLoader's ``worker_init_fn``. Terminals and launchers also send their signals to the
    workers, without which the rank would fail. :func:`kill_loaders` ends them instead."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def kill_loaders() -> None:
    """Called at exit: after an exception, Python would wait for the workers."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's would report an error
    for process in multiprocessing.active_children():
        process.kill()
