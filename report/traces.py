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
    """The rows of all ranks, on a common clock that starts with the first of them.

    Raises:
        Unusable: there is no trace, or one cannot be read or lacks the rows.
    """
    found = []
    for rows in read_ranks(list_traces(folder)):
        kinds = {kind: [] for kind in KINDS}
        for row in rows:
            begin, size = row["ts"] / 1e3, row.get("args", {}).get("bytes")
            kinds[row["cat"]].append(Bar(row["name"], begin, begin + row["dur"] / 1e3, size))
        found.append(kinds)
    return found


def list_traces(folder: Path) -> list[Path]:
    """The files of the ranks, in order."""
    again = "train with --trace N and give the folder trace of its --output-dir"
    if not folder.is_dir():
        raise Unusable(f"{folder} is no folder; {again}")
    files = {path.name.partition(".")[0]: path for path in folder.glob("rank*.json.gz")}
    if not files:
        raise Unusable(f"{folder} has no traces (rank0.pt.trace.json.gz, ...); {again}")
    missing = [f"rank{i}" for i in range(len(files)) if f"rank{i}" not in files]
    if missing:
        raise Unusable(f"{folder} has {len(files)} traces, but none of {missing[0]}; {again}")
    return [files[f"rank{i}"] for i in range(len(files))]


def read_rows(path: Path) -> list[dict]:
    """The events of the rows, in microseconds of the machine's clock."""
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


def read_ranks(paths: list[Path]) -> list[list[dict]]:
    """The rows of all ranks, sorted by start, in microseconds from the first."""
    ranks = [read_rows(path) for path in paths]
    first = min(row["ts"] for rows in ranks for row in rows)
    ranks = [[row | {"ts": row["ts"] - first} for row in rows] for rows in ranks]
    return [sorted(rows, key=lambda row: row["ts"]) for rows in ranks]


def slim(source: Path, target: Path) -> None:
    """Copy only these rows of traces, and close gaps in compute that are too short to see."""
    target.mkdir(parents=True, exist_ok=True)
    paths = list_traces(source)
    for path, rows in zip(paths, read_ranks(paths), strict=True):
        kept, last = [], {}  # the last row of a kind
        for row in rows:
            kind, begin, end = row["cat"], row["ts"], row["ts"] + row["dur"]
            before = last.get(kind) if kind in ("compute", "overlap") else None
            if before and begin - before["ts"] - before["dur"] < UNSEEN:
                before["dur"] = round(end - before["ts"], 1)
                continue
            last[kind] = row | {"ts": round(begin, 1), "dur": round(end - begin, 1)}
            kept.append(last[kind])
        text = json.dumps({"traceEvents": kept}, separators=(",", ":"))
        name = f"{path.name.partition('.')[0]}.json.gz"
        (target / name).write_bytes(gzip.compress(text.encode(), mtime=0))
