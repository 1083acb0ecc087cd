"""Dispatch and combine: send tokens to the ranks of their experts, and back.

Problem     Mixtral-8x7B has 8 experts in each block, 90 GB in bfloat16 of its 93, and a token needs
            2 of them. With an expert on each rank, tokens travel instead of weights; how many go
            where is known only when the router has chosen.
Write       dispatch() and combine().
The judge   has one expert per rank, gives each rank another number of tokens, and leaves an expert
            without any. It compares what each expert gets, what comes back, and gradients.
"""

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange(torch.autograd.Function):
    """Send the first ``outgoing[0]`` rows to rank 0, the next ``outgoing[1]`` to rank 1, ...; get
    ``incoming[0]`` rows from rank 0, followed by those from rank 1, ..."""

    @staticmethod
    def forward(ctx, rows: Tensor, outgoing: list[int], incoming: list[int]) -> Tensor:
        ctx.counts = outgoing, incoming
        arrives = rows.new_empty(sum(incoming), *rows.shape[1:])
        dist.all_to_all_single(arrives, rows.contiguous(), incoming, outgoing)
        return arrives

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        outgoing, incoming = ctx.counts
        return Exchange.apply(gradient, incoming, outgoing), None, None


def dispatch(tokens: Tensor, expert: Tensor) -> tuple[Tensor, tuple]:
    """Send each token to the rank of its expert.

    Args:
        tokens: of this rank, [count, width].
        expert: the number of each token's expert [count], which is the number of a rank.

    Returns:
        The tokens that arrive, those of rank 0 first; of a rank, in its order. And a plan: whatever
        combine() needs.

    Hints: ``expert.argsort(stable=True)`` puts tokens of an expert side by side.
    ``expert.bincount(minlength=ranks)`` counts them. ``dist.all_to_all_single(theirs, counts)``
    sends one number to each rank: so a rank learns how many rows arrive.
    """
    raise NotImplementedError("dispatch() sorts tokens by expert, exchanges counts, then tokens")


def combine(outputs: Tensor, plan: tuple) -> Tensor:
    """Send the outputs of this rank's expert back, in the order in which its tokens arrived. Return
    those of this rank's tokens, in their order. Hint: ``order.argsort()`` undoes an order."""
    raise NotImplementedError("combine() is the way back")
