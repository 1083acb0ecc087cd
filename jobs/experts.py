"""A mixture of experts: several MLPs, and a router that sends each token to one or a few."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.cli import fail
from harness.settings import fill


def resolve(args):
    """Fill in the defaults of a mixture of experts, and check its flags."""
    if not args.experts:
        if args.top_k is not None or args.balance is not None:
            fail("--top-k and --balance are for a mixture of experts; add --experts 8")
        return args
    args = fill(args, top_k=1, balance=0.01)
    parts = args.accumulate > 1 or args.dtype == "float16"
    if args.balance and parts:  # they scale the loss, but not the balancing loss
        fail("--balance is not for --accumulate or --dtype float16; use --balance 0")
    if args.top_k > args.experts:
        fail(f"--top-k {args.top_k} is more than --experts {args.experts}; use no more")
    return args


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


class MixtureOfExperts(nn.Module):
    """Replaces an MLP; from tokens ``[batch, time, width]`` to the same shape (Shazeer et al. 2017,
    arXiv:1701.06538). No token is dropped, however many are routed to the same expert.

    Args:
        make_expert: makes an expert, a module that takes ``[tokens, width]``.
        experts: number of experts.
        top_k: experts per token; their outputs are weighted by its gates.
        balance: weight of the load-balancing loss (Fedus et al. 2021, arXiv:2101.03961, equation
            4), which is lowest when the router uses all experts equally.
    """

    def __init__(self, make_expert: Callable, experts: int, width: int, top_k=1, balance=0.0):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleDict({str(i): make_expert() for i in range(experts)})
        self.count, self.top_k, self.balance = experts, top_k, balance
        # Expert parallelism replaces these:
        self.run_experts, self.mean_over_ranks = self.run_own_experts, lambda load: load

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):  # bfloat16 would choose other experts
            wide = torch.promote_types(x.dtype, torch.float32)
            probabilities = F.linear(tokens.to(wide), self.router.weight.to(wide)).softmax(-1)
        gates, chosen = probabilities.topk(self.top_k)
        if torch.is_autocast_enabled(x.device.type):  # to send and to multiply half as many bytes
            tokens = tokens.to(torch.get_autocast_dtype(x.device.type))
        if self.balance and self.training:
            loss = self.balance * self.load_balancing_loss(probabilities, chosen)
            tokens = AddGradientOf.apply(tokens, loss)
        chosen = chosen.flatten()
        order = chosen.argsort(stable=True)  # sorted by expert
        counts = chosen.new_zeros(self.count).scatter_add_(0, chosen, torch.ones_like(chosen))
        outputs = self.run_experts(tokens[order // self.top_k], counts)  # dispatch
        outputs = outputs * gates.flatten()[order, None]
        combined = outputs.new_zeros(tokens.shape).index_add(0, order // self.top_k, outputs)
        return combined.to(x.dtype).view_as(x)

    def run_own_experts(self, tokens: Tensor, counts: Tensor, sizes=None) -> Tensor:
        """The outputs of the experts for their tokens, which are sorted by expert.

        Args:
            counts: int64 ``[experts]``, tokens per expert.
            sizes: the same on the CPU; if not given, it is copied from ``counts`` when needed.
        """
        experts = list(self.experts.values())
        if tokens.is_cuda and tokens.dtype == torch.bfloat16 and hasattr(experts[0], "up"):
            return grouped(experts, tokens, counts)
        parts = tokens.split(counts.tolist() if sizes is None else sizes)
        return torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])

    def load_balancing_loss(self, probabilities: Tensor, chosen: Tensor) -> Tensor:
        """1 if all experts are used equally, up to their number if only one is used."""
        load = F.one_hot(chosen[:, 0], self.count).to(probabilities.dtype).mean(0)
        return self.count * (self.mean_over_ranks(load) * probabilities.mean(0)).sum()


def grouped(experts: list[nn.Module], tokens: Tensor, counts: Tensor) -> Tensor:
    """All experts at once, in bfloat16: the CPU need not know the number of tokens per expert."""
    ends = counts.cumsum(0).to(torch.int32)

    def multiply(x: Tensor, name: str) -> Tensor:
        matrices = [getattr(expert, name).weight for expert in experts]
        return F.grouped_mm(x, torch.stack(matrices).mT.to(x.dtype), offs=ends)

    if hasattr(experts[0], "gate"):
        return multiply(F.silu(multiply(tokens, "gate")) * multiply(tokens, "up"), "down")
    return experts[0].dropout(multiply(F.gelu(multiply(tokens, "up")), "down"))
