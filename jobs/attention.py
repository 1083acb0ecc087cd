"""Attention over sequences whose positions are sharded among ranks, and what it is made of.

Queries, keys and values are ``[batch, heads, time, width]``, of this rank's positions.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from harness.command_line import fail

aten = torch.ops.aten

# Position t sees those up to t, so the later ones have more work. Each sequence is cut into 2 N
# chunks, and rank r has the r-th and the r-th from the end ("zigzag"), as much work as any other.


def in_rank_order(whole: Tensor, dim: int) -> Tensor:
    """The chunks of rank 0, then those of rank 1, ..."""
    chunks = whole.chunk(2 * dist.get_world_size(), dim)
    half = len(chunks) // 2
    return torch.cat([*sum(zip(chunks[:half], chunks[: half - 1 : -1], strict=True), ())], dim)


def in_order(shards: Tensor, dim: int) -> Tensor:
    """The inverse: the ranks' chunks by position."""
    chunks = shards.chunk(2 * dist.get_world_size(), dim)
    return torch.cat([*chunks[::2], *chunks[::-2]], dim)


def shard(whole: Tensor, dim: int = 1) -> Tensor:
    """This rank's positions."""
    return in_rank_order(whole, dim).chunk(dist.get_world_size(), dim)[dist.get_rank()]


class Gather(torch.autograd.Function):
    """The shards of all ranks, concatenated along ``dim``."""

    @staticmethod
    def forward(ctx, own: Tensor, dim: int) -> Tensor:
        ctx.dim, world_size = dim, dist.get_world_size()
        shards = own.new_empty(world_size * len(own), *own.shape[1:])
        dist.all_gather_into_tensor(shards, own.contiguous())
        return torch.cat(shards.chunk(world_size), dim)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        """All ranks have used our shard, and its gradient is the sum of theirs."""
        shards = gradient.chunk(dist.get_world_size(), ctx.dim)
        own = torch.empty_like(shards[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter_tensor(own, torch.cat(shards))
        return own, None


# ------------------------------------------------------- between some queries and some keys
# By the kernel that the device has, which keeps no scores; or else by matrix products, which make
# them. Forward also returns, and backward needs, the logarithm of the sum of each query's
# exponentiated scores, [batch, heads, time]. If these, and the output, are those of more keys than
# are given, the gradients are what the given ones contribute. causal: queries and keys are of the
# same positions, and none sees a later one.


def has_kernel(q: Tensor) -> bool:
    """Of CPUs, PyTorch's flash attention; of GPUs the memory-efficient one, which takes fp32."""
    width = 4 if q.dtype == torch.float32 else 8  # it takes multiples of 16 bytes
    return not q.is_cuda or q.dtype != torch.float64 and q.shape[-1] % width == 0


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and sums."""
    if not has_kernel(q):
        found = scores(q, k, causal)
        return found.softmax(-1) @ v, found.logsumexp(-1)
    if q.is_cuda:
        kernel = aten._scaled_dot_product_efficient_attention
        out, sums, _, _ = kernel(q, k, v, None, True, 0.0, causal)
        return out, sums[..., : q.shape[2]]  # it pads them
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    if not has_kernel(q):
        weights = (scores(q, k, causal) - sums[..., None]).exp()
        mean = (gradient * out).sum(-1, keepdim=True)  # of the weights' gradients, by weight
        of_scores = weights * (gradient @ v.mT - mean) / math.sqrt(q.shape[-1])
        return of_scores @ k, of_scores.mT @ q, weights.mT @ gradient
    if q.is_cuda:
        kernel = aten._scaled_dot_product_efficient_attention_backward
        sums = F.pad(sums, (0, -sums.shape[-1] % 32), value=math.inf).contiguous()
        none = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout's seed
        needed = [True, True, True, False]
        saved = None, out, sums, none, none, 0.0, needed, causal
        return kernel(gradient, q, k, v, *saved)[:3]
    kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(gradient, q, k, v, out, sums, 0.0, causal)


def scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    found = q @ k.mT / math.sqrt(q.shape[-1])
    later = torch.ones(found.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return found.masked_fill(later, -math.inf) if causal else found


# ------------------------------------------------------------------ other ways than a ring


def allgather_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Our queries, and all keys and values (as Llama 3 was trained, arXiv:2407.21783)."""
    k, v = in_order(Gather.apply(torch.stack([k, v]), 3), 3)
    rank, world_size, found = dist.get_rank(), dist.get_world_size(), []
    for chunk, number in zip(q.chunk(2, 2), (rank, 2 * world_size - 1 - rank), strict=True):
        size = chunk.shape[2]
        end = (number + 1) * size  # what comes later is not even multiplied
        visible = torch.ones(size, end, dtype=torch.bool, device=q.device).tril(end - size)
        found.append(F.scaled_dot_product_attention(chunk, k[:, :, :end], v[:, :, :end], visible))
    return torch.cat(found, 2)


class AllToAll(torch.autograd.Function):
    """Splits a tensor among the ranks along one dimension, and joins what comes along another."""

    @staticmethod
    def forward(ctx, tensor: Tensor, split: int, join: int) -> Tensor:
        ctx.split, ctx.join = split, join
        parts = torch.stack(tensor.chunk(dist.get_world_size(), split))
        theirs = torch.empty_like(parts)
        dist.all_to_all_single(theirs, parts)
        return torch.cat(theirs.unbind(), join)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return AllToAll.apply(gradient, ctx.join, ctx.split), None, None


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All positions of 1/N of the heads: ranks exchange heads for positions (Jacobs et al. 2023,
    arXiv:2309.14509)."""
    q, k, v = in_order(AllToAll.apply(torch.stack([q, k, v]), 2, 3), 3)
    found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return AllToAll.apply(in_rank_order(found, 2), 2, 1)


def make_pytorch_ring() -> Callable:
    """PyTorch's own, of an experimental module that moves between versions. DTensors say that each
    rank has a shard of the positions; it takes them to be dealt out as in pytorch_CP.py."""
    try:
        from torch.distributed.tensor import DTensor, Shard, init_device_mesh
        from torch.distributed.tensor.experimental import _attention

        _attention._cp_options.enable_load_balance = True
        _attention._enable_context_parallel_dispatcher()
    except (ImportError, AttributeError) as error:
        fail(
            f"--attention pytorch: PyTorch {torch.__version__} has it in another way ({error}); "
            "use --attention ring"
        )
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (DTensor.from_local(t, mesh, [Shard(2)], run_check=False) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).to_local()

    return attend


OTHERS = {
    "allgather": lambda: allgather_attention,
    "ulysses": lambda: ulysses_attention,
    "pytorch": make_pytorch_ring,
}
