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


def read_results(path: Path) -> dict:
    """Read the results of a suite.

    Raises:
        FileNotFoundError: there is no file.
        Unusable: it is damaged, or has another schema.
    """
    found = read_json(path, ("schema", "rows"), "measure it again")
    if found["schema"] != SCHEMA:
        theirs = found["schema"]
        raise Unusable(f"{path} has schema {theirs} instead of {SCHEMA}; measure it again")
    return found


def read_figures(path: Path, keys: Iterable[str], again: str) -> dict:
    """Read the results of a suite of steps, which the command ``again`` writes; empty if there are
    none.

    Raises:
        Unusable: the file is damaged, or lacks one of the keys.
    """
    try:
        return read_json(path, keys, f"measure it again: {again}")
    except FileNotFoundError:
        return {}


def read_json(path: Path, keys: Iterable[str], cure: str) -> dict:
    """See :func:`read_results`."""
    try:
        found = json.loads(path.read_text())
        missing = [key for key in keys if key not in found]
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise Unusable(f"{path} cannot be used ({why}); {cure}") from None
    if missing:
        raise Unusable(f"{path} has no {missing[0]}; {cure}")
    return found


@functools.cache
def read_words() -> dict[str, dict[str, str]]:
    """The Chinese translations for tables and pictures, by the English words."""
    return json.loads(Path(__file__).with_name("chinese.json").read_text())


def of_all(runs: list[dict], *keys: str) -> list:
    """A value of each run."""
    values = runs
    for key in keys:
        values = [value and value[key] for value in values]
    return values


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


def middle(values: list) -> float | None:
    """The median of the available values."""
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None


def devices_of(run: dict) -> int:
    """Number of devices per rank: DP uses all GPUs from one process. Older results lack it."""
    return run.get("devices", run["world_size"])


def name_of(row: dict) -> str:
    """The name of a row, without its number of ranks."""
    return re.sub(r" x\d+$", "", row["name"])
