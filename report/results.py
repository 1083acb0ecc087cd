"""Read what benchmark.py left in results/, and combine the figures of several runs."""

import json
import re
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_YET = "not measured yet: `python benchmark.py --suite {}`"
# Chinese, by the English words: of whole cells, of phrases in notes, and of pictures.
WORDS = json.loads(Path(__file__).with_name("chinese.json").read_text())


class Unusable(Exception):
    """A file that cannot be rendered or updated; the message names the file and the reason."""


def load(path: Path) -> dict:
    """A result; empty if there is none. ``Unusable``: it is damaged."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise Unusable(f"{path} is damaged ({error}); measure it again") from None


def read_result(root: Path, name: str) -> dict:
    """What is in results/; a suite that was not measured has no rows."""
    return load(root / "results" / f"{name}.json") or {"rows": []}


def runs_of(rows: list[dict]) -> list[dict]:
    return [run for row in rows for run in row["runs"]]


def middle(runs: list[dict], *keys: str) -> float | None:
    """The median of a figure over the runs that measured it; ``keys`` lead to it."""
    values = runs
    for key in keys:
        values = [value[key] for value in values if value.get(key) is not None]
    return statistics.median(values) if values else None


def speeds_of(runs: list[dict]) -> list[float]:
    """Tokens per second, or images."""
    return [run[unit_of(run).replace("/s", "_per_second")] for run in runs]


def unit_of(run: dict) -> str:
    """The unit of :func:`speeds_of`."""
    return "tokens/s" if "tokens_per_second" in run else "images/s"


def name_of(row: dict) -> str:
    """The name of a row, without its number of ranks."""
    return re.sub(r" x\d+$", "", row["name"])
