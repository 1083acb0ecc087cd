"""The loss of a batch is a mean over its tokens, not a mean of the means of its parts.

Sequences differ in length, and the labels of padding are -100. So the ranks, and the parts that a
rank accumulates, hold different numbers of labels; a mean of their means weighs labels unequally.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import difference, show

PARTS = 2  # micro-batches of a rank
LENGTHS = torch.tensor([12, 1, 7, 2, 11, 3, 4, 2])  # of eight sequences
torch.manual_seed(0)
tokens = torch.randint(5, (8, 12))
labels = torch.randint(5, (8, 12)).masked_fill(torch.arange(12) >= LENGTHS[:, None], -100)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))


def step(model):
    torch.optim.SGD(model.parameters(), lr=1).step()
    return model


def count_all(labels):
    """Labels on all ranks that are not padding."""
    count = (labels >= 0).sum()
    dist.all_reduce(count)
    return count


def off_by(variant):
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    model = DistributedDataParallel(make_model())
    mine = labels[rank::world_size]
    parts = zip(tokens[rank::world_size].chunk(PARTS), mine.chunk(PARTS), strict=True)
    for i, (inputs, targets) in enumerate(parts):
        with model.no_sync() if i < PARTS - 1 else contextlib.nullcontext():
            logits = model(inputs).transpose(1, 2)
            total = F.cross_entropy(logits, targets, reduction="sum")  # right: without -100
            if variant == "right":
                loss = total * world_size / count_all(mine)  # right: DDP divides by world_size
            elif variant == "over ranks":
                loss = total / (mine >= 0).sum()  # wrong: DDP averages the ranks' means
            elif variant == "over parts":
                loss = total * world_size / count_all(targets) / PARTS  # wrong: each part's mean
            elif variant == "over chunks":  # pytorch_chunked_loss.py
                chunks = zip(logits.chunk(2), targets.chunk(2), strict=True)
                mean = sum(F.cross_entropy(*chunk) for chunk in chunks) / 2  # wrong: their mean
                loss = mean * (targets >= 0).sum() * world_size / count_all(mine)
            elif variant == "over both":
                loss = F.cross_entropy(logits, targets) / PARTS  # wrong: means on each rank, too
            loss.backward()
    alone = make_model()
    F.cross_entropy(alone(tokens).transpose(1, 2), labels).backward()
    return difference(step(model.module), step(alone), start=make_model())


if __name__ == "__main__":
    show(off_by, "weights", "over ranks", "over parts", "over chunks", "over both")
