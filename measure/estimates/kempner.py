"""Train a Llama on fake tensors as KempnerForge does at commit 01b461a.

Weights, gradients and states are in bf16. A step accumulates gradients without communication, so
that FSDP keeps them unsharded in fp32; with tensor parallelism every rank has all logits. The
references of each option are in measure/published.json.
"""

import contextlib
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from jobs.gpt import MLP, Attention, Decoder
from jobs.sizes import LlamaSize
from measure.estimates.llama import VOCABULARY, fused_mlp, recompute
from pytorch_TP import clip_grad_norm

CONTEXT = 4096
SIZES = {
    "7B": LlamaSize(32, 32, 4096, CONTEXT, 0.0, 8, 14_336),
    "13B": LlamaSize(40, 40, 5120, CONTEXT, 0.0, 8, 17_920),
    "70B": LlamaSize(80, 64, 8192, CONTEXT, 0.0, 8, 28_672),
}


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        wide = x.float()
        normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (normalized * self.weight).to(x.dtype)


def rotate(x, cos, sin):
    cos, sin = (turn.view(1, 1, *turn.shape).to(x.dtype) for turn in (cos, sin))
    first, second = x.chunk(2, 3)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attend(q, k, v):
    times = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(times, dim=1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Llama(Decoder):
    """Their Llama, with the names of ours. ``compiled``: norm and gate are one operation each."""

    def __init__(self, size: LlamaSize, compiled: bool):
        make_norm = partial(nn.RMSNorm if compiled else RMSNorm, eps=1e-5)
        make_attention = partial(Attention, size, rotate=rotate)
        make_mlp = partial(MLP, size.width, size.mlp_width, gated=True)
        super().__init__(range(VOCABULARY), size, make_norm, make_attention, make_mlp)
        self.turns = [torch.empty(size.context, size.head_width // 2) for _ in range(2)]
        if compiled:
            self.token.forward = lambda tokens: CompiledEmbedding.apply(tokens, self.token.weight)
        for block in self.blocks:
            block.attention.attend = attend
            if compiled:
                block.mlp.forward = partial(fused_mlp, block.mlp)

    def forward(self, tokens):
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x, (self.turns, (), ()))
        return self.head(self.norm(x))


class CompiledEmbedding(torch.autograd.Function):
    """torch.compile adds up the gradient in fp32."""

    @staticmethod
    def forward(ctx, tokens, weight):
        ctx.save_for_backward(weight)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, gradient):
        [weight] = ctx.saved_tensors
        return None, torch.empty_like(weight, dtype=torch.float32).to(weight.dtype)


def parallelize(model: Llama, mesh) -> None:
    """Tensor parallelism as theirs: each matrix gathers its own input, the embedding is on all
    ranks, and so are all logits."""
    gathered = ColwiseParallel(input_layouts=Shard(1))
    scattered = RowwiseParallel(output_layouts=Shard(1))
    plan = {f"attention.{name}": gathered for name in ("query", "key", "value")}
    plan |= {"mlp.gate": gathered, "mlp.up": gathered, "mlp.down": scattered}
    plan |= {"attention.out": scattered}
    plan |= {name: SequenceParallel() for name in ("attention_norm", "mlp_norm")}

    def wrap(placement, module, args, output):
        return DTensor.from_local(output, mesh, [placement])

    model.token.register_forward_hook(partial(wrap, Replicate()))
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
        block.attention.register_forward_hook(partial(wrap, Shard(1)))
        block.mlp.register_forward_hook(partial(wrap, Shard(1)))
    whole = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, mesh, {"norm": SequenceParallel(), "head": whole})


def shard(model: Llama, mesh) -> None:
    options = {"mesh": mesh, "reshard_after_forward": True}
    options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


@contextlib.contextmanager
def one_graph(parameters: list[nn.Parameter], logits: torch.Tensor):
    """A compiled model returns the gradients of all parameters at once, and only then are they
    added to those of the micro-batches before. Until then autograd holds that of the logits."""
    held = []
    logits.register_hook(held.append)

    def hold(parameter, gradient):
        if parameter.grad is not None:
            held.append(gradient)

    hooks = [p.register_hook(partial(hold, p)) for p in parameters]
    yield
    held.clear()  # the logits live on, and their hook with them
    for hook in hooks:
        hook.remove()


def forge(
    live, layers: int, model: str, batch: int, accumulate: int, fsdp=1, tp=1, compiled=True
) -> None:
    """Two steps: the first makes the states, and later micro-batches of the second are left out, as
    each is like the one before. Without FSDP and tensor parallelism there is no mesh, and the
    compiled model is one graph; FSDP's hooks break it before every block."""
    live.counts = False  # until it is sharded
    alone = fsdp * tp == 1
    size = replace(SIZES[model], layers=layers)
    network = Llama(size, compiled).to(torch.bfloat16)
    if not alone:
        names = {"mesh_dim_names": ("fsdp", "tp")}
        mesh = device_mesh.init_device_mesh("cpu", (fsdp, tp), **names)
    if tp > 1:
        parallelize(network, mesh["tp"])
    recompute(network.blocks, "inputs")
    if not alone:
        shard(network, mesh["fsdp"])
    live.counts = True
    parameters = [*network.parameters()]
    live.mark([*parameters, *network.turns], "parameters")
    optimizer = torch.optim.AdamW(parameters, fused=True)
    for micro_batches in (1, min(accumulate, 3)):
        live.begin_step()
        for number in range(micro_batches):
            tokens, labels = (torch.zeros(batch, CONTEXT, dtype=torch.int64) for _ in range(2))
            if not alone:
                network.set_requires_gradient_sync(number + 1 == micro_batches)
            logits = network(tokens)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
            graph = contextlib.nullcontext()
            if compiled and alone:
                graph = one_graph(parameters, logits)
            with graph:
                (loss / accumulate).backward()
        clip_grad_norm(network, 1.0)
        optimizer.step()
        optimizer.zero_grad()
