"""Write website/data/, which the site's pictures and widgets show, with the project's own programs.

    python website/make_data.py [memory] [fit] [schedules] [collectives]

Without a name it writes all four.
"""

import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "website" / "data"
sys.path[:0] = [str(ROOT)]

import estimate  # noqa: E402
from estimator import recommend, techniques, trial  # noqa: E402
from estimator.live_bytes import LiveBytes  # noqa: E402
from estimator.tables import room_of  # noqa: E402
from harness.measure import git_commit, versions  # noqa: E402
from measure import bubble  # noqa: E402
from techniques import TECHNIQUES  # noqa: E402

# ------------------------------------------------------------------------- memory over one step

GPUS, POINTS = 4, 120  # GPUs in the pictures; maximum number of points per step
JOBS = {  # by title: flags and global batch
    "GPT": ("--model gpt-12x12x768 --context 256", 16),
    "ResNet-50": ("--model resnet50 --image-size 224", 64),
}


def memory() -> dict:
    """Of every technique that can be predicted: its first case, and those that estimate.py has."""
    names = [
        techniques.name_of(row, case)
        for row in TECHNIQUES
        for case in row.cases
        if not row.unpredicted and (case is row.cases[0] or "estimated" in case.traits)
    ]
    tasks = [partial(record, name, title) for title in JOBS for name in names]
    found = techniques.side_by_side(tasks, os.cpu_count())
    return {"gpus": GPUS, "jobs": JOBS, "series": [one for one in found if one]}


