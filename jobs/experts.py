"""A mixture of experts: several MLPs, and a router that sends each token to one or a few."""

import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.measure import local

BIAS_STEP = 0.001  # by which --balance bias changes a bias (DeepSeek-V3, arXiv:2412.19437)


class AddGradientOf(torch.autograd.Function):
    """Identity in forward that adds the gradient of another loss in backward, so the training loops
    need no code for it (as AddAuxiliaryLoss in DeepSeek-V2's code)."""

    @staticmethod
    def forward(ctx, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones_like(ctx.loss)


class DivideGradient(torch.autograd.Function):
    """Identity in forward; in backward, divides the gradient."""

    @staticmethod
    def forward(ctx, tensor: Tensor, by: int) -> Tensor:
        ctx.by = by
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.by, None


class WithoutGarbage(torch.autograd.Function):
    """Identity in forward of ``[experts, ...]``; in backward, zeros for experts without a token.
    ``F.grouped_mm`` leaves there what was in memory, NaN included, on GPUs of compute capability 10
    (pytorch/pytorch#172439)."""

    @staticmethod
    def forward(ctx, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        [counts] = ctx.saved_tensors
        return torch.where(counts[:, None, None] > 0, gradient, 0), None


def can_group(tokens: Tensor) -> bool:
    """Whether ``F.grouped_mm`` multiplies by all experts' matrices at once. On other GPUs it is a
    loop, for which the CPU waits in each product."""
    if not tokens.is_cuda or tokens.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_properties(tokens.device).major in (9, 10)


def is_aligned(*widths: int) -> bool:
    """Whether rows of these widths are multiples of 16 bytes in bfloat16, as ``F.grouped_mm``
    needs."""
    return all(width % 8 == 0 for width in widths)


class Experts(nn.Module):
    """MLPs of one shape, whose matrices are stacked: ``up``, and ``gate`` of SwiGLU, ``[experts,
    width, inner]``; ``down`` ``[experts, inner, width]``. Each can be a DTensor: a rank computes
    with its part, of the experts and of ``inner``."""

    def __init__(self, experts: int, width: int, inner: int, gated: bool):
        super().__init__()
        if gated:
            self.gate = nn.Parameter(torch.empty(experts, width, inner))
        self.up = nn.Parameter(torch.empty(experts, width, inner))
        self.down = nn.Parameter(torch.empty(experts, inner, width))
        self.gated = gated
        # Expert parallelism sets it: ranks whose tokens come here, each with a loss of its own.
        # A gradient is their mean, as that of every other parameter.
        self.sources = 1

    def forward(self, tokens: Tensor, counts: Tensor, sizes: list[int] | None = None) -> Tensor:
        """From ``[tokens, width]``, sorted by expert, to the same shape. ``counts``: int64
        ``[experts]``, tokens per expert; ``sizes``: the same on the CPU, if it is known there."""
        if can_group(tokens) and is_aligned(tokens.shape[1], local(self.up).shape[2]):
            ends = counts.cumsum(0).to(torch.int32)  # stays on the GPU

            def multiply(x: Tensor, weight: Tensor) -> Tensor:
                weight = WithoutGarbage.apply(self.own(weight).to(x.dtype), counts)
                return F.grouped_mm(x, weight, offs=ends)
        else:
            sizes = counts.tolist() if sizes is None else sizes

            def multiply(x: Tensor, weight: Tensor) -> Tensor:
                parts = zip(x.split(sizes), self.own(weight).unbind(), strict=True)
                return torch.cat([part @ matrix for part, matrix in parts])

        if self.gated:
            hidden = F.silu(multiply(tokens, self.gate)) * multiply(tokens, self.up)
        else:
            hidden = F.gelu(multiply(tokens, self.up))
        return multiply(hidden, self.down)

    def width_dim(self, weight: Tensor) -> Shard:
        """How FSDP shards them, as there may be more ranks than experts."""
        return Shard(2 if weight is self.down else 1)

    def own(self, weight: Tensor) -> Tensor:
        weight = local(weight)
        return weight if self.sources == 1 else DivideGradient.apply(weight, self.sources)


class MixtureOfExperts(nn.Module):
    """Replaces an MLP; from tokens ``[batch, time, width]`` to the same shape (Shazeer et al. 2017,
    arXiv:1701.06538). No token is dropped, however many are routed to the same expert.

    Args:
        inner: width within an expert.
        top_k: experts per token; their outputs are weighted by its gates.
        balance: weight of the load-balancing loss (Fedus et al. 2021, arXiv:2101.03961, equation
            4); or "bias": see :func:`balance_at_steps`.
        gated: SwiGLU, otherwise GELU.
        normalize: a token's gates add up to 1.
    """

    routes = True  # takes the padding, too: see MLP

    def __init__(
        self, width: int, inner: int, experts: int, top_k: int = 1, balance: float | str = 0.0,
        gated=False, dropout=0.0, normalize=False,
    ):  # fmt: skip
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, inner, gated)
        self.dropout = nn.Dropout(dropout)
        self.count = experts
        self.top_k = top_k
        self.balance = balance
        self.normalize = normalize
        if balance == "bias":  # both fp32, and float64 with --double
            self.register_buffer("bias", torch.zeros(experts))
            self.register_buffer("load", torch.zeros(experts), persistent=False)
        self.run_experts = None  # expert parallelism sets what runs them
        # Tensor parallelism sets its number of ranks: they route the same tokens, and each has a
        # part of the outputs and of their gradients. It also sets what sums these parts, which
        # dropout must follow.
        self.copies = 1
        self.add_up = None

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """``padding``: ``[batch, time]``, which tokens are padding; they count for no balance."""
        tokens = x.flatten(0, 1)
        router = self.router.weight
        if x.is_meta:  # FLOPs are counted: of top_k experts per token, whichever they are
            counts = [len(tokens) * self.top_k, *[0] * (self.count - 1)]
            outputs = self.experts(tokens.repeat(self.top_k, 1), None, counts)
            return self.router(x)[..., :1] * outputs[: len(tokens)].view_as(x)
        if isinstance(router, DTensor):
            router = router.to_local(grad_placements=[Partial()])
        # bfloat16 would choose other experts. On GPUs these products are in TF32, of 10 bits
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(x.dtype, torch.float32)
            probabilities = F.linear(tokens.to(wide), router.to(wide)).softmax(-1)
        preferred = probabilities + self.bias if self.balance == "bias" else probabilities
        chosen = preferred.topk(self.top_k).indices
        gates = probabilities.gather(1, chosen)
        if self.normalize:
            gates = gates / gates.sum(1, keepdim=True)
        if torch.is_autocast_enabled(x.device.type):  # to send and to multiply half as many bytes
            tokens = tokens.to(torch.get_autocast_dtype(x.device.type))
        if self.training and self.balance:
            load = self.count_tokens(chosen, padding)
            if self.balance == "bias":
                self.load += load
            else:
                loss = self.balance * self.load_balancing_loss(probabilities, load, padding)
                tokens = AddGradientOf.apply(tokens, loss / self.copies)
        counts = self.count_tokens(chosen)
        chosen = chosen.flatten()
        order = chosen.argsort(stable=True)  # sorted by expert
        run_experts = self.run_experts or self.experts
        outputs = run_experts(tokens[order // self.top_k], counts)  # dispatch
        outputs = outputs * gates.flatten()[order, None]
        combined = outputs.new_zeros(tokens.shape).index_add(0, order // self.top_k, outputs)
        combined = combined.to(x.dtype).view_as(x)
        if self.add_up:
            combined = self.add_up(combined)
        return self.dropout(combined)

    def count_tokens(self, chosen: Tensor, padding: Tensor | None = None) -> Tensor:
        """How many tokens have chosen each expert, of ``chosen`` ``[tokens, top_k]``."""
        ones = torch.ones_like(chosen)
        if padding is not None:
            ones = ones.masked_fill(padding.view(-1, 1), 0)
        return chosen.new_zeros(self.count).scatter_add_(0, chosen.flatten(), ones.flatten())

    def load_balancing_loss(
        self, probabilities: Tensor, load: Tensor, padding: Tensor | None = None
    ) -> Tensor:
        """1 if all experts are used equally, by all ``top_k`` choices; more the fewer are used. The
        load is that of all ranks: otherwise each would balance only its own tokens."""
        load = load.to(probabilities.dtype)
        ranks = 1
        if dist.is_initialized():
            dist.all_reduce(load)
            ranks = dist.get_world_size()
        if padding is not None:
            probabilities = probabilities.masked_fill(padding.view(-1, 1), 0)
        tokens = load.sum() / self.top_k / ranks  # of a rank, on average
        return self.count * (load / load.sum() * probabilities.sum(0) / tokens).sum()


def balance_at_steps(model: nn.Module) -> None:
    """After each step of an optimizer, raise the bias of experts that had less than the mean load
    since the last step, over all micro-batches and ranks, and lower the others' (Wang et al. 2024,
    arXiv:2408.15664). All ranks take a step together."""
    blocks_ref = weakref.ref(model.blocks)  # a hook is for all optimizers, and outlives the model

    @torch.no_grad()
    def balance(*_) -> None:
        blocks = [getattr(block, "mlp", None) for block in blocks_ref() or ()]
        mixtures = [mixture for mixture in blocks if mixture]  # of this stage of a pipeline
        if not mixtures:
            return
        nothing = torch.zeros_like(mixtures[0].load)
        loads = torch.stack([mixture.load if mixture else nothing for mixture in blocks])
        if dist.is_initialized():  # otherwise the ranks' biases would drift apart
            dist.all_reduce(loads)
        for mixture, load in zip(blocks, loads, strict=True):
            if mixture:
                mixture.bias += BIAS_STEP * (load.mean() - load).sign()
                mixture.load.zero_()

    register_optimizer_step_post_hook(balance)
