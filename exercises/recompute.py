"""Recomputation: keep the input of a block, and compute the block again in backward.

Problem     Backward needs what the layers of a block computed. For 8,192 tokens in bfloat16, the
            input of a block of Llama-3-8B is 67 MB, each tensor inside its MLP 235 MB. A second
            forward in backward takes a third more compute, and saves all but the input.
Write       Recompute.forward() and Recompute.backward().
The judge   compares output and gradients with those of the block itself, counts what autograd
            keeps, and tries a block with dropout, which has to draw the same mask again, and
            must not bring back the generator of then for good.
"""

import torch
from torch import Tensor, nn


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        """Return ``block(x)``. What is computed here is not recorded by autograd.

        Hints: ``ctx.save_for_backward(...)`` keeps tensors; other values become attributes of ctx.
        ``torch.get_rng_state()`` is the state of the generator that dropout draws from.
        """
        raise NotImplementedError("Recompute.forward() keeps the input, and returns block(x)")

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return a gradient for each argument of forward(): None for the block, then those of x
        and of the parameters. ``gradient`` is that of the output.

        Hints: compute the block again on a detached x that requires a gradient, within
        ``torch.enable_grad()``. ``torch.autograd.grad(output, tensors, gradient)`` returns a tuple.
        ``torch.random.fork_rng()`` restores the generator when it is left.
        """
        raise NotImplementedError("Recompute.backward() computes the block again")


def recomputed(block: nn.Module, x: Tensor) -> Tensor:
    """What a model calls instead of ``block(x)``."""
    return Recompute.apply(block, x, *block.parameters())
