"""FSDP and DTensor: what is sharded and what is not, and state dicts of all ranks.

torchrun --nproc_per_node=2 examples/troubles/fsdp.py
"""

import torch
import torch.distributed as dist
from shared import Block, Model, backward, show
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor.debug import CommDebugMode
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


def uneven_generation(remedy):
    """Rank 0 has all its tokens first; a forward gathers the parameters from all ranks."""
    model = sharded()
    row = torch.ones(1, 4)
    missing = 2 + dist.get_rank()  # tokens of this rank's sample
    unfinished = torch.ones(())
    while unfinished:
        row = model(row)  # where a rank needs no more tokens, it ignores the result
        missing -= 1
        unfinished.fill_(missing > 0)
        if remedy:
            dist.all_reduce(unfinished, dist.ReduceOp.MAX)  # of any rank
    dist.barrier()


def gathers_for_each_token(remedy):
    model = sharded()
    units = [part for part in model.modules() if isinstance(part, FSDPModule)]
    if remedy:
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
    with CommDebugMode() as sent, torch.no_grad():
        for _ in range(5):
            model(torch.ones(1, 4))
    if remedy:
        for unit in units:
            unit.reshard()
            unit.set_reshard_after_forward(unit is not model, recurse=False)
    backward(model)  # shards are trained as before
    assert sent.get_total_counts() == 0, "each forward gathers the blocks again"


def other_method(remedy):
    """The hooks that gather and free parameters are of forward()."""

    class Encoder(Block):
        def encode(self, x):
            return self.linear(x)

    model = fully_shard(Encoder(), mesh=init_device_mesh("cpu", (2,)))
    if remedy:
        register_fsdp_forward_method(model, "encode")
    model.encode(torch.ones(1, 4))


def saved_sharded(remedy):
    model = sharded()
    weights = sd.get_model_state_dict(model, options=WHOLE) if remedy else model.state_dict()
    if dist.get_rank() == 0 or not remedy:  # others get an empty dict
        Model().load_state_dict(weights)


def skipped_module(remedy):
    """Rank 1 has a batch of text alone. Without the encoder, it does not send its shards of it."""
    decoder = Model()
    encoder = Model(width=8)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(encoder, mesh=mesh)
    fully_shard(decoder, mesh=mesh)
    loss = decoder(torch.ones(2, 4)).sum()
    has_image = dist.get_rank() == 0
    if has_image or remedy:
        loss = loss + has_image * encoder(torch.ones(2, 8)).sum()
    loss.backward()


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
    hang = one_rank_saves, skipped_module, uneven_generation
    rest = saved_sharded, gathers_for_each_token, other_method, early_optimizer, frozen
    show(mixed_tensors, *hang, *rest, hang=hang)
