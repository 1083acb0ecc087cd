"""Makes the CPU follow a GPU's defaults, so that its tensors take the same bytes as on a GPU.

Autocast uses CUDA's lists, dropout saves a boolean mask, attention saves no scores where there is a
fused kernel, and optimizers use their foreach implementation. The kernels of GPUs are called by
name: on fake tensors they need no GPU.
"""

import importlib
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import bias
from torch.utils._pytree import tree_leaves, tree_map

from jobs import experts, gpt

aten = torch.ops.aten
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
AUTOCAST = torch.library.Library("aten", "IMPL", "AutocastCPU")
AUTOGRAD = torch.library.Library("aten", "IMPL", "AutogradCPU")
HALF = torch.float16, torch.bfloat16


def stand_in_for_a_gpu() -> None:
    """Patch PyTorch; the process cannot be used for anything else afterwards."""
    on_gpus, on_cpus = (
        torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device}")
        for device in ("CUDA", "CPU")
    )
    for name in set(on_cpus) - set(on_gpus):
        register(AUTOCAST, name, torch.library.fallthrough_kernel)
    for kind, names in autocast_lists().items():
        for name in names:
            # What autocast on a CPU also casts to half keeps its kernel, which caches cast weights.
            if kind is not in_half or f"aten::{name}" not in on_cpus:
                register(AUTOCAST, name, without_autocast(kind, overload_of(name)))
    register(AUTOGRAD, "dropout", dropout)
    register(AUTOGRAD, "rms_norm", rms_norm)
    register(AUTOGRAD, "scaled_dot_product_attention", attention)
    gpt.shares_heads = lambda q: q.dtype in HALF
    gpt.see_documents = lambda begins: None  # FlexAttention keeps what causal attention keeps
    experts.can_group = lambda tokens: tokens.dtype == torch.bfloat16
    bias.can_use_flash_attention = lambda inputs: inputs.query.dtype in HALF
    bias.can_use_efficient_attention = lambda inputs: inputs.query.dtype == torch.float32
    for name in ("sgd", "adam"):  # on a CPU, they would update one tensor at a time by default
        module = importlib.import_module(f"torch.optim.{name}")  # torch.optim hides it
        module._default_to_fused_or_foreach = lambda *_, **__: (False, True)


def register(library: torch.library.Library, name: str, kernel) -> None:
    library.impl(name.removeprefix("aten::"), kernel, allow_override=True)


# ---------------------------------------------------------------------------------------- autocast


def autocast_lists() -> dict:
    """The operations that autocast casts on CUDA, by target dtype, from PyTorch's header."""
    text = HEADER.read_text()

    def names(macro: str) -> list[str]:
        body = re.search(rf"#define AT_FORALL_{macro}\(_\)(.*?)\n\n", text, re.DOTALL)[1]
        found = re.findall(r"_\((\w+)(?:, (\w+))?\)", body)
        return [".".join(filter(None, name)) for name in found] + re.findall(r'"(\S+)"', body)

    return {
        in_half: names("LOWER_PRECISION_FP"),
        in_fp32: names("FP32"),
        into_fp32: names("FP32_SET_OPT_DTYPE") + names("DIFFERENT_REDISPATCH_SIGNATURE"),
        in_the_widest: names("PROMOTE"),
    }


def overload_of(name: str):
    name, _, overload = name.partition(".")
    return getattr(getattr(aten, name), overload or "default")


def without_autocast(kind, operation):
    """The kernel of an operation, without autocast inside."""
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def compute(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            return kind(operation, args, kwargs)

    return compute


def is_cast(value) -> bool:
    return torch.is_tensor(value) and value.is_floating_point() and value.dtype != torch.float64


def call_in(dtype: torch.dtype, operation, args, kwargs):
    given = tree_map(lambda value: value.to(dtype) if is_cast(value) else value, (args, kwargs))
    return operation(*given[0], **given[1])


def in_half(*call):
    return call_in(torch.get_autocast_dtype("cpu"), *call)


def in_fp32(*call):
    return call_in(torch.float32, *call)


def into_fp32(operation, args, kwargs):
    """Keep the input's dtype, but compute in fp32."""
    names = [argument.name for argument in operation._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if not is_cast(args[0]) or given.get("dtype") is not None:
        return operation(*args, **kwargs)
    if "softmax" in operation.__name__ and args[0].dtype == torch.float16:
        return getattr(aten, f"_{operation._opname}")(args[0], given["dim"], True)
    if operation._opname == "norm":  # a separate overload takes the dtype, by keyword
        overload = operation._overloadname.replace("Scalar", "ScalarOpt").replace("OptOpt", "Opt")
        return getattr(aten.norm, f"{overload}_dtype")(*args, **kwargs, dtype=torch.float32)
    return operation(**given | {"dtype": torch.float32})


def in_the_widest(operation, args, kwargs):
    dtypes = [value.dtype for value in tree_leaves((args, kwargs)) if is_cast(value)]
    return call_in(max(dtypes, key=lambda dtype: dtype.itemsize), operation, args, kwargs)


# ------------------------------------------------------------------------- what has a fused kernel


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """A GPU saves a boolean mask; a CPU saves the factors."""
    if not train or p == 0 or not x.numel():
        return x
    return aten.native_dropout(x, p, train)[0] if p < 1 else x * torch.zeros_like(x)


class RMSNorm(torch.autograd.Function):
    """A CPU has no fused kernel, so it saves intermediate tensors. This stand-in for the fused
    kernel has only the right shapes."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, inner: int) -> Tensor:
        # Each row's reciprocal root mean square.
        rows = x.new_empty(*x.shape[:-inner], *[1] * inner, dtype=torch.float32)
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None):
    return RMSNorm.apply(x, weight, len(shape))


def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None,
              enable_gqa=False):  # fmt: skip
    """Choose the first kernel that supports the inputs, by the order and the rules of PyTorch's
    ``sdp_utils.cpp`` for GPUs of compute capability 8.0 or more."""
    width = q.shape[-1]
    is_half = q.dtype in HALF
    same = q.ndim == 4 and q.dtype == k.dtype == v.dtype and width == k.shape[-1]
    if same and is_half and attn_mask is None and v.shape[-1] == width <= 256:
        padded = [F.pad(t, (0, -width % 8)) if width % 8 else t for t in (q, k, v)]
        scale = scale or width**-0.5
        out = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)
        return out[0][..., :width]
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    aligned = 8 if is_half else 4
    if same and q.dtype != torch.float64 and width % aligned == v.shape[-1] % aligned == 0:
        if attn_mask is not None:
            attn_mask = attn_mask.to(q.dtype).expand(*q.shape[:3], k.shape[2])
        return aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        q, k, v, attn_mask, dropout_p, is_causal, scale=scale
    )[0]
