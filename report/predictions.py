"""Predictions beside published and measured figures: tables and a plot."""

from pathlib import Path

from report import stale, tables
from report.results import middle, of_all, read_figures

AGAIN = "python benchmark.py --suite estimate"
OURS = {  # rows of the suite gpu that are published techniques, where the names differ
    "auto_mixed_precision": "auto_mixed_precision --dtype float16",
    "half_precision": "half_precision --dtype float16",
    "torchrun_DDP": "torchrun_DDP x4",
    "DDP_ZeRO": "DDP_ZeRO --use_zero x4",
    "FSDP": "FSDP x4",
}


def read(root: Path) -> dict:
    """``results/estimate.json``; see :func:`report.results.read_figures`."""
    keys = ("published", "suites", "messages", "git_commit", "versions")
    return read_figures(root / "results" / "estimate.json", keys, AGAIN)


def blocks(root: Path, found: dict, results: dict) -> dict[str, str]:
    """The tables, by the name of their block."""
    drawn = dict.fromkeys(("estimate", "scaling"), f"not measured yet: `{AGAIN}`")
    if not found:
        return drawn
    since = stale.note(root, found["git_commit"], ["measure/estimates/published.py estimator"])
    about = f"torch {found['versions']['torch']}; [results/estimate.json](results/estimate.json)"
    drawn["estimate"] = f"{published_table(found, results.get('gpu'))}\n\n{about}{since}"
    drawn["scaling"] = "not measured yet: `python benchmark.py --suite scaling`"
    if scaled := results.get("scaling"):
        rows = scaled["rows"]
        where = tables.measured_where(scaled, rows) + stale.note_of_rows(root, scaled, rows)
        drawn["scaling"] = f"{scaling_table(found, scaled)}\n\n{where}"
    return drawn


def published_table(found: dict, gpu: dict | None) -> str:
    """Published and predicted figures, and for our own workload predicted and measured ones."""
    rows = {row["name"]: row for row in gpu["rows"]} if gpu else {}
    lines = []
    for row in found["published"]:
        ours = OURS.get(row["name"], row["name"])
        runs = rows.get(ours, {"runs": []})["runs"]
        took = middle(of_all(runs, "peak_memory_gib", "allocated"))
        published, predicted = row["published_gb"], row["predicted"] / 1e9
        cells = [f"`{row['name']}`", row["gpus"], f"{published:.2f}", f"{predicted:.2f}"]
        cells += [f"{predicted / published:.3f}", tables.gib(found["suites"]["gpu"].get(ours))]
        lines.append([*cells, "" if took is None else f"{took:.2f}"])
    header = ["technique", "GPUs", "published GB", "predicted for that job", "ratio"]
    return tables.markdown([*header, "predicted for ours, GiB", "measured, GiB"], lines)


def steps_of(found: dict, scaled: dict) -> dict[str, dict[int, float]]:
    """Milliseconds of a measured step, by technique of the prediction and number of ranks."""
    steps = {name: {} for name in found["messages"]}
    for row in scaled["rows"]:
        name, _, ranks = row["name"].rpartition(" x")
        if row["runs"] and name in steps:
            steps[name][int(ranks)] = middle(of_all(row["runs"], "step_ms", "p50"))
    return {name: took for name, took in steps.items() if 1 in took}


def scaling_table(found: dict, scaled: dict) -> str:
    """The step time on two ranks: predicted from one rank and communication, and measured."""
    lines = []
    for name, took in steps_of(found, scaled).items():
        predicted = took[1] + 1e3 * found["messages"][name]["2"]
        cells = [f"`{name}`", f"{took[1]:.0f}", f"{predicted:.0f}"]
        if 2 in took:
            cells += [f"{took[2]:.0f}", f"{predicted / took[2]:.2f}"]
        lines.append(cells + [""] * (5 - len(cells)))
    header = ["technique", "step ms, 1 rank", "2 ranks, predicted", "2 ranks, measured", "ratio"]
    return tables.markdown(header, lines)


def scaling_plot(found: dict, scaled: dict | None) -> dict[str, dict]:
    """Speed per rank relative to one rank: measured, and predicted up to 1,024 ranks."""
    if not found or not scaled:
        return {}
    values = {}
    for name, took in steps_of(found, scaled).items():
        model = {1: 1.0}
        for ranks, seconds in found["messages"][name].items():
            model[int(ranks)] = round(took[1] / (took[1] + 1e3 * seconds), 3)
        measured = {ranks: round(took[1] / step, 3) for ranks, step in took.items()}
        values[name] = {"measured": measured, "model": model}
    run = next(run for row in scaled["rows"] for run in row["runs"])
    job = f"{run['model']} at {run['image_size']}, {run['device']}, gloo"
    return {"scaling": {"unit": f"% of one rank's speed ({job})", "values": values}}
