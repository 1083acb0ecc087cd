"""A schedule is stepped once per optimizer step, and ends with the last step of this rank's loader.

The rate falls linearly to zero here. Stepped once per rank, it is zero after half of the training.
With the number of steps that one rank needs for all samples, it ends at half of its first value.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from two_ranks import difference, make_task, show


def off_by(variant):
    model = make_task()[0]
    mine = train(DistributedDataParallel(model), dist.get_rank(), dist.get_world_size(), variant)
    return difference(mine.module, train(make_task()[0]))


def train(model, rank=0, world_size=1, variant="right"):
    _, inputs, targets = make_task()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps, batch, _ = inputs.shape
    if variant == "counted for all ranks":
        steps = steps * batch // (batch // world_size)  # wrong: all samples / batch of a rank
    scheduler = LinearLR(optimizer, 1, 0, total_iters=steps)
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        F.mse_loss(model(x[rank::world_size]), y[rank::world_size]).backward()
        optimizer.step()
        scheduler.step()  # right: once
        if variant == "stepped per rank":
            for _ in range(world_size - 1):
                scheduler.step()  # wrong: world_size times in all
    return model


if __name__ == "__main__":
    show(off_by, "weights", "stepped per rank", "counted for all ranks")
