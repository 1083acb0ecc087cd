"""Markdown tables of the results, in English. report/pages.py inserts them into pages."""

import re
import statistics
import textwrap
from pathlib import Path

from report.results import Unusable, devices_of, middle, name_of, of_all, speeds_of, unit_of
from report.scripts import PARENTS
from report.theory import kept_bytes

# The figures of memory to show, and in brackets: on a GPU, on a CPU with --profile-memory, and on a
# CPU without it.
MEMORY = {
    "reserved": ("allocated", "reserved"),
    "allocated": ("process", "allocated"),
    "process": ("process",),
}
KEPT, PROVEN = "state B/param (theory)", "difference from one process"  # columns


def markdown(header: list[str], rows: list[list]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


# ------------------------------------------------------------------ what benchmark.py measured


def suite_table(found: dict, table: str) -> str:
    """A table of a suite: medians over the repeats, and where they were measured."""
    rows = [row for row in found["rows"] if row["table"] == table]
    draw = {"peers": peers_table, "amp": amp_table}.get(table.rpartition("-")[2])
    drawn = draw(rows) if draw else techniques_table(rows, found.get("times", True))
    return f"{drawn}\n\n{measured_where(found, rows)}"


def measured_where(found: dict, rows: list[dict]) -> str:
    """The line below a table: machine, version, repeats, file."""
    on_cpu = all(run["device"] == "cpu" for row in rows for run in row["runs"])
    about = f"{machine_line(found['hardware'], on_cpu)}; torch {found['versions']['torch']}; "
    one = found["repeats"] == 1
    about += "1 run of each; " if one else f"{found['repeats']} runs of each, median (least–most); "
    return f"{about}[results/{found['suite']}.json](results/{found['suite']}.json)"


def machine_line(machine: dict, on_cpu: bool) -> str:
    if on_cpu:
        return ", ".join([machine["cpu"], f"{machine['cores']} cores", *machine["cpu_flags"]])
    return ", ".join(machine["gpus"] + machine.get("power_limits", []))


def techniques_table(rows: list[dict], times: bool = True) -> str:
    """All columns that the rows have; without times if the suite is about results alone."""
    runs = [run for row in rows for run in row["runs"]]
    text = bool(runs) and unit_of(runs[0]) == "tokens/s"
    columns = ["technique", "ranks", "precision"]
    last = "first step s" if text else "epoch s"  # text has no meaningful epoch
    columns += ["speed", "step ms (p95)", last] if times else []
    columns += ["memory", "GPU %"] if any(run["device"] != "cpu" for run in runs) else ["memory"]
    lines = [technique_cells(row) for row in rows]
    compared = ["weights"] if any(line.get("weights") for line in lines) else []
    columns += [KEPT, *compared, "loss" if text else "accuracy"]
    for line in lines:
        if not line["runs"] and "speed" not in columns:
            line["technique"] += f" ({line['speed']})"
    return draw_rows(columns, lines)


def front_table(found: dict, proof: dict, names: list[str], predicted: dict) -> str:
    """One row per technique, with links to docs/techniques/: time, memory and communication, and
    the difference to a single process, as measured by the tests.

    Args:
        found: a suite's results.
        proof: measurements of the tests.
        names: of the rows to show.
        predicted: predicted bytes on a GPU, by name of the row.
    """
    rows = {row["name"]: row for row in found["rows"]}
    unit = unit_of(next(run for row in found["rows"] for run in row["runs"]))
    lines = []
    for name in names:
        row = rows.get(name, {"name": name, "runs": [], "failed": "not measured yet"})
        title, cells = name_of(row), technique_cells(row)
        cells["technique"] = f"[`{title}`](docs/techniques/{title.split()[0]}.md)"
        if row["runs"]:
            cells[KEPT] = kept_cell(row["runs"][0], digits)
            cells["predicted on a GPU"] = gib(predicted.get(name))
            cells[PROVEN] = against_one_process(f"pytorch_{title}", proof, unit)
        lines.append(cells)
    columns = ["technique", "ranks", PROVEN, "predicted on a GPU", "memory", "speed"]
    table = draw_rows([*columns, KEPT], lines)
    return f"{table}\n\n{measured_where(found, found['rows'])}"


def peers_table(rows: list[dict]) -> str:
    """Training loops on the same workload, relative to the bare one of the same precision."""
    lines = [technique_cells(row) | {"loop": row["name"]} for row in rows]
    units = [line for line in lines if line["loop"].startswith("bare loop")]
    columns = ["loop", "speed", "of the bare loop", "memory"]
    return relative_table(columns, lines, units, same=("precision",))


def amp_table(rows: list[dict]) -> str:
    """One model in SingleGPU, DP and DDP, each in fp32, with autocast and with a GradScaler, as in
    the rows' names. Speed is also relative to the same technique in fp32."""
    lines = []
    for row in rows:
        technique, precision = name_of(row).split(", ")
        lines.append(technique_cells(row) | {"technique": technique, "precision": precision})
    units = [line for line in lines if line["precision"] == "fp32"]
    columns = ["technique", "precision", "ranks", "speed", "of fp32", "memory"]
    return relative_table(columns, lines, units, same=("technique", "ranks"))


def relative_table(columns: list[str], lines: list[dict], units: list[dict], same: tuple) -> str:
    """Some columns; the last but one is the speed relative to the reference row of its group."""
    units = {tuple(map(unit.get, same)): unit["runs"] for unit in units if unit["runs"]}
    for line in lines:
        if line["runs"] and (key := tuple(map(line.get, same))) in units:
            line[columns[-2]] = relative_speed(line["runs"], units[key])
    return draw_rows(columns, lines)


def relative_speed(runs: list[dict], reference: list[dict]) -> str:
    """The ratio of the medians, and its range over the rounds."""
    if runs is reference:
        return "1.00"
    ours, theirs = speeds_of(runs), speeds_of(reference)
    ratios = [a / b for a, b in zip(ours, theirs, strict=False)]
    around = f" ({min(ratios):.2f}–{max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{statistics.median(ours) / statistics.median(theirs):.2f}{around}"


def draw_rows(columns: list[str], lines: list[dict]) -> str:
    """Some columns of :func:`technique_cells`. The header explains the kind of some figures."""
    runs = [run for line in lines for run in line["runs"]]
    kind = kind_of_memory(runs)
    apart = any(devices_of(run) != run["world_size"] for run in runs)
    heads = {
        "ranks": "ranks (GPUs)" if apart else "ranks",
        "speed": f"{unit_of(next(iter(runs), {}))} (min–max)",
        "memory": "peak GiB" if kind == "process" else f"peak GiB ({kind})",
    }
    cells = [[line.get(column, "") for column in columns] for line in lines]
    return markdown([heads.get(column, column) for column in columns], cells)


def technique_cells(row: dict) -> dict:
    """A row's runs, and its cells by column; without runs the reason, and an empty cell for a
    figure that was not measured."""
    runs, ranks = row["runs"], re.search(r" x(\d+)$", row["name"])
    cells = {"technique": f"`{name_of(row)}`", "ranks": ranks[1] if ranks else "", "runs": runs}
    if not runs:
        return cells | {"speed": row["failed"] or f"left out: {row['left_out']}"}
    if row["failed"]:
        cells["technique"] += f" ({len(runs)} runs; then {row['failed']})"
    run, speeds = runs[0], speeds_of(runs)
    cells |= {"median": statistics.median(speeds), "speed": spread(speeds)}
    cells |= {"ranks": ranks_cell(run), "precision": precision_cell(run)}
    cells["memory"] = memory_cell(runs)
    if run["state_bytes"]:  # a peer has none
        cells[KEPT] = kept_cell(run)
    p50, p95 = (middle(of_all(runs, "step_ms", p)) for p in ("p50", "p95"))
    cells["step ms (p95)"] = f"{p50:.0f} ({p95:.0f})"
    for column, value, form in (
        ("first step s", middle([run.get("first_step_seconds") for run in runs]), ",.1f"),
        ("epoch s", run["train_samples"] / cells["median"], ",.1f"),
        ("GPU %", middle(of_all(runs, "gpu", "utilization_percent")), ".0f"),
        ("weights", middle(of_all(runs, "weights_difference")), ".0e"),
        ("loss", middle(of_all(runs, "eval_loss")), ".4f"),
        ("accuracy", middle(of_all(runs, "eval_accuracy")), ".1%"),
    ):
        cells[column] = "" if value is None else f"{value:{form}}"
    return cells


def kept_cell(run: dict, number=lambda value: f"{value:.2f}") -> str:
    """State bytes per parameter, with theory in brackets."""
    kept, expected = kept_bytes(run)
    return f"{number(kept)} ({number(expected)})"


def against_one_process(script: str, proof: dict, unit: str) -> str:
    """The largest difference of weights with SGD; of the loss, for a technique that rounds."""
    rows = proof["parity" if unit == "images/s" else "parity_gpt"]
    weights = [r["value"] for r in rows if (r["script"], r["optimizer"]) == (script, "sgd")]
    if weights:
        return f"weights {max(weights):.0e}".replace(" 0e+00", " 0")
    losses = [row["value"] / row["fp32"] - 1 for row in proof["loss"] if row["script"] == script]
    return f"loss {max(losses, key=abs):+.2%}" if losses and unit == "images/s" else ""


def ranks_cell(run: dict) -> str:
    """Number of ranks, and in brackets the number of GPUs if one rank uses several."""
    ranks, devices = run["world_size"], devices_of(run)
    return str(ranks) if devices == ranks else f"{ranks} ({devices})"


def precision_cell(run: dict) -> str:
    """The precision, with a note on TF32. (Older results have one flag for both kinds.)"""
    kinds = run["tf32"].values() if isinstance(run["tf32"], dict) else [run["tf32"]]
    return f"{run['precision']} (TF32)" if any(kinds) else run["precision"]


def kind_of_memory(runs: list[dict]) -> str:
    """The kind of ``MEMORY`` that these runs measured."""
    found = [run["peak_memory_gib"] for run in runs]
    known = {kind for memory in found for kind, gib in memory.items() if gib is not None}
    return next((kind for kind in MEMORY if kind in known), "process")


def memory_cell(runs: list[dict]) -> str:
    kinds = MEMORY[kind_of_memory(runs)]
    first, *more = [f"{middle(of_all(runs, 'peak_memory_gib', kind)):.2f}" for kind in kinds]
    return f"{first} ({more[0]})" if more else first


def gib(size: float | None) -> str:
    """Bytes in GiB; empty if there are none."""
    return f"{size / 2**30:.2f}" if size else ""


def spread(values: list[float]) -> str:
    """Median, minimum and maximum, with as many digits as three repeats justify."""
    low, mid, high = min(values), statistics.median(values), max(values)
    digits = 0 if mid >= 100 else 1
    if len(values) == 1:
        return f"{mid:,.{digits}f}"
    return f"{mid:,.{digits}f} ({low:,.{digits}f}–{high:,.{digits}f})"


# ---------------------------------------------------------------- what was run on which hardware


def hardware_table(suites: dict[str, dict], inference: dict) -> str:
    """Which workloads were run on which hardware, according to the suites' results."""
    places = {f"training on {where}": [] for where in ("a CPU", "one GPU", "several GPUs")}
    for found in suites.values():
        for run in (run for row in found["rows"] for run in row["runs"]):
            where = "several GPUs" if devices_of(run) > 1 else "one GPU"
            where = "a CPU" if run["device"] == "cpu" else where
            places[f"training on {where}"].append((run["technique"], found))
    lines = []
    for what, runs in places.items():
        scripts = {technique for technique, _ in runs if technique.startswith("pytorch_")}
        where = run_where(runs[0][1] if runs else None, what)
        lines.append([what, f"{len(scripts)} / {len(PARENTS) + 1}", *where])
    for what, on_cpu in {"inference on a CPU": True, "inference on a GPU": False}.items():
        found = inference if (inference["device"] == "cpu") == on_cpu else None
        lines.append([what, "", *run_where(found, what)])
    return markdown(["what", "scripts", "hardware", "torch", "date"], lines)


def run_where(found: dict | None, what: str) -> list[str]:
    """Hardware, version and date; empty cells if it was not run."""
    if not found:
        return ["not run yet", "", ""]
    machine = found["hardware"]
    gpus = [f"{machine['gpus'].count(name)} × {name}" for name in dict.fromkeys(machine["gpus"])]
    hardware = machine["cpu"] if what.endswith("CPU") else ", ".join(gpus)
    return [hardware, found["versions"]["torch"], found.get("date", "")]


# -------------------------------------------------------------- what model_inference.py measured


def inference_markdown(found: dict) -> str:
    """images/s per batch size, and in brackets p50 and p95 of a call in ms."""
    sizes = list(dict.fromkeys(row["batch_size"] for row in found["rows"]))
    lines = []
    for key in dict.fromkeys((row["runtime"], row["precision"]) for row in found["rows"]):
        rows = [row for row in found["rows"] if (row["runtime"], row["precision"]) == key]
        cells = dict.fromkeys(sizes, "")
        for row in rows:
            now = row["host_to_host"]
            speed, latency = now["images_per_second"], now["latency_ms"]
            cells[row["batch_size"]] = f"{speed:,.1f} ({latency['p50']:.1f}, {latency['p95']:.1f})"
        memory = rows[0]["peak_memory_gib"]
        memory = f"{memory['device'] or memory['process']:.2f}"
        lines.append([*key, *cells.values(), memory, f"{rows[0]['first_call_s']:.2f}"])
    batches = [f"batch {size}" for size in sizes]
    return markdown(["runtime", "precision", *batches, "memory GiB", "first call s"], lines)


def inference_table(found: dict) -> str:
    """The same, with the hardware and versions."""
    packages = [f"{name} {version}" for name, version in found["versions"].items()
                if name.startswith(("torch", "onnx")) and name != "torchvision"]  # fmt: skip
    about = f"{found['model']}, {found['image_size']}×{found['image_size']}; "
    about += f"{machine_line(found['hardware'], found['device'] == 'cpu')}; "
    about += f"{', '.join(packages)}; [results/inference.json](results/inference.json)"
    return f"{inference_markdown(found)}\n\n{about}"


# ------------------------------------------------------------------------ what the tests measured


def by_script(rows: list[dict]) -> dict[str, list[dict]]:
    """The rows grouped by script, parents first."""
    order = ["SingleGPU", *PARENTS]
    scripts = {row["script"].removeprefix("pytorch_") for row in rows}
    return {
        f"`{script}`": [row for row in rows if row["script"] == f"pytorch_{script}"]
        for script in sorted(scripts, key=lambda s: (order.index(s.split()[0]), s))
    }


def parity_table(rows: list[dict]) -> str:
    """Largest relative difference of any tensor, over all world sizes."""
    lines = []
    for script, group in by_script(rows).items():
        cells = [script, ", ".join(map(str, sorted({row["ranks"] for row in group})))]
        for optimizer in ("sgd", "adamw"):
            values = [row["value"] for row in group if row["optimizer"] == optimizer]
            cells.append(f"{max(values):.0e}" if values else "")
        lines.append(cells)
    return markdown(["script", "ranks", "SGD with momentum", "AdamW"], lines)


parity_gpt_table = parity_shared_table = parity_table  # of the language model


def digits(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def bytes_table(rows: list[dict]) -> str:
    """parameters + gradients + optimizer (+ others), for SGD (AdamW), on 1, 2 and 4 ranks."""
    lines = []
    kinds = ("parameters", "gradients", "optimizer")
    for script, group in by_script(rows).items():
        cells = [script]
        for ranks in (1, 2, 4):
            at = {row["optimizer"]: row["kept"] for row in group if row["ranks"] == ranks}
            kept = at.get("sgd", at.get("adamw", {}))
            own = [digits(at["sgd"]["optimizer"])] if "sgd" in at else []
            own += [f"({digits(at['adamw']['optimizer'])})"] if "adamw" in at else []
            parts = [digits(kept[kind]) for kind in kinds[:2] if kept] + [" ".join(own)]
            parts += [f"{digits(kept[kind])} {kind.replace('_', ' ')}" for kind in sorted(kept)
                      if kept[kind] and kind not in kinds]  # fmt: skip
            cells.append(" + ".join(parts))
        lines.append(cells)
    return markdown(["script", "1 rank", "2 ranks", "4 ranks"], lines)


def sent_table(rows: list[dict]) -> str:
    lines = []
    for script, group in by_script(rows).items():
        sent = {row["ranks"]: sorted(row["sent"].items()) for row in group}
        cells = [[f"{digits(size)} {kind.replace('_', '-')}" for kind, size in sent.get(n, ())
                  if digits(size) != "0"] for n in (2, 4)]  # fmt: skip
        lines.append([script, *map(", ".join, cells)])
    return markdown(["script", "2 ranks", "4 ranks"], lines)


def loss_table(rows: list[dict]) -> str:
    lines = []
    for script, group in by_script(rows).items():
        for row in group:
            change = f"{row['value'] / row['fp32'] - 1:+.2%}"
            figures = [row["ranks"], f"{row['fp32']:.4f}", f"{row['value']:.4f}", change]
            lines.append([script, *figures])
    return markdown(["script", "ranks", "loss in fp32", "its loss", "difference"], lines)


def shared_table(rows: list[dict]) -> str:
    """State bytes and communication per rank, measured, with theory in brackets."""
    lines = []
    for script, group in by_script(rows).items():
        for row in sorted(group, key=lambda row: row["ranks"]):
            kept = f"{row['kept']:,.2f} ({row['kept_theory']:,.2f})"
            sent = f"{row['sent'] / 1e3:,.0f} ({row['sent_theory'] / 1e3:,.0f})"
            how = ", ".join(kind.replace("_", "-") for kind in sorted(row["how"]))
            lines.append([script, row["ranks"], kept, sent, how])
    return markdown(["script", "ranks", KEPT, "sent kB (theory)", "in"], lines)


def optimizers_table(rows: list[dict]) -> str:
    """Communication and FLOPs of the optimizer step, against theory."""
    lines = []
    for row in sorted(rows, key=lambda row: (row["ranks"], -row["sent"])):
        sent = f"{row['sent']:.2f}"
        sent += f" ({row['sent_theory']:.2f})" if "sent_theory" in row else ""
        lines.append(
            [f"`{row['script']}`", row["ranks"], sent, row["calls"], f"{row['flops']:.2f}"]
        )
    head = ["script", "ranks", "sent per matrix element (theory)", "collectives", "FLOPs x N"]
    return markdown(head, lines)


def silent_table(rows: list[dict]) -> str:
    """Silent mistakes in model parallelism, with the error of the weights after twelve steps."""
    lines = [
        [row["mistake"], f"`{row['script'].removeprefix('pytorch_')}`", f"{row['value']:.2f}"]
        for row in sorted(rows, key=lambda row: -row["value"])
    ]
    return markdown(["mistake", "script", "off by"], lines)


HANGS = {  # what rank 1 does, in measure/faults/hang.py
    "skip": "skips a collective", "order": "calls two collectives in another order",
    "shape": "passes a tensor of another shape", "dtype": "passes another dtype",
    "loop": "is in an endless loop", "stop": "is stopped (SIGSTOP)",
    "kill": "is killed (SIGKILL)", "sleep": "waits for its loader",
}  # fmt: skip


def hangs_table(rows: list[dict]) -> str:
    """The printed diagnosis, and the scripts whose rank, collective and line it named."""
    lines = []
    for fault, does in HANGS.items():
        group = [row for row in rows if row["fault"] == fault]
        said = group[0]["lines"][0].partition("; recorded in")[0]
        named = [r["script"].removeprefix("pytorch_") for r in group if not r["missed"]]
        lines.append([does, f"`{said}`", ", ".join(named)])
    return markdown(["rank 1", "first line, of DDP", "named in"], lines)


def silent_examples_table(rows: list[dict]) -> str:
    """Silent mistakes in any training loop, with their errors."""
    lines = [
        [row["mistake"], row["effect"], f"{row['value']:.2g}", row["of"], f"`{row['script']}.py`"]
        for row in sorted(rows, key=lambda row: -row["value"])
    ]
    return markdown(["mistake", "effect", "off by", "measured on", "run"], lines)


TRIAL = re.compile(r"trial +\d+: (\w+) .*?(clean|wrong|hung|fallback|silent|failed)\b")


def outcomes_table(path: Path, what: str) -> str:
    """Trials by kind and outcome, from the output of measure/faults/*.py, with its last line."""
    if not path.is_file():
        return "not measured yet"
    command, where, *trials, summary = path.read_text().splitlines()
    command = command.removeprefix("$ ")
    found = [TRIAL.match(line) for line in trials]
    if not all(found) or not summary.startswith(f"{len(found)} trials: "):
        raise Unusable(f"{path} was modified; run {command} again")
    outcomes = ["clean", "wrong", "hung"] if what == "fault" else ["fallback", "silent", "failed"]
    lines = []
    for kind in [*sorted({match[1] for match in found}), "all"]:
        ends = [match[2] for match in found if kind in (match[1], "all")]
        lines.append([kind, len(ends), *map(ends.count, outcomes)])
    table = markdown([what, "trials", *outcomes], lines)
    link = f"[results/{path.name}](results/{path.name})"
    run, where = (textwrap.shorten(text, 360, placeholder=" …") for text in (command, where))
    return f"{table}\n\n`{run}`: {summary} ({where}; {link})"
