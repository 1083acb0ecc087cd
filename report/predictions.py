"""Predictions beside published figures, and what estimate.py recommends: two tables."""

import json
from pathlib import Path

from report.blocks import TABLES, draw, footer, origin
from report.results import load

MODELS = ("llama3-8b", "llama3-70b")  # smaller ones need no flags


def blocks(root: Path, results: dict) -> dict[str, str]:
    """The tables, by the name of their block."""
    published = results["published"]
    shown = load(root / "measure" / "suites" / "published.json")["shown"]
    rows = {row["name"]: row for row in published["peaks"]}
    peaks = [rows[name] | {"off": off(rows[name])} for name in shown]  # the report has all
    below = footer(published, "published", "predicted", peaks)
    found = {"published-peaks": draw(peaks, TABLES["published-peaks"]) + below}
    return found | {"recommended": recommended(root)}


def off(row: dict) -> str:
    """How far a prediction is from what was published: of a range, both of its ends."""
    ends = [f"{row[end] / row['published'] - 1:+.1%}" for end in ("lowest", "highest")]
    return " to ".join(dict.fromkeys(ends))  # one, if it is no range


def recommended(root: Path) -> str:
    """The flags of pytorch_ND_parallel.py that --recommend prints first, on H100s."""
    fit = json.loads((root / "website" / "data" / "fit.json").read_text())
    found = fit["data"]
    rows = []
    for cell in found["cells"]:
        flags = cell["command"].partition("--batch-size ")[2].partition(" ")[2] or "(none)"
        about = {"context": found["context"][cell["model"]], "flags": flags}
        about["host"] = cell.get("host") or None
        if cell["memory"] == "H100" and cell["gpus"] > 1 and cell["model"] in MODELS:
            rows.append(cell | about)
    return draw(rows, TABLES["recommended"]) + fit_footer(fit)


def fit_footer(fit: dict) -> str:
    """The line below what website/data/fit.json says."""
    link = "[website/data/fit.json](website/data/fit.json)"
    return f"\n\n{origin(fit, 'predicted')}; `python website/make_data.py`; {link}"
