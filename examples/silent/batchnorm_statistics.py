"""BatchNorm's running statistics are those of the samples that a rank has seen.

The model that rank 0 saves has the statistics of rank 0's shard of the data; their average over the
ranks describes all of it. (``SyncBatchNorm`` computes them over all ranks at each step, on GPUs.)
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from two_ranks import make_task, show


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def off_by(variant):
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    model = make_model()
    alone = make_model()
    _, inputs, targets = make_task()
    for x in inputs:
        model(x[rank::world_size])  # the running statistics learn
        alone(x)
    if variant == "right":
        for buffer in (model[1].running_mean, model[1].running_var):
            dist.all_reduce(buffer)
            buffer /= world_size  # right: the mean over the ranks
    with torch.no_grad():
        loss = F.mse_loss(model.eval()(inputs[0]), targets[0])
        expected = F.mse_loss(alone.eval()(inputs[0]), targets[0])
    return abs(loss / expected - 1).item()


if __name__ == "__main__":
    show(off_by, "evaluation loss")
