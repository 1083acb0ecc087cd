"""A mixture of experts: several MLPs, of which a router chooses one or a few for each token."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AddGradientOf(torch.autograd.Function):
    """Passes a tensor on as it is, and in backward asks for the gradient of another loss besides:
    so no training loop needs a line for it (as in DeepSeek-V2's code, AddAuxiliaryLoss)."""

    @staticmethod
    def forward(ctx, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones_like(ctx.loss)


class Mixture(nn.Module):
    """In the place of an MLP, tokens ``[batch, time, width]`` to as many (Shazeer et al. 2017,
    arXiv:1701.06538). No token is dropped, however many choose the same expert.

    Args:
        make_expert: makes one, a module that takes ``[tokens, width]``.
        experts: how many there are.
        top_k: how many of them answer a token; their answers are weighed by the router.
        balance: weight of a loss that is least when the router uses all experts alike (Fedus et
            al. 2021, arXiv:2101.03961, equation 4).
    """

    def __init__(
        self, make_expert: Callable[[], nn.Module], experts: int, width: int, top_k=1, balance=0.0
    ):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleDict({str(i): make_expert() for i in range(experts)})
        self.count, self.top_k, self.balance = experts, top_k, balance
        # What expert parallelism does in another way:
        self.answer, self.mean_over_ranks = self.answer_here, lambda shares: shares

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        chances = self.router(tokens).softmax(-1)
        weights, chosen = chances.topk(self.top_k)
        if self.balance and self.training:
            tokens = AddGradientOf.apply(tokens, self.balance * self.imbalance(chances, chosen))
        order = chosen.flatten().argsort(stable=True)  # tokens of the same expert side by side
        counts = torch.bincount(chosen.flatten(), minlength=self.count)
        answers = self.answer(tokens[order // self.top_k], counts)
        answers = answers * weights.flatten()[order, None]
        summed = torch.zeros_like(tokens).index_add(0, order // self.top_k, answers)
        return summed.view_as(x)

    def answer_here(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Each expert's answer to its tokens, which lie side by side.

        Args:
            counts: int64 ``[experts]``, how many each has.
        """
        parts = tokens.split(counts.tolist())
        return torch.cat([self.experts[str(i)](part) for i, part in enumerate(parts)])

    def imbalance(self, chances: Tensor, chosen: Tensor) -> Tensor:
        """1 if all experts are used alike, up to their number if one is used alone."""
        used = F.one_hot(chosen[:, 0], self.count).to(chances.dtype).mean(0)
        return self.count * (self.mean_over_ranks(used) * chances.mean(0)).sum()
