"""Llama (Touvron et al. 2023, arXiv:2302.13971), compared with gpt.py: rotary instead of learned
positions, RMSNorm, SwiGLU, grouped-query attention, no dropout; Mistral, Mixtral, Qwen2 and Qwen3,
which differ in a few details."""

import math
from functools import partial

import torch
from torch import Tensor, nn

from jobs.gpt import Attention, Decoder, mlp_maker
from jobs.sizes import LlamaSize


def frequencies(size: LlamaSize, device: torch.device) -> Tensor:
    """The rotation of each pair of a head's elements per position, in radians, fp32
    ``[head_width / 2]`` (Su et al. 2021, arXiv:2104.09864)."""
    width = size.head_width
    scaling = dict(size.scaling)
    periods = size.base ** (torch.arange(0, width, 2, device=device).float() / width)
    found = 1 / periods
    if not scaling:
        return found
    slow = found / scaling["factor"]
    share = 0.0  # all are slowed down, if it is linear
    old = scaling.get("original_max_position_embeddings")
    if scaling["rope_type"] == "llama3":  # by the turns within the old context
        low = scaling["low_freq_factor"]
        high = scaling["high_freq_factor"]
        share = ((old / (2 * math.pi / found) - low) / (high - low)).clamp(0, 1)
    elif scaling["rope_type"] == "yarn":  # also by them, but linear in the number of the pair
        turns = [scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1]
        logs = [math.log(old / (n * 2 * math.pi)) / (2 * math.log(size.base)) for n in turns]
        low, high = (width * log for log in logs)
        if scaling.get("truncate", True):
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, width - 1)
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
    above = scaling.get("mscale")
    below = scaling.get("mscale_all_dim")
    if not (above and below):
        above = 1
        below = 0
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
        if experts:
            experts["normalize"] = size.normalize
        make_mlp = partial(mlp_maker(**experts), size.width, size.mlp_width, gated=True)
        super().__init__(vocabulary, size, make_norm, make_attention, make_mlp, tie)
        self.size = size

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of all angles, once for all blocks, in fp32 for any dtype of weights."""
        angles = positions.float()[..., None] * frequencies(self.size, positions.device)
        angles = torch.cat([angles, angles], -1).unsqueeze(-3)  # the same for all heads
        factor = attention_factor(self.size)
        return factor * angles.cos(), factor * angles.sin()
