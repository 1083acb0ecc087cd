"""A decoder-only transformer for next-token prediction, in the form of GPT-2."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jobs.sizes import Size
from parallel.attention_kernels import attend_to, repeat, see_documents, shares_heads


def attend(q: Tensor, k: Tensor, v: Tensor, seen=None) -> Tensor:
    """Causal attention of ``[batch, heads, time, head_width]``. Keys and values may have fewer
    heads, each of which is used by several heads of queries (Ainslie et al. 2023,
    arXiv:2305.13245). ``seen``: of packed rows, from :func:`see_documents`."""
    if seen is not None:
        return attend_to(seen, q, *repeat(q, k, v))
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
        width = size.heads * size.head_width
        kv_width = (size.kv_heads or size.heads) * size.head_width
        self.attend = attend
        self.rotate = rotate
        self.query = nn.Linear(size.width, width, bias=bias)
        self.key = nn.Linear(size.width, kv_width, bias=bias)
        self.value = nn.Linear(size.width, kv_width, bias=bias)
        self.out = nn.Linear(width, size.width, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.normalizes = make_norm is not None
        if make_norm:
            self.query_norm = make_norm(size.head_width)
            self.key_norm = make_norm(size.head_width)

    def forward(self, x: Tensor, places) -> Tensor:
        angles, documents, _ = places
        q, k, v = (self.split(project(x)) for project in (self.query, self.key, self.value))
        if self.normalizes:
            q = self.query_norm(q).to(v.dtype)  # norms return fp32 under autocast
            k = self.key_norm(k).to(v.dtype)
        if self.rotate:
            q = self.rotate(q, *angles)
            k = self.rotate(k, *angles)
        heads = self.attend(q, k, v, *documents)
        return self.dropout(self.out(heads.transpose(1, 2).flatten(2)))

    def split(self, x: Tensor) -> Tensor:
        """``[batch, time, width]`` to ``[batch, heads, time, head_width]``."""
        return x.unflatten(2, (-1, self.head_width)).transpose(1, 2)


class MLP(nn.Module):
    """With GELU; ``gated``: SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    routes = False  # tokens to experts: see MixtureOfExperts

    def __init__(self, width: int, inner: int, dropout=0.0, gated=False):
        super().__init__()
        if gated:
            self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.gate(x)) * self.up(x) if self.gated else F.gelu(self.up(x))
        return self.dropout(self.down(hidden))


def mlp_maker(**experts) -> Callable:
    """What makes the MLP of a block: a mixture, if there are options of one."""
    if not experts:
        return MLP
    from jobs.experts import MixtureOfExperts  # which other models do not need

    return partial(MixtureOfExperts, **experts)


class Block(nn.Module):
    """Attention and MLP, each after a norm (Radford et al. 2019, section 2.3)."""

    def __init__(self, width: int, make_norm: Callable, attention: nn.Module, mlp: nn.Module):
        super().__init__()
        self.attention_norm = make_norm(width)
        self.attention = attention
        self.mlp_norm = make_norm(width)
        self.mlp = mlp

    def forward(self, x: Tensor, places) -> Tensor:
        """``places``: from :meth:`Decoder.locate`; attention needs them in every block."""
        x = x + self.attention(self.attention_norm(x), places=places)
        if self.mlp.routes:
            return x + self.mlp(self.mlp_norm(x), padding=places[2])
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Tokens ``[batch, time]`` to logits ``[batch, time, vocabulary]``.

    Linear layers have no bias; a key's bias, for example, would cancel in the softmax. Weights are
    initialized by :func:`jobs.language_models.init_weights`. ``vocabulary``: code points of the
    tokens' characters, part of the state dict."""

    before = ("token",)  # modules before the blocks
    after = ("norm", "head")  # and after them

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

    def angles(self, positions: Tensor) -> tuple[Tensor, ...]:
        """What rotary attention needs of the positions."""
        return ()

    def locate(self, rows: Tensor, order: Tensor | None = None) -> tuple[Tensor, Tensor, tuple]:
        """The tokens of :meth:`forward`'s arguments, their positions, and what all blocks need of
        them: angles, of packed rows which tokens are in one document, and which are padding. That
        is -1 in ``rows``."""
        positions = torch.arange(rows.shape[-1], device=rows.device) if order is None else order
        tokens = rows
        documents = ()
        if rows.ndim == 3:
            tokens, in_document = rows.unbind(1)
            begins = positions - in_document  # where the document of each token begins, in its row
            documents = (begins if order is not None else see_documents(begins),)
            positions = in_document
        places = self.angles(positions), documents, tokens < 0
        return tokens.clamp(min=0), positions, places

    def unembed(self, x: Tensor) -> Tensor:
        """Logits from the output of the last block."""
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """``tokens`` are packed if they are ``[batch, 2, time]``, with the position of each in its
        document; -1 is padding. ``positions``: ``[time]``, of this rank's tokens, if sequences are
        sharded."""
        tokens, positions, places = self.locate(tokens, positions)
        x = self.embed(tokens, positions)
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
        inner = size.mlp_width or 4 * size.width
        make_mlp = partial(mlp_maker(**experts), size.width, inner, dropout=dropout)
        super().__init__(vocabulary, size, nn.LayerNorm, make_attention, make_mlp, tie)
        self.position = nn.Embedding(context, size.width)
        self.dropout = nn.Dropout(dropout)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.dropout(self.token(tokens) + self.position(positions))
