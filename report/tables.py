"""Markdown tables, in English, of what results/ holds. report/pages.py puts them into pages."""

import re
import statistics
from collections.abc import Iterable
from pathlib import Path

from report.results import (
    MEMORY,
    Unusable,
    devices_of,
    kind_of_memory,
    middle,
    name_of,
    of_all,
    peak_memory,
    speeds_of,
    unit_of,
)
from report.scripts import PARENTS
from report.theory import kept_bytes


def markdown(header: list[str], rows: list[list]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


# ------------------------------------------------------------------ what benchmark.py measured


def suite_table(found: dict, table: str) -> str:
    """One of a suite's tables: medians over the repeats, and where they are from."""
    rows = [row for row in found["rows"] if row["table"] == table]
    draw = techniques_table
    if table.endswith("-peers"):
        draw = peers_table
    if table.endswith("-amp"):
        draw = amp_table
    return f"{draw(rows)}\n\n{measured_where(found, rows)}"


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


def front_table(found: dict, proof: dict, names: list[str], predicted: dict) -> str:
    """A row a technique, with links to docs/techniques/: what it costs, and how far its result
    is from one process's, as the tests measured it.

    Args:
        found: a suite's results.
        proof: what the tests measured.
        names: of the rows to show.
        predicted: bytes that a row would take on a GPU, by its name.
    """
    rows = {row["name"]: row for row in found["rows"]}
    lines, unit = [], unit_of(next(run for row in found["rows"] for run in row["runs"]))
    for name in names:
        title = name_of({"name": name})
        section = title.split()[0]
        link = f"[`{title}`](docs/techniques/{section}.md)"
        row = rows.get(name, {"runs": [], "failed": "not measured yet"})
        if not row["runs"]:
            lines.append([link, "", why_empty(row), "", "", "", ""])
            continue
        run = row["runs"][0]
        kept, expected = kept_bytes(run)
        lines.append(
            [
                link,
                ranks_cell(run),
                spread(speeds_of(row["runs"])),
                memory_cell(row["runs"]),
                gib(predicted.get(name)),
                f"{digits(kept)} ({digits(expected)})",
                against_one_process(f"pytorch_{title}", proof, unit),
            ]
        )
    shown = [rows[name] for name in names if name in rows]
    header = ["technique", ranks_head(shown), f"{unit} (min–max)", memory_head(shown)]
    header += ["predicted on a GPU", "kept (theory)", "against one process"]
    table = markdown(header, lines)
    return f"{table}\n\n{measured_where(found, list(rows.values()))}"


def against_one_process(script: str, proof: dict, unit: str) -> str:
    """The weights' largest difference with SGD; the loss's, of a technique that rounds."""
    rows = proof["parity" if unit == "images/s" else "parity_gpt"]
    weights = [r["value"] for r in rows if (r["script"], r["optimizer"]) == (script, "sgd")]
    if weights:
        return f"weights {max(weights):.0e}".replace(" 0e+00", " 0")
    losses = [row["value"] / row["fp32"] - 1 for row in proof["loss"] if row["script"] == script]
    losses = losses if unit == "images/s" else []
    return f"loss {max(losses, key=abs):+.2%}" if losses else ""


def ranks_head(rows: Iterable[dict]) -> str:
    """Of a column of :func:`ranks_cell`."""
    apart = (devices_of(run) != run["world_size"] for row in rows for run in row["runs"])
    return "ranks (GPUs)" if any(apart) else "ranks"


def ranks_cell(run: dict) -> str:
    """How many ranks, and in brackets how many GPUs if one rank uses several."""
    ranks, devices = run["world_size"], devices_of(run)
    return str(ranks) if devices == ranks else f"{ranks} ({devices})"


def precision_cell(run: dict) -> str:
    """With a word where fp32 was computed in TF32. (Older results have one flag for both kinds.)"""
    kinds = run["tf32"].values() if isinstance(run["tf32"], dict) else [run["tf32"]]
    return f"{run['precision']} (TF32)" if any(kinds) else run["precision"]


def memory_head(rows: Iterable[dict]) -> str:
    kind = kind_of_memory(run for row in rows for run in row["runs"])
    return "peak GiB" if kind == "process" else f"peak GiB ({kind})"


def memory_cell(runs: list[dict]) -> str:
    kinds = MEMORY[kind_of_memory(runs)]
    first, *more = [f"{middle(of_all(runs, 'peak_memory_gib', kind)):.2f}" for kind in kinds]
    return f"{first} ({more[0]})" if more else first


def gib(size: float | None) -> str:
    """Of bytes, if there are any."""
    return f"{size / 2**30:.2f}" if size else ""


def why_empty(row: dict) -> str:
    """Of a row without figures."""
    return row["failed"] or f"left out: {row['left_out']}"


def spread(values: list[float]) -> str:
    """Median, and least and most; as many digits as three repeats are worth."""
    low, mid, high = min(values), statistics.median(values), max(values)
    digits = 0 if mid >= 100 else 1
    if len(values) == 1:
        return f"{mid:,.{digits}f}"
    return f"{mid:,.{digits}f} ({low:,.{digits}f}–{high:,.{digits}f})"


def techniques_table(rows: list[dict]) -> str:
    unit = unit_of(next((run for row in rows for run in row["runs"]), {}))
    gpu = any(run["device"] != "cpu" for row in rows for run in row["runs"])
    header = [
        "technique",
        ranks_head(rows),
        "precision",
        f"{unit} (min–max)",
        "step ms (p95)",
        "first step s" if unit == "tokens/s" else "epoch s",
    ]
    header += [memory_head(rows), "GPU %"] if gpu else [memory_head(rows)]
    header += ["kept (theory)", "weights", "loss" if unit == "tokens/s" else "accuracy"]
    lines = []
    for row in rows:
        if row["runs"]:
            lines.append(technique_cells(row, gpu))
        else:
            ranks = re.search(r" x(\d+)$", row["name"])
            cells = [f"`{name_of(row)}`", ranks[1] if ranks else "", "", why_empty(row)]
            lines.append(cells + [""] * (len(header) - len(cells)))
    return markdown(header, lines)


def technique_cells(row: dict, gpu: bool) -> list:
    """Of a row that has runs."""
    runs, run = row["runs"], row["runs"][0]
    name = f"`{name_of(row)}`"
    if row["failed"]:
        name += f" ({len(runs)} runs; then {row['failed']})"
    speeds = speeds_of(runs)
    p50, p95 = (middle(of_all(runs, "step_ms", p)) for p in ("p50", "p95"))
    cells = [name, ranks_cell(run), precision_cell(run), spread(speeds)]
    cells.append(f"{p50:.0f} ({p95:.0f})")
    if unit_of(run) == "tokens/s":  # a text has no epoch to speak of, but may be compiled
        first = middle([run.get("first_step_seconds") for run in runs])  # a peer's has none
        cells.append("" if first is None else f"{first:,.1f}")
    else:
        cells.append(f"{run['train_samples'] / statistics.median(speeds):,.1f}")
    cells.append(memory_cell(runs))
    if gpu:
        used = middle(of_all(runs, "gpu", "utilization_percent"))
        cells.append("" if used is None else f"{used:.0f}")
    if run["state_bytes"]:
        kept, expected = kept_bytes(run)
        cells.append(f"{kept:.2f} ({expected:.2f})")
    else:  # a peer's
        cells.append("")
    apart = middle(of_all(runs, "weights_difference"))
    cells.append("" if apart is None else f"{apart:.0e}")
    if unit_of(run) == "tokens/s":
        loss = middle(of_all(runs, "eval_loss"))
        return [*cells, "" if loss is None else f"{loss:.4f}"]
    accuracy = middle(of_all(runs, "eval_accuracy"))
    return [*cells, "" if accuracy is None else f"{accuracy:.1%}"]


def peers_table(rows: list[dict]) -> str:
    """Loops on the same work, against the bare one of the same precision."""
    bare, lines = {}, []
    for row in rows:
        if not row["runs"]:
            lines.append([row["name"], why_empty(row), "", ""])
            continue
        speeds, precision = speeds_of(row["runs"]), row["runs"][0]["precision"]
        if row["name"].startswith("bare loop"):
            bare[precision] = statistics.median(speeds)
        part = f"{statistics.median(speeds) / bare[precision]:.2f}" if precision in bare else ""
        lines.append([row["name"], spread(speeds), part, f"{peak_memory(row['runs']):.2f}"])
    return markdown(["loop", "images/s (min–max)", "of the bare loop", "peak GiB"], lines)


def amp_table(rows: list[dict]) -> str:
    """One model in SingleGPU, DP and DDP, each in fp32, under autocast and with a GradScaler; both
    are in the rows' names. Speed also relative to the same technique in fp32."""
    lines, full = [], {}
    for row in rows:
        technique, precision = name_of(row).split(", ")
        if not row["runs"]:
            ranks = re.search(r" x(\d+)$", row["name"])
            lines.append([technique, precision, ranks[1] if ranks else "", why_empty(row), "", ""])
            continue
        ranks, speeds = ranks_cell(row["runs"][0]), speeds_of(row["runs"])
        if precision == "fp32":
            full[technique, ranks] = statistics.median(speeds)
        part = ""
        if (technique, ranks) in full:
            part = f"{statistics.median(speeds) / full[technique, ranks]:.2f}"
        memory = f"{peak_memory(row['runs']):.2f}"
        lines.append([technique, precision, ranks, spread(speeds), part, memory])
    header = ["technique", "precision", ranks_head(rows), "images/s (min–max)", "of fp32"]
    return markdown([*header, "peak GiB"], lines)


# ---------------------------------------------------------------- what was run on which hardware


def hardware_table(suites: dict[str, dict], inference: dict) -> str:
    """What has been run where and what has not, as far as results/ knows.

    Args:
        suites: their results, by name.
    """
    on_cpu, on_one, on_several = [], [], []
    for found in suites.values():
        for run in (run for row in found["rows"] for run in row["runs"]):
            several = devices_of(run) > 1
            group = on_cpu if run["device"] == "cpu" else on_several if several else on_one
            group.append((run["technique"], found))
    lines = []
    for what, group in {
        "training on a CPU": on_cpu,
        "training on one GPU": on_one,
        "training on several GPUs": on_several,
    }.items():
        scripts = {technique for technique, _ in group if technique.startswith("pytorch_")}
        found = group[0][1] if group else None
        lines.append([what, f"{len(scripts)} / {len(PARENTS) + 1}", *run_where(found, what)])
    for what, on_cpu in {"inference on a CPU": True, "inference on a GPU": False}.items():
        found = inference if (inference["device"] == "cpu") == on_cpu else None
        lines.append([what, "", *run_where(found, what)])
    return markdown(["what", "scripts", "hardware", "torch", "date"], lines)


def run_where(found: dict | None, what: str) -> list[str]:
    """Hardware, version and date; empty cells after the first of what was not run."""
    if not found:
        return ["not run yet", "", ""]
    machine = found["hardware"]
    gpus = [f"{machine['gpus'].count(name)} × {name}" for name in dict.fromkeys(machine["gpus"])]
    hardware = machine["cpu"] if what.endswith("CPU") else ", ".join(gpus)
    return [hardware, found["versions"]["torch"], found.get("date", "")]


# -------------------------------------------------------------- what model_inference.py measured


def inference_markdown(found: dict) -> str:
    """images/s, and in brackets the p50 and p95 of a call in ms, per batch size."""
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
    """The same, and where it was measured."""
    packages = [f"{name} {version}" for name, version in found["versions"].items()
                if name.startswith(("torch", "onnx")) and name != "torchvision"]  # fmt: skip
    about = f"{found['model']}, {found['image_size']}×{found['image_size']}; "
    about += f"{machine_line(found['hardware'], found['device'] == 'cpu')}; "
    about += f"{', '.join(packages)}; [results/inference.json](results/inference.json)"
    return f"{inference_markdown(found)}\n\n{about}"


# ------------------------------------------------------------------------ what the tests measured


def by_script(rows: list[dict]) -> dict[str, list[dict]]:
    """Rows of each script, parents first."""
    order = ["SingleGPU", *PARENTS]
    scripts = {row["script"].removeprefix("pytorch_") for row in rows}
    return {
        f"`{script}`": [row for row in rows if row["script"] == f"pytorch_{script}"]
        for script in sorted(scripts, key=lambda s: (order.index(s.split()[0]), s))
    }


def parity_table(rows: list[dict]) -> str:
    """Largest relative difference of any tensor; worst over the world sizes."""
    lines = []
    for script, group in by_script(rows).items():
        cells = [script, ", ".join(map(str, sorted({row["ranks"] for row in group})))]
        for optimizer in ("sgd", "adamw"):
            values = [row["value"] for row in group if row["optimizer"] == optimizer]
            cells.append(f"{max(values):.0e}" if values else "")
        lines.append(cells)
    return markdown(["script", "ranks", "SGD with momentum", "AdamW"], lines)


parity_gpt_table = parity_table  # of the language model


def digits(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def bytes_table(rows: list[dict]) -> str:
    """parameters + gradients + optimizer (+ what else), for SGD (AdamW), at 1, 2 and 4 ranks."""
    lines = []
    kinds = ("parameters", "gradients", "optimizer")
    for script, group in by_script(rows).items():
        cells = [script]
        for ranks in (1, 2, 4):
            at = {row["optimizer"]: row for row in group if row["ranks"] == ranks}
            if not at:
                cells.append("")
                continue
            kept = at.get("sgd", at.get("adamw"))["kept"]
            words = " + ".join(digits(kept[kind]) for kind in kinds[:2]) + " +"
            if "sgd" in at:
                words += f" {digits(kept['optimizer'])}"
            if "adamw" in at:
                words += f" ({digits(at['adamw']['kept']['optimizer'])})"
            for extra in sorted(kind for kind in kept if kept[kind] and kind not in kinds):
                words += f" + {digits(kept[extra])} {extra.replace('_', ' ')}"
            cells.append(words)
        lines.append(cells)
    return markdown(["script", "1 rank", "2 ranks", "4 ranks"], lines)


def sent_table(rows: list[dict]) -> str:
    lines = []
    for script, group in by_script(rows).items():
        cells = [script]
        for ranks in (2, 4):
            parts = []
            for row in group:
                if row["ranks"] == ranks:
                    sent = sorted(row["sent"].items())
                    parts = [f"{digits(size)} {kind.replace('_', '-')}" for kind, size in sent]
            cells.append(", ".join(part for part in parts if not part.startswith("0 ")))
        lines.append(cells)
    return markdown(["script", "2 ranks", "4 ranks"], lines)


def loss_table(rows: list[dict]) -> str:
    lines = []
    for script, group in by_script(rows).items():
        for row in group:
            change = f"{row['value'] / row['fp32'] - 1:+.2%}"
            figures = [row["ranks"], f"{row['fp32']:.4f}", f"{row['value']:.4f}", change]
            lines.append([script, *figures])
    return markdown(["script", "ranks", "loss in fp32", "its loss", "difference"], lines)


TRIAL = re.compile(
    r"trial +\d+: (?P<kind>\w+) .*?(?P<end>clean|wrong|hung|fallback|silent|failed)\b"
)


def outcomes_table(path: Path, what: str) -> str:
    """Trials by kind and outcome, counted in what tests/faults/*.py printed, and its last line."""
    if not path.is_file():
        return "not measured yet"
    command, where, *trials, summary = path.read_text().splitlines()
    found = [TRIAL.match(line) for line in trials]
    if not all(found) or not summary.startswith(f"{len(found)} trials: "):
        again = command.removeprefix("$ ")
        raise Unusable(f"{path} is not what it was written as; run {again} again")
    outcomes = ["clean", "wrong", "hung"] if what == "fault" else ["fallback", "silent", "failed"]
    lines = []
    for kind in sorted({match["kind"] for match in found}):
        ends = [match["end"] for match in found if match["kind"] == kind]
        lines.append([kind, len(ends), *(ends.count(outcome) for outcome in outcomes)])
    ends = [match["end"] for match in found]
    lines.append(["all", len(ends), *(ends.count(outcome) for outcome in outcomes)])
    table = markdown([what, "trials", *outcomes], lines)
    link = f"[results/{path.name}](results/{path.name})"
    return f"{table}\n\n`{command.removeprefix('$ ')}`: {summary} ({where}; {link})"
