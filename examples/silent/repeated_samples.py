"""DistributedSampler repeats samples until the ranks have equally many. An evaluation counts them.

Nine samples on two ranks become ten: the first one counts twice.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DistributedSampler
from two_ranks import make_task, show


def off_by(variant):
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    model, inputs, targets = make_task()
    inputs, targets = (t.flatten(0, 1)[:9] for t in (inputs, targets))
    mine = torch.tensor(list(DistributedSampler(inputs, shuffle=False)))
    with torch.no_grad():
        losses = F.mse_loss(model(inputs[mine]), targets[mine], reduction="none")[:, 0]
        expected = F.mse_loss(model(inputs), targets)
    if variant == "right":
        numbers = rank + world_size * torch.arange(len(mine))  # as the sampler counts
        losses = losses[numbers < len(inputs)]  # right: without repeated samples
    sums = torch.tensor([losses.sum(), len(losses)])  # wrong without the line above
    dist.all_reduce(sums)
    return abs(sums[0] / sums[1] / expected - 1).item()


if __name__ == "__main__":
    show(off_by, "loss")
