"""Tables of what benchmark.py measured: medians over the repeats of each row of a suite."""

import difflib
import re
import statistics
from collections.abc import Callable
from pathlib import Path

from report.blocks import TABLES, digits, draw, footer, machine_line
from report.results import ROOT, Unusable, middle, name_of, runs_of, speeds_of, unit_of
from techniques import LIBRARIES, decoder, technique

MEMORY = "process", "allocated", "reserved"  # on a CPU; there with --profile-memory; on a GPU
LONG = 200  # steps, after which an accuracy means something
SHORT = 50  # steps, before which a loss means nothing
GPTS = {"gpt-nano": (4, 128), "gpt-mini": (6, 384), "gpt2": (12, 768)}  # layers, width


def kinds_of_memory(rows: list[dict]) -> list[str]:
    """The last two of :data:`MEMORY` that these rows measured."""
    runs = runs_of(rows)
    return [kind for kind in MEMORY if middle(runs, "peak_memory_gib", kind) is not None][-2:]


def memory(row: dict) -> str:
    sizes = [middle(row["runs"], "peak_memory_gib", kind) for kind in kinds_of_memory([row])]
    return f"{sizes[0]:.2f}" + "".join(f" ({size:.2f})" for size in sizes[1:])


def spread(values: list[float], form: str = "") -> str:
    """Median, minimum and maximum, by default with as many digits as three repeats justify."""
    mid = statistics.median(values)
    form = form or (",.0f" if mid >= 100 else ",.1f")
    around = f" ({min(values):{form}}–{max(values):{form}})" if len(values) > 1 else ""
    return f"{mid:{form}}{around}"


def speed(row: dict) -> str:
    if not row["runs"]:
        return row["failed"] or f"left out: {row['left_out']}"
    return spread(speeds_of(row["runs"]))


def ranks(row: dict) -> str:
    """Number of ranks, and in brackets the number of GPUs if one rank uses several, as with DP."""
    if not row["runs"]:
        return (re.findall(r" x(\d+)$", row["name"]) or [""])[0]
    size, devices = (row["runs"][0][key] for key in ("world_size", "devices"))
    return str(size) if devices == size else f"{size} ({devices})"


def precision(row: dict) -> str:
    """The precision, with a note on TF32."""
    run = row["runs"][0]
    return f"{run['precision']} (TF32)" if any(run["tf32"].values()) else run["precision"]


def decoder_of(run: dict):
    """The sizes of a run's GPT, for theory; ``None`` if it is no GPT. The vocabulary follows from
    the number of parameters."""
    shape = re.fullmatch(r"gpt-(\d+)x\d+x(\d+)", run["model"])
    layers, width = map(int, shape.groups()) if shape else GPTS.get(run["model"], (0, 0))
    if not layers:
        return None
    sizes, more = (run["context"], run["global_batch_size"]), {"experts": run.get("experts") or 0}
    empty = decoder(layers, width, 0, *sizes, **more)
    vocabulary = round((run["parameters"] - empty.whole) / 2 / width)
    return decoder(layers, width, vocabulary, *sizes, **more, tied=bool(run.get("tie")))


def kept(run: dict, number: Callable = "{:.2f}".format) -> str | None:
    """State bytes per parameter of model.pt, where tied weights stand twice, with theory in
    brackets; a peer has neither."""
    if not run["state_bytes"] or "parameters" not in run:  # adapters alone were saved
        return None
    model, each = decoder_of(run), sum(run["state_bytes"].values()) / run["parameters"]
    options = run["options"] | {"optimizer": run["optimizer"], "decoder": model}
    theory = sum(technique(run["technique"]).keeps(run["world_size"], options).values())
    theory *= model.whole / run["parameters"] if model else 1
    return f"{number(each)} ({number(theory)})"


def model_flops(runs: list[dict]) -> str | None:
    """Model TFLOP/s of a device, and in brackets their share of its peak, if that is known."""
    each, share = middle(runs, "model_tflops"), middle(runs, "mfu")
    return each and f"{each:.3g}" + (f" ({share:.0%})" if share else "")


def figures(row: dict) -> dict:
    """A row and what its tables show, some of which it has only after runs, or for a task."""
    runs, note = row["runs"], f"{len(row['runs'])} runs; then {row['failed']}"
    title = f"`{name_of(row)}`" + (f" ({note})" if runs and row["failed"] else "")
    found = row | {"title": title, "ranks": ranks(row), "speed": speed(row)}
    found["script"], _, found["part"] = name_of(row).partition(", ")
    if not runs:
        return found | {"why": f" ({speed(row)})"}
    run, text = runs[0], unit_of(runs[0]) == "tokens/s"
    found |= {"precision": precision(row), "peak": memory(row), "kept": kept(run)}
    found |= {"gpu": middle(runs, "gpu", "utilization_percent"), "flops": model_flops(runs)}
    found["steps"] = "{:.0f} ({:.0f})".format(*(middle(runs, "step_ms", p) for p in ("p50", "p95")))
    if text:  # without a meaningful epoch
        loss = middle(runs, "eval_loss") if run["steps"] >= SHORT else None
        return found | {"loss": loss, "first_step": middle(runs, "first_step_seconds")}
    found["accuracy"] = middle(runs, "eval_accuracy") if run["steps"] >= LONG else None
    return found | {"epoch": run["train_samples"] / statistics.median(speeds_of(runs))}


