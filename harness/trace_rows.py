"""Summarizes a trace of torch.profiler in four rows at its top: phases, compute, communication, and
the overlap of these two. On a GPU, all but the first show kernels, which run later than the CPU."""

import collections
import itertools
import math
from collections.abc import Iterator

from harness.clock import PHASES

ROWS = ("phases", "compute", "communication", "overlap")
WAITING = ("c10d", "_c10d_functional", "autograd", "torch")  # ranges that may contain waits
NAMES = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
# Bytes of types as nccl ("Float") and gloo ("c10::Half", "long int") call them:
SIZES = {"float": 4, "double": 8, "half": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
SIZES |= {"byte": 1, "unsigned char": 1, "char": 1, "signed char": 1, "bool": 1, "short": 2}
SIZES |= {"int": 4, "long": 8, "long int": 8}


def make_rows(events: list[dict], rank: int) -> list[dict]:
    """The rows as events of a separate process, named after the rank."""
    events = [event for event in events if event.get("ph") == "X"]
    phases = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in PHASES]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    waits = []
    if kernels:
        working = [e for e in kernels if not e["name"].startswith("nccl")]
        sent = [describe_nccl(e) for e in kernels if e["name"].startswith("nccl")]
    else:
        threads = {event["tid"] for event in phases}
        working = [e for e in events if e.get("cat") == "cpu_op" and e["tid"] in threads]
        working = [e for e in working if computes(e["name"])]
        # gloo's thread ends its last event of the step before, which is in the trace then, only
        # after the waiting thread has gone on.
        start = min((e["ts"] for e in phases), default=0)
        sent = [*describe_gloo([e for e in events if e["ts"] >= start])]
        # An operation on a DTensor may contain a wait for communication.
        waits = [e for e in events if e["name"] == "_c10d_functional::wait_tensor"]
    compute = [row(rank, "compute", *found) for found in spans(working, without=waits)]
    transfers = [event for event, _, _ in sent]
    both = [row(rank, "overlap", *found) for found in spans(compute, within=transfers)]
    rows = [row(rank, "phases", e["ts"], e["dur"], e["name"]) for e in phases] + compute + both
    rows += [row(rank, "communication", e["ts"], e["dur"], name, bytes=n) for e, name, n in sent]
    names = [("process_name", 0, {"name": f"rank {rank}"})]
    names += [("process_sort_index", 0, {"sort_index": -1})]
    names += [("thread_name", i, {"name": name}) for i, name in enumerate(ROWS)]
    about = {"ph": "M", "pid": f"rank {rank}"}
    return rows + [about | {"tid": i, "name": n, "args": args} for n, i, args in names]


def row(rank: int, kind: str, begin: float, seconds: float, name: str = "", **args) -> dict:
    event = {"ph": "X", "cat": kind, "name": name or kind, "pid": f"rank {rank}"}
    return event | {"tid": ROWS.index(kind), "ts": begin, "dur": seconds, "args": args}


def spans(events: list[dict], within: list[dict] | None = None, without=()) -> list[tuple]:
    """Spans (begin and duration) in which any of ``events`` is active, and also any of ``within``,
    or none of ``without``. Adjacent and overlapping spans are merged."""
    others = without if within is None else within
    edges = [(e["ts"], 0, 1) for e in events] + [(e["ts"] + e["dur"], 0, -1) for e in events]
    edges += [(e["ts"], 1, 1) for e in others] + [(e["ts"] + e["dur"], 1, -1) for e in others]
    on = [0, 0]  # how many of the events, and of the others, are active
    found = []
    for (here, whose, step), (there, _, _) in itertools.pairwise(sorted(edges)):
        on[whose] += step
        if on[0] and bool(on[1]) == (within is not None) and here < there:
            touches = found and found[-1][1] == here
            found.append((found.pop()[0] if touches else here, there))
    return [(begin, end - begin) for begin, end in found]


def sum_up(rows: list[dict], steps: int) -> dict:
    """The summary of the traced steps for result.json: milliseconds of communication per step that
    overlap with compute, and that do not; and the number and bytes of collectives of each kind."""
    sums = {}
    for kind in ("communication", "overlap"):
        active = spans([event for event in rows if event.get("cat") == kind])
        sums[kind] = sum(duration for _, duration in active) / 1e3 / steps
    calls = collections.defaultdict(list)
    for event in rows:
        if event.get("cat") == "communication":
            calls[event["name"]].append(event["args"]["bytes"])
    return {
        "overlapped_ms": sums["overlap"],
        "exposed_ms": sums["communication"] - sums["overlap"],
        "collectives": {
            name: {"per_step": len(sizes) / steps, "bytes_per_step": sum(sizes) / steps}
            for name, sizes in calls.items()
        },
    }


def computes(name: str) -> bool:
    """Whether an operation on a CPU is compute: it does not wait, or is compiled code."""
    first, _, operation = name.partition("::")
    return bool(operation) and first not in WAITING or name.startswith("## Call CompiledFxGraph")


def name_of(collective: str) -> str:
    """A collective as torch.distributed calls it: of "_allgather_base_", "all_gather"."""
    name = collective.strip(":_").removesuffix("_base").removesuffix("_any_source")
    return NAMES.get(name, name)


def describe_gloo(events: list[dict]) -> Iterator[tuple[dict, str, int]]:
    """Events of gloo's threads, but barriers, each with its collective and its largest tensor's
    bytes, from the dispatcher's call: gloo runs a reduce_scatter as an all_reduce. Calls and events
    are in the same order; at the start of the trace one may be missing."""
    events = sorted((e for e in events if "barrier" not in e["name"]), key=lambda e: e["ts"])
    own = [e for e in events if e["name"].startswith("gloo:")]
    calls = [e for e in events if e["name"].startswith("c10d::")]
    for event, call in zip(own, calls if len(calls) == len(own) else own, strict=True):
        kind = (event["args"].get("Input type") or [""])[0]
        shapes = event["args"].get("Input Dims", []) + call["args"].get("Input Dims", [])
        size = max(map(count_elements, filter(None, shapes)), default=0)
        yield event, name_of(call["name"].partition(":")[2]), bytes_of(size, kind)


def count_elements(shape: list) -> int:
    """Elements of a tensor, or of a list of tensors, that a profiled operation received."""
    nested = shape and isinstance(shape[0], list)
    return sum(map(count_elements, shape)) if nested else math.prod(shape)


def describe_nccl(event: dict) -> tuple[dict, str, int]:
    """A kernel with its collective, and the bytes of its larger tensor."""
    args = event["args"]
    elements = max(args.get("In msg nelems", 0), args.get("Out msg nelems", 0))
    name = name_of(args.get("Collective name", "nccl"))
    return event, name, bytes_of(elements, args.get("dtype"))


def bytes_of(elements: int, kind: str | None) -> int:
    """Bytes of so many elements of a type; an unknown type is a ``KeyError``, not a wrong size."""
    return elements and elements * SIZES[str(kind).removeprefix("c10::").lower()]
