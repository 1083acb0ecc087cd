"""The solution of exercises/zero.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def flatten(tensors):
    flat = torch.cat([t.flatten() for t in tensors])
    return F.pad(flat, (0, -len(flat) % dist.get_world_size()))


def step(parameters, shard, optimizer):
    flat = flatten([p.grad for p in parameters])
    shard.grad = torch.empty_like(shard)
    dist.reduce_scatter_tensor(shard.grad, flat)
    shard.grad /= dist.get_world_size()
    optimizer.step()
    dist.all_gather_into_tensor(flat, shard.detach())
    begin = 0
    for p in parameters:
        p.data.copy_(flat[begin : begin + p.numel()].view_as(p))
        begin += p.numel()
