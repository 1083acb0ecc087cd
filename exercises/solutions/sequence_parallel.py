"""The solution of exercises/sequence_parallel.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from exercises.sequence_parallel import all_gather, reduce_scatter


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return all_gather(x)

    @staticmethod
    def backward(ctx, gradient):
        return reduce_scatter(gradient)


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return reduce_scatter(x)

    @staticmethod
    def backward(ctx, gradient):
        return all_gather(gradient)


def block(x, norm, up, down):
    hidden = F.gelu(F.linear(Gather.apply(norm(x)), up))
    return x + Scatter.apply(F.linear(hidden, down))


def finish(norm):
    for p in norm.parameters():
        dist.all_reduce(p.grad)
