"""Rank 0 decides whether a run resumes, and sends the others what it has loaded.

On machines without a shared disk, only rank 0 finds the checkpoint that it has written. If each
rank decides for itself, the others start from scratch, and gradients of different weights are
averaged.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from two_ranks import difference, make_task, show, train_alone


def train(path, variant):
    """Two steps, from the checkpoint if there is one; then rank 0 writes the next."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    model, inputs, targets = make_task()
    model = DistributedDataParallel(model)
    found = [torch.load(path) if path.exists() else None]
    if variant == "right":
        dist.broadcast_object_list(found, src=0)  # wrong without this line: its own disk
    start, weights = found[0] or (0, model.module.state_dict())
    model.module.load_state_dict(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(start, start + 2):
        optimizer.zero_grad()
        x = inputs[step, rank::world_size]
        y = targets[step, rank::world_size]
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    if rank == 0:
        torch.save((start + 2, model.module.state_dict()), path)
    return model.module


def off_by(variant):
    with tempfile.TemporaryDirectory() as disk:  # of this rank alone
        path = Path(disk, "checkpoint.pt")
        train(path, variant)
        return difference(train(path, variant), train_alone())


if __name__ == "__main__":
    show(off_by, "weights")
