"""Fine-tune a Llama 2 on fake tensors as litgpt does at commit 8641822: LoRA of query and value on
one GPU, in bf16, or with weights quantized by bitsandbytes 0.41.1. The references of each option
are in measure/published.json.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from jobs.gpt import MLP, Decoder
from jobs.sizes import LLAMAS

LONGEST = 1304  # tokens of Alpaca's longest sample, the first that is trained
CHUNK = 128  # tokens whose logits and losses are computed at once
RANK = 8
BLOCK = 64  # weights with a common scale


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x):
        normed = x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5)
        return self.weight * normed


class Product(torch.autograd.Function):
    """Of an input and a quantized matrix, whose copy in bf16 is temporary. It saves its input."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.input = x
        ctx.layer = layer
        return F.linear(x, layer.dequantize(x))

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.layer.dequantize(gradient), None


class Quantized(nn.Module):
    """NF4: 4 bits per weight and the scale of each block in fp32, or ``twice`` quantized: 8 bits,
    with a second scale for 256 of them."""

    def __init__(self, shape: torch.Size, twice: bool):
        super().__init__()
        self.shape = shape
        n = shape.numel()
        scales = torch.uint8 if twice else torch.float32
        self.register_buffer("weight", torch.empty(n // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(n // BLOCK, dtype=scales))
        if twice:
            self.register_buffer("second", torch.empty(n // BLOCK // 256))

    def dequantize(self, like):
        return torch.empty(self.shape, dtype=torch.float16).to(like.dtype)

    def forward(self, x):
        return Product.apply(x, self)


class Attention(nn.Module):
    """Query, key and value are one product; LoRA's is padded with zeros for the key."""

    def __init__(self, size):
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.a = nn.Parameter(torch.empty(2 * RANK, size.width))
        self.b = nn.Parameter(torch.empty(2 * size.width, RANK))
        self.dropout = nn.Dropout(0.05)

    def adapt(self, x):
        inner = F.linear(self.dropout(x), self.a).transpose(1, 2)
        outer = F.conv1d(inner, self.b.unsqueeze(2), groups=2).transpose(1, 2).transpose(0, 1)
        width = x.shape[-1]
        padded = x.new_zeros(*outer.shape[:2], 3 * width).view(-1, 3 * width)
        places = torch.tensor([*range(width), *range(2 * width, 3 * width)])
        padded = padded.index_copy(1, places, outer.reshape(-1, 2 * width))
        return padded.view(*outer.shape[:2], 3 * width).transpose(0, 1) * 2.0

    def forward(self, x, places):
        parts = (self.qkv(x) + self.adapt(x)).unflatten(2, (self.heads, 3, -1))
        q, k, v = parts.permute(0, 2, 3, 1, 4).unbind(2)
        q, k = (torch.cat([rotate(t, *places[0]), t[..., t.shape[3] :]], -1) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.out(y.reshape(x.shape))


def rotate(x, cos, sin):
    """Their cosine is in fp32, although the weights are not."""
    first, second = x.chunk(2, 3)
    rotated = torch.cat([-second, first], -1)
    return (x * cos + rotated * sin).type_as(x)


def adapt(live, layers: int, model: str, batch: int, quantized="") -> None:
    """The first step, which has the longest sample; later ones are far shorter. ``quantized``: nf4,
    or nf4-dq: also its scales."""
    live.counts = False
    size = LLAMAS[model]
    make_attention = partial(Attention, size)
    make_mlp = partial(MLP, size.width, size.mlp_width, gated=True)
    network = Decoder(range(size.vocabulary), size, RMSNorm, make_attention, make_mlp)
    del network.blocks[layers:]
    network = network.to(torch.bfloat16).requires_grad_(False)
    for module in [*network.modules()] if quantized else []:
        for name, layer in module.named_children():
            if isinstance(layer, nn.Linear):
                setattr(module, name, Quantized(layer.weight.shape, quantized == "nf4-dq"))
    turns = [torch.empty(LONGEST, size.head_width) for _ in range(2)]
    trained = []
    for block in network.blocks:
        trained += [block.attention.a, block.attention.b]
    for parameter in trained:
        parameter.requires_grad_()
    live.counts = True
    live.mark([*network.parameters(), *network.buffers(), *turns], "parameters")
    optimizer = torch.optim.AdamW(trained)
    live.begin_step()
    tokens, labels = (torch.zeros(batch, LONGEST, dtype=torch.int64) for _ in range(2))
    x = network.token(tokens)
    for block in network.blocks:
        x = block(x, (turns, (), ()))
    x = network.norm(x)
    logits = [network.head(part) for part in x.split(CHUNK, dim=1)]
    logits = [part.float() for part in logits]  # Fabric converts what a module returns
    del x
    logits[-1] = logits[-1][..., :-1, :]
    losses = []
    for part, of_part in zip(logits, labels[..., 1:].split(CHUNK, dim=1), strict=True):
        rows = part.reshape(-1, part.size(-1))
        losses.append(F.cross_entropy(rows, of_part.reshape(-1), reduction="none"))
    torch.cat(losses).mean().backward()
    optimizer.step()
