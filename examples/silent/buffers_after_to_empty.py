"""to_empty allocates every tensor anew, also buffers that no checkpoint has the values of.

A model that is made on the meta device, and filled from a checkpoint, has its parameters. A buffer
with ``persistent=False``, such as the frequencies of rotary embeddings, has what was in memory.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.module import register_module_parameter_registration_hook
from two_ranks import make_task, show


class Rotary(nn.Module):
    def __init__(self, width):
        super().__init__()
        frequencies = 100 ** (-torch.arange(width // 2) / (width // 2))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x):  # a sequence: positions, width
        angles = torch.outer(torch.arange(len(x)), self.frequencies)
        a, b = x.chunk(2, 1)
        sin = angles.sin()
        cos = angles.cos()
        return torch.cat([a * cos - b * sin, a * sin + b * cos], 1)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Rotary(8), nn.Tanh(), nn.Linear(8, 1))


def to_meta(module, name, parameter):
    return nn.Parameter(parameter.to("meta"))


def off_by(variant):
    complete = make_model()
    _, inputs, targets = make_task()
    if variant == "right":
        with register_module_parameter_registration_hook(to_meta):
            model = make_model()  # right: only the parameters are on the meta device
    else:
        with torch.device("meta"):
            model = make_model()  # wrong: the buffers are, too
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    buffers = dict(model.named_buffers())
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    model.to_empty(device="cpu")
    torch.use_deterministic_algorithms(False)
    for name, buffer in model.named_buffers():
        if variant == "right":
            buffer.copy_(buffers[name])  # right: puts their values back
        buffer.nan_to_num_(0)  # memory may hold anything: zeros give the same figure every time
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, complete.state_dict(), options=options)
    with torch.no_grad():
        loss = F.mse_loss(model(inputs[0]), targets[0])
        expected = F.mse_loss(complete(inputs[0]), targets[0])
    return abs(loss / expected - 1).item()


if __name__ == "__main__":
    show(off_by, "loss")
