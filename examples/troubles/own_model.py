"""Your own model: blocks wrapped outside it, a cache with recomputed activations, tied weights.

torchrun --nproc_per_node=2 examples/troubles/own_model.py
"""

import torch
from shared import Model, backward, show
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


def wrapped_outside(remedy):
    """The model still has the blocks without their wrappers, whose parameters are sharded twice."""
    model = Model()
    mesh = init_device_mesh("cpu", (2,))
    blocks = [checkpoint_wrapper(block) for block in model.blocks]
    if remedy:
        model.blocks = nn.ModuleList(blocks)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    backward(model)


def cache_and_recomputation(remedy):
    """As in a decoder with use_cache: recomputing appends the keys once more."""
    cache = []

    def attend(x):
        if not remedy:
            cache.append(x)
        return (torch.cat(cache or [x])[:, 0] + torch.ones(2)).sin()  # the ones: a mask

    checkpoint(attend, torch.ones(2, 4, requires_grad=True), use_reentrant=False).sum().backward()


def tied_not_saved(remedy):
    """safetensors has a tied tensor once."""
    model = nn.ModuleDict({"token": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["token"].weight
    weights = {"token.weight": torch.zeros(8, 4)}
    if remedy:
        weights["head.weight"] = weights["token.weight"]
    set_model_state_dict(model, weights)


if __name__ == "__main__":
    show(wrapped_outside, cache_and_recomputation, tied_not_saved)
