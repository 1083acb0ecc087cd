"""Tensor-parallel ranks that draw their shards with the same seed draw copies of one shard.

Copies compute the same and get the same gradients, so they stay copies: on N ranks, the layers have
the hidden units of one rank N times. The loss falls, but like that of a smaller model. Give each
rank a seed of its own for what it does not share with others, or shard layers that were drawn
whole, as ``parallelize_module`` does.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from two_ranks import make_task, show

UNITS = 8  # hidden, of all ranks together


def off_by(variant):
    """How much the rank of the first weight matrix is below the number of hidden units."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    _, inputs, targets = make_task()
    inputs = torch.cat([inputs, inputs.sin()], 2)  # 8 features, so that the rank can be 8
    if variant == "right":
        torch.manual_seed(rank)  # right: each rank draws other units
    else:
        torch.manual_seed(0)  # wrong: all ranks draw the same units
    columns = nn.Linear(8, UNITS // world_size)  # this rank's hidden units
    rows = nn.Linear(UNITS // world_size, 1, bias=False)
    rows.weight.data /= world_size**0.5  # nn.Linear scales by the inputs of this rank alone
    optimizer = torch.optim.SGD([*columns.parameters(), *rows.parameters()], lr=0.1)
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        part = rows(torch.tanh(columns(x)))
        others = part.detach().clone()
        dist.all_reduce(others)
        output = others + part - part.detach()  # the sum over the ranks; its gradient is the part's
        F.mse_loss(output, y).backward()
        optimizer.step()
    shards = [torch.empty_like(columns.weight) for _ in range(world_size)]
    dist.all_gather(shards, columns.weight.detach())
    return 1 - torch.linalg.matrix_rank(torch.cat(shards)).item() / UNITS


if __name__ == "__main__":
    show(off_by, "different hidden units")
