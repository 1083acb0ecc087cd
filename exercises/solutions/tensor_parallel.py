"""The solution of exercises/tensor_parallel.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def mlp(x, up, up_bias, down, down_bias):
    hidden = F.gelu(F.linear(Copy.apply(x), up, up_bias))
    return Sum.apply(F.linear(hidden, down)) + down_bias
