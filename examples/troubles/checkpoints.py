"""Precision and checkpoints: halved parameters, whole modules, prefixes, optimizers in parts.

torchrun --nproc_per_node=2 examples/troubles/checkpoints.py
"""

import tempfile

import torch
import torch.distributed as dist
from shared import Block, show
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def half_parameters(remedy):
    model = Block()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dtype = torch.float32 if remedy else torch.float16
    with torch.autocast("cpu", torch.float16, enabled=remedy):
        loss = model.to(dtype)(torch.ones(2, 4, dtype=dtype)).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)


def whole_module(remedy):
    with tempfile.TemporaryFile() as file:
        torch.save(Block().state_dict() if remedy else Block(), file)
        file.seek(0)
        torch.load(file)


def wrapper_prefix(remedy):
    if remedy:
        model = Block()
        model.compile(backend="eager")
        weights = DistributedDataParallel(model).module.state_dict()
    else:
        model = torch.compile(Block(), backend="eager")
        weights = DistributedDataParallel(model).state_dict()
    Block().load_state_dict(weights)


def not_consolidated(remedy):
    model = DistributedDataParallel(Block())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    if remedy:
        optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        optimizer.state_dict()
    dist.barrier()


if __name__ == "__main__":
    show(half_parameters, whole_module, wrapper_prefix, not_consolidated)
