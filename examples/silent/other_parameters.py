"""Every rank has to use every parameter of a sharded module, or say that it does not.

``fully_shard`` reduce-scatters the gradients that exist on a rank, in the order of the parameters.
If one rank's samples use one layer, and those of another rank a layer of the same shape, the
gradients of two layers are added up. In PyTorch 2.13 and later, the module's
``set_reduce_scatter_unused_params(True)`` sends zeros for what is not used.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from two_ranks import difference, show


class Heads(nn.Module):
    """A layer for each kind of sample."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def forward(self, x, kind, variant):
        loss = self.heads[kind](x).square().mean()
        if variant == "right":  # right: the other layer has a gradient, too, of zeros
            loss = loss + 0 * self.heads[1 - kind](x).sum()
        return loss  # wrong: this rank has no gradient of the other layer


def train(model, kinds, variant):
    """Steps with one kind of samples after the other, or each on its rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    for x in torch.randn(4, 2, 8, 4):
        optimizer.zero_grad()
        for kind in kinds:
            (model(x[kind], kind, variant) / len(kinds)).backward()
        optimizer.step()
    return model


def off_by(variant):
    alone = train(Heads(), [0, 1], "right")
    model = Heads()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    train(model, [dist.get_rank()], variant)
    return difference(model, alone, Heads())


if __name__ == "__main__":
    show(off_by, "weights")
