"""Tables of what benchmark.py measured: medians over the repeats of each row of a suite."""

import re
import statistics

from report.blocks import TABLES, draw, footer, machine_line, size_name
from report.results import middle, name_of, runs_of, speeds_of, unit_of
from techniques import technique
from theory import decoder

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


def ranks(row: dict) -> str:
    """Number of ranks, and in brackets the number of GPUs if one rank uses several, as with DP."""
    if not row["runs"]:
        return (re.findall(r" x(\d+)$", row["name"]) or [""])[0]
    size, devices = (row["runs"][0][key] for key in ("world_size", "devices"))
    return str(size) if devices == size else f"{size} ({devices})"


def precision(row: dict) -> str:
    """The precision, with a note on TF32; empty if the row has no runs."""
    if not row["runs"]:
        return ""
    run = row["runs"][0]
    return f"{run['precision']} (TF32)" if any(run["tf32"].values()) else run["precision"]


def decoder_of(run: dict):
    """The sizes of a run's GPT, for theory; ``None`` if it is no GPT. The vocabulary follows from
    the number of parameters."""
    shape = re.fullmatch(r"gpt-(\d+)x\d+x(\d+)", run["model"])
    layers, width = map(int, shape.groups()) if shape else GPTS.get(run["model"], (0, 0))
    if not layers:
        return None
    sizes = (run["context"], run["global_batch_size"])
    experts = run.get("experts") or 0
    empty = decoder(layers, width, 0, *sizes, experts=experts)
    vocabulary = round((run["parameters"] - empty.whole) / 2 / width)
    tied = bool(run.get("tie"))
    return decoder(layers, width, vocabulary, *sizes, experts=experts, tied=tied)


def kept(run: dict) -> str | None:
    """State bytes per parameter of model.pt, where tied weights stand twice, with theory in
    brackets; a peer has neither."""
    if not run["state_bytes"] or "parameters" not in run:  # adapters alone were saved
        return None
    model = decoder_of(run)
    each = sum(run["state_bytes"].values()) / run["parameters"]
    options = run["options"] | {"optimizer": run["optimizer"], "decoder": model}
    theory = sum(technique(run["technique"]).keeps(run["world_size"], options).values())
    theory *= model.whole / run["parameters"] if model else 1
    return f"{each:.2f} ({theory:.2f})"


def model_flops(runs: list[dict]) -> str | None:
    """Model TFLOP/s of a device, and in brackets their share of its peak, if that is known."""
    each = middle(runs, "model_tflops")
    share = middle(runs, "mfu")
    return each and f"{each:.3g}" + (f" ({share:.0%})" if share else "")


def figures(row: dict) -> dict:
    """A row and what its tables show, some of which it has only after runs, or for a task."""
    runs = row["runs"]
    script = name_of(row)
    note = f" ({len(runs)} runs; then {row['failed']})" if runs and row["failed"] else ""
    found = row | {"title": f"`{script}`{note}", "ranks": ranks(row)}
    if not runs:
        why = row["failed"] or f"left out: {row['left_out']}"
        return found | {"speed": why, "why": f" ({why})"}
    run = runs[0]
    is_text = "context" in run
    found |= {"precision": precision(row), "peak": memory(row), "kept": kept(run)}
    if is_text and run["steps"] >= SHORT:
        found["loss"] = middle(runs, "eval_loss")
    if not is_text and run["steps"] >= LONG:
        found["accuracy"] = middle(runs, "eval_accuracy")
    return found | times_of(runs) if "step_ms" in run else found


def times_of(runs: list[dict]) -> dict:
    """What a table with times shows in addition."""
    found = {"speed": spread(speeds_of(runs)), "flops": model_flops(runs)}
    median, slow = (middle(runs, "step_ms", part) for part in ("p50", "p95"))
    found["steps"] = f"{median:.0f} ({slow:.0f})"
    return found | {"first_step": middle(runs, "first_step_seconds")}


def table_of(name: str, rows: list[dict]) -> str:
    """A table of such rows: the columns that any of them has, under titles that fit them all."""
    runs = runs_of(rows)
    rows = [figures(row) for row in rows]
    several = any(" (" in row["ranks"] for row in rows)
    memory = "".join(f" ({kind})" for kind in kinds_of_memory(rows)[1:])
    fitting = {"ranks": "ranks (GPUs)" if several else "ranks", "memory": f"peak GiB{memory}"}
    fitting["speed"] = f"{unit_of(runs[0] if runs else {})} (min–max)"
    columns = {title.format_map(fitting): cell for title, cell in TABLES[name].items()}
    return draw(rows, columns, empty=False)


def techniques_table(rows: list[dict], times: bool = True) -> str:
    """Without times if the suite is about results alone."""
    return table_of("techniques" if times else "untimed", rows)


def suite_table(found: dict, table: str) -> str:
    """A table of a suite, and where its rows were measured."""
    rows = [row for row in found["rows"] if row["table"] == table]
    times = found.get("times", True)
    drawn = peers_table(rows) if table.endswith("peers") else techniques_table(rows, times)
    return drawn + measured_where(found, rows)


def measured_where(found: dict, rows: list[dict]) -> str:
    """The line below a table of a suite."""
    n = found["repeats"]
    times = "1 run of each" if n == 1 else f"{n} runs of each, median (least–most)"
    on_cpu = {run["device"] for run in runs_of(found["rows"])} == {"cpu"}
    return footer(found, found["suite"], machine_line(found["hardware"], on_cpu), rows, times)


def relative_speed(runs: list[dict], reference: list[dict] | None) -> str | None:
    """The ratio of the medians, and its range over the rounds; ``None`` without a reference."""
    if not runs or not reference:
        return None
    if runs is reference:
        return "1.00"
    ours = speeds_of(runs)
    theirs = speeds_of(reference)
    ratio = statistics.median(ours) / statistics.median(theirs)
    ratios = [a / b for a, b in zip(ours, theirs, strict=False)]
    around = f" ({min(ratios):.2f}–{max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{ratio:.2f}{around}"


def peers_table(rows: list[dict]) -> str:
    """Speeds relative to the minimal loop of the same precision."""
    base = {precision(row): row["runs"] for row in rows if row["name"].startswith("minimal loop")}
    speeds = [relative_speed(row["runs"], base.get(precision(row))) for row in rows]
    found = [row | {"relative": speed} for row, speed in zip(rows, speeds, strict=True)]
    return table_of("peers", found)


def collectives_table(found: dict) -> str:
    """A row for each collective: latency and bandwidth."""
    rows = []
    for name, one in found["operations"].items():
        largest = one["rows"][-1]
        rows.append(one | {"name": name, "bus": largest["bus"]})
    about = f"{found['backend']}, {found['ranks']} ranks, messages up to "
    about += size_name(largest["bytes"])
    machine = machine_line(found["hardware"], found["backend"] == "gloo")
    return draw(rows, TABLES["collectives"]) + footer(found, "collectives", machine, rows, about)
