"""What every table is made of: columns, each with its Chinese title, and the line below."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from report import fresh

TITLES: dict[str, str] = {}  # of what was drawn: Chinese, by the English ones


class Column(NamedTuple):
    """A column of a table: the one place to edit for a new one.

    Args:
        title: or a function of all rows that returns one of the keys of ``chinese``.
        chinese: the title in Chinese, or a dictionary of titles; empty if it is the same.
        value: a function of a row; for ``None`` the cell is empty.
        form: of the cell, as in f-strings.
    """

    title: str | Callable
    chinese: str | dict
    value: Callable
    form: str = ""


def field(name: str, title: str, chinese: str, form: str = "") -> Column:
    """A column of what a row has by this name."""
    return Column(title, chinese, lambda row: row[name], form)


def draw(rows: Iterable, *columns: Column) -> str:
    rows = list(rows)
    heads = [c.title(rows) if callable(c.title) else c.title for c in columns]
    for head, chinese in zip(heads, (c.chinese for c in columns), strict=True):
        TITLES[head] = chinese[head] if isinstance(chinese, dict) else chinese or head
    cells = [[(c.value(row), c.form) for c in columns] for row in rows]
    lines = [["" if v is None else f"{v:{form}}" for v, form in line] for line in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *lines])


def footer(root: Path, found: dict, file: str, *before: str, after: str = "", commands=None) -> str:
    """The line below a table: machine and what was run (``before``), version, repeats (``after``),
    the file in results/, and what of the measured code has changed since (:func:`fresh.note`)."""
    parts = [*before, f"torch {found['versions']['torch']}", after]
    parts = [*filter(None, parts), f"[results/{file}](results/{file})"]
    return f"\n\n{'; '.join(parts)}{fresh.note(root, found, commands)}"


def machine_line(machine: dict, on_cpu: bool = True) -> str:
    if on_cpu:
        return ", ".join([machine["cpu"], f"{machine['cores']} cores", *machine["cpu_flags"]])
    return ", ".join(machine["gpus"] + machine.get("power_limits", []))


def gib(size: float | None) -> str:
    """Bytes in GiB; empty if there are none."""
    return f"{size / 2**30:.2f}" if size else ""


def digits(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def size_name(size: float) -> str:
    """A size in KiB or MiB."""
    return f"{size / 2**20:.3g} MiB" if size >= 2**20 else f"{size / 2**10:.3g} KiB"
