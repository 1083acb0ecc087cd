"""Replicas of bfloat16 weights that each rank rounds with random numbers of its own drift apart.

Each rank adds the same updates to its replica, as after DDP's all-reduce, and rounds it to one of
the two neighbours at random. The distance of the replicas is compared with how far they have moved.
"""

import torch
import torch.distributed as dist
from two_ranks import show

SEED = 0
STEPS = 100


def off_by(variant):
    generator = torch.Generator()
    if variant == "right":
        generator.manual_seed(SEED)  # right
    else:
        generator.manual_seed(SEED + dist.get_rank())  # wrong: replicas are rounded differently
    weights = torch.ones(1000, dtype=torch.bfloat16)
    for _ in range(STEPS):
        weights = round_at_random(weights.float() - 1e-3, generator)
    first = weights.float()
    dist.broadcast(first, src=0)
    apart = (weights.float() - first).norm() / (first - 1).norm()
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    return apart.item()


def round_at_random(x, generator):
    """Stochastic rounding: random bits are added to the 16 bits of fp32 that bfloat16 lacks."""
    noise = torch.randint(2**16, x.shape, generator=generator, dtype=torch.int32)
    bits = (x.view(torch.int32) + noise) & -(2**16)
    return bits.view(torch.float32).to(torch.bfloat16)


if __name__ == "__main__":
    show(off_by, "replicas")
