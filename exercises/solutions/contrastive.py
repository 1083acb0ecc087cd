"""The solution of exercises/contrastive.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from exercises.contrastive import TEMPERATURE


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        whole = rows.new_empty(len(rows) * dist.get_world_size(), rows.shape[1])
        dist.all_gather_into_tensor(whole, rows.contiguous())
        return whole

    @staticmethod
    def backward(ctx, gradient):
        part = gradient.new_empty(len(gradient) // dist.get_world_size(), gradient.shape[1])
        dist.reduce_scatter_tensor(part, gradient.contiguous())
        return part


def gather(rows):
    return Gather.apply(rows)


def loss_of(queries, keys):
    targets = dist.get_rank() * len(keys) + torch.arange(len(keys))
    return F.cross_entropy(queries @ gather(keys).T / TEMPERATURE, targets)
