"""With expert parallelism under FSDP, the gradient of an expert is not yet the mean over all ranks.

It sums over the ranks of the mesh dimension "ep", whose tokens the expert has computed; FSDP
averages over the other ranks only. FSDP's own remedy, ``set_gradient_divide_factor(world_size)``,
divides twice where a single rank is left (``ep`` = world size) and FSDP reduces by sums: in float64
or float16, or after ``set_force_sum_reduction_for_comms(True)``. PyTorch 2.10 to 2.14 do that
(``foreach_reduce`` in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from two_ranks import difference, make_task, show

EXPERTS = 4


class DivideGradient(torch.autograd.Function):
    """Identity in forward; in backward, divides the gradient."""

    @staticmethod
    def forward(ctx, tensor, by):
        ctx.by = by
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / ctx.by, None


class Experts(nn.Module):
    """Matrices, stacked; a rank has some of them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, 8, 8) / 3)
        self.sources = 1  # ranks whose tokens come here

    def forward(self, tokens, gates):
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        weight = DivideGradient.apply(weight, self.sources)  # identity in forward
        return (torch.einsum("ti,eio->teo", tokens, weight) * gates[..., None]).sum(1)


class Mixture(nn.Module):
    """Every expert computes every token: to route tokens would not change the factor."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, EXPERTS)
        self.experts = Experts()
        self.mesh = None

    def forward(self, tokens):
        gates = self.router(tokens).softmax(-1)
        if self.mesh is None:
            return self.experts(tokens, gates)
        tokens = self.gather(tokens)  # dispatch
        gates = self.gather(gates)
        own = gates.chunk(self.mesh.size(), 1)[self.mesh.get_local_rank()]
        outputs = DTensor.from_local(self.experts(tokens, own), self.mesh, [Partial()])
        return outputs.redistribute(placements=[Shard(0)]).to_local()  # combine: sums over experts

    def gather(self, rows):
        rows = DTensor.from_local(rows, self.mesh, [Shard(0)])
        rows = rows.redistribute(placements=[Replicate()])
        return rows.to_local(grad_placements=[Partial()])  # backward sums over the ranks


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Mixture(), nn.Tanh(), nn.Linear(8, 1))


def train(model, rank=0, world_size=1):
    _, inputs, targets = make_task()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        F.mse_loss(model(x[rank::world_size]), y[rank::world_size]).backward()
        optimizer.step()
    return model


def shard(model, ep, variant="right"):
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size // ep, ep), mesh_dim_names=("rest", "ep"))
    mixture = model[1]
    mixture.mesh = mesh["ep"]
    experts = mixture.experts
    experts.weight = nn.Parameter(distribute_tensor(experts.weight.data, mesh["ep"], [Shard(0)]))
    fully_shard(experts, mesh=mesh["rest"], shard_placement_fn=lambda _: Shard(1))
    if variant == "right":
        experts.sources = ep  # right: divides in backward. Wrong without this line
    elif variant == "divided twice":
        experts.set_gradient_divide_factor(world_size)  # wrong if ep is world_size
    return fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))


def off_by(variant):
    """The larger distance of two meshes: ep = 2, where FSDP averages over two ranks, and ep = 4."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    alone = train(make_model())
    differences = []
    for ep in (2, 4):
        model = train(shard(make_model(), ep, variant), rank, world_size)
        differences.append(difference(model, alone, start=make_model()))
    return max(differences)


if __name__ == "__main__":
    show(off_by, "weights", "not divided", "divided twice", ranks=4)
