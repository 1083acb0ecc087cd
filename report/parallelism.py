"""What docs/parallelism.md shows besides a suite: bytes beside theory, bubbles, silent mistakes."""

import json
from collections.abc import Callable
from pathlib import Path

from report import tables

AGAIN = "python tests/measure_bubble.py"


def blocks(root: Path, proof: dict, note: Callable[[str], str]) -> dict[str, str]:
    """By the name of their place.

    Args:
        proof: what the tests measured.
        note: makes the line below a table of the proof.
    """
    drawn = {"parity_shared": tables.parity_table, "shared": shared_table, "silent": silent_table}
    found = dict.fromkeys(drawn, "not measured yet: `python -m pytest`")
    for name, draw in drawn.items():
        if name in proof:
            found[name] = draw(proof[name]) + note(name)
    return found | {"bubble": bubble_block(root / "results" / "bubble.json")}


def with_theory(counted: float, theory: float, digits: int) -> str:
    return f"{counted:,.{digits}f} ({theory:,.{digits}f})"


def shared_table(rows: list[dict]) -> str:
    """What a rank keeps and sends, counted, and in brackets by theory."""
    lines = []
    for script, group in tables.by_script(rows).items():
        for row in sorted(group, key=lambda row: row["ranks"]):
            kept = with_theory(row["kept"], row["kept_theory"], 2)
            sent = with_theory(row["sent"] / 1e3, row["sent_theory"] / 1e3, 0)
            how = ", ".join(kind.replace("_", "-") for kind in sorted(row["how"]))
            lines.append([script, row["ranks"], kept, sent, how])
    head = ["script", "ranks", "kept (theory)", "sent kB (theory)", "in"]
    return tables.markdown(head, lines)


def silent_table(rows: list[dict]) -> str:
    """Mistakes that no error tells of, by how far the weights are off after twelve steps."""
    lines = [
        [row["mistake"], f"`{row['script'].removeprefix('pytorch_')}`", f"{row['value']:.2f}"]
        for row in sorted(rows, key=lambda row: -row["value"])
    ]
    return tables.markdown(["mistake", "script", "off by"], lines)


def bubble_block(path: Path) -> str:
    """The share of a step in which a rank computes nothing."""
    if not path.is_file():
        return f"not measured yet: `{AGAIN}`"
    found = json.loads(path.read_text())
    lines = []
    for row in found["rows"]:
        shares = [f"{row[kind]:.1%}" for kind in ("formula", "order", "core", "clock")]
        lines.append([f"`{row['schedule']}`", row["microbatches"], *shares])
    head = ["schedule", "micro-batches", "formula", "order", "compute alone", "clock"]
    where = f"{tables.machine_line(found['hardware'], True)}; torch {found['versions']['torch']}; "
    where += f"[results/{path.name}](results/{path.name})"
    return f"{tables.markdown(head, lines)}\n\n{where}"
