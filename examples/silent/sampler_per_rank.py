"""WeightedRandomSampler knows no ranks: each rank draws a whole epoch by itself.

The weights let 64 of 96 samples be drawn, in an epoch without replacement.
"""

import torch
import torch.distributed as dist
from torch.utils.data import WeightedRandomSampler
from two_ranks import show

WEIGHTS = torch.tensor([2.0, 1.0, 0.0]).repeat(32)
BATCH = 16  # of all ranks together
STEPS = 4
EPOCH = 0


def off_by(variant):
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    generator = torch.Generator().manual_seed(EPOCH)
    if variant == "right":  # as a line of order() in examples/: all ranks draw all, and split it
        drawn = torch.multinomial(WEIGHTS, BATCH * STEPS, False, generator=generator)  # right
        mine = drawn[rank::world_size]  # right: this rank's samples
    elif variant == "with the same seed":  # each rank has what the others have
        sampler = WeightedRandomSampler(WEIGHTS, BATCH * STEPS, False, generator)  # wrong
        mine = torch.tensor(list(sampler))[: BATCH * STEPS // world_size]
    elif variant == "with a seed of the rank":  # some samples twice, others never
        generator.manual_seed(EPOCH * world_size + rank)
        sampler = WeightedRandomSampler(WEIGHTS, BATCH * STEPS, False, generator)  # wrong
        mine = torch.tensor(list(sampler))[: BATCH * STEPS // world_size]
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(gathered, mine)
    return 1 - len(torch.cat(gathered).unique()) / (BATCH * STEPS)


if __name__ == "__main__":
    show(off_by, "different samples", "with the same seed", "with a seed of the rank")
