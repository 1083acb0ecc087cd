"""PyTorch's attention kernels, with separate forward and backward for ring attention; and PyTorch's
own ring attention.

Queries, keys, values and outputs are ``[batch, heads, time, width]``; keys and values may have
fewer heads than queries. Forward also returns, and backward needs, the log-sum-exp of each query's
scores, ``[batch, heads, time]``. If log-sum-exp and output are those over more keys than are
given, the gradients are the contribution of the given keys. With ``causal``, queries and keys have
the same positions, and no query sees a later key.
"""

import math
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from harness.cli import fail

aten = torch.ops.aten


def has_kernel(q: Tensor) -> bool:
    """PyTorch's flash attention; for fp32 on GPUs the memory-efficient one."""
    width = 4 if q.dtype == torch.float32 else 8  # the latter needs multiples of 16 bytes
    return not q.is_cuda or q.dtype != torch.float64 and q.shape[-1] % width == 0


def shares_heads(q: Tensor) -> bool:
    """Whether PyTorch's attention takes fewer heads of keys and values: its flash kernels do."""
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)


def repeat(q: Tensor, *kv: Tensor) -> tuple[Tensor, ...]:
    """Repeat heads of keys or values: one for each head of queries."""
    times = q.shape[1] // kv[0].shape[1]
    return kv if times == 1 else tuple(t.repeat_interleave(times, 1) for t in kv)


def has_flex(tensor: Tensor) -> bool:
    """Whether packed rows use FlexAttention (arXiv:2412.05496), which skips hidden blocks."""
    return tensor.is_cuda and torch.get_default_dtype() != torch.float64


def flex(function: str) -> Callable:
    """A function of FlexAttention. It has to be compiled: by itself, as cached, or as part of what
    is being compiled, whose graph a second ``torch.compile`` would break."""
    from torch.nn.attention import flex_attention  # imports the compiler

    found = getattr(flex_attention, function)
    return found if torch.compiler.is_compiling() else compiled(found)


@cache
def compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=False)


def see_documents(begins: Tensor):
    """Which keys each query of packed rows sees: those of its document, up to itself. For
    :func:`attend_to`. ``begins``: ``[batch, time]``, where the document of a token begins."""
    batch, time = begins.shape
    device = begins.device
    if has_flex(begins):
        visible = lambda b, h, q, k: (k <= q) & (k >= begins[b, q])  # noqa: E731
        return flex("create_block_mask")(visible, batch, None, time, time, device=device)
    times = torch.arange(time, device=device)
    return mask(begins, times, times)


def mask(begins: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """What to add to scores, ``[batch, 1, queries, keys]``: 0, or -inf for keys that a query does
    not see, by the positions of both."""
    seen = (keys <= queries[:, None]) & (keys >= begins[..., None])
    return torch.where(seen, 0.0, -math.inf)[:, None]


def attend_to(seen, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to the keys that :func:`see_documents` has found."""
    if torch.is_tensor(seen):
        return F.scaled_dot_product_attention(q, k, v, seen.to(q.dtype))
    width = q.shape[-1]
    missing = 16 - q.shape[-1]
    if missing > 0:  # its heads are no narrower
        q, k, v = (F.pad(t, (0, missing)) for t in (q, k, v))
    found = flex("flex_attention")(q, k, v, block_mask=seen, scale=width**-0.5)
    return found[..., :width]


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp of the scores."""
    k, v = repeat(q, k, v)
    if not has_kernel(q):
        found = scores(q, k, causal)
        return found.softmax(-1) @ v, found.logsumexp(-1)
    if shares_heads(q):
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    if q.is_cuda:
        kernel = aten._scaled_dot_product_efficient_attention
        out, sums, _, _ = kernel(q, k, v, None, True, 0.0, causal)
        return out, sums[..., : q.shape[2]]  # the kernel pads them
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def backward(gradient, q, k, v, out, sums, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    heads = k.shape[1]
    of_q, *of_kv = gradients(gradient, q, *repeat(q, k, v), out, sums, causal)
    if heads < q.shape[1]:  # several heads of queries share one
        of_kv = (t.unflatten(1, (heads, -1)).sum(2) for t in of_kv)
    return of_q, *of_kv


def gradients(gradient, q, k, v, out, sums, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for as many heads of keys as of queries."""
    if not has_kernel(q):
        weights = (scores(q, k, causal) - sums[..., None]).exp()
        mean = (gradient * out).sum(-1, keepdim=True)  # of the weights' gradients, weighted
        of_scores = weights * (gradient @ v.mT - mean) / math.sqrt(q.shape[-1])
        return of_scores @ k, of_scores.mT @ q, weights.mT @ gradient
    none = torch.zeros((), dtype=torch.int64, device=q.device)  # dropout's seed: not used
    if shares_heads(q):
        kernel = aten._scaled_dot_product_flash_attention_backward
        saved = out, sums.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, none, none
        return kernel(gradient, q, k, v, *saved)
    if q.is_cuda:
        kernel = aten._scaled_dot_product_efficient_attention_backward
        padding = 0 if torch.version.hip else -sums.shape[-1] % 32  # AMD's takes none
        sums = F.pad(sums, (0, padding), value=math.inf).contiguous()
        saved = None, out, sums, none, none, 0.0, [True, True, True, False], causal
        return kernel(gradient, q, k, v, *saved)[:3]
    kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(gradient, q, k, v, out, sums, 0.0, causal)


def scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    found = q @ k.mT / math.sqrt(q.shape[-1])
    later = torch.ones(found.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return found.masked_fill(later, -math.inf) if causal else found


def pytorch_ring(group=None) -> Callable:
    """PyTorch's own ring attention, from an experimental module that differs between versions. As
    DTensors, queries, keys and values are sharded by position, in the order of pytorch_CP.py."""
    try:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard
        from torch.distributed.tensor.experimental import _attention

        _attention._cp_options.enable_load_balance = True
        _attention.set_rotate_method("alltoall")  # by default it gathers all keys at once
        _attention._enable_context_parallel_dispatcher()
    except (ImportError, AttributeError) as error:
        why = f"PyTorch {torch.__version__} has another interface ({error})"
        fail(f"--attention pytorch: {why}; use --attention ring")
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cuda")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (DTensor.from_local(t, mesh, [Shard(2)]) for t in (q, *repeat(q, k, v)))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).to_local()

    return attend
