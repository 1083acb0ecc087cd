"""TaskData: the interface between harness and a data set. Each task implements it."""

import torch
from torch import Tensor
from torch.utils.data import Dataset


class TaskData(Dataset):
    """A data set that says itself what it is. Besides what is here, it has ``classes`` (their
    names, or the vocabulary) and ``__getitems__()``, which makes a batch for the loader."""

    unit, units = "sample", "samples"  # the progress bar's, and the plural
    name = ""  # what --dataset came to be
    identity: dict = {}  # flags of this job, with their values, that must match to resume
    tensors: tuple[str, ...] = ()  # names of the attributes that hold the data
    workers = 0  # processes of a loader, unless --workers says otherwise
    bytes_on_gpu = 0  # of all data sets of this process

    def keep_on_gpu(self) -> None:
        """Move the data to the current GPU if that leaves nine tenths of its free memory: a batch
        is gathered there then, and only its indices are sent. A loader with processes cannot."""
        held = [getattr(self, name) for name in self.tensors]
        needed = sum(tensor.nbytes for tensor in held)
        free, _ = torch.cuda.mem_get_info()
        if not held[0].is_cuda and needed <= free / 10:
            for name, tensor in zip(self.tensors, held, strict=True):
                setattr(self, name, tensor.cuda())
            TaskData.bytes_on_gpu += needed

    def prepare(
        self, batch, device, seed: int, epoch: int, step: int, dtype=None, share=(0, 1)
    ) -> tuple[Tensor, Tensor]:
        """This rank's training batch on its device: inputs and labels.

        Args:
            batch: as the loader hands it out.
            seed, epoch, step: all that augmentation depends on.
            dtype: of inputs that are not integers, the default one if it is ``None``.
            share: which share of the global batch this is, and of how many.
        """
        raise NotImplementedError

    def prepare_evaluation(self, batch, device, dtype=None) -> tuple[Tensor, Tensor]:
        """The same without augmentation."""
        raise NotImplementedError

    def count_labels(self) -> int:
        """How many predictions an evaluation scores."""
        return len(self)

    def example(self, n: int) -> Tensor:
        """n inputs of the model."""
        raise NotImplementedError

    def rates(self, samples_per_second: float) -> dict[str, float]:
        """Throughput in the units in which it is reported; the last one is the usual one."""
        raise NotImplementedError

    def describe(self) -> dict:
        """What ``result.json`` says of the data."""
        raise NotImplementedError
