"""FSDP of one layer: a rank keeps 1/N of the weight, and has all of it only while it computes.

Problem     Weights, gradients and AdamW's state of Llama-3-8B are 128 GB in float32. Of 8 ranks,
            each keeps 16 GB, if a layer's weight is freed after its forward and its backward.
Write       gather(), Layer.forward() and Layer.backward().
The judge   compares output and gradients with those of one process that has the whole batch, and
            counts what autograd keeps. The weight has 5 rows, on 1, 2 and 4 ranks: of 4 ranks, one
            has padding only.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def shard_of(weight: Tensor) -> Tensor:
    """This rank's rows of a weight [rows, inputs]: as many as on any other rank. The last ranks
    have rows of zeros where the weight has ended."""
    ranks = dist.get_world_size()
    padded = F.pad(weight, (0, 0, 0, -len(weight) % ranks))
    return padded.chunk(ranks)[dist.get_rank()].clone()


def gather(shard: Tensor, rows: int) -> Tensor:
    """The whole weight [rows, inputs] from the shards of all ranks, without padding.

    Hint: ``dist.all_gather_into_tensor(whole, shard)`` fills a tensor with all shards in order.
    """
    raise NotImplementedError("gather() puts the shards of all ranks together")


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, shard: Tensor, rows: int) -> Tensor:
        """``F.linear(x, weight)``: from [samples, inputs] to [samples, rows]. Only x and the shard
        may be kept for backward."""
        raise NotImplementedError("Layer.forward() gathers the weight, and forgets it")

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """From the gradient of the output [samples, rows], that of x, and that of the shard: its
        rows of the mean over all ranks of the weight's gradient.

        Hints: that of x is ``gradient @ weight``, that of the weight ``gradient.T @ x``.
        ``dist.reduce_scatter_tensor(part, whole)`` sums, and leaves each rank its part.
        """
        raise NotImplementedError("Layer.backward() gathers again, and reduce-scatters")
