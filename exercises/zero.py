"""ZeRO-1: each rank updates 1/N of the weights, and keeps only that part of the optimizer state.

Problem     AdamW keeps 8 bytes per parameter: 64 GB for Llama-3-8B, the same on every rank of DDP.
            With ZeRO-1 a rank of 8 keeps 8 GB of it, and sends as many bytes as before.
Write       flatten() and step().
The judge   compares the changes of the weights in two steps with those of one process. The number
            of parameters is not divisible by 2 or 3.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def flatten(tensors: list[Tensor]) -> Tensor:
    """All tensors in one dimension, one after the other, then as few zeros as make the length
    divisible by the number of ranks. Hint: ``F.pad(flat, (0, count))`` appends zeros."""
    raise NotImplementedError("flatten() puts tensors into one flat tensor, and pads it")


def make_shard(parameters: list[nn.Parameter]) -> nn.Parameter:
    """The part of the weights that this rank updates. The optimizer is made of it alone."""
    flat = flatten([p.detach() for p in parameters])
    return nn.Parameter(flat.chunk(dist.get_world_size())[dist.get_rank()].clone())


def step(
    parameters: list[nn.Parameter], shard: nn.Parameter, optimizer: torch.optim.Optimizer
) -> None:
    """Update all parameters, in place, with the mean of the gradients over all ranks.

    Args:
        parameters: whole, the same on every rank; ``p.grad`` is of this rank's samples.
        shard: from make_shard(); no gradient yet.
        optimizer: updates the shard only.

    Hints: ``dist.reduce_scatter_tensor(part, flat)`` leaves in ``part`` this rank's part of the
    sum, ``dist.all_gather_into_tensor(flat, part)`` puts all parts together. Both need tensors
    without gradients. ``p.data.copy_(values)`` replaces the values of a parameter.
    """
    raise NotImplementedError("step() reduce-scatters gradients, updates, and gathers the weights")
