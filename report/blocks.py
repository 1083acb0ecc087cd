"""What every table is made of: rows and columns, and the line below."""

import json
import string
from collections.abc import Collection
from pathlib import Path

from report import fresh

# Columns by table: a title, of which chinese.json has the Chinese one, and a format string.
TABLES = json.loads(Path(__file__).with_name("tables.json").read_text())
UNITS = {"GiB": 2**30, "GB": 1e9, "kB": 1e3, "ms": 1e-3, "µs": 1e-6}


class Cell(string.Formatter):
    """A format string. Numbers may have a unit, as ``{size:.2f GiB}``. What is missing is empty."""

    def get_value(self, key, args, kwargs):
        return kwargs.get(key)

    def format_field(self, value, spec: str) -> str:
        form, _, unit = spec.partition(" ")
        if value is None:
            return ""
        return format(value / UNITS[unit] if unit else value, form)


def draw(rows: Collection[dict], columns: dict[str, str], empty: bool = True) -> str:
    """A table. Columns have a title, and a format string of a row's fields for its cell. If not
    ``empty``, without columns that no row has."""
    cells = {}
    for title, cell in columns.items():
        column = [Cell().vformat(cell, (), row) for row in rows]
        if empty or any(column):
            cells[title] = column
    lines = [[*cells], ["---"] * len(cells), *zip(*cells.values(), strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def footer(root: Path, found: dict, file: str, *before: str, after: str = "", commands=None) -> str:
    """The line below a table: machine and what was run (``before``), versions, repeats (``after``),
    the file in results/, and what of the measured code has changed since (:func:`fresh.note`)."""
    named = [f"{n} {v}" for n, v in found["versions"].items() if n == "torch" or "onnx" in n]
    parts = [*filter(None, [*before, ", ".join(named), after]), f"[results/{file}](results/{file})"]
    return f"\n\n{'; '.join(parts)}{fresh.note(root, found, commands)}"


def machine_line(machine: dict, on_cpu: bool = True) -> str:
    if on_cpu:
        return ", ".join([machine["cpu"], f"{machine['cores']} cores", *machine["cpu_flags"]])
    return ", ".join(machine["gpus"] + machine.get("power_limits", []))


def digits(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def size_name(size: float) -> str:
    """A size in KiB or MiB."""
    return f"{size / 2**20:.3g} MiB" if size >= 2**20 else f"{size / 2**10:.3g} KiB"
