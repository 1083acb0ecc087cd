"""FSDP and DTensor: what is sharded and what is not, and state dicts of all ranks.

torchrun --nproc_per_node=2 examples/troubles/fsdp.py
"""

import torch
import torch.distributed as dist
from shared import Model, backward, show
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.utils import clip_grad_norm_

WHOLE = sd.StateDictOptions(full_state_dict=True, cpu_offload=True)


def sharded(root=True):
    model = Model()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.blocks[0], mesh=mesh)
    return fully_shard(model, mesh=mesh) if root else model


def mixed_tensors(remedy):
    """Without the root, the second block keeps plain parameters."""
    model = sharded(root=remedy)
    backward(model)
    clip_grad_norm_(model.parameters(), 1.0)


def one_rank_saves(remedy):
    model = sharded()
    if remedy or dist.get_rank() == 0:
        sd.get_model_state_dict(model, options=WHOLE)
    dist.barrier()


def saved_sharded(remedy):
    model = sharded()
    weights = sd.get_model_state_dict(model, options=WHOLE) if remedy else model.state_dict()
    if dist.get_rank() == 0 or not remedy:  # others get an empty dict
        Model().load_state_dict(weights)


def early_optimizer(remedy):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.blocks[0].linear.bias.detach().clone()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    if remedy:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    backward(model)
    optimizer.step()
    assert not model.blocks[0].linear.bias.full_tensor().equal(before), "nothing is trained"


def frozen(remedy):
    model = Model()
    model.requires_grad_(False)
    model.blocks[0].linear.requires_grad_(True)
    if not remedy:
        FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    before = model.blocks[0].linear.bias.detach().clone()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    backward(model)
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0).step()
    assert not model.blocks[0].linear.bias.full_tensor().equal(before), "nothing is trained"


if __name__ == "__main__":
    hang = (one_rank_saves,)
    show(mixed_tensors, one_rank_saves, saved_sharded, early_optimizer, frozen, hang=hang)
