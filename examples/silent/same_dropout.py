"""Ranks with the same seed drop the same units, so averaging reduces dropout's noise by less.

The variance of the averaged gradient is compared with that of a single process, which draws a mask
for every sample of the global batch. The right result differs from it by sampling noise.
"""

import torch
import torch.distributed as dist
from torch import nn
from two_ranks import make_task, show

SEED = 0
DRAWS = 2000  # of gradients, for their variance


def off_by(variant):
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    _, inputs, _ = make_task()
    x = inputs[0].abs()  # as activations behind a ReLU
    if variant == "right":
        torch.manual_seed(SEED + rank)  # right
    else:
        torch.manual_seed(SEED)  # wrong: all ranks draw the same masks
    averaged = draw_gradients(x[rank::world_size]) / world_size
    dist.all_reduce(averaged)
    torch.manual_seed(SEED + world_size)
    variance = averaged.var(0).sum()
    expected = draw_gradients(x).var(0).sum()
    return abs(variance / expected - 1).item()


def draw_gradients(x):
    layer = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1))
    losses = (layer(x).mean() for _ in range(DRAWS))
    return torch.stack([torch.autograd.grad(loss, layer[1].weight)[0] for loss in losses])


if __name__ == "__main__":
    show(off_by, "gradient variance")
