"""A routing bias moves by the tokens of all ranks, and of training alone.

Load balancing without a loss (Wang et al. 2024, arXiv:2408.15664; DeepSeek-V3, arXiv:2412.19437): a
bias is added to the router's probabilities when experts are chosen. After each step it rises for
experts with less than the mean load, and falls for the others. FSDP leaves buffers alone, so a rank
that counts only its own tokens moves a bias of its own: the same token then goes to other experts
on other ranks. (DDP copies rank 0's bias to all ranks, which rank 0's tokens alone have moved.)

Recomputed activations count each token twice. This changes nothing, as only the sign of the
difference from the mean load matters: here the ranks recompute, and the single process does not.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from two_ranks import difference, make_task, show

EXPERTS = 4
EPOCHS = 8
BIAS_STEP = 0.02  # DeepSeek-V3 has steps of 0.001, and many of them


class Mixture(nn.Module):
    """Each token goes to one expert."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, 8, 8) / 3)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("load", torch.zeros(EXPERTS), persistent=False)
        self.always_count = self.recompute = False

    def forward(self, tokens):
        if self.recompute:
            return checkpoint(self.mix, tokens, use_reentrant=False)
        return self.mix(tokens)

    def mix(self, tokens):
        probabilities = self.router(tokens).softmax(-1)
        chosen = F.one_hot((probabilities + self.bias).argmax(-1), EXPERTS)
        if self.training or self.always_count:  # right: if self.training
            self.load += chosen.sum(0)
        return torch.einsum("ti,eio,te->to", tokens, self.experts, probabilities * chosen)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Mixture(), nn.Tanh(), nn.Linear(8, 1))


def train(model, rank=0, world_size=1, variant="right"):
    _, inputs, targets = make_task()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bias = model[1].bias
    load = model[1].load
    batches = list(zip(inputs, targets, strict=True))
    for x, y in EPOCHS * batches:
        optimizer.zero_grad()
        F.mse_loss(model(x[rank::world_size]), y[rank::world_size]).backward()
        optimizer.step()
        if world_size > 1 and variant != "per rank":
            dist.all_reduce(load)  # wrong without this line: each rank keeps a bias of its own
        bias += BIAS_STEP * (load.mean() - load).sign()
        load.zero_()
        if world_size > 1:
            model.eval()
            with torch.no_grad():
                model(inputs[0] + 1)
            model.train()
    return model


def off_by(variant):
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    model = make_model()
    model[1].recompute = True
    model[1].always_count = variant == "in evaluation"
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    trained = train(model, rank, world_size, variant)
    return difference(trained, train(make_model()), start=make_model())


if __name__ == "__main__":
    show(off_by, "weights", "per rank", "in evaluation")
