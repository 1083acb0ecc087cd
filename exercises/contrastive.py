"""A contrastive loss over the samples of all ranks: an all-gather with a gradient.

Problem     CLIP compares each sample with all others of a batch of 32,768, of which a GPU has a
            few: it needs the embeddings of all ranks. ``dist.all_gather`` returns them without a
            gradient, and nothing reports that a part of the gradient is lost.
Write       Gather.forward(), Gather.backward() and loss_of().
The judge   calls gather() and loss_of() on 1, 2 and 3 ranks, averages the gradients of the model's
            parameters over the ranks, as DDP does, and compares with one process that has the
            whole batch. gather() may do without the class, with DTensor for instance.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

TEMPERATURE = 0.2  # by which similarities are divided


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor) -> Tensor:
        """The rows of all ranks, those of rank 0 first: from [samples, width], on every rank the
        same shape, to [ranks * samples, width].

        Hint: ``dist.all_gather_into_tensor(whole, part)`` fills a tensor with the parts of all
        ranks in order.
        """
        raise NotImplementedError("Gather.forward() puts the rows of all ranks together")

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        """From what this rank's loss says about the rows of all ranks [ranks * samples, width], to
        what the losses of all ranks say about this rank's rows [samples, width].

        Hints: ``dist.reduce_scatter_tensor(part, whole)`` sums, and leaves each rank its part. A
        gradient may be transposed or expanded, and collectives need ``.contiguous()``.
        """
        raise NotImplementedError("Gather.backward(): other ranks used this rank's rows, too")


def gather(rows: Tensor) -> Tensor:
    return Gather.apply(rows)


def loss_of(queries: Tensor, keys: Tensor) -> Tensor:
    """The loss of which this rank computes gradients: their mean over the ranks, which DDP takes,
    has to be the gradient of one process.

    Args:
        queries: embeddings of this rank's samples, of length 1 [samples, width].
        keys: embeddings of another view of the same samples, in the same order [samples, width].

    One process computes ``F.cross_entropy(queries @ keys.T / TEMPERATURE, targets)`` with the
    queries and keys of all samples: query i belongs to key i, and all other keys are negatives.
    Hint: a rank's own queries are enough. Where are their keys among those of all ranks?
    """
    raise NotImplementedError("loss_of() compares this rank's queries with the keys of all ranks")
