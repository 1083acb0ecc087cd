"""A decoder-only transformer for next-token prediction, in the form of GPT-2; its sizes."""

import dataclasses
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.cli import fail
from jobs.experts import MixtureOfExperts
from libraries.attention_kernels import repeat, shares_heads


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

    def make_model(self, vocabulary: list[int], args, **options) -> "Decoder":
        """A model of this shape; ``options``: ``tie``, and for experts instead of MLPs those of
        :class:`MixtureOfExperts`."""
        return GPT(vocabulary, self, args.context, args.dropout, **options)

    def count_parameters(self, vocabulary: int) -> int:
        """Number of parameters of an untied model, without norms, biases and positions."""
        attention = 2 * self.head_width * (self.heads + self.kv_heads)  # per element of the width
        mlp = max(1, self.experts) * self.mlp_matrices * self.mlp_width + self.experts
        return (self.layers * (attention + mlp) + 2 * vocabulary) * self.width


# gpt-nano and gpt-mini are nanoGPT's sizes for a CPU and for one GPU
# (https://github.com/karpathy/nanoGPT); gpt2 is the smallest GPT-2 (Radford et al. 2019), with
# which this one shares 12 layers of width 768, but not the 50,257 tokens.
SIZES = {
    "gpt-nano": Size(4, 4, 128, 64),
    "gpt-mini": Size(6, 6, 384, 256, 0.2),
    "gpt2": Size(12, 12, 768, 1024, 0.1),
}


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of ``[batch, heads, time, head_width]``. Keys and values may have fewer
    heads, each of which is used by several heads of queries (Ainslie et al. 2023,
    arXiv:2305.13245)."""
    if shares_heads(q):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return F.scaled_dot_product_attention(q, *repeat(q, k, v), is_causal=True)


class Attention(nn.Module):
    """Causal attention with several heads.

    Queries, keys and values have separate matrices: tensor parallelism would split a combined
    matrix so that a rank has some queries and no values.

    Args:
        rotate: applied to queries and to keys before.
        bias: whether queries, keys and values have one.
        make_norm: makes a norm for a width; of each head's queries and keys, before ``rotate``.
    """

    def __init__(
        self, size: Size, dropout: float = 0.0, rotate: Callable | None = None, bias=False,
        make_norm: Callable | None = None,
    ):  # fmt: skip
        super().__init__()
        self.head_width = size.head_width
        width, kv_width = (n * size.head_width for n in (size.heads, size.kv_heads or size.heads))
        self.attend, self.rotate = attend, rotate
        self.query = nn.Linear(size.width, width, bias=bias)
        self.key = nn.Linear(size.width, kv_width, bias=bias)
        self.value = nn.Linear(size.width, kv_width, bias=bias)
        self.out = nn.Linear(width, size.width, bias=False)
        self.dropout, self.normalizes = nn.Dropout(dropout), make_norm is not None
        if make_norm:
            self.query_norm, self.key_norm = make_norm(size.head_width), make_norm(size.head_width)

    def forward(self, x: Tensor, places) -> Tensor:
        q, k, v = (self.split(project(x)) for project in (self.query, self.key, self.value))
        if self.normalizes:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rotate:
            q, k = self.rotate(q, *places), self.rotate(k, *places)
        heads = self.attend(q, k, v)
        return self.dropout(self.out(heads.transpose(1, 2).flatten(2)))

    def split(self, x: Tensor) -> Tensor:
        """``[batch, time, width]`` to ``[batch, heads, time, head_width]``."""
        return x.unflatten(2, (-1, self.head_width)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x))))


class Block(nn.Module):
    """Attention and MLP, each after a norm (Radford et al. 2019, section 2.3), which
    ``make_norm`` makes for a width."""

    def __init__(self, width: int, make_norm: Callable, attention: nn.Module, mlp: nn.Module):
        super().__init__()
        self.attention_norm = make_norm(width)
        self.attention = attention
        self.mlp_norm = make_norm(width)
        self.mlp = mlp

    def forward(self, x: Tensor, places) -> Tensor:
        """``places``: from :meth:`Decoder.places`; rotary attention needs them in every block."""
        x = x + self.attention(self.attention_norm(x), places=places)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Tokens ``[batch, time]`` to logits ``[batch, vocabulary, time]``, the shape
    that ``F.cross_entropy`` takes with labels ``[batch, time]``.

    Linear layers have no bias; a key's bias, for example, would cancel in the softmax. Weights are
    initialized by :func:`jobs.decoder.init_weights`.

    Args:
        vocabulary: code points of the characters of the tokens, part of the state dict.
        make_mlp: makes the MLP of a block.
        tie: share one matrix between embedding and head.
    """

    before, after = ("token",), ("norm", "head")  # modules, before the blocks and after them

    def __init__(
        self, vocabulary: list[int], size: Size, make_norm: Callable, make_attention: Callable,
        make_mlp: Callable, tie=False,
    ):  # fmt: skip
        super().__init__()
        width = size.width
        self.register_buffer("vocabulary", torch.tensor(vocabulary))
        self.token = nn.Embedding(len(vocabulary), width)
        self.blocks = nn.ModuleList(
            Block(width, make_norm, make_attention(), make_mlp()) for _ in range(size.layers)
        )
        self.norm = make_norm(width)
        self.head = nn.Linear(width, len(vocabulary), bias=False)
        if tie:
            self.head.weight = self.token.weight

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The input of the first block, ``[batch, time, width]``."""
        return self.token(tokens)

    def places(self, positions: Tensor):
        """What all blocks need of the positions: with rotary attention, the angles."""
        return positions

    def unembed(self, x: Tensor) -> Tensor:
        """Logits from the output of the last block."""
        # A copy, which the loss would make anyway; and FSDP warns about views.
        return self.head(self.norm(x)).transpose(1, 2).contiguous()

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """``positions``: ``[time]``, of this rank's tokens, if sequences are sharded."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x, places = self.embed(tokens, positions), self.places(positions)
        for block in self.blocks:
            x = block(x, places)
        return self.unembed(x)


class GPT(Decoder):
    """Learned positions, ``context`` of them, LayerNorm, GELU, dropout; see :class:`Decoder`."""

    before = ("token", "position", "dropout")

    def __init__(
        self, vocabulary: list[int], size: Size, context: int, dropout=0.0, tie=False, **experts
    ):
        make_attention = partial(Attention, size, dropout)
        make_mlp = partial(MLP, size.width, dropout)
        if experts:
            sizes = size.width, 4 * size.width
            make_mlp = partial(MixtureOfExperts, *sizes, dropout=dropout, **experts)
        super().__init__(vocabulary, size, nn.LayerNorm, make_attention, make_mlp, tie)
        self.position = nn.Embedding(context, size.width)
        self.dropout = nn.Dropout(dropout)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.dropout(self.token(tokens) + self.position(positions))
