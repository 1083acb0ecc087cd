"""Predictions beside published and measured figures: tables and a plot."""

import json
from pathlib import Path

from report.blocks import TABLES, draw, footer
from report.draw import percent_by_ranks
from report.results import middle
from report.suites import measured_where

LANGUAGE_MODELS = ("peaks", "speeds", "differences", "slopes")  # published, and predicted


def blocks(root: Path, results: dict) -> dict[str, str]:
    """The tables, by the name of their block."""
    found, scaled, published = results["estimate"], results["scaling"], results["published"]
    where = measured_where(root, scaled, scaled["rows"])
    rows = {"scaling": scaling(found, scaled)}
    for row in found["published"]:
        ratio = row["predicted"] / 1e9 / row["published_gb"]
        rows.setdefault("estimate", []).append(row | {"ratio": ratio})
    rows |= {f"published-{name}": published[name] for name in LANGUAGE_MODELS}
    about = dict.fromkeys(rows, footer(root, published, "published.json"))
    about |= {"estimate": footer(root, found, "estimate.json"), "scaling": where}
    tables = {name: draw(rows[name], TABLES[name]) + about[name] for name in rows}
    return tables | {"recommended": draw(recommended(root), TABLES["recommended"])}


def steps_of(found: dict, scaled: dict) -> dict[str, dict[int, float]]:
    """Milliseconds of a measured step, by technique of the prediction and number of ranks."""
    runs = {row["name"]: row["runs"] for row in scaled["rows"]}
    return {
        name: {n: middle(runs[f"{name} x{n}"], "step_ms", "p50") for n in (1, 2)}
        for name in found["messages"]
    }


def recommended(root: Path) -> list[dict]:
    """The flags of pytorch_ND_parallel.py that --recommend prints first, on H100s."""
    found = json.loads((root / "website" / "data" / "fit.json").read_text())["data"]
    rows = []
    for cell in found["cells"]:
        flags = cell["command"].partition("--batch-size ")[2].partition(" ")[2] or "(none)"
        about = {"context": found["context"][cell["model"]], "flags": flags}
        about["host"] = cell.get("host") or None
        if cell["memory"] == "H100" and cell["fits"]:
            rows.append(cell | about)
    return rows


def scaling(found: dict, scaled: dict) -> list[dict]:
    """The step time on two ranks: predicted from one rank and communication, and measured."""
    rows = []
    for name, took in steps_of(found, scaled).items():
        predicted = took[1] + 1e3 * found["messages"][name]["2"]
        figures = {"one": took[1], "two": took[2], "predicted": predicted}
        rows.append({"name": name, "ratio": predicted / took[2]} | figures)
    return rows


def plots(results: dict) -> dict[str, dict]:
    """Speed per rank relative to one rank: measured, and predicted up to 1,024 ranks."""
    found, scaled, lines = results["estimate"], results["scaling"], {}
    for name, took in steps_of(found, scaled).items():
        messages = {1: 0.0} | {int(n): seconds for n, seconds in found["messages"][name].items()}
        predicted = [100 * took[1] / (took[1] + 1e3 * seconds) for seconds in messages.values()]
        measured = [100 * took[1] / step for step in took.values()]
        lines[name] = {"-": ([*messages], predicted), "o": ([*took], measured)}
    run = next(run for row in scaled["rows"] for run in row["runs"])
    unit = f"% of one rank's speed ({run['model']} at {run['image_size']}, {run['device']}, gloo)"
    return {"scaling": percent_by_ranks(unit, lines, [*messages], {"o": "measured"})}
