"""DDP: batches of one rank more than of another, and parameters without or with two gradients.

torchrun --nproc_per_node=2 examples/troubles/ddp.py
"""

import torch
import torch.distributed as dist
from shared import Block, Model, backward, show
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DistributedSampler


class Checkpointed(Model):
    """The last block is used twice."""

    def forward(self, x, use_reentrant):
        for i in (0, 1, 1):
            x = checkpoint(self.blocks[i], x, use_reentrant=use_reentrant)
        return x


def uneven_batches(remedy):
    """Rank 0 has three batches, rank 1 two."""
    model = DistributedDataParallel(Block())
    with Join([model], enable=remedy):
        for _ in range(3 - dist.get_rank()):
            backward(model)
    dist.barrier()


def uneven_then_a_sum(remedy):
    """Rank 1 adds its numbers to the gradients of rank 0."""
    model = DistributedDataParallel(Block())
    sampler = DistributedSampler(range(5), drop_last=True)
    for _ in sampler if remedy else range(3 - dist.get_rank()):
        backward(model)
    sums = torch.zeros(sum(p.numel() for p in model.parameters()))
    dist.all_reduce(sums)
    assert not sums.any(), sums


def unused_parameter(remedy):
    model = DistributedDataParallel(Model(), find_unused_parameters=remedy)
    model.module.used = [0]
    for _ in range(2):
        backward(model)


def marked_twice(remedy):
    backward(DistributedDataParallel(Checkpointed()), not remedy)
    backward(DistributedDataParallel(Checkpointed(), static_graph=True), True)


def two_forwards(remedy):
    model = DistributedDataParallel(nn.Sequential(Block(), nn.BatchNorm1d(4)))
    model.broadcast_buffers = not remedy
    x = torch.randn(3, 4)
    (model(x) * model(x + 1)).sum().backward()


def sync_batch_norm(remedy):
    DistributedDataParallel(nn.BatchNorm1d(4) if remedy else nn.SyncBatchNorm(4))


if __name__ == "__main__":
    show(
        uneven_batches,
        uneven_then_a_sum,
        unused_parameter,
        marked_twice,
        two_forwards,
        sync_batch_norm,
        hang=(uneven_batches,),
    )
