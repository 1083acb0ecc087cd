"""The gradient norm is that of the whole model, not of the shards of one rank.

``clip_grad_norm_`` knows sharded tensors and sums their squares over the ranks. The norm of local
tensors is smaller, and differs between the ranks.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from two_ranks import difference, make_task, show, train_alone

LIMIT = 0.1


def off_by(variant):
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    model, inputs, targets = make_task()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        F.mse_loss(model(x[rank::world_size]), y[rank::world_size]).backward()
        if variant == "right":
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)  # right: one norm for all ranks
        else:
            shards = [p.grad.to_local() for p in model.parameters()]
            norm = nn.utils.get_total_norm(shards)  # wrong: of this rank's shards
            nn.utils.clip_grads_with_norm_(model.parameters(), LIMIT, norm)
        optimizer.step()
    return difference(model, train_alone(LIMIT))


if __name__ == "__main__":
    show(off_by, "weights")
