"""Llama (Touvron et al. 2023, arXiv:2302.13971), to be read beside gpt.py: rotary positions in the
place of learned ones, RMSNorm, SwiGLU, grouped queries, no dropout. Its sizes, and the names that
its configuration and its weights have on huggingface.co.
"""

import dataclasses
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jobs.gpt import Decoder, Size, attend


@dataclasses.dataclass(frozen=True)
class LlamaSize(Size):
    """See :class:`jobs.gpt.Size`.

    Args:
        base: of the frequencies by which positions rotate.
        scaling: of these frequencies, as Llama 3.1 stretches them; its keys are those of
            ``rope_scaling`` in a configuration.
        eps: of the norms.
        tie: whether embedding and head share a matrix, unless ``--tie`` is given.
    """

    base: float = 10_000.0
    scaling: tuple[tuple[str, float], ...] = ()
    eps: float = 1e-5
    tie: bool = False

    mlp_matrices = 3


# From config.json of TinyLlama/TinyLlama-1.1B-Chat-v1.0, meta-llama/Llama-2-7b-hf, -13b-hf,
# Meta-Llama-3-8B, -70B and Llama-3.2-1B on https://huggingface.co. Context: what they were trained
# with, of Llama 3.2 before it was stretched.
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
    """How far each pair of a head's numbers rotates from one position to the next, in radians,
    fp32 ``[head_width / 2]`` (Su et al. 2021, arXiv:2104.09864)."""
    width = size.width // size.heads
    found = 1 / size.base ** (torch.arange(0, width, 2, device=device).float() / width)
    if not size.scaling:
        return found
    # Slow rotations become slower by the factor, fast ones stay, and those between are between.
    scaling = dict(size.scaling)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / found
    old = scaling["original_max_position_embeddings"]
    share = ((old / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - share) * found / scaling["factor"] + share * found


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """``[batch, heads, time, head_width]``, of which the first half of a head's numbers is paired
    with the second. Angles are in fp32, whatever x is in."""
    angles = positions.float()[:, None] * frequencies
    angles = torch.cat([angles, angles], 1)
    first, second = x.chunk(2, 3)
    turned = torch.cat([-second, first], 3)
    return x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)


class RotaryAttention(nn.Module):
    """Queries and keys are rotated by their positions, so that a product depends on how far apart
    they are. Keys and values have fewer heads (Ainslie et al. 2023, arXiv:2305.13245)."""

    def __init__(self, size: LlamaSize):
        super().__init__()
        self.size, self.head_width, self.attend = size, size.width // size.heads, attend
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, size.kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(size.width, size.kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (self.split(project(x)) for project in (self.query, self.key, self.value))
        by = frequencies(self.size, x.device)
        heads = self.attend(rotate(q, positions, by), rotate(k, positions, by), v)
        return self.out(heads.transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        """``[batch, time, width]`` to ``[batch, heads, time, head_width]``."""
        return x.unflatten(2, (-1, self.head_width)).transpose(1, 2)


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
        make_attention, make_mlp = partial(RotaryAttention, size), partial(SwiGLU, size)
        super().__init__(vocabulary, size, make_norm, make_attention, make_mlp, **options)


# ------------------------------------------------------------------------------ as others name it

NAMES = {  # of the state dict, here and there
    "token": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj", "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip


def their_name(name: str) -> str:
    """Of one of our parameters."""
    module, _, kind = name.rpartition(".")
    blocks, _, inner = module.partition(".")
    number, _, inner = inner.partition(".")
    where = f"model.layers.{number}.{NAMES[inner]}" if blocks == "blocks" else NAMES[module]
    return f"{where}.{kind}"


def make_config(size: LlamaSize, context: int, vocabulary: int, tie: bool) -> dict:
    """``config.json``."""
    scaling = {"rope_type": "llama3", **dict(size.scaling)} if size.scaling else None
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": size.width, "intermediate_size": size.mlp_width,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads, "max_position_embeddings": context,
        "rms_norm_eps": size.eps, "rope_theta": size.base, "rope_scaling": scaling,
        "vocab_size": vocabulary, "tie_word_embeddings": tie,
    }  # fmt: skip


def size_of_config(config: dict) -> LlamaSize:
    """The shape that a ``config.json`` describes.

    Raises:
        ValueError: it is not a Llama's, or one that computes what is not here.
    """
    rope = {"rope_theta": 10_000.0, **(config.get("rope_scaling") or {})}
    rope |= {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
    rope |= config.get("rope_parameters") or {}  # of transformers 5
    kind = rope.get("rope_type") or rope.get("type") or "default"
    heads, width = config["num_attention_heads"], config["hidden_size"]
    needed = {
        "model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "head_dim": width // heads,
    }  # fmt: skip
    for name, value in needed.items():
        if config.get(name, value) not in (value, None):
            raise ValueError(f"its {name} is {config[name]}, and only {value} is known here")
    if kind not in ("default", "llama3"):
        raise ValueError(f"its rope_type is {kind}, and only default and llama3 are known here")
    scaling = tuple((name, float(rope[name])) for name, _ in STRETCHED) if kind == "llama3" else ()
    return LlamaSize(
        config["num_hidden_layers"], heads, width, config["max_position_embeddings"], 0.0,
        config.get("num_key_value_heads") or heads, config["intermediate_size"],
        config["vocab_size"], rope["rope_theta"], scaling, config["rms_norm_eps"],
        config.get("tie_word_embeddings", False),
    )  # fmt: skip
