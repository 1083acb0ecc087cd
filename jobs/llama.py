"""Llama (Touvron et al. 2023, arXiv:2302.13971), compared with gpt.py: rotary instead of learned
positions, RMSNorm, SwiGLU, grouped-query attention, no dropout; Mistral, Mixtral, Qwen2 and Qwen3,
which differ in a few details; and their sizes."""

import dataclasses
import math
from functools import partial

import torch
from torch import Tensor, nn

from harness.cli import fail
from jobs.experts import MixtureOfExperts
from jobs.gpt import MLP, Attention, Decoder, Size


@dataclasses.dataclass(frozen=True)
class LlamaSize(Size):
    """See :class:`jobs.gpt.Size`. ``kind`` is the ``model_type`` of huggingface.co: qwen2 has
    biases of queries, keys and values, qwen3 and qwen3_moe have norms of queries and keys."""

    kind: str = "llama"
    base: float = 10_000.0  # of the rotary embedding's frequencies
    scaling: tuple[tuple[str, str | float], ...] = ()  # of these, as rope_scaling in config.json
    eps: float = 1e-5  # of the norms
    tie: bool = False  # default of --tie: whether embedding and head share a matrix
    window: int = 0  # tokens that a token attends to, itself included; 0: all before it
    normalize: bool = False  # whether the gates of a token's experts add up to 1

    mlp_matrices = 3
    on_the_hub = True

    def complete(self, model: str, kv_heads: int | None, mlp_width: int | None) -> "LlamaSize":
        kv_heads = kv_heads or self.kv_heads or self.heads
        if self.heads % kv_heads:
            of = f"{self.heads} heads of {model}"
            fail(f"--kv-heads {kv_heads} do not divide {of}; use a divisor")
        if self.head_width % 2:
            fail(f"--model {model}: head width {self.head_width} is odd; use an even one")
        # Two thirds of a GPT's, as there are three matrices, and a multiple of 32.
        width = mlp_width or self.mlp_width or 32 * math.ceil(8 * self.width / 3 / 32)
        return dataclasses.replace(self, kv_heads=kv_heads, mlp_width=width)

    def make_model(self, vocabulary: list[int], args, **options) -> "Llama":
        return Llama(vocabulary, self, **options)


# Values of --model before LxHxD
mistral = partial(LlamaSize, kind="mistral", base=1e6)
mixtral = partial(LlamaSize, kind="mixtral", base=1e6, experts=8, top_k=2, normalize=True)
qwen2 = partial(LlamaSize, kind="qwen2", base=1e6, eps=1e-6)
qwen3 = partial(qwen2, kind="qwen3")
qwen3moe = partial(qwen3, kind="qwen3_moe", experts=8, top_k=2, normalize=True)
FAMILIES = {"llama": LlamaSize, "mistral": mistral, "mixtral": mixtral}
FAMILIES |= {"qwen2": qwen2, "qwen3": qwen3, "qwen3moe": qwen3moe}

# From config.json of TinyLlama/TinyLlama-1.1B-Chat-v1.0, meta-llama/Llama-2-7b-hf, -13b-hf,
# Meta-Llama-3-8B, -70B and Llama-3.2-1B, mistralai/Mistral-7B-v0.3 and Mixtral-8x7B-v0.1, and
# Qwen/Qwen2.5-0.5B, Qwen3-0.6B, -8B, -32B and -30B-A3B on https://huggingface.co. Context: as in
# training, for Llama 3.2 before its extension.
LLAMA3 = {"vocabulary": 128_256, "base": 500_000.0}
SCALED = (
    ("rope_type", "llama3"), ("factor", 32.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0),
    ("original_max_position_embeddings", 8192),
)  # fmt: skip
QWEN3 = {"vocabulary": 151_936, "head_dim": 128}
SIZES = {
    "tinyllama-1.1b": LlamaSize(22, 32, 2048, 2048, 0.0, 4, 5632, 32_000),
    "llama2-7b": LlamaSize(32, 32, 4096, 4096, 0.0, 32, 11_008, 32_000),
    "llama2-13b": LlamaSize(40, 40, 5120, 4096, 0.0, 40, 13_824, 32_000),
    "llama3-8b": LlamaSize(32, 32, 4096, 8192, 0.0, 8, 14_336, **LLAMA3),
    "llama3-70b": LlamaSize(80, 64, 8192, 8192, 0.0, 8, 28_672, **LLAMA3),
    "llama3.2-1b": LlamaSize(16, 32, 2048, 8192, 0.0, 8, 8192, **LLAMA3, scaling=SCALED, tie=True),
    "mistral-7b": mistral(32, 32, 4096, 32_768, 0.0, 8, 14_336, 32_768),
    "mixtral-8x7b": mixtral(32, 32, 4096, 32_768, 0.0, 8, 14_336, 32_000),
    "qwen2.5-0.5b": qwen2(24, 14, 896, 32_768, 0.0, 2, 4864, 151_936, tie=True),
    "qwen3-0.6b": qwen3(28, 16, 1024, 32_768, 0.0, 8, 3072, **QWEN3, tie=True),
    "qwen3-8b": qwen3(36, 32, 4096, 32_768, 0.0, 8, 12_288, **QWEN3),
    "qwen3-32b": qwen3(64, 64, 5120, 32_768, 0.0, 8, 25_600, **QWEN3),
    "qwen3-30b-a3b": qwen3moe(48, 32, 2048, 32_768, 0.0, 4, 768, **QWEN3, experts=128, top_k=8),
}


