"""The solution of exercises/mean.py."""

import torch.distributed as dist


def average_gradients(parameters):
    for p in parameters:
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
