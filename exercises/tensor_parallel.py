"""Tensor parallelism: f and g around an MLP whose matrices are split.

Problem     The matrices of one MLP of Llama-3-70B are 1.4 GB in bfloat16, and every token waits for
            them. Two ranks with half of the columns and rows each need half of the time, and meet
            twice: in g to add their terms of the output, in f to add their gradients of the input.
Write       Copy.backward(), Sum.forward() and mlp().
The judge   compares output and gradients with those of one process. The width of 7 is not divisible
            by 2 or 3, and both layers have a bias.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


class Copy(torch.autograd.Function):
    """f: every rank gets the input as it is."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        """The gradient of x. ``gradient`` is that through this rank's columns. Hint: all_reduce
        works in place, and this tensor may be used elsewhere: clone it."""
        raise NotImplementedError("Copy.backward(): each rank has a term of the gradient")


class Sum(torch.autograd.Function):
    """g: every rank gets the sum of all terms."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        """The sum over all ranks."""
        raise NotImplementedError("Sum.forward(): each rank has a term of the output")

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient  # as for each term of a sum


def mlp(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    """The output [tokens, model] of ``down(gelu(up(x)))``, the same on every rank.

    Args:
        x: [tokens, model], the same on every rank.
        up: [own width, model], and its bias [own width]: of this rank's part of the width.
        down: [model, own width], of the same part.
        down_bias: [model], the same on every rank.
    """
    raise NotImplementedError("mlp() is two F.linear(), with Copy and Sum around them")
