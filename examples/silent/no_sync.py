"""no_sync has to end before the last part of a batch, or the gradients are never averaged.

Each rank then trains a model of its own on its share of the data, and the one of rank 0 is saved.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from two_ranks import difference, make_task, show, train_alone

PARTS = 2


def off_by(variant):
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    model, inputs, targets = make_task()
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        parts = (t[rank::world_size].chunk(PARTS) for t in (x, y))
        for i, (x_part, y_part) in enumerate(zip(*parts, strict=True)):
            if variant == "right":
                last = i == PARTS - 1  # right: the last backward communicates
            else:
                last = False  # wrong: none does
            with contextlib.nullcontext() if last else model.no_sync():
                (F.mse_loss(model(x_part), y_part) / PARTS).backward()
        optimizer.step()
    return difference(model.module, train_alone())


if __name__ == "__main__":
    show(off_by, "weights")
