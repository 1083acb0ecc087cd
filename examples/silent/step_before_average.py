"""DDP averages a gradient after its parameter's hooks: an optimizer step in such a hook uses the
gradient of one rank. FSDP2 calls the hooks after the reduce-scatter.

Each rank then trains a model of its own on its share of the data, and the one of rank 0 is saved.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from two_ranks import difference, make_task, show, train_alone


def off_by(variant):
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    model, inputs, targets = make_task()
    if variant == "right":
        model = fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))  # right
    else:
        model = DistributedDataParallel(model)  # wrong: it averages too late
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update(parameter):
        optimizer.step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)  # right after FSDP2's average
    for x, y in zip(inputs, targets, strict=True):
        F.mse_loss(model(x[rank::world_size]), y[rank::world_size]).backward()
    return difference(model, train_alone())


if __name__ == "__main__":
    show(off_by, "weights")
