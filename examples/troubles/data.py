"""Data and evaluation: the order after a resume, and samples that are counted twice.

torchrun --nproc_per_node=2 examples/troubles/data.py
"""

import torch
import torch.distributed as dist
from shared import show
from torch.utils.data import DistributedSampler


def resumed_order(remedy):
    """Half of epoch 1 is trained, then the run resumes in its middle."""
    sampler = DistributedSampler(range(64), seed=3)
    sampler.set_epoch(1)
    seen = list(sampler)[:16]
    sampler = DistributedSampler(range(64), seed=3)
    if remedy:
        sampler.set_epoch(1)
    seen += list(sampler)[16:]
    assert len(set(seen)) == 32, f"{len(set(seen))} of 32 samples"


def padded_evaluation(remedy):
    sampler = DistributedSampler(range(5), shuffle=False)
    numbers = dist.get_rank() + 2 * torch.arange(len(sampler))
    count = (numbers < 5).sum() if remedy else torch.tensor(len(sampler))
    dist.all_reduce(count)
    assert count == 5, f"{count} of 5 samples"


if __name__ == "__main__":
    show(resumed_order, padded_evaluation)
