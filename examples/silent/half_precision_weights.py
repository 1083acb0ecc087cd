"""A model that is loaded in bfloat16 is trained in bfloat16, and most of its weights do not move.

A bfloat16 number has 8 significant bits. At the learning rate of a fine-tuning run, a step is less
than half of the last bit of most weights, and is rounded away. ``MixedPrecisionPolicy`` does not
help: it keeps the dtype of the shards, which AdamW updates.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from two_ranks import make_task, show, weights


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)  # as large as the weights of a GPT
    return model


def off_by(variant):
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    model = make_model()
    _, inputs, targets = make_task()
    model.bfloat16()  # as the folder has it
    if variant == "right":
        model.float()  # wrong without this line. In transformers: dtype=torch.float32
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    start = weights(model)
    for x, y in zip(inputs.float(), targets.float(), strict=True):
        optimizer.zero_grad()
        F.mse_loss(model(x[rank::world_size]).float(), y[rank::world_size]).backward()
        optimizer.step()
    return (weights(model) == start).double().mean().item()


if __name__ == "__main__":
    show(off_by, "share of weights that move")
