"""What PyTorch records of the collectives of a process: the only file with its private APIs."""

import json
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from hangs.diagnosis import describe

LAST = 50  # number of collectives per group to compare

set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # 2.11


class PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, strings and numbers, and runs no code."""

    def find_class(self, module: str, name: str):
        raise pickle.UnpicklingError(f"a record of collectives does not need {module}.{name}")


def read_recorder() -> dict:
    """PyTorch's record: ``entries``, one per collective, and ``pg_config``, one per group. It
    includes send and receive only for NCCL."""
    try:
        own = torch._C._distributed_c10d
        read = own._dump_nccl_trace if "nccl" in dist.get_backend() else own._dump_fr_trace
        recorded = pickle.loads(read(includeCollectives=True, includeStackTraces=True))
    except AttributeError:  # another version of PyTorch
        recorded = {"version": "", "entries": []}
    recorded["pg_config"] = {  # empty with gloo, but PyTorch's tool needs it
        name: {
            "name": name,
            "desc": group.group_desc,
            "ranks": str(dist.get_process_group_ranks(group)),
        }
        for group, name in groups_of_process().items()
    }
    return recorded


def groups_of_process() -> dict[dist.ProcessGroup, str]:
    """The process groups of this process, by name."""
    world = getattr(dist.distributed_c10d, "_world", None)
    return dict(getattr(world, "pg_names", {}))


def account_of(
    recorded: dict,
    name_places: Callable,
    place: str = "",
    message: dict | None = None,
    why: str = "",
    stopped: bool = False,
) -> dict:
    """What :func:`diagnose` has to know of a rank.

    Args:
        name_places: see :meth:`Watch.name_places`.
        place: where the rank is; "": at its last collective.
        message: see :func:`awaited_message`.
        why: the collective failed on this rank; "": it was asked.
        stopped: it was stopped by a signal, so it does not wait.
    """
    # Groups of other ranks may have the same name.
    key = {name: f"{name} of {g['ranks']}" for name, g in recorded["pg_config"].items()}
    groups = {key[name]: json.loads(g["ranks"]) for name, g in recorded["pg_config"].items()}
    calls, number_of = [], Counter()
    for entry in reversed(recorded["entries"]):
        name = entry["process_group"][0]
        number_of[name] += 1
        if number_of[name] <= LAST:
            frames = [(Path(f["filename"]), f["line"]) for f in entry.get("frames", [])[::-1]]
            at = name_places(frames)
            place = place or at
            call = call_of(entry, at, place) | {"group": key.get(name, name)}
            if why and at == place and not any(call["open"] for call in calls):
                call["open"] = True  # it has failed, which gloo records as completed
            calls.append(call)
    waits = not stopped and bool(why or message or any(call["open"] for call in calls))
    about = {"place": place, "message": message, "waits": waits, "stopped": stopped}
    return about | {"calls": calls, "groups": groups}


def call_of(entry: dict, at: str, place: str) -> dict:
    """The relevant fields of an entry. A call is open if the rank is still in the line that made
    it, and it has not completed."""
    kind = entry["profiling_name"].partition(":")[2].lstrip("_")
    dtypes = entry.get("input_dtypes") or [""]
    return {
        "number": entry["collective_seq_id"], "kind": kind, "place": at,
        "what": describe(kind, entry["input_sizes"], dtypes[0]), "time": entry["time_created_ns"],
        "open": not entry["retired"] and at == place, "alone": entry["is_p2p"],
    }  # fmt: skip


def awaited_message(frames: list) -> dict | None:
    """The send or receive that waits at these lines, which gloo does not record."""
    if not frames or "torch/distributed" not in frames[-1][0].f_code.co_filename:
        return None  # it is computing
    for frame, _ in reversed(frames):
        kind, given = frame.f_code.co_name, frame.f_locals
        if kind in ("send", "recv") and "tensor" in given:
            end = "dst" if kind == "send" else "src"
            group, peer = given["group"] or dist.group.WORLD, given[end]
            peer = dist.get_global_rank(group, given[f"group_{end}"]) if peer is None else peer
            return message(kind, given["tensor"], peer)
        lists = [value for value in given.values() if isinstance(value, list)]
        ops = [op for op in sum(lists, []) if isinstance(op, dist.P2POp)]
        for op in sorted(ops, key=lambda op: op.op is dist.isend):
            return message("send" if op.op is dist.isend else "recv", op.tensor, op.peer)
    return None


def message(kind: str, tensor: torch.Tensor, peer: int) -> dict:
    what = describe(kind, [tensor.shape], tensor.dtype)
    return {"peer": peer, "what": f"{what} {'from' if kind == 'recv' else 'to'} rank {peer}"}
