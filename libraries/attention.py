"""Attention over sequences whose positions are sharded among ranks: the order of the positions, and
the variants that are simpler than ring attention.

Queries, keys and values are ``[batch, heads, time, width]``, of this rank's positions; keys and
values may have fewer heads. ``group``: the ranks that share a sequence; ``None``: all ranks.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from libraries.attention_kernels import repeat

# Position t attends to positions up to t, so later ones take more work. Each sequence has 2 N
# chunks, and rank r has the r-th and the r-th from the end ("zigzag"), to balance the work.


def in_rank_order(whole: Tensor, dim: int, group=None) -> Tensor:
    """Reorder positions: the chunks of rank 0, then those of rank 1, ..."""
    chunks = whole.chunk(2 * dist.get_world_size(group), dim)
    half = len(chunks) // 2
    return torch.cat([*sum(zip(chunks[:half], chunks[: half - 1 : -1], strict=True), ())], dim)


def in_order(shards: Tensor, dim: int, group=None) -> Tensor:
    """The inverse: sort the ranks' chunks by position."""
    chunks = shards.chunk(2 * dist.get_world_size(group), dim)
    return torch.cat([*chunks[::2], *chunks[::-2]], dim)


def shard(whole: Tensor, dim: int = 1, group=None) -> Tensor:
    """This rank's positions of a tensor."""
    shards = in_rank_order(whole, dim, group).chunk(dist.get_world_size(group), dim)
    return shards[dist.get_rank(group)].contiguous()


class Gather(torch.autograd.Function):
    """The shards of all ranks, concatenated along ``dim``."""

    @staticmethod
    def forward(ctx, own: Tensor, dim: int, group=None) -> Tensor:
        ctx.dim, ctx.group, ranks = dim, group, dist.get_world_size(group)
        shards = own.new_empty(ranks * len(own), *own.shape[1:])
        dist.all_gather_into_tensor(shards, own.contiguous(), group=group)
        return torch.cat(shards.chunk(ranks), dim)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        """All ranks used our shard, so its gradient is the sum of theirs."""
        shards = gradient.chunk(dist.get_world_size(ctx.group), ctx.dim)
        own = torch.empty_like(shards[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter_tensor(own, torch.cat(shards), group=ctx.group)
        return own, None, None


def allgather_attention(q: Tensor, k: Tensor, v: Tensor, group=None) -> Tensor:
    """Our queries attend to all keys and values, as in Llama 3's training (arXiv:2407.21783)."""
    k, v = repeat(q, *in_order(Gather.apply(torch.stack([k, v]), 3, group), 3, group))
    rank, ranks, found = dist.get_rank(group), dist.get_world_size(group), []
    for chunk, number in zip(q.chunk(2, 2), (rank, 2 * ranks - 1 - rank), strict=True):
        size = chunk.shape[2]
        end = (number + 1) * size  # skips all later positions
        visible = torch.ones(size, end, dtype=torch.bool, device=q.device).tril(end - size)
        found.append(F.scaled_dot_product_attention(chunk, k[:, :, :end], v[:, :, :end], visible))
    return torch.cat(found, 2)


class AllToAll(torch.autograd.Function):
    """Splits a tensor over the ranks along one dimension, and concatenates along another."""

    @staticmethod
    def forward(ctx, tensor: Tensor, split: int, join: int, group=None) -> Tensor:
        ctx.split, ctx.join, ctx.group = split, join, group
        parts = torch.stack(tensor.chunk(dist.get_world_size(group), split))
        theirs = torch.empty_like(parts)
        dist.all_to_all_single(theirs, parts, group=group)
        return torch.cat(theirs.unbind(), join)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return AllToAll.apply(gradient, ctx.join, ctx.split, ctx.group), None, None, None


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, group=None) -> Tensor:
    """All positions for 1/N of the heads: ranks exchange heads for positions (Jacobs et al. 2023,
    arXiv:2309.14509)."""
    if k.shape[1] == q.shape[1]:
        q, k, v = in_order(AllToAll.apply(torch.stack([q, k, v]), 2, 3, group), 3, group)
    else:
        q = in_order(AllToAll.apply(q, 1, 2, group), 2, group)
        k, v = in_order(AllToAll.apply(torch.stack([k, v]), 2, 3, group), 3, group)
    found = F.scaled_dot_product_attention(q, *repeat(q, k, v), is_causal=True)
    return AllToAll.apply(in_rank_order(found, 2, group), 2, 1, group)


OTHERS = {
    "allgather": lambda group=None: partial(allgather_attention, group=group),
    "ulysses": lambda group=None: partial(ulysses_attention, group=group),
}
