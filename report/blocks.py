"""What every table is made of: rows and columns, and the line below."""

import json
import string
from collections import Counter
from collections.abc import Collection
from pathlib import Path

# Columns by table: a title, of which chinese.json has the Chinese one, and a format string.
TABLES = json.loads(Path(__file__).with_name("tables.json").read_text())
UNITS = {"GiB": 2**30, "GB": 1e9, "MB": 1e6, "kB": 1e3, "ms": 1e-3, "µs": 1e-6, "400 GB/s": 4e11}


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


def footer(found: dict, name: str, machine: str, entries: Collection, runs: str = "") -> str:
    """The line below a table: where its figures are from, and the command that measures them.

    Args:
        found: what is in results/``name``.json.
        machine: which has measured them, or that they are predicted.
        entries: of the table; those that an earlier measurement has left say so in ``from``.
        runs: how many there were of each row.
    """
    origins = Counter(entry.get("from", origin(found, machine)) for entry in entries)
    lines = (
        [f"{line} (rows: {n})" for line, n in origins.items()] if len(origins) > 1 else [*origins]
    )
    link = f"[results/{name}.json](results/{name}.json)"
    parts = [*lines, runs, f"`python benchmark.py --suite {name}`", link]
    return "\n\n" + "; ".join(filter(None, parts))


def origin(found: dict, machine: str) -> str:
    """Machine, PyTorch, date and commit of a result, if it was measured in a clone."""
    commit, _, changed = (found["git_commit"] or "no commit").partition("-")
    commit = commit[:9] + (" with uncommitted changes" if changed else "")
    return "; ".join([machine, f"torch {found['versions']['torch']}", found["date"], commit])


def machine_line(machine: dict, on_cpu: bool = True) -> str:
    if on_cpu:
        return ", ".join([machine["cpu"], f"{machine['cores']} cores", *machine["cpu_flags"]])
    return ", ".join(machine["gpus"] + machine.get("power_limits", []))


def size_name(size: float) -> str:
    """A size in KiB or MiB."""
    return f"{size / 2**20:.3g} MiB" if size >= 2**20 else f"{size / 2**10:.3g} KiB"
