"""An optimizer made before fully_shard holds parameters that the model no longer has.

``fully_shard`` replaces every parameter by a sharded one. The optimizer steps over the old ones,
which never get a gradient, so the model does not learn at all.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from two_ranks import difference, make_task, show, train_alone


def off_by(variant):
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    model, inputs, targets = make_task()
    mesh = init_device_mesh("cpu", (world_size,))
    if variant == "right":
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # right: of the shards
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # wrong: of what is replaced
        fully_shard(model, mesh=mesh)
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        F.mse_loss(model(x[rank::world_size]), y[rank::world_size]).backward()
        optimizer.step()
    return difference(model, train_alone())


if __name__ == "__main__":
    show(off_by, "weights")
