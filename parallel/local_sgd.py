"""Snapshots of Local SGD, whose ranks have different weights between synchronizations.

Each rank writes and reads a file of its own, with its optimizer state. After a synchronization, a
snapshot also has what every script reads: common weights, and the mean of the optimizer states.
"""

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.state import load_file
from harness.world import this_script, world


def own_file(folder: Path) -> Path:
    return folder / f"rank-{world().rank:05}.pt"


def mean(tensor: Tensor) -> Tensor:
    """The mean of a tensor over all ranks, on the CPU: a GPU has room for one at a time."""
    total = tensor.clone()
    dist.all_reduce(total)
    return total.div_(dist.get_world_size()).cpu()


def save_then_exit_if_asked(
    run, model: nn.Module, optimizer, scheduler, outer, apart: bool
) -> None:
    """Write a snapshot. All ranks call it. ``apart``: whether they have different weights."""
    own = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    parts = {"write": lambda folder: torch.save(own, own_file(folder)), "outer": outer}
    if apart:
        why = "was written between two synchronizations, when each of {n} ranks had its own "
        why += "weights; resume with {script}.py on {n} ranks, or from a snapshot at the end of an "
        only = f"{why}epoch".format(n=world().size, script=this_script())
        return run.save_then_exit_if_asked(None, None, scheduler, only=only, **parts)
    state = {}
    for p, entries in optimizer.state.items():
        state[p] = {name: mean(tensor) for name, tensor in entries.items()}
    average = SimpleNamespace(state=state, param_groups=optimizer.param_groups)
    run.save_then_exit_if_asked(model, average, scheduler, **parts)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The mean of the weights in a snapshot between two synchronizations, on the CPU."""
    ranks = [load_file(f, "--weights")["model"] for f in sorted(folder.glob("rank-*.pt"))]
    weights = {}
    for name, tensor in ranks[0].items():
        if tensor.is_floating_point():
            tensor = torch.stack([own[name] for own in ranks]).mean(0)
        weights[name] = tensor
    return weights


def resume_or_exit(run, model: nn.Module, optimizer, scheduler, outer) -> None:
    """Resume: with the same script and number of ranks, each rank from its own file."""

    def read(folder: Path, snapshot: dict) -> bool:
        if (snapshot["technique"], len(snapshot["run"]["ranks"])) != (this_script(), world().size):
            return False
        own = load_file(own_file(folder), "--resume")
        groups = zip(own["optimizer"]["param_groups"], optimizer.param_groups, strict=True)
        for saved, group in groups:
            saved["fused"] = group.get("fused")  # the script decides how a step is computed
        model.load_state_dict(own["model"])
        optimizer.load_state_dict(own["optimizer"])
        return True

    run.resume_or_exit(model, optimizer, scheduler, read=read, outer=outer)
