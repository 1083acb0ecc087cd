"""Data and evaluation: the order after a resume, samples that are counted twice, and ranks that
wait for one that prepares the data.

torchrun --nproc_per_node=2 examples/troubles/data.py
"""

import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

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


def prepared(path, prepare, rank):
    """Returns when rank 0 has made this file: no collective waits, so none times out."""
    if rank == 0 and not os.path.exists(path):
        prepare(f"{path}.part")
        os.replace(f"{path}.part", path)  # nobody sees half a file
    while not os.path.exists(path):
        time.sleep(0.1)


def tokenize(path):
    time.sleep(2.5)
    Path(path).write_text("tokens")


def one_rank_prepares(remedy):
    """It takes longer than the timeout of a collective."""
    patience = dist.new_group(timeout=timedelta(seconds=2))
    with tempfile.TemporaryDirectory() as folder:
        names = [folder]
        dist.broadcast_object_list(names)
        path = f"{names[0]}/tokens"
        if remedy:
            prepared(path, tokenize, dist.get_rank())
        elif dist.get_rank() == 0:
            tokenize(path)
        dist.barrier(patience)
        assert Path(path).read_text() == "tokens"
        dist.barrier()  # before rank 0 removes its folder


if __name__ == "__main__":
    show(resumed_order, padded_evaluation, one_rank_prepares)
