"""Draw the timeline of each rank from the traces that --trace wrote.

Draw        python timeline.py runs/pytorch_torchrun_DDP/trace
            writes timeline.svg beside the traces: ranks from top to bottom, phases and compute
            above, communication below, dark where it overlaps with compute.
Keep        python timeline.py runs/pytorch_torchrun_DDP/trace --slim results/traces/torchrun_DDP
            copies what the picture needs, a few kilobytes per rank. benchmark.py --render draws
            the traces in results/traces.
"""

import argparse
import gzip
import json
from pathlib import Path

from harness.cli import ArgumentParser, check_writable, fail
from report import draw, traces
from report.results import Unusable

UNSEEN = 0.02  # milliseconds: shorter gaps in compute are closed


def main():
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    # fmt: off
    parser.add_argument("folder", type=Path, help="folder with one trace per rank")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="the picture (default: FOLDER/timeline.svg)"
    )
    parser.add_argument("--slim", type=Path, metavar="DIR", help="copy reduced traces here instead")
    # fmt: on
    args = parser.parse_args()
    output = args.output or args.folder / "timeline.svg"
    try:
        if args.slim:
            check_writable(args.slim, f"--slim {args.slim}")
            return slim(args.folder, args.slim)
        ranks = traces.read_traces(args.folder)
    except Unusable as error:
        fail(str(error))
    check_writable(output.parent, f"--output {output}")
    draw.draw(output, {"ranks": ranks, "words": {}})
    print(f"drawn: {output}")


def slim(source: Path, target: Path) -> None:
    """Copy only what the picture needs, without gaps in compute that are too short to see."""
    target.mkdir(parents=True, exist_ok=True)
    for i, rank in enumerate(traces.read_traces(source)):
        rank |= {kind: traces.joined(rank[kind], UNSEEN) for kind in ("compute", "overlap")}
        rows = [
            {"cat": kind, "name": bar.name, "ts": round(1e3 * bar.begin, 1),
             "dur": round(1e3 * (bar.end - bar.begin), 1), "args": {"bytes": bar.bytes}}
            for kind, bars in rank.items() for bar in bars
        ]  # fmt: skip
        text = json.dumps({"traceEvents": rows}, separators=(",", ":"))
        (target / f"rank{i}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
