"""A learning rate belongs to a global batch, which grows with the ranks if each has a whole one.

If the global batch stays what it was, the rate does, and so does the result. If it grows with the
ranks, the rate is usually scaled with it once (Goyal et al. 2017, arXiv:1706.02677).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from two_ranks import difference, make_task, show, train_alone

BATCH = 8  # of a single process
RATE = 0.1  # of this batch


def off_by(variant):
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    model, inputs, targets = make_task()
    if variant == "right":
        batch = BATCH // world_size  # right: the same global batch
        rate = RATE
    elif variant == "not scaled":
        batch = BATCH
        rate = RATE  # wrong: fewer steps, none of them longer
    elif variant == "scaled twice":
        batch = BATCH
        rate = RATE * world_size * world_size  # wrong: by a library and by hand
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    batches = (t.flatten(0, 1).split(batch * world_size) for t in (inputs, targets))
    for x, y in zip(*batches, strict=True):
        optimizer.zero_grad()
        F.mse_loss(model(x[rank::world_size]), y[rank::world_size]).backward()
        optimizer.step()
    return difference(model.module, train_alone())


if __name__ == "__main__":
    show(off_by, "weights", "not scaled", "scaled twice")
