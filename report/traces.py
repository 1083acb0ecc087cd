"""Read the traces of all ranks: the rows that --trace adds to a trace of torch.profiler.

See harness/trace_rows.py. Files with only these rows, as in results/traces/, are small.
"""

import gzip
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from report.results import Unusable

KINDS = ("phases", "compute", "communication", "overlap")
DAMAGED = (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError)


class Bar(NamedTuple):
    """A span in a row, in milliseconds from the start of the trace."""

    name: str
    begin: float
    end: float
    bytes: int | None


Rank = dict[str, list[Bar]]  # bars by kind


def read_traces(folder: Path) -> list[Rank]:
    """The bars of all ranks, on a common clock that starts with the first of them. ``Unusable``:
    there is no trace, or one cannot be read or lacks the rows."""
    files = {path.name.partition(".")[0]: path for path in folder.glob("rank*.json.gz")}
    for i in range(len(files) or 1):
        if f"rank{i}" not in files:
            again = "train with --trace N and give the folder trace of its --output-dir"
            raise Unusable(f"{folder} has {len(files)} traces, but none of rank{i}; {again}")
    ranks = [read_rows(files[f"rank{i}"]) for i in range(len(files))]
    first = min(row["ts"] for rows in ranks for row in rows)
    return [bars_of(rows, first) for rows in ranks]


def bars_of(rows: list[dict], first: float) -> Rank:
    """The bars of a rank; ``first``: the start of the trace in the time of the rows."""
    bars = {kind: [] for kind in KINDS}
    for row in rows:
        begin = (row["ts"] - first) / 1e3
        size = row.get("args", {}).get("bytes")
        bars[row["cat"]].append(Bar(row["name"], begin, begin + row["dur"] / 1e3, size))
    return bars


def read_rows(path: Path) -> list[dict]:
    """The events of the rows of a file by start, in microseconds of the machine's clock."""
    again = "train with --trace once more"
    try:
        trace = json.loads(gzip.decompress(path.read_bytes()))
        rows = [row for row in trace["traceEvents"] if row.get("cat") in KINDS]
        base = trace.get("baseTimeNanoseconds", 0) / 1e3
        rows = [row | {"ts": row["ts"] + base, "dur": row["dur"] + 0} for row in rows]
    except DAMAGED as error:
        raise Unusable(f"{path} is damaged ({type(error).__name__}: {error}); {again}") from None
    if not any(row["cat"] == "phases" for row in rows):
        raise Unusable(f"{path} has no phases of a step, as --trace writes them; {again}")
    return sorted(rows, key=lambda row: row["ts"])


def joined(bars: Iterable[Bar], unseen: float) -> list[Bar]:
    """The bars without gaps shorter than this, which nobody would see."""
    found: list[Bar] = []
    for bar in bars:
        if found and bar.begin - found[-1].end < unseen:
            found[-1] = found[-1]._replace(end=bar.end)
        else:
            found.append(bar)
    return found
