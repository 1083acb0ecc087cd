"""Read what benchmark.py left in results/, and combine the figures of several runs."""

import functools
import json
import re
import statistics
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = 1  # of the files in results/ that a suite leaves


class Unusable(Exception):
    """A file that cannot be rendered or updated; the message names the file and the reason."""


def load(path: Path, keys: Iterable[str] = (), again: str = "measure it again") -> dict:
    """A result; empty if there is none.

    Args:
        keys: that it has to have.
        again: how to make it, for the error message.

    Raises:
        Unusable: it is damaged, lacks a key, or has another schema.
    """
    try:
        found = json.loads(path.read_text())
        missing = [key for key in keys if key not in found]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise Unusable(f"{path} cannot be used ({why}); {again}") from None
    if missing:
        raise Unusable(f"{path} has no {missing[0]}; {again}")
    if found.get("schema", SCHEMA) != SCHEMA:
        raise Unusable(f"{path} has schema {found['schema']} instead of {SCHEMA}; {again}")
    return found


def read_suite(root: Path, name: str) -> dict:
    """The results of a suite; without rows if there are none. See :func:`load`."""
    return load(root / "results" / f"{name}.json", ("schema", "rows")) or {"rows": []}


@functools.cache
def read_words() -> dict[str, dict[str, str]]:
    """The Chinese translations for tables and pictures, by the English words."""
    return json.loads(Path(__file__).with_name("chinese.json").read_text())


def runs_of(rows: list[dict]) -> list[dict]:
    return [run for row in rows for run in row["runs"]]


def of_all(runs: list[dict], *keys: str) -> list:
    """A value of each run; ``None`` if it was not measured."""
    values = runs
    for key in keys:
        values = [value and value.get(key) for value in values]
    return values


def middle(values: list) -> float | None:
    """The median of the available values."""
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None


def speeds_of(runs: list[dict]) -> list[float]:
    """Tokens per second, or images, or reviews."""
    return [run[unit_of(run).replace("/s", "_per_second")] for run in runs]


def unit_of(run: dict) -> str:
    """The unit of :func:`speeds_of`."""
    names = (name for name in ("tokens", "reviews") if f"{name}_per_second" in run)
    return f"{next(names, 'images')}/s"


def size_of(run: dict) -> str:
    """The size of an input: image size or context."""
    if "context" in run:
        return f"context {run['context']}"
    return f"{run['image_size']}×{run['image_size']}"


def devices_of(run: dict) -> int:
    """Number of devices of all ranks: DP uses all GPUs from one process. Older results lack it."""
    return run.get("devices", run["world_size"])


def name_of(row: dict) -> str:
    """The name of a row, without its number of ranks."""
    return re.sub(r" x\d+$", "", row["name"])
