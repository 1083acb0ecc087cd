"""The solution of exercises/fsdp.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def gather(shard, rows):
    whole = shard.new_empty(len(shard) * dist.get_world_size(), shard.shape[1])
    dist.all_gather_into_tensor(whole, shard.detach())
    return whole[:rows]


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, rows):
        ctx.save_for_backward(x, shard)
        ctx.rows = rows
        return F.linear(x, gather(shard, rows))

    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        of_x = gradient @ gather(shard, ctx.rows)
        ranks = dist.get_world_size()
        of_weight = F.pad(gradient.T @ x, (0, 0, 0, -ctx.rows % ranks))
        part = torch.empty_like(shard)
        dist.reduce_scatter_tensor(part, of_weight)
        return of_x, part / ranks, None
