"""Attention over sequences whose positions are sharded among ranks: the order of the positions, and
the variants that are simpler than ring attention.

Queries, keys and values are ``[batch, heads, time, width]``, of this rank's positions; keys and
values may have fewer heads. ``group``: the ranks that share a sequence; ``None``: all ranks.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from parallel.attention_kernels import mask, repeat

all_gather = getattr(functional, "all_gather_single_autograd", None)  # since PyTorch 2.14
all_gather = all_gather or functional.all_gather_tensor_autograd

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


def shard(whole: Tensor, dim: int = -1, group=None) -> Tensor:
    """This rank's positions of a tensor."""
    shards = in_rank_order(whole, dim, group).chunk(dist.get_world_size(group), dim)
    return shards[dist.get_rank(group)].contiguous()


def allgather_attention(q: Tensor, k: Tensor, v: Tensor, begins=None, group=None) -> Tensor:
    """Our queries attend to all keys and values, as in Llama 3's training (arXiv:2407.21783).
    ``begins``: of packed rows, where the document of each of our queries begins."""
    shards = all_gather(torch.stack([k, v]), 3, group or dist.group.WORLD)
    k, v = repeat(q, *in_order(shards, 3, group))
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    found = []
    times = torch.arange(k.shape[2], device=q.device)
    numbers = (rank, 2 * ranks - 1 - rank)
    begins = (None, None) if begins is None else begins.chunk(2, 1)
    for chunk, begin, number in zip(q.chunk(2, 2), begins, numbers, strict=True):
        size = chunk.shape[2]
        end = (number + 1) * size  # skips all later positions
        if begin is not None:
            visible = mask(begin, times[end - size : end], times[:end]).to(q.dtype)
        else:
            with _disable_current_modes():  # in a dispatch mode it cannot be made
                visible = causal_lower_right(size, end)  # no mask, which backward would need
        found.append(F.scaled_dot_product_attention(chunk, k[:, :, :end], v[:, :, :end], visible))
    return torch.cat(found, 2)


def all_to_all(tensor: Tensor, split: int, join: int, group=None) -> Tensor:
    """Split a tensor over the ranks along one dimension, and concatenate along another."""
    parts = torch.stack(tensor.chunk(dist.get_world_size(group), split))
    theirs = functional.all_to_all_single_autograd(parts, None, None, group or dist.group.WORLD)
    return torch.cat(theirs.unbind(), join)


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, group=None) -> Tensor:
    """All positions for 1/N of the heads (Jacobs et al. 2023, arXiv:2309.14509)."""
    if k.shape[1] == q.shape[1]:
        q, k, v = in_order(all_to_all(torch.stack([q, k, v]), 2, 3, group), 3, group)
    else:
        q = in_order(all_to_all(q, 1, 2, group), 2, group)
        k, v = in_order(all_to_all(torch.stack([k, v]), 2, 3, group), 3, group)
    found = F.scaled_dot_product_attention(q, *repeat(q, k, v), is_causal=True)
    return all_to_all(in_rank_order(found, 2, group), 2, 1, group)


OTHERS = {
    "allgather": lambda group=None: partial(allgather_attention, group=group),
    "ulysses": lambda group=None: partial(ulysses_attention, group=group),
}
