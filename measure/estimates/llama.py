"""Train a Llama on fake tensors as two libraries do: torchtitan, at commit 5940ddeb5 and as of
February to June 2026, and torchtune at 1814feb17.

Both have a norm of separate operations in fp32, rotate by complex numbers in fp32, copy the keys
and values that several heads use, and free the logits before backward.
"""

import contextlib
import itertools
from collections import defaultdict
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as selective

from jobs.gpt import MLP, Attention, Decoder
from jobs.sizes import LlamaSize
from measure.estimates import GIVEN
from parallel import attention
from pytorch_TP import parallelize

VOCABULARY = 128_256
SIZES = {name: LlamaSize(*numbers) for name, numbers in GIVEN["sizes"].items()}
mm, scattered = torch.ops.aten.mm.default, torch.ops._c10d_functional.reduce_scatter_tensor.default
attended = {torch.ops.aten._scaled_dot_product_flash_attention.default: (1,)}
attended_TP = attended | {scattered: (1,)}
SAVED = {  # by block, in turn: which products, from query to down, and which other results
    "inputs": [{}],
    "every second": [attended | {mm: (1, 3, 5, 7), scattered: (1, 2)}],  # torchtitan's
    "every second, traced": [attended_TP | {mm: (1, 3, 5)}, attended_TP | {mm: (2, 6)}],
    "needed": [attended | {mm: (1, 2, 3, 4, 5, 6)}],  # no gradient needs the last
    "needed, TP": [attended_TP | {mm: (1, 2, 3, 5, 6)}],
}


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        wide = x.float()
        normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normalized.type_as(x) * self.weight