def table_of(name: str, rows: list[dict]) -> str:
    """A table of such rows: the columns that any of them has, under titles that fit them all."""
    rows, runs = [figures(row) for row in rows], runs_of(rows)
    several = any(" (" in row["ranks"] for row in rows)
    memory = "".join(f" ({kind})" for kind in kinds_of_memory(rows)[1:])
    fitting = {"ranks": "ranks (GPUs)" if several else "ranks", "memory": f"peak GiB{memory}"}
    fitting["speed"] = f"{unit_of(runs[0] if runs else {})} (min–max)"
    columns = {title.format_map(fitting): cell for title, cell in TABLES[name].items()}
    return draw(rows, columns, empty=False)


def techniques_table(rows: list[dict], times: bool = True) -> str:
    """Without times if the suite is about results alone."""
    return table_of("techniques" if times else "untimed", rows)


def suite_table(root: Path, found: dict, table: str) -> str:
    """A table of a suite, and where its rows were measured."""
    rows = [row for row in found["rows"] if row["table"] == table]
    kind = table.rpartition("-")[2]
    if kind == "ecosystem":
        drawn = ecosystem_table(rows)
    elif kind in RELATIVE:
        drawn = relative_table(kind, rows)
    else:
        drawn = techniques_table(rows, found.get("times", True))
    return drawn + measured_where(root, found, rows)


def measured_where(root: Path, found: dict, rows: list[dict]) -> str:
    """The line below a table of a suite."""
    n, on_cpu = found["repeats"], {run["device"] for run in runs_of(found["rows"])} == {"cpu"}
    times = "1 run of each" if n == 1 else f"{n} runs of each, median (least–most)"
    commands = [run["command"] for run in runs_of(rows)]
    machine = machine_line(found["hardware"], on_cpu)
    return footer(root, found, f"{found['suite']}.json", machine, after=times, commands=commands)


def relative_speed(runs: list[dict], reference: list[dict] | None) -> str | None:
    """The ratio of the medians, and its range over the rounds; ``None`` without a reference."""
    if not reference or runs is reference:
        return reference and "1.00"
    ours, theirs = speeds_of(runs), speeds_of(reference)
    ratios = [a / b for a, b in zip(ours, theirs, strict=False)]
    around = f" ({min(ratios):.2f}–{max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{statistics.median(ours) / statistics.median(theirs):.2f}{around}"


RELATIVE = {  # tables with speeds relative to a row of the same key: which one, and the key
    "peers": (lambda row: row["name"].startswith("minimal loop"), precision),
    "amp": (lambda row: name_of(row).endswith(", fp32"),
            lambda row: (name_of(row).split(", ")[0], ranks(row))),
}  # fmt: skip


def relative_table(name: str, rows: list[dict]) -> str:
    is_base, key = RELATIVE[name]
    base = {key(row): row["runs"] for row in rows if row["runs"] and is_base(row)}
    found = []
    for row in rows:
        relative = relative_speed(row["runs"], base.get(key(row))) if row["runs"] else None
        found.append(row | {"relative": relative})
    return table_of(name, found)


def ecosystem_table(rows: list[dict]) -> str:
    """A row for each script of a library and of ours that equals one: lines, speed, bytes. Speeds
    are relative: to the minimal loop, and to the raw script on as many ranks; in brackets the range
    over the rounds."""
    found = [row["runs"] for row in rows if row["runs"]]
    runs = {(run[0]["technique"], run[0]["world_size"]): run for run in found}
    raw = {one.script: f"pytorch_{one.parent}" for one in LIBRARIES}
    raw = {"pytorch_SingleGPU": "pytorch_SingleGPU"} | {p: p for p in raw.values()} | raw

    def share(name: str, n: int, reference: str) -> str | None:
        ours, theirs = runs.get((name, n)), runs.get((reference, n))
        if not ours or not theirs or ours is theirs:
            return None
        threads = [run[0]["threads"] for run in (ours, theirs)]
        if len(set(threads)) > 1:  # no comparison
            raise Unusable(f"{name} had {threads[0]} threads, {reference} {threads[1]}")
        return relative_speed(ours, theirs)

    found = []
    for name, other in raw.items():
        own = runs.get((name, 2), runs.get((name, 1)))
        row = {"script": name, "lines": len(code_of(name)), "bytes": own and kept(own[0], digits)}
        row |= {"new": count_new("pytorch_SingleGPU", name) or None}
        row |= {"other": count_new(other, name) or None, "minimal": share(name, 1, "peer: minimal")}
        found.append(row | {"x1": share(name, 1, other), "x2": share(name, 2, other)})
    return draw(found, TABLES["ecosystem"])


def code_of(script: str) -> list[str]:
    """A script's lines below its docstring, without empty ones, comments and spaces."""
    lines = (ROOT / f"{script}.py").read_text().split('"""\n', 1)[1].splitlines()
    lines = [re.sub(r"(^|  )#.*", "", line).strip() for line in lines]
    return [line for line in lines if line]


def count_new(parent: str, script: str) -> int:
    """Number of lines of a script that its parent does not have."""
    diff = difflib.unified_diff(code_of(parent), code_of(script), n=0)
    return sum(line.startswith("+") and line != "+++ \n" for line in diff)
