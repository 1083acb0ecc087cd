"""FSDP and DTensor: what is sharded and what is not, and state dicts of all ranks.

torchrun --nproc_per_node=2 examples/troubles/fsdp.py
"""

import re
from pathlib import Path

import torch
import torch.distributed as dist
from shared import Model, backward, show
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.utils import clip_grad_norm_

PAGE = Path(__file__).resolve().parents[2] / "docs/troubleshooting.md"
WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)


def sharded(root=True):
    model, mesh = Model(), init_device_mesh("cpu", (2,))
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
        dcp.get_model_state_dict(model, options=WHOLE)
    dist.barrier()


def saved_sharded(remedy):
    model = sharded()
    weights = dcp.get_model_state_dict(model, options=WHOLE) if remedy else model.state_dict()
    if dist.get_rank() == 0 or not remedy:  # others get an empty dict
        Model().load_state_dict(weights)


def early_optimizer(remedy):
    model = Model()
    early = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.blocks[0].linear.bias.detach().clone()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    backward(model)
    (torch.optim.SGD(model.parameters(), lr=1.0) if remedy else early).step()
    assert not model.blocks[0].linear.bias.full_tensor().equal(before), "nothing is trained"


def lora(remedy):
    """The page's example in float64, on two ranks and on one."""
    mesh = init_device_mesh("cpu", (2,))
    if not remedy:
        model = Model()
        model.blocks[0].requires_grad_(False)
        FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    code = re.search(r"class LoRA.*?(?=```)", PAGE.read_text(), re.DOTALL)[0]
    x, adapters = torch.randn(8, 4, dtype=torch.float64), []
    dist.broadcast(x, 0)
    for shard, rows in (fully_shard, x.chunk(2)[dist.get_rank()]), (lambda *_, **__: None, x):
        torch.manual_seed(0)
        given = {"torch": torch, "nn": nn, "fully_shard": shard, "mesh": mesh}
        torch.set_default_dtype(torch.float64)
        exec(code, given | {"model": (model := Model())}, given := {})
        torch.set_default_dtype(torch.float32)
        for _ in range(5):
            model(rows).square().mean().backward()
            given["optimizer"].step()
            given["optimizer"].zero_grad()
        options = dcp.StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
        adapters.append(dcp.get_model_state_dict(model, options=options))
    assert len(adapters[1]) == 4
    for name, tensor in adapters[0].items():
        torch.testing.assert_close(tensor, adapters[1][name], rtol=1e-11, atol=0)


if __name__ == "__main__":
    show(
        mixed_tensors, one_rank_saves, saved_sharded, early_optimizer, lora, hang=(one_rank_saves,)
    )
