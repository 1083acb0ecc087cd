"""Sizes of decoders: the families that ``--model`` may name, and published sizes."""

import dataclasses
import difflib
import functools
import math
import re
from functools import partial

from harness.cli import fail


@dataclasses.dataclass(frozen=True)
class Size:
    """The shape of a decoder."""

    layers: int
    heads: int
    width: int
    context: int = 256  # default of --context, tokens per sequence
    dropout: float = 0.0
    kv_heads: int = 0  # heads of keys and values; 0: as many as heads of queries
    mlp_width: int = 0  # within the MLP
    vocabulary: int = 0  # tokens of the published model; 0 if there is none
    head_dim: int = 0  # width of a head; 0: width / heads
    experts: int = 0  # in each block, instead of one MLP
    top_k: int = 1  # experts per token

    mlp_matrices = 2
    on_the_hub = False  # whether libraries/hub.py reads and writes its weights

    @property
    def head_width(self) -> int:
        return self.head_dim or self.width // self.heads

    def complete(self, model: str, kv_heads: int | None, mlp_width: int | None) -> "Size":
        """The shape with ``--kv-heads`` and ``--mlp-width`` of ``--model``, or their defaults."""
        if kv_heads or mlp_width:
            fail(f"--kv-heads and --mlp-width need a Llama, and --model is {model}; leave them out")
        return dataclasses.replace(self, kv_heads=self.heads, mlp_width=4 * self.width)

    def count_parameters(self, vocabulary: int) -> int:
        """Number of parameters of an untied model, without norms, biases and positions."""
        attention = 2 * self.head_width * (self.heads + self.kv_heads)  # per element of the width
        mlp = max(1, self.experts) * self.mlp_matrices * self.mlp_width + self.experts
        return (self.layers * (attention + mlp) + 2 * vocabulary) * self.width


@dataclasses.dataclass(frozen=True)
class LlamaSize(Size):
    """See :class:`Size`. ``kind`` is the ``model_type`` of huggingface.co: qwen2 has biases of
    queries, keys and values, qwen3 and qwen3_moe have norms of queries and keys."""

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


# Values of --model before LxHxD
mistral = partial(LlamaSize, kind="mistral", base=1e6)
mixtral = partial(LlamaSize, kind="mixtral", base=1e6, experts=8, top_k=2, normalize=True)
qwen2 = partial(LlamaSize, kind="qwen2", base=1e6, eps=1e-6)
qwen3 = partial(qwen2, kind="qwen3")
qwen3moe = partial(qwen3, kind="qwen3_moe", experts=8, top_k=2, normalize=True)
FAMILIES = {
    "gpt": Size,
    "llama": LlamaSize,
    "mistral": mistral,
    "mixtral": mixtral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3moe": qwen3moe,
}

# gpt-nano and gpt-mini are nanoGPT's sizes for a CPU and for one GPU
# (https://github.com/karpathy/nanoGPT); gpt2 is the smallest GPT-2 (Radford et al. 2019), with
# which this one shares 12 layers of width 768, but not the 50,257 tokens.
GPTS = {
    "gpt-nano": Size(4, 4, 128, 64),
    "gpt-mini": Size(6, 6, 384, 256, 0.2),
    "gpt2": Size(12, 12, 768, 1024, 0.1),
}

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
LLAMAS = {
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
SIZES = GPTS | LLAMAS


def is_decoder(name: str | None) -> bool:
    """Whether ``--model`` names a decoder, even a misspelled one."""
    return any(family[:4] in (name or "") for family in FAMILIES)


@functools.cache
def size_of_name(name: str, kv_heads: int | None, mlp_width: int | None) -> Size:
    """The size of ``--model``, a published one or FAMILY-LxHxD."""
    family, _, shape = name.partition("-")
    if name in SIZES:
        size = SIZES[name]
    elif family in FAMILIES and re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", shape):
        layers, heads, width = map(int, shape.split("x"))
        size = FAMILIES[family](layers, heads, width)
    else:
        close = difflib.get_close_matches(name, SIZES) or GPTS
        example = "such as gpt-4x4x128 for 4 layers of 4 heads and width 128"
        use = f"try {', '.join(close)}, or {'-, '.join(FAMILIES)}-LxHxD, {example}"
        fail(f"--model {name} is no decoder; {use}")
    if size.width % size.heads and not size.head_dim:
        why = f"width {size.width} is not divisible by {size.heads} heads"
        fail(f"--model {name}: {why}; use a multiple")
    return size.complete(name, kv_heads, mlp_width)
