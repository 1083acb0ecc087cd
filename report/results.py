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
    """A file that cannot be rendered, or rendered into; the message says which one, and why."""


def read_results(path: Path) -> dict:
    """A suite's file.

    Raises:
        FileNotFoundError: there is none.
        Unusable: it is damaged, or of another version of this program.
    """
    found = read_json(path, ("schema", "rows"), "measure it again")
    if found["schema"] != SCHEMA:
        theirs = found["schema"]
        raise Unusable(f"{path} is of schema {theirs}, and this is {SCHEMA}; measure it again")
    return found


def read_figures(path: Path, keys: Iterable[str], again: str) -> dict:
    """A file that a suite of steps leaves, and ``again`` makes; empty if there is none.

    Raises:
        Unusable: it is damaged, or lacks one of the keys.
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
    """What tables and pictures say in Chinese, by the English words."""
    return json.loads(Path(__file__).with_name("chinese.json").read_text())


def of_all(runs: list[dict], *keys: str) -> list:
    """A figure of each run."""
    values = runs
    for key in keys:
        values = [value and value[key] for value in values]
    return values


def speeds_of(runs: list[dict]) -> list[float]:
    """Tokens per second, or images, or reviews."""
    return [run[unit_of(run).replace("/s", "_per_second")] for run in runs]


def unit_of(run: dict) -> str:
    """Of :func:`speeds_of`."""
    names = (name for name in ("tokens", "reviews") if f"{name}_per_second" in run)
    return f"{next(names, 'images')}/s"


def size_of(run: dict) -> str:
    """Of what a model sees at once."""
    if "context" in run:
        return f"context {run['context']}"
    return f"{run['image_size']}×{run['image_size']}"


def middle(values: list) -> float | None:
    """The median of those that there are."""
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None


def devices_of(run: dict) -> int:
    """That it computed on: DP uses all GPUs from one process. Older results do not say it."""
    return run.get("devices", run["world_size"])


def name_of(row: dict) -> str:
    """Of a row, without its number of ranks."""
    return re.sub(r" x\d+$", "", row["name"])
