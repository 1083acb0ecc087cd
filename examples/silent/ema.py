"""An exponential moving average (EMA) of weights under FSDP: at least in fp32, and put into the
model in place, after what FSDP has gathered is freed.

In bfloat16, the average stays near where it began: 0.1% of a difference is mostly below half a unit
in the last place. FSDP gathers from memory of its own, of which the parameters are views: another
tensor in ``.data`` changes nothing. What the root module has gathered for one evaluation, it uses
for the next one, too.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from two_ranks import make_task, show

EMA = 0.999  # decay
EPOCHS = 50


def train(model, dtype, rank=0, world_size=1):
    """Returns the average of the parameters, or of their shards, in this dtype."""
    _, inputs, targets = make_task()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    average = [parameter.detach().to(dtype, copy=True) for parameter in parameters]
    for step in range(EPOCHS * len(inputs)):
        x = inputs[step % len(inputs), rank::world_size]
        y = targets[step % len(inputs), rank::world_size]
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        for averaged, parameter in zip(average, parameters, strict=True):
            averaged.lerp_(parameter.detach().to(dtype), 1 - EMA)
    return average


def evaluate(model):
    _, inputs, targets = make_task()
    with torch.no_grad():
        return F.mse_loss(model(inputs), targets)


def put(average, parameters, variant="right"):
    for averaged, parameter in zip(average, parameters, strict=True):
        averaged = averaged.to(parameter.dtype)
        if variant == "in .data":
            parameter.data = averaged  # wrong: FSDP gathers the memory that it had before
        else:
            parameter.detach().copy_(averaged)  # right: in place


def off_by(variant):
    alone, _, _ = make_task()
    put(train(alone, torch.float64), alone.parameters())
    model, _, _ = make_task()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    parameters = list(model.parameters())  # the shards
    dtype = torch.float64  # right: at least fp32
    if variant == "in bfloat16":
        dtype = torch.bfloat16  # wrong: hardly any update changes it
    average = train(model, dtype, dist.get_rank(), dist.get_world_size())
    evaluate(model)  # of the last weights
    if variant != "not resharded":
        model.reshard()  # right. Wrong without this line: evaluates the last weights again
    put(average, parameters, variant)
    return abs(evaluate(model) / evaluate(alone) - 1).item()


if __name__ == "__main__":
    show(off_by, "evaluation loss", "in bfloat16", "in .data", "not resharded")
