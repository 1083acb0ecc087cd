"""Every rank has to run the same sharded modules, equally often and in the same order.

``fully_shard`` gathers the weights of a module when a rank calls it, and reduce-scatters the
gradients that exist on this rank, in the order of the parameters. If the samples of one rank use
one layer, and those of another rank a layer of the same shape, the collectives fit each other:
gradients of two layers are added up, and where each layer is a unit of its own, a rank computes
with shards of both. Layers of different shapes hang, or end in an error.
In PyTorch 2.13 and later, the module's ``set_reduce_scatter_unused_params(True)`` sends zeros for
parameters that are not used, which is enough for layers in one unit.
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
        if variant == "right":  # right: every rank runs both layers, in this order
            losses = [head(x).square().mean() for head in self.heads]
            return losses[kind] + 0 * losses[1 - kind]
        loss = self.heads[kind](x).square().mean()  # wrong: the layer of this rank's samples alone
        if variant == "order":
            loss = loss + 0 * self.heads[1 - kind](x).sum()  # wrong: ranks begin with another one
        return loss


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
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if variant != "gradients":
        for head in model.heads:
            fully_shard(head, mesh=mesh)  # each is gathered when it is called
    fully_shard(model, mesh=mesh)
    train(model, [dist.get_rank()], variant)
    return difference(model, alone, Heads())


if __name__ == "__main__":
    show(off_by, "weights", "gradients", "weights", "order")
