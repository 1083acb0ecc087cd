"""What PyTorch records of the collectives of a process: the only file with its private APIs."""

import json
import linecache
import pickle
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import _weights_only_unpickler
from torch.distributed import distributed_c10d as c10d

from hangs.diagnosis import describe

LAST = 50  # number of collectives per group to compare
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def set_timeouts(seconds: float) -> None:
    """Set the timeout of all groups, as those of a device mesh or a library have their own; and the
    default of later ones, as gloo's sends and receives keep the one that their group began with."""
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timedelta(seconds=seconds)
    set_timeout = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout  # before 2.14
    for group in c10d._world.pg_map:
        set_timeout(timedelta(seconds=seconds), group)


def read_recorder(stacks: bool = True) -> dict:
    """PyTorch's record: ``entries``, one per collective, and ``pg_config``, one per group. It
    includes send and receive only for NCCL. Without ``stacks`` it is read at once: to look up the
    lines of the first takes seconds."""
    own = torch._C._distributed_c10d
    options = {"includeCollectives": True, "includeStackTraces": stacks}
    read = own._dump_fr_trace
    if "nccl" in dist.get_backend():
        name = dist.group.WORLD._get_backend(torch.device("cuda")).name()
        if name == "nccl":
            read = own._dump_nccl_trace
        else:  # since PyTorch 2.15 it is "nccl2", which has a recorder of its own
            options["backend"] = name
    recorded = pickle.loads(read(**options))
    recorded["pg_config"] = {  # empty with gloo, but PyTorch's tool needs it
        g["pg_name"]: {"name": g["pg_name"], "desc": g["pg_desc"], "ranks": str(g["ranks"])}
        for g in c10d._get_all_pg_configs()
    }
    return recorded


def read_file(path: Path) -> dict:
    """The record in a file, of which no code is run."""
    with open(path, "rb") as file:
        return _weights_only_unpickler.load(file)


def account_of(
    recorded: dict, script: Path, at=("", None), failed: bool = False, stopped: bool = False
) -> dict:
    """What :func:`diagnose` has to know of a rank.

    Args:
        script: the file whose lines are named first.
        at: from :func:`locate`; default: at its last collective.
        failed: the collective failed on this rank; otherwise it was asked.
        stopped: it was stopped by a signal, so it does not wait.
    """
    place, message = at
    # Groups of other ranks may have the same name.
    key = {name: f"{name} of {g['ranks']}" for name, g in recorded["pg_config"].items()}
    groups = {key[name]: json.loads(g["ranks"]) for name, g in recorded["pg_config"].items()}
    calls = []
    number_of = Counter()
    for entry in reversed(recorded["entries"]):
        name = entry["process_group"][0]
        number_of[name] += 1
        if number_of[name] <= LAST:
            frames = ((f["filename"], f["line"]) for f in entry.get("frames", []))
            line = name_places(script, frames)
            place = place or line
            call = call_of(entry, line, place) | {"group": key.get(name, name)}
            if failed and line == place and not any(call["open"] for call in calls):
                call["open"] = True  # it has failed, which gloo records as completed
            calls.append(call)
        message = message_of(entry, groups.get(key.get(name))) or message  # the earliest
    waits = not stopped and bool(failed or message or any(call["open"] for call in calls))
    about = {"place": place, "message": message, "waits": waits, "stopped": stopped}
    return about | {"calls": calls, "groups": groups}


def locate(script: Path, frames: list[tuple[FrameType, int]]) -> tuple[str, dict | None]:
    """Where a thread is with these frames, the innermost first; and the message it waits for."""
    places = ((frame.f_code.co_filename, line) for frame, line in frames)
    return name_places(script, places), awaited_message(frames)


def name_places(script: Path, places: Iterable[tuple[str, int]]) -> str:
    """Of lines from the innermost to the outermost: the first of the script, and the first outside
    of libraries."""
    places = [(Path(file), line) for file, line in places if not file.startswith(LIBRARIES)]
    ours = [p for p in places if p[0].is_file() and p[0].parent != Path(__file__).parent]
    of_script = [p for p in ours if p[0].absolute() == script]
    return ", in ".join(
        f"{path.name}:{line} {linecache.getline(str(path), line).partition('  #')[0].strip()}"
        for path, line in dict.fromkeys([*of_script[:1], *ours[:1]])
    )


def call_of(entry: dict, line: str, place: str) -> dict:
    """The relevant fields of an entry. A call is open if the rank is still in the line that made
    it, and it has not completed."""
    kind = entry["profiling_name"].partition(":")[2].lstrip("_")
    dtypes = entry.get("input_dtypes") or [""]
    return {
        "number": entry["collective_seq_id"], "kind": kind, "place": line,
        "what": describe(kind, entry["input_sizes"], dtypes[0]), "time": entry["time_created_ns"],
        "open": not entry["retired"] and line == place, "alone": entry["is_p2p"],
    }  # fmt: skip


def awaited_message(frames: list[tuple[FrameType, int]]) -> dict | None:
    """The send, the receive or a script's own work that waits here: gloo does not record it."""
    waits = any(isinstance(value, dist.Work) for value in frames[0][0].f_locals.values())
    if not waits and "torch/distributed" not in frames[0][0].f_code.co_filename:
        return None  # it is computing
    for frame, _ in frames:
        kind = frame.f_code.co_name
        given = frame.f_locals
        if kind in ("send", "recv") and "tensor" in given:
            end = "dst" if kind == "send" else "src"
            peer = given[end]
            if peer is None:
                group = given["group"] or dist.group.WORLD
                peer = dist.get_global_rank(group, given[f"group_{end}"])
            return message(kind, given["tensor"].shape, given["tensor"].dtype, peer)
        lists = [value for value in given.values() if isinstance(value, list)]
        ops = [op for op in sum(lists, []) if isinstance(op, dist.P2POp)]
        for op in sorted(ops, key=lambda op: op.op is dist.isend):
            kind = "send" if op.op is dist.isend else "recv"
            return message(kind, op.tensor.shape, op.tensor.dtype, op.peer)
    return {"peer": None} if waits else None


def message_of(entry: dict, ranks: list[int]) -> dict | None:
    """The send or receive of NCCL in an entry that has not completed. Its call has returned."""
    name = re.fullmatch(r"nccl2?:(send|recv) \d+(?:->|<-)(\d+)", entry["profiling_name"])
    if not name or entry["retired"]:
        return None
    which = "input" if entry["input_sizes"] else "output"  # what nccl2 receives is an output
    size, *_ = entry[f"{which}_sizes"]
    dtype, *_ = entry[f"{which}_dtypes"]
    return message(name[1], size, dtype, ranks[int(name[2])])


def message(kind: str, size, dtype, peer: int) -> dict:
    to = "from" if kind == "recv" else "to"
    return {"peer": peer, "what": f"{describe(kind, [size], dtype)} {to} rank {peer}"}
