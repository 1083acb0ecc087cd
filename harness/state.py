"""The state of a model and its optimizer in a snapshot, plain or sharded, and how to load it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from harness import trust
from harness.cli import fail
from harness.files import load_file
from harness.measure import count_bytes
from harness.world import gather_objects, print0, this_script, world

# --------------------------------------------------------------------------------- a plain model


def plain(model: nn.Module) -> nn.Module:
    """The model without DDP's wrapper, whose entries have no ``module.`` prefix."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def load_plain(path: Path, snapshot: dict, model: nn.Module, optimizer, **others) -> None:
    """Load model, optimizer and other objects with a ``state_dict()`` from a snapshot."""
    if "apart" in snapshot:
        snapshot = snapshot | read_own(path, snapshot)
    plain(model).load_state_dict(snapshot["model"])
    state = snapshot["optimizer"]
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        saved["fused"] = own.get("fused")  # the script decides how a step is computed
    optimizer.load_state_dict(state)
    for name, other in others.items():
        if snapshot.get(name) or not other.state_dict():  # a disabled GradScaler has no state
            other.load_state_dict(snapshot.get(name, {}))
        else:
            print0(f"{path} contains no {name} state; {name} is reset")


def rebuild_buckets(model: DistributedDataParallel, inputs: torch.Tensor) -> None:
    """Let DDP sort its gradients into the buckets that it uses from its second step on.

    DDP sorts them in the order of the first step, and the position in a bucket affects the rounding
    of a sum over more than two ranks. So a resumed run whose bits must match begins with a step
    that changes nothing.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]
    gpus = [inputs.device] if inputs.device.type == "cuda" else []
    with torch.random.fork_rng(gpus):  # dropout draws from it
        model.train()
        model(inputs).sum().backward()
    model.zero_grad()
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)


# ------------------------------------------------------ ranks with different optimizer states

# Rank 0's state is in state.pt, like a state that all ranks share; other ranks have own files.


def own_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.pt"


def own_files(model: nn.Module, optimizer) -> tuple[Callable, int]:
    """A function that writes one file per rank except rank 0 into the folder of a snapshot, and
    their total size in bytes."""
    own = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    tensors = (t for t in tree_leaves(own) if torch.is_tensor(t))

    def write_own(folder: Path) -> None:
        if world().rank > 0:
            torch.save(own, own_file(folder, world().rank))

    return write_own, (world().size - 1) * count_bytes(tensors)


def read_own(path: Path, snapshot: dict) -> dict:
    """This rank's own entries of a snapshot.

    With the same script and number of ranks, each rank resumes from its own file. Any other run
    takes the weights, if all ranks had the same, and the mean of their optimizer states.
    """
    writer, ranks = snapshot["technique"], len(snapshot["run"]["ranks"])
    read = partial(load_file, flag="--resume")
    if (this_script(), world().size) == (writer, ranks):
        return read(own_file(path, world().rank)) if world().rank > 0 else {}
    if snapshot["apart"]:
        fail(
            f"--resume {path} was written between two synchronizations, when each of {ranks} ranks "
            f"had its own weights; resume with {writer}.py on {ranks} ranks, or from a snapshot at "
            "the end of an epoch"
        )
    mean = snapshot["optimizer"]["state"]
    for rank in range(1, ranks):
        other = read(own_file(path, rank))["optimizer"]["state"]
        mean = tree_map(
            lambda a, b, n=rank: a + (b - a) / (n + 1) if torch.is_tensor(a) else a, mean, other
        )
    return {"optimizer": snapshot["optimizer"] | {"state": mean}}


# ------------------------------------------------------------------------------ a sharded model


def load_sharded(path: Path, snapshot: dict, model: nn.Module, optimizer) -> None:
    """Each rank reads what it needs, at any number of ranks
    (https://docs.pytorch.org/docs/stable/distributed.checkpoint.html)."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as dcp_state

    try:
        trust.check_sharded(path / "shards")
    except trust.UntrustedSnapshot as error:
        fail(f"--resume {path} is rejected: {error}; use a snapshot that you trust")
    weights, state = dcp_state.get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state["state"]}, checkpoint_id=path / "shards")
    for group in state["param_groups"]:  # of this rank's parameters
        name = next(iter(group["params"]), None)
        theirs = (saved for saved in snapshot["param_groups"] if name in saved["params"])
        group |= next(theirs, {}) | {"params": group["params"], "fused": group.get("fused")}
    dcp_state.set_model_state_dict(model, weights)
    dcp_state.set_optimizer_state_dict(model, optimizer, state)


def sharded_parts(model: nn.Module, optimizer):
    """What each rank saves of a sharded model.

    Returns:
        a function that writes the shards into the folder of a snapshot, the bytes that all ranks
        write, and additional entries for ``state.pt``.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as dcp_state

    for buffer in model.buffers():  # any rank's copy may be written
        dist.broadcast(buffer, src=0)
    weights, state = dcp_state.get_state_dict(model, optimizer)
    shards = {"model": weights, "optimizer": state["state"]}

    def write(folder: Path) -> None:
        try:
            dcp.save(shards, checkpoint_id=folder / "shards")
        except dcp.CheckpointException as error:  # wraps the errors of all ranks
            raise next(iter(error.failures.values()))[0] from None

    size = count_bytes(tree_leaves(shards)) * world().size
    groups = [group for rank in gather_objects(state["param_groups"]) for group in rank]
    different = {tuple(group["params"]): group for group in groups}  # differ by pipeline stage
    return write, size, {"param_groups": list(different.values())}
