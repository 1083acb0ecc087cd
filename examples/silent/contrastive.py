"""A contrastive loss compares each sample with the samples of all ranks, and so does its gradient.

A sample is a negative for the samples of every other rank, so its gradient has a part from the loss
of each rank. ``all_gather`` of torch.distributed has no backward: these parts are lost, unless each
rank computes the loss of all samples, of which DDP then averages the gradients.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from two_ranks import difference, show

SCALE = 5  # of the similarities: 1 / temperature


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def make_batches():
    """Four batches of eight samples, in two views each: ``[views, samples, 4]``."""
    samples = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1))
    return torch.stack([samples, samples.roll(1, -1)], 1)


def gather(rows, mesh):
    """The rows of all ranks, through which gradients flow back to the ranks that have them."""
    rows = DTensor.from_local(rows, mesh, [Shard(0)])
    rows = rows.redistribute(placements=[Replicate()])
    return rows.to_local(grad_placements=[Partial()])  # backward adds up the ranks' gradients


def gather_constants(rows):
    """The same rows, as constants. ``all_gather`` knows no gradients."""
    gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, rows.detach().contiguous())
    return gathered


def with_own(rows):
    """The same rows, of which those of this rank are no constants."""
    gathered = gather_constants(rows)
    gathered[dist.get_rank()] = rows
    return torch.cat(gathered)


def contrast(queries, keys, first=0):
    """InfoNCE: the key of query i is key ``first + i``, and all others are negatives."""
    numbers = first + torch.arange(len(queries))
    return F.cross_entropy(SCALE * queries @ keys.T, numbers)


def loss_of(queries, keys, variant):
    """Of the rows of this rank. DDP averages the gradients of the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    first = dist.get_rank() * len(keys)
    if variant == "right":
        keys = gather(keys, mesh)  # right: gradients return to the ranks that have the rows
    elif variant == "negatives of one rank":
        first = 0  # wrong: an easier task
    elif variant == "without gradients":
        keys = torch.cat(gather_constants(keys))  # wrong: no key has a gradient
    elif variant == "own gradients":
        keys = with_own(keys)  # wrong: lacks the gradients of the other ranks' losses
    elif variant == "loss of all ranks":
        first = 0
        keys = with_own(keys)
        queries = with_own(queries)  # wrong: 1/N. Right times world_size, as DDP averages
    return contrast(queries, keys, first)


def train(model, variant=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for views in make_batches():
        optimizer.zero_grad()
        if variant:
            views = views.chunk(dist.get_world_size(), 1)[dist.get_rank()]
        queries, keys = F.normalize(model(views), dim=-1)
        loss = loss_of(queries, keys, variant) if variant else contrast(queries, keys)
        loss.backward()
        optimizer.step()
    return model


def off_by(variant):
    model = train(DistributedDataParallel(make_model()), variant)
    return difference(model, train(make_model()), start=make_model())


if __name__ == "__main__":
    mistakes = "negatives of one rank", "without gradients", "own gradients", "loss of all ranks"
    show(off_by, "weights", *mistakes, ranks=4)
