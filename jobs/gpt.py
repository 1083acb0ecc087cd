"""A decoder-only transformer that predicts the next token of a text, and its sizes."""

import argparse
import difflib
import math
import re
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.command_line import fail
from harness.files import check_weights, load_file
from harness.remote import fetch_input
from jobs.experts import MixtureOfExperts

# Layers, heads, width, context and dropout. gpt-nano and gpt-mini are nanoGPT's sizes for a CPU and
# for one GPU (https://github.com/karpathy/nanoGPT); gpt2 is the smallest GPT-2 (Radford et al.
# 2019), with which this one shares 12 layers of 768, but not 50,257 tokens.
SIZES = {
    "gpt-nano": (4, 4, 128, 64, 0.0),
    "gpt-mini": (6, 6, 384, 256, 0.2),
    "gpt2": (12, 12, 768, 1024, 0.1),
}


def size_of(name: str) -> tuple[int, int, int, int, float]:
    """Layers, heads, width, context and dropout of ``--model``."""
    if name in SIZES:
        return SIZES[name]
    numbers = re.fullmatch(r"gpt-([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", name)
    if not numbers:
        close = difflib.get_close_matches(name, SIZES) or SIZES
        fail(
            f"--model {name} is no GPT; try {', '.join(close)}, or gpt-LxHxD, "
            "such as gpt-4x4x128 for 4 layers of 4 heads and width 128"
        )
    layers, heads, width = map(int, numbers.groups())
    if width % heads:
        fail(f"--model {name}: {heads} heads cannot share a width of {width}; use a multiple")
    return layers, heads, width, 256, 0.0


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What each position finds at itself and before; all are ``[batch, heads, time, width]``."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    """Each position looks at itself and those before, in several heads at once.

    Queries, keys and values have a matrix each: of one that holds all three, tensor parallelism
    would give a rank a part of the queries and no values.
    """

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.head_width, self.attend = width // heads, attend
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(project(x)) for project in (self.query, self.key, self.value))
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
    def __init__(self, width: int, heads: int, dropout: float, mlp: nn.Module):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Tokens ``[batch, time]`` to logits ``[batch, vocabulary, time]``, which is how
    ``F.cross_entropy`` takes them with labels ``[batch, time]``.

    Norms come before attention and MLP (Radford et al. 2019, section 2.3). Linear layers have no
    bias: that of a key, for one, would change nothing, as softmax does not see it.

    Args:
        vocabulary: the characters that tokens stand for. They are part of the state dict.
        tie: use the matrix of the embedding for the head as well.
        experts, top_k, balance: in the place of each MLP, see :class:`MixtureOfExperts`.
    """

    def __init__(
        self, vocabulary, context, layers, heads, width, dropout=0.0, tie=False,
        experts=None, top_k=1, balance=0.0,
    ):  # fmt: skip
        super().__init__()
        make_mlp = partial(MLP, width, dropout)
        if experts:
            make_mlp = partial(MixtureOfExperts, make_mlp, experts, width, top_k, balance)
        self.register_buffer("vocabulary", torch.tensor([ord(token) for token in vocabulary]))
        self.token = nn.Embedding(len(vocabulary), width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(Block(width, heads, dropout, make_mlp()) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(vocabulary), bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:  # what each block adds to its input is drawn smaller
                adds = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * layers) if adds else 1))
        if tie:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """``positions``: of the tokens ``[time]``, where a rank has a shard of each sequence."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(positions))
        # A copy, which the loss would make of a view; and FSDP warns of views.
        return self.head(self.norm(self.blocks(x))).transpose(1, 2).contiguous()


def make_model(args: argparse.Namespace, vocabulary: list[str]) -> GPT:
    """``--model`` with ``--context``, on the CPU or the default device."""
    layers, heads, width, _, _ = size_of(args.model)
    mixture = (args.experts, args.top_k, args.balance) if args.experts else ()
    model = GPT(vocabulary, args.context, layers, heads, width, args.dropout, args.tie, *mixture)
    if args.weights != "none":
        weights = load_file(fetch_input(args.weights, "--weights"), "--weights")
        flags = f"--model {args.model} --context {args.context}"
        flags += f" --experts {args.experts}" if args.experts else ""
        check_weights(model, weights, f"--weights {args.weights} does not fit {flags}")
        theirs = weights["vocabulary"]
        if "".join(map(chr, theirs.tolist())) != "".join(vocabulary):
            fail(
                f"--weights {args.weights} knows other characters than this text has; "
                "give the text that it was trained on"
            )
        if not next(model.parameters()).is_meta:  # else it has shapes alone
            model.load_state_dict(weights)
    return model


def check_model_name(name: str) -> None:
    size_of(name)


def parameter_groups(model: nn.Module) -> list[dict]:
    """What an optimizer takes: ``--weight-decay`` is for matrices, not for norms and embeddings."""
    kept = [
        module for module in model.modules() if isinstance(module, (nn.LayerNorm, nn.Embedding))
    ]
    kept = {id(p): p for module in kept for p in module.parameters()}
    decayed = [p for p in model.parameters() if id(p) not in kept]
    return [{"params": decayed}, {"params": list(kept.values()), "weight_decay": 0.0}]


def check_deterministic(name: str, model: nn.Module) -> None:
    """Refuse on a GPU what PyTorch does not add up in a fixed order there: the mean of a loss that
    has a dimension besides batch and classes (``nll_loss2d_forward_out_cuda_template``)."""
    fail(
        f"--deterministic: PyTorch adds up the loss of {name} the same way every time on CPUs "
        "only; use --device cpu"
    )
