"""A sharded model is saved by all ranks: what rank 0 has is a part of each tensor.

``torch.save`` of a DTensor writes this rank's shard, with the shape of the whole. So a file of rank
0 has all names and shapes, and ``load_state_dict(strict=True)`` accepts it on as many ranks: each
of them gets the shard of rank 0, and those of the other ranks are lost.
"""

import io

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from two_ranks import difference, make_task, show, train_alone

WHOLE = sd.StateDictOptions(full_state_dict=True)


def make_sharded(weights=None):
    model, _, _ = make_task()
    model.load_state_dict(weights or model.state_dict())
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def off_by(variant):
    trained = train_alone()
    model = make_sharded(trained.state_dict())
    if variant == "right":
        weights = sd.get_model_state_dict(model, options=WHOLE)  # right: on every rank, for rank 0
    else:
        weights = model.state_dict()  # wrong: the shards of this rank
    file = [b""]
    if dist.get_rank() == 0:
        buffer = io.BytesIO()
        torch.save(weights, buffer)
        file = [buffer.getvalue()]
    dist.broadcast_object_list(file)  # a file that all ranks see
    weights = torch.load(io.BytesIO(file[0]))
    resumed = make_sharded()
    if variant == "right":
        sd.set_model_state_dict(resumed, weights, options=WHOLE)  # right: gets its own shards
    else:
        resumed.load_state_dict(weights, strict=True)  # wrong, and "All keys matched successfully"
    return difference(resumed, trained)


if __name__ == "__main__":
    show(off_by, "weights")
