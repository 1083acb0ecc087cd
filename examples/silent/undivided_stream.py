"""A DataLoader divides no IterableDataset: each rank and each worker reads all of it.

Two ranks with two workers each. A reader is a worker of a rank, and takes every fourth sample.
"""

from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from two_ranks import difference, make_task, show

WORKERS = 2
BATCH = 4  # samples of a rank
STEPS = 4


class Stream(IterableDataset):
    def __init__(self, variant):
        super().__init__()
        self.variant = variant

    def __iter__(self):
        ranks = dist.get_world_size()
        rank = dist.get_rank()
        worker = get_worker_info().id
        workers = WORKERS
        if self.variant in ("over ranks", "at all"):
            ranks = 1  # wrong: every rank reads the same samples
            rank = 0
        if self.variant in ("over workers", "at all"):
            workers = 1  # wrong: every worker of a rank does
            worker = 0
        _, inputs, targets = make_task()
        samples = zip(inputs.flatten(0, 1), targets.flatten(0, 1), strict=True)
        reader = rank * workers + worker
        yield from islice(samples, reader, None, ranks * workers)  # right: each has its own


def off_by(variant):
    model, *_ = make_task()
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Stream(variant), BATCH, num_workers=WORKERS)
    for x, y in islice(loader, STEPS):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return difference(model.module, train_alone())


def train_alone():
    model, inputs, targets = make_task()
    inputs, targets = (t.flatten(0, 1) for t in (inputs, targets))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):  # from the workers by turns
        numbers = torch.arange(step % WORKERS, len(inputs), WORKERS)[step // WORKERS * 8 :][:8]
        optimizer.zero_grad()
        F.mse_loss(model(inputs[numbers]), targets[numbers]).backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    show(off_by, "weights", "over ranks", "over workers", "at all")
