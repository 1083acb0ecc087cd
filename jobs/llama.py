"""Llama (Touvron et al. 2023, arXiv:2302.13971), compared with gpt.py: rotary instead of learned
positions, RMSNorm, SwiGLU, grouped-query attention, no dropout; and its sizes."""

import dataclasses
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.cli import fail
from jobs.gpt import Attention, Decoder, Size


@dataclasses.dataclass(frozen=True)
class LlamaSize(Size):
    """See :class:`jobs.gpt.Size`."""

    base: float = 10_000.0  # of the rotary embedding's frequencies
    scaling: tuple[tuple[str, float], ...] = ()  # of these, as rope_scaling of Llama 3.1 has it
    eps: float = 1e-5  # of the norms
    tie: bool = False  # default of --tie: whether embedding and head share a matrix

    mlp_matrices = 3
    on_the_hub = True

    def complete(self, model: str, kv_heads: int | None, mlp_width: int | None) -> "LlamaSize":
        kv_heads = kv_heads or self.kv_heads or self.heads
        if self.heads % kv_heads:
            of = f"{self.heads} heads of {model}"
            fail(f"--kv-heads {kv_heads} do not divide {of}; use a divisor")
        if self.width // self.heads % 2:
            fail(f"--model {model}: head width {self.width // self.heads} is odd; use an even one")
        # Two thirds of a GPT's, as there are three matrices, and a multiple of 32.
        width = mlp_width or self.mlp_width or 32 * math.ceil(8 * self.width / 3 / 32)
        return dataclasses.replace(self, kv_heads=kv_heads, mlp_width=width)

    def make_model(self, vocabulary: list[int], args, **options) -> "Llama":
        return Llama(vocabulary, self, **options)


# From config.json of TinyLlama/TinyLlama-1.1B-Chat-v1.0, meta-llama/Llama-2-7b-hf, -13b-hf,
# Meta-Llama-3-8B, -70B and Llama-3.2-1B on https://huggingface.co. Context: as in training,
# for Llama 3.2 before its extension.
LLAMA3 = {"vocabulary": 128_256, "base": 500_000.0}
STRETCHED = (
    ("factor", 32.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0),
    ("original_max_position_embeddings", 8192.0),
)  # fmt: skip
SIZES = {
    "tinyllama-1.1b": LlamaSize(22, 32, 2048, 2048, 0.0, 4, 5632, 32_000),
    "llama2-7b": LlamaSize(32, 32, 4096, 4096, 0.0, 32, 11_008, 32_000),
    "llama2-13b": LlamaSize(40, 40, 5120, 4096, 0.0, 40, 13_824, 32_000),
    "llama3-8b": LlamaSize(32, 32, 4096, 8192, 0.0, 8, 14_336, **LLAMA3),
    "llama3-70b": LlamaSize(80, 64, 8192, 8192, 0.0, 8, 28_672, **LLAMA3),
    "llama3.2-1b": LlamaSize(
        16, 32, 2048, 8192, 0.0, 8, 8192, **LLAMA3, scaling=STRETCHED, tie=True
    ),
}


def frequencies(size: LlamaSize, device: torch.device) -> Tensor:
    """The rotation of each pair of a head's elements per position, in radians, fp32
    ``[head_width / 2]`` (Su et al. 2021, arXiv:2104.09864)."""
    width = size.width // size.heads
    found = 1 / size.base ** (torch.arange(0, width, 2, device=device).float() / width)
    if not size.scaling:
        return found
    # Low frequencies are divided by the factor, high ones stay, those between are interpolated.
    scaling = dict(size.scaling)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / found
    old = scaling["original_max_position_embeddings"]
    share = ((old / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - share) * found / scaling["factor"] + share * found


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``[batch, heads, time, head_width]``, so that the product of a query and a key depends
    on their distance. The first half of a head's elements is paired with the second half."""
    first, second = x.chunk(2, 3)
    turned = torch.cat([-second, first], 3)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


class SwiGLU(nn.Module):
    """Shazeer 2020, arXiv:2002.05202."""

    def __init__(self, size: LlamaSize):
        super().__init__()
        self.gate = nn.Linear(size.width, size.mlp_width, bias=False)
        self.up = nn.Linear(size.width, size.mlp_width, bias=False)
        self.down = nn.Linear(size.mlp_width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Llama(Decoder):
    """See :class:`jobs.gpt.Decoder`."""

    def __init__(self, vocabulary: list[int], size: LlamaSize, **options):
        make_norm = partial(nn.RMSNorm, eps=size.eps)
        make_attention = partial(Attention, size, rotate=rotate)
        make_mlp = partial(SwiGLU, size)
        super().__init__(vocabulary, size, make_norm, make_attention, make_mlp, **options)
        self.size = size

    def places(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of all angles, once for all blocks, in fp32 for any dtype of weights."""
        angles = positions.float()[:, None] * frequencies(self.size, positions.device)
        angles = torch.cat([angles, angles], 1)
        return angles.cos(), angles.sin()
