"""TaskData: the interface between harness and a data set. Each task implements it."""

import torch
from torch import Tensor
from torch.utils.data import Dataset


class TaskData(Dataset):
    """Base class of data sets. Subclasses also have ``classes`` (their names, or the vocabulary)
    and ``__getitems__()``, which makes a batch for the loader."""

    unit, units = "sample", "samples"  # for the progress bar, and its plural
    name = ""  # the data set that --dataset selected
    identity: dict = {}  # flags of this task, with values, that must match to resume
    tensors: tuple[str, ...] = ()  # names of the attributes that hold the data
    workers = 0  # default of --workers
    bytes_on_gpu = 0  # of all data sets of this process

    def keep_on_gpu(self) -> None:
        """Move the data to the current GPU if that leaves nine tenths of its free memory. A batch
        is then gathered there, from its indices. Worker processes cannot use this."""
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
            batch: from the loader.
            seed, epoch, step: which determine the augmentation.
            dtype: of inputs that are not integers; ``None``: the default dtype.
            share: which part of the global batch this is, and the number of parts.
        """
        raise NotImplementedError

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
        raise NotImplementedError

    def describe(self) -> dict:
        """The description of the data in ``result.json``."""
        raise NotImplementedError
