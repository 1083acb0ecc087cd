"""Train a Llama on fake tensors as two libraries do: torchtitan, at commit 5940ddeb5 and as of
February to June 2026 (``recent``), and torchtune at 1814feb17.

Their Llama saves other tensors than ours, GiB of them. It rotates by complex numbers in fp32 and
frees the logits before backward; torchtitan's of 2024 also has a norm of separate operations in
fp32, and copies the keys and values that several heads use.
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
from pytorch_TP import parallelize

VOCABULARY = 128_256
LLAMA_8B = LlamaSize(32, 32, 4096, 8192, 0.0, 8, 14_336)
LLAMA_3B = LlamaSize(28, 24, 3072, 8192, 0.0, 8, 8192)
mm = torch.ops.aten.mm.default
scattered = torch.ops._c10d_functional.reduce_scatter_tensor.default
attended = {torch.ops.aten._scaled_dot_product_flash_attention.default: (1,)}
attended_TP = attended | {scattered: (1,)}
SAVED = {  # by block, in turn: which products, from query to down, and which other results
    "inputs": [{}],
    "every second": [attended | {mm: (1, 3, 5, 7), scattered: (1, 2)}],  # torchtitan's
    "every second, traced": [attended_TP | {mm: (1, 3, 5)}, attended_TP | {mm: (2, 6)}],
    "needed, TP": [attended_TP | {mm: (1, 2, 3, 5, 6)}],  # no gradient needs the others
}


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        wide = x.float()
        normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normalized.type_as(x) * self.weight


def rotate(x, turns):
    pairs = torch.view_as_complex(x.float().unflatten(3, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


def attend(q, k, v, copies):
    if copies:
        times = q.shape[1] // k.shape[1]
        k = k.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)
        v = v.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not copies)


class Llama(Decoder):
    """Their Llama, with the names of ours.

    Args:
        positions: number of tokens for which rotations are prepared.
        fused_norm: one operation, instead of several in fp32.
        copies: of keys and values, for all heads that use them.
    """

    def __init__(self, size: LlamaSize, positions: int, fused_norm: bool, copies: bool, tie=False):
        make_norm = partial(nn.RMSNorm, eps=1e-5) if fused_norm else RMSNorm
        make_attention = partial(Attention, size, rotate=rotate)
        make_mlp = partial(MLP, size.width, size.mlp_width, gated=True)
        super().__init__(range(VOCABULARY), size, make_norm, make_attention, make_mlp, tie)
        self.turns = torch.empty(positions, size.head_width // 2, dtype=torch.complex64)
        for block in self.blocks:
            block.attention.attend = partial(attend, copies=copies)

    def forward(self, tokens, chunks, hooks):
        """Logits of each chunk of the positions. ``hooks``: of what autograd saves, but for the
        head."""
        with hooks:
            x = self.token(tokens)
            turns = self.turns[: tokens.shape[1]]
            for block in self.blocks:
                x = block(x, ((turns,), (), ()))
            x = self.norm(x)
        return [self.head(part) for part in x.chunk(chunks, 1)]


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
    """The product of an MLP's two halves as torch.compile fuses it, without a saved SiLU."""

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
    live, layers: int, fsdp=8, tp=1, saves="every second", reshard="default", recent=False
) -> None:
    """torchtitan: one sequence, bf16, AdamW in fp32. ``recent``: with a fused norm, no copied
    heads, and embedding and head as units of FSDP, as in 2026."""
    mesh = device_mesh.init_device_mesh("cpu", (fsdp, tp), mesh_dim_names=("fsdp", "tp"))
    live.counts = False  # until it is sharded
    size = replace(LLAMA_8B, layers=layers)
    model = Llama(size, size.context, fused_norm=recent, copies=not recent)
    if tp > 1:
        parallelize(model, mesh["tp"], sequence_parallel=True)
    recompute(model.blocks, saves)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options = {"mesh": mesh["fsdp"], "mp_policy": policy}
    always = reshard == "always"
    if recent:
        fully_shard(model.token, **options)
        fully_shard([model.norm, model.head], **options, reshard_after_forward=always)
    for block in model.blocks:
        reshards = always or block is not model.blocks[-1]
        fully_shard(block, **options, reshard_after_forward=reshards)
    fully_shard(model, **options)
    take_steps(live, model, batch=1, context=size.context, clip=1.0, parallel=tp > 1)


class Adapted(nn.Module):
    """LoRA of a linear layer."""

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__()
        self.linear = linear
        self.a = nn.Linear(linear.in_features, rank, bias=False)
        self.b = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + 2.0 * self.b(self.a(x))


def finetune(live, layers: int, rank: int, chunks: int) -> None:
    """torchtune on one GPU: LoRA, except of key and head, all in bf16, compiled, with a loss in
    chunks; inputs of blocks are on the host."""
    live.counts = False
    size = replace(LLAMA_3B, layers=layers)
    model = Llama(size, 131_072, fused_norm=True, copies=True, tie=True)
    for block in model.blocks:
        block.mlp.forward = partial(fused_mlp, block.mlp)
    model.requires_grad_(False)
    for module in list(model.blocks.modules()):
        for name in {"query", "value", "out", "gate", "up", "down"} & {*module._modules}:
            setattr(module, name, Adapted(getattr(module, name), rank))
    model = model.to(torch.bfloat16)
    recompute(model.blocks, "inputs")
    take_steps(live, model, batch=2, context=4096, chunks=chunks, compiled=True, offload=True)


def take_steps(
    live, model, batch: int, context: int, chunks=1, compiled=False, offload=False, clip=None,
    parallel=False,
) -> None:  # fmt: skip
    """Two steps of AdamW. ``offload``: what autograd saves in forward is on the host."""
    live.counts = True
    live.mark([*model.parameters(), model.turns], "parameters")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    hooks = contextlib.nullcontext()
    if offload:
        away = partial(torch.Tensor.to, device="meta")
        back = partial(torch.empty_like, device="cpu")
        hooks = torch.autograd.graph.saved_tensors_hooks(away, back)
    for _ in range(2):
        live.begin_step()
        live.kind = "parameters"
        tokens = torch.zeros(batch, context, dtype=torch.int64)
        labels = torch.zeros(batch, context, dtype=torch.int64)
        optimizer.zero_grad()
        with loss_parallel() if parallel else contextlib.nullcontext():
            loss_of(live, model(tokens, chunks, hooks), labels, compiled).backward()
        if clip:
            nn.utils.clip_grad_norm_(trained, clip, foreach=True)
        optimizer.step()


def loss_of(live, logits: list[torch.Tensor], labels: torch.Tensor, compiled: bool):
    """The sum over all chunks. Nobody else has the logits: they are freed before backward."""
    live.kind = "activations"  # of the loss, and "temporary" in its backward
    logits[0].register_hook(lambda _: setattr(live, "kind", "gradients"))
    cross_entropy = FusedLoss.apply if compiled else F.cross_entropy
    loss = 0
    for part, of_part in zip(logits, labels.chunk(len(logits), 1), strict=True):
        part = part.flatten(0, 1)
        if not compiled:
            part = part.float()
        loss = loss + cross_entropy(part, of_part.flatten())
    return loss
