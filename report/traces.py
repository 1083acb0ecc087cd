"""Read the traces of all ranks: the rows that --trace adds to a trace of torch.profiler.

See harness/trace_rows.py. Files with only these rows, as in results/traces/, are small.
"""

import gzip
import json
import zlib
from pathlib import Path
from typing import NamedTuple

from report.results import Unusable

KINDS = ("phases", "compute", "communication", "overlap")
UNSEEN = 20  # microseconds: shorter gaps are closed
DAMAGED = (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError)


class Bar(NamedTuple):
    """A span in a row, in milliseconds from the start of the trace."""

    name: str
    begin: float
    end: float
    bytes: int | None


Rank = dict[str, list[Bar]]  # bars by kind


def read_traces(folder: Path) -> list[Rank]:
    """The rows of all ranks, on a common clock that starts with the first of them. ``Unusable``:
    there is no trace, or one cannot be read or lacks the rows."""
    found = []
    for rows in read_ranks(folder):
        kinds = {kind: [] for kind in KINDS}
        for row in rows:
            begin, size = row["ts"] / 1e3, row.get("args", {}).get("bytes")
            kinds[row["cat"]].append(Bar(row["name"], begin, begin + row["dur"] / 1e3, size))
        found.append(kinds)
    return found


def read_ranks(folder: Path) -> list[list[dict]]:
    """The events of the rows of all ranks, sorted by start, in microseconds from the first."""
    files = {path.name.partition(".")[0]: path for path in folder.glob("rank*.json.gz")}
    for i in range(len(files) or 1):
        if f"rank{i}" not in files:
            again = "train with --trace N and give the folder trace of its --output-dir"
            raise Unusable(f"{folder} has {len(files)} traces, but none of rank{i}; {again}")
    ranks = [read_rows(files[f"rank{i}"]) for i in range(len(files))]
    first = min(row["ts"] for rows in ranks for row in rows)
    ranks = [[row | {"ts": row["ts"] - first} for row in rows] for rows in ranks]
    return [sorted(rows, key=lambda row: row["ts"]) for rows in ranks]


def read_rows(path: Path) -> list[dict]:
    """The events of the rows of a file, in microseconds of the machine's clock."""
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
    return rows


def slim(source: Path, target: Path) -> None:
    """Copy only these rows of traces, and close gaps in compute that are too short to see."""
    target.mkdir(parents=True, exist_ok=True)
    for i, rows in enumerate(read_ranks(source)):
        kept, last = [], {}  # the last row of a kind
        for row in rows:
            kind, begin, end = row["cat"], row["ts"], row["ts"] + row["dur"]
            before = last.get(kind) if kind in ("compute", "overlap") else None
            if before and begin - before["ts"] - before["dur"] < UNSEEN:
                before["dur"] = round(end - before["ts"], 1)
            else:
                last[kind] = row | {"ts": round(begin, 1), "dur": round(end - begin, 1)}
                kept.append(last[kind])
        text = json.dumps({"traceEvents": kept}, separators=(",", ":"))
        (target / f"rank{i}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