def frequencies(size: LlamaSize, device: torch.device) -> Tensor:
    """The rotation of each pair of a head's elements per position, in radians, fp32
    ``[head_width / 2]`` (Su et al. 2021, arXiv:2104.09864)."""
    width, scaling = size.head_width, dict(size.scaling)
    periods = size.base ** (torch.arange(0, width, 2, device=device).float() / width)
    found = 1 / periods
    if not scaling:
        return found
    slow, share = found / scaling["factor"], 0.0  # all are slowed down, if it is linear
    old = scaling.get("original_max_position_embeddings")
    if scaling["rope_type"] == "llama3":  # by the turns within the old context
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        share = ((old / (2 * math.pi / found) - low) / (high - low)).clamp(0, 1)
    elif scaling["rope_type"] == "yarn":  # also by them, but linear in the number of the pair
        turns = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1
        logs = (math.log(old / (n * 2 * math.pi)) / (2 * math.log(size.base)) for n in turns)
        low, high = (width * log for log in logs)
        if scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        pairs = torch.arange(width // 2, device=device).float()
        share = 1 - ((pairs - low) / (high - low or 0.001)).clamp(0, 1)
        slow = 1 / (scaling["factor"] * periods)  # to the last bit as in transformers
    return (1 - share) * slow + share * found


def attention_factor(size: LlamaSize) -> float:
    """By which YaRN (Peng et al. 2023, arXiv:2309.00071) multiplies cosine and sine, so that the
    product of a query and a key grows by its square."""
    scaling = dict(size.scaling)
    if scaling.get("rope_type") != "yarn":
        return 1.0
    scales = scaling.get("mscale"), scaling.get("mscale_all_dim")
    above, below = scales if all(scales) else (1, 0)
    log = 0.1 * math.log(max(scaling["factor"], 1))
    return scaling.get("attention_factor") or (above * log + 1) / (below * log + 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``[batch, heads, time, head_width]``, so that the product of a query and a key depends
    on their distance. The first half of a head's elements is paired with the second half."""
    first, second = x.chunk(2, 3)
    return x * cos.to(x.dtype) + torch.cat([-second, first], 3) * sin.to(x.dtype)


class Llama(Decoder):
    """See :class:`jobs.gpt.Decoder`."""

    def __init__(self, vocabulary: list[int], size: LlamaSize, tie=False, **experts):
        make_norm = partial(nn.RMSNorm, eps=size.eps)
        norms = make_norm if size.kind in ("qwen3", "qwen3_moe") else None
        options = {"rotate": rotate, "bias": size.kind == "qwen2", "make_norm": norms}
        make_attention = partial(Attention, size, **options)
        experts |= {"normalize": size.normalize} if experts else {}
        kind = MixtureOfExperts if experts else MLP
        make_mlp = partial(kind, size.width, size.mlp_width, gated=True, **experts)
        super().__init__(vocabulary, size, make_norm, make_attention, make_mlp, tie)
        self.size = size

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of all angles, once for all blocks, in fp32 for any dtype of weights."""
        angles = positions.float()[..., None] * frequencies(self.size, positions.device)
        angles = torch.cat([angles, angles], -1).unsqueeze(-3)  # the same for all heads
        factor = attention_factor(self.size)
        return factor * angles.cos(), factor * angles.sin()
