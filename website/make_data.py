"""Write website/data/, which the site's pictures and widgets show, with the project's own programs.

    python website/make_data.py [memory] [worked] [fit] [schedules]

Without a name it writes all four.
"""

import contextlib
import datetime
import io
import json
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "website" / "data"
sys.path[:0] = [str(ROOT)]

import estimate  # noqa: E402
from estimator import recommend, techniques, trial  # noqa: E402
from estimator.tables import room_of  # noqa: E402
from harness.measure import git_commit, versions  # noqa: E402
from report.steps import SHOWN  # noqa: E402
from techniques import SHELF, TECHNIQUES  # noqa: E402
from website.schedules import timetables  # noqa: E402

# ------------------------------------------------------------------------- memory over one step

GPUS = 4
POINTS = 120  # of a step, at most
JOBS = {  # by title: flags and global batch
    "GPT": ("--model gpt-12x12x768 --context 256", 16),
    "ResNet-50": ("--model resnet50 --image-size 224", 64),
}


def memory() -> dict:
    """Of each technique whose page shows it, and can be predicted: its first case, and those that
    estimate.py has. And of DDP, with whose peak the pictures end."""
    rows = [row for row in TECHNIQUES if row.part == SHELF or row.name == "torchrun_DDP"]
    names = [
        techniques.name_of(row, case)
        for row in rows
        for case in row.cases
        if not row.unpredicted and (case is row.cases[0] or "estimated" in case.traits)
    ]
    tasks = [partial(record, name, title) for title in JOBS for name in names]
    found = techniques.side_by_side(tasks, os.cpu_count())
    return {"gpus": GPUS, "jobs": JOBS, "series": [one for one in found if one]}


def record(name: str, title: str) -> dict | None:
    """Live bytes on rank 0 in the second step of a technique, by kind; ``None`` if the script
    rejects the model."""
    technique = techniques.make_technique(name, GPUS)
    flags, batch = JOBS[title]
    words = [*technique.command, *flags.split(), "--batch-size", str(batch // technique.gpus)]
    try:
        return {"technique": name, "job": title} | series_of(technique, words)
    except (SystemExit, NotImplementedError, *trial.NEEDS_NUMBERS):
        return None


def worked() -> dict:
    """Of the rows of results/front.json that the pages of the course show."""
    front = json.loads((ROOT / "results" / "front.json").read_text())["outputs"]
    rows = {one.get(key) for one in SHOWN.values() for key in ("front", "beside")}
    rows = [name for name in front if name in rows]
    found = techniques.side_by_side([partial(work, front[row]) for row in rows], os.cpu_count())
    return dict(zip(rows, found, strict=True))


def work(one: dict) -> dict:
    """Live bytes of a step that results/front.json has predicted."""
    [row] = one["output"]
    technique = techniques.make_technique(row["technique"], row["gpus"])
    words = [*row["command"], "--batch-size", str(row["batch_size"] // technique.gpus)]
    return series_of(technique, words)


def series_of(technique: techniques.Setup, words: list[str]) -> dict:
    """Run a command's training step, and split it, without the evaluation after it, into at most
    ``POINTS`` parts. Returns the bytes by kind at the peak of each part, and the phases: where each
    begins, as a fraction of the step's events, and its name."""
    with contextlib.redirect_stdout(io.StringIO()):
        live, _ = trial.run_script(words, technique.ranks)
    now = {kind: 0 for kind in live.KINDS if kind not in technique.on_host}
    [end] = [begin for begin, name in live.phases if name == "evaluation"]
    events = end - live.begin + 1
    points = min(POINTS, events)
    peaks = [None] * points
    for index, (number, size) in enumerate(live.changes[:end]):
        if live.kinds[number] in now:
            now[live.kinds[number]] += size
        part = (index - live.begin + 1) * points // events
        if part < 0:  # before the step
            continue
        if peaks[part] is None or sum(now.values()) > sum(peaks[part].values()):
            peaks[part] = dict(now)
    sizes = {}
    for kind in now:
        sizes[kind] = [peak[kind] for peak in peaks]
    phases = [((begin - live.begin) / events, name) for begin, name in live.phases]
    return {"bytes": {k: v for k, v in sizes.items() if any(v)}, "phases": phases[:-1]}


# ------------------------------------------------------------------------------- will it fit?

MODELS = {"gpt-12x12x768": 1024, "llama3.2-1b": 4096, "llama3-8b": 8192, "llama3-70b": 8192}
COUNTS = (1, 8, 64)
MEMORIES = ("RTX3090", "A100-40GB", "H100")
EACH = 2  # sequences per GPU
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
    args, flags = estimate.parse_args(words)
    job = estimate.job_of(args, flags)
    room = room_of(args)
    [found] = recommend.recommend(job, gpus, room, args.link, os.cpu_count(), enough=1)
    row = {"model": model, "gpus": gpus, "memory": memory, "gib": args.memory, "spare": args.spare}
    row |= {"estimate": f"python estimate.py {' '.join(words)}", "peak": found.peak}
    row |= {"way": found.technique.describe(), "fits": found.peak <= room, "host": found.host}
    if row["fits"]:
        command = found.technique.launch(job.flags, job.batch_size)
        row |= {"command": command, "sent": found.sent}
        return row | {"copied": copied(found) if found.technique.offload else 0}
    return row | {"ideas": [*recommend.would_fit(job, gpus, room), "a smaller --batch-size"]}


def copied(found: techniques.Prediction) -> float:
    """Bytes over PCIe per step with offload: FSDP copies its shard of the fp32 parameters, a fourth
    of AdamW's state, to the GPU before each all-gather, of forward and of backward (a pipeline
    keeps what forward gathered), and the gradients back, in every part of an accumulated batch."""
    way = found.technique
    return found.host / 4 * (3 if way.pp == 1 else 2) * way.accumulate


# --------------------------------------------------------------------------------------- writing

KINDS = {"memory": memory, "worked": worked, "fit": fit, "schedules": timetables}


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(KINDS)}")
    names = parser.parse_args().names or KINDS
    if unknown := set(names) - KINDS.keys():
        parser.error(f"{unknown.pop()}: the names are {', '.join(KINDS)}")
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    DATA.mkdir(exist_ok=True)
    for name in names:
        found = {"git_commit": git_commit(), "versions": versions(), "date": date}
        found["data"] = KINDS[name]()
        (DATA / f"{name}.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")
        print(f"wrote {DATA / name}.json")


if __name__ == "__main__":
    main()