def rotate(x, turns):
    pairs = torch.view_as_complex(x.float().unflatten(3, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


class Llama(Decoder):
    """Their Llama, with the names of ours. ``group``: ranks that share a sequence."""

    def __init__(self, size: LlamaSize, positions: int, make_norm=RMSNorm, tie=False, **attention):
        make_mlp = partial(MLP, size.width, size.mlp_width, gated=True)
        make = partial(Attention, size, rotate=rotate), make_mlp
        super().__init__(range(VOCABULARY), size, make_norm, *make, tie)
        self.turns = torch.empty(positions, size.head_width // 2, dtype=torch.complex64)
        for block in self.blocks:
            block.attention.attend = partial(attend, **attention)

    def forward(self, tokens, chunks, hooks):
        with hooks:  # not of the head
            x, turns = self.token(tokens), self.turns[: tokens.shape[1]]
            for block in self.blocks:
                x = block(x, ((turns,), (), ()))
            x = self.norm(x)
        return [self.head(part) for part in x.chunk(chunks, 1)]


def attend(q, k, v, group=None, copies=True):
    if copies:
        n = q.shape[1] // k.shape[1]
        k, v = (t.unsqueeze(2).expand(-1, -1, n, -1, -1).flatten(1, 2) for t in (k, v))
    if group:
        k, v = (attention.all_gather(t, 2, group) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not copies)


class FusedLoss(torch.autograd.Function):
    """Cross entropy as torch.compile fuses it: it writes no logits in fp32."""

    @staticmethod
    def forward(ctx, logits, labels):
        ctx.save_for_backward(logits, labels, logits.new_empty(len(logits), dtype=torch.float32))
        return logits.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx, gradient):
        return torch.empty_like(ctx.saved_tensors[0]), None


class FusedGate(torch.autograd.Function):
    """The product of an MLP's two halves, without a saved SiLU."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx, gradient):
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def fused_mlp(mlp, x):
    return mlp.down(FusedGate.apply(mlp.gate(x), mlp.up(x)))


def recompute(blocks: nn.ModuleList, saves: str) -> None:
    """Activation checkpointing; selective if some operations' results are saved."""

    def policy(kept, counts, context, func, *_, **__):
        key = func, context.is_recompute
        counts[key] += 1
        save = counts[key] in kept.get(func, ())
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    options = {"use_reentrant": False, "preserve_rng_state": False}
    for block, kept in zip(blocks, itertools.cycle(SAVED[saves]), strict=False):
        choose = partial(policy, kept)
        if kept:
            options["context_fn"] = lambda f=choose: selective(partial(f, defaultdict(int)))
        block.forward = partial(checkpoint, block.forward, **options)


def pretrain(
    live, layers, model="8b", batch=1, context=8192, fsdp=8, tp=1, cp=False, saves="every second",
    reshard="default", recent=False,
):  # fmt: skip
    """torchtitan: bf16, AdamW in fp32. ``cp``: the ranks of FSDP share a sequence. ``recent``: with
    a fused norm, no copied heads, and embedding and head as units of FSDP, as in 2026."""
    mesh = device_mesh.init_device_mesh("cpu", (fsdp, tp), mesh_dim_names=("fsdp", "tp"))
    live.counts = False  # until it is sharded
    make_norm = partial(nn.RMSNorm, eps=1e-5) if recent else RMSNorm
    heads = {"group": mesh["fsdp"].get_group() if cp else None, "copies": not recent}
    model = Llama(replace(SIZES[model], layers=layers), context, make_norm, **heads)
    if tp > 1:
        parallelize(model, mesh["tp"], sequence_parallel=True)
    if saves != "all":
        recompute(model.blocks, saves)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options = {"mesh": mesh["fsdp"], "mp_policy": policy}
    if recent:
        fully_shard(model.token, **options)
        always = {"reshard_after_forward": reshard == "always"}
        fully_shard([model.norm, model.head], **options, **always)
    for block in model.blocks:
        kept = reshard == "never" or reshard == "default" and block is model.blocks[-1]
        fully_shard(block, **options, reshard_after_forward=not kept)
    fully_shard(model, **options)
    take_steps(live, model, batch, context, clip=1.0, parallel=tp > 1, fused=True)


class Adapted(nn.Module):
    """LoRA of a linear layer."""

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__()
        self.linear = linear
        self.a = nn.Linear(linear.in_features, rank, bias=False)
        self.b = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + 2.0 * self.b(self.a(x))


def finetune(
    live, layers, model="3b", batch=2, context=4096, saves="all", rank=0, compiled=(), **options
):
    """torchtune on one GPU, all in bf16. ``rank``: of adapters, except of key and head.
    ``compiled``: blocks or loss, which then save what fused kernels need."""
    live.counts = False
    make_norm = partial(nn.RMSNorm, eps=1e-5) if "blocks" in compiled else RMSNorm
    model = Llama(replace(SIZES[model], layers=layers), 131_072, make_norm, tie=True)
    for block in model.blocks if "blocks" in compiled else ():
        block.mlp.forward = partial(fused_mlp, block.mlp)
    model.requires_grad_(not rank)
    for module in list(model.blocks.modules()) if rank else ():
        for name in {"query", "value", "out", "gate", "up", "down"} & {*module._modules}:
            setattr(module, name, Adapted(getattr(module, name), rank))
    model = model.to(torch.bfloat16)
    if saves != "all":
        recompute(model.blocks, saves)
    take_steps(live, model, batch, context, fused_loss="loss" in compiled, **options)


def take_steps(
    live, model, batch, context, chunks=1, fused_loss=False, offload=False, in_backward=False,
    clip=None, parallel=False, **options,
):  # fmt: skip
    """Two steps of AdamW. ``offload``: what autograd saves in forward is on the host;
    ``in_backward``: each parameter is updated and its gradient freed."""

    def update(parameter):
        own[parameter].step()
        own[parameter].zero_grad()

    live.counts = True
    live.mark([*model.parameters(), model.turns], "parameters")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **options)
    own = {p: torch.optim.AdamW([p], **options) for p in trained}
    for p in trained if in_backward else ():
        p.register_post_accumulate_grad_hook(update)
    away = partial(torch.Tensor.to, device="meta"), partial(torch.empty_like, device="cpu")
    hooks = torch.autograd.graph.saved_tensors_hooks(*away) if offload else contextlib.nullcontext()
    for _ in range(2):
        live.begin_step()
        live.kind = "parameters"
        tokens, labels = (torch.zeros(batch, context, dtype=torch.int64) for _ in range(2))
        optimizer.zero_grad()
        with loss_parallel() if parallel else contextlib.nullcontext():
            logits = model(tokens, chunks, hooks)
            live.kind = "activations"  # of the loss, and "temporary" in its backward
            logits[0].register_hook(lambda _: setattr(live, "kind", "gradients"))
            parts = zip((p.flatten(0, 1) for p in logits), labels.chunk(chunks, 1), strict=True)
            if not fused_loss or chunks == 1:  # else it is part of the loss
                parts = ((part.float(), y) for part, y in parts)
            one = FusedLoss.apply if fused_loss else F.cross_entropy
            loss = sum(one(part, y.flatten()) for part, y in parts)
            del logits, parts
            loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(trained, clip, foreach=True)
        optimizer.step()