def record(name: str, title: str) -> dict | None:
    """Live bytes on rank 0 in the second step of a technique, by kind; ``None`` if the script
    rejects the model."""
    technique, (flags, batch) = techniques.make_technique(name, GPUS), JOBS[title]
    words = [*technique.command, *flags.split(), "--batch-size", str(batch // technique.gpus)]
    sys.argv = words  # the scripts read their names there
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        try:
            live, _ = trial.run_script(words, technique.ranks)
        except (SystemExit, NotImplementedError, *trial.NEEDS_NUMBERS):
            return None
    return {"technique": name, "job": title} | series_of(live, technique.on_host)


def series_of(live: LiveBytes, without: tuple[str, ...] = ()) -> dict:
    """Split the step into at most ``POINTS`` parts. Returns the bytes by kind at the peak of each
    part, and where phases begin, as fractions of the step's events."""
    now = dict.fromkeys((kind for kind in live.KINDS if kind not in without), 0)
    events = len(live.changes) - live.begin + 1
    points = min(POINTS, events)
    peaks = [None] * points
    for index, (number, size) in enumerate(live.changes):
        if live.kinds[number] in now:
            now[live.kinds[number]] += size
        part = (index - live.begin + 1) * points // events
        if part >= 0 and (peaks[part] is None or sum(now.values()) > sum(peaks[part].values())):
            peaks[part] = dict(now)
    kinds = {kind: [peak[kind] for peak in peaks] for kind in now}
    phases = [(begin - live.begin) / events for begin in live.phases]
    return {"bytes": {kind: sizes for kind, sizes in kinds.items() if any(sizes)}, "phases": phases}


# ------------------------------------------------------------------------------- will it fit?

MODELS = {"gpt-12x12x768": 1024, "llama3.2-1b": 4096, "llama3-8b": 8192, "llama3-70b": 8192}
COUNTS, MEMORIES, EACH = (1, 8, 64), ("RTX3090", "A100-40GB", "H100"), 2  # sequences per GPU
LINKS = {"RTX3090": "pcie4"}  # within a machine; the others have NVLink


def fit() -> dict:
    """The first recommendation of ``estimate.py --recommend``, or what to try if nothing fits."""
    cells = [cell(m, n, memory) for m in MODELS for n in COUNTS for memory in MEMORIES]
    return {"context": MODELS, "sequences_per_gpu": EACH, "cells": cells}


def cell(model: str, gpus: int, memory: str) -> dict:
    words = ["--model", model, "--context", str(MODELS[model]), "-b", str(EACH * gpus)]
    words += ["--gpus", str(gpus), "--memory", memory, "--recommend"]
    link = "ib400" if gpus > recommend.MACHINE else LINKS.get(memory)
    words += ["--link", link] if link and gpus > 1 else []
    with mock.patch("sys.argv", ["estimate.py", *words]), mock.patch.object(recommend, "ENOUGH", 1):
        args, flags = estimate.parse_args()
        job, room = estimate.job_of(args, flags), room_of(args)
        [found] = recommend.recommend(job, gpus, room, args.link, os.cpu_count())
    row = {"model": model, "gpus": gpus, "memory": memory, "gib": args.memory, "spare": args.spare}
    row |= {"estimate": f"python estimate.py {' '.join(words)}", "peak": found.peak}
    in_cpu = f", {found.host / 2**30:,.1f} GiB per GPU in CPU memory" if found.host else ""
    row |= {"way": found.technique.describe() + in_cpu, "fits": found.peak <= room}
    if row["fits"]:
        command = found.technique.launch(job.flags, job.batch_size)
        return row | {"command": command, "sent": found.sent}
    return row | {"ideas": [*recommend.would_fit(job, gpus, room), "a smaller --batch-size"]}


# ------------------------------------------------------------------- collectives, step by step

RANKS = 4
Cells = list[list[str]]  # the chunks of each rank: "", or a sum such as "b0+b2"


def collectives() -> dict[str, list[Cells]]:
    """The buffers of every rank at the start and after each step. The last ones are compared with
    what torch.distributed computes from the same numbers."""
    ranks = range(RANKS)
    full = [[f"{letter}{rank}" for letter in "abcd"] for rank in ranks]
    root = [full[0], *[[""] * RANKS for _ in ranks[1:]]]
    own = [[full[r][c] if c == r else "" for c in ranks] for r in ranks]
    # In each round, every rank sends one chunk to the next rank, or one to the k-th rank after it.
    scatter = [[(r, r - k - 1, r + 1, r - k - 1) for r in ranks] for k in range(RANKS - 1)]
    gather = [[(r, r - k, r + 1, r - k) for r in ranks] for k in range(RANKS - 1)]
    exchange = [[(r, r + k, r + k, r) for r in ranks] for k in range(1, RANKS)]
    scattered = play(full, scatter, add=True)
    reduced = [[cell if c == r else "" for c, cell in enumerate(row)]
               for r, row in enumerate(scattered[-1])]  # fmt: skip
    found = {
        "broadcast": play(root, [whole((0, 2)), whole((0, 1), (2, 3))]),
        "reduce": play(full, [whole((1, 0), (3, 2)), whole((2, 0))], add=True, clear=True),
        "reduce_scatter": [*scattered, reduced],
        "all_gather": play(own, gather),
        "all_reduce": [*scattered, *play(scattered[-1], gather)[1:]],
        "all_to_all": play(full, exchange, source=full),
    }
    compare_with_gloo({name: steps[-1] for name, steps in found.items()})
    return found


def whole(*pairs: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """Messages that send a rank's whole buffer to another rank."""
    return [(sender, chunk, to, chunk) for sender, to in pairs for chunk in range(RANKS)]


def play(cells: Cells, rounds, add=False, clear=False, source: Cells | None = None) -> list[Cells]:
    """The cells at the start, and after each round of messages: sender and chunk, receiver and its
    chunk.

    Args:
        add: the receiver adds a chunk instead of storing it.
        clear: the sender's chunk is empty afterwards.
        source: a buffer to send from that receives nothing.
    """
    steps = [cells]
    for messages in rounds:
        before, after = steps[-1], [list(row) for row in steps[-1]]
        for message in messages:
            sender, chunk, to, place = (number % RANKS for number in message)
            sent = (source or before)[sender][chunk]
            after[to][place] = merge(sent, before[to][place] if add else "")
            after[sender][chunk] = "" if clear else after[sender][chunk]
        steps.append(after)
    return steps


def merge(one: str, other: str) -> str:
    return "+".join(sorted({*one.split("+"), *other.split("+")} - {""}))


def number_of(cell: str) -> int:
    """Encode a chunk so that sums stay readable: a0 is 1, a1 is 10, and b0 is 2."""
    parts = [part for part in cell.split("+") if part]
    return sum((ord(letter) - ord("a") + 1) * 10 ** int(rank) for letter, rank in parts)


def compare_with_gloo(last: dict[str, Cells]) -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(RANKS) as pool:
        jobs = [(rank, f"{folder}/store") for rank in range(RANKS)]
        for rank, found in enumerate(pool.starmap(run_collectives, jobs, chunksize=1)):
            for name, cells in last.items():
                expected = [number_of(cell) for cell in cells[rank]]
                if found[name] not in (None, expected):
                    raise RuntimeError(f"{name}, rank {rank}: {expected}, and gloo {found[name]}")


def run_collectives(rank: int, store: str) -> dict[str, list[int] | None]:
    """This rank's buffers after each collective of torch.distributed; empty chunks are zero."""
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    full = torch.tensor([number_of(f"{letter}{rank}") for letter in "abcd"])
    found = {}
    dist.broadcast(given := full * (rank == 0), 0)
    found["broadcast"] = given
    dist.reduce(total := full.clone(), 0)
    found["reduce"] = total if rank == 0 else None  # undefined on all other ranks
    dist.all_reduce(total := full.clone())
    found["all_reduce"] = total
    dist.reduce_scatter_tensor(one := full[:1].clone(), full.clone())
    found["reduce_scatter"] = torch.where(torch.arange(RANKS) == rank, one, 0)
    dist.all_gather_into_tensor(every := full.clone(), full[rank : rank + 1].clone())
    found["all_gather"] = every
    dist.all_to_all_single(every := full.clone(), full.clone())
    found["all_to_all"] = every
    dist.destroy_process_group()
    return {name: None if x is None else x.tolist() for name, x in found.items()}


# --------------------------------------------------------------------------------------- writing

KINDS = {"memory": memory, "fit": fit, "schedules": bubble.timetables, "collectives": collectives}


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(KINDS)}")
    names = parser.parse_args().names or KINDS
    if unknown := set(names) - KINDS.keys():
        parser.error(f"{unknown.pop()}: the names are {', '.join(KINDS)}")
    DATA.mkdir(exist_ok=True)
    for name in names:
        found = {"git_commit": git_commit(), "versions": versions(), "data": KINDS[name]()}
        (DATA / f"{name}.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")
        print(f"wrote {DATA / name}.json")


if __name__ == "__main__":
    main()
