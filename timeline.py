"""Draw the timeline of each rank from the traces that --trace wrote.

Draw        python timeline.py runs/pytorch_torchrun_DDP/trace
            writes timeline.svg beside the traces: ranks from top to bottom, phases and compute
            above, communication below, dark where it overlaps with compute.
Keep        python timeline.py runs/pytorch_torchrun_DDP/trace --slim results/traces/torchrun_DDP
            copies what the picture needs, a few kilobytes per rank. benchmark.py --render draws
            the traces in results/traces.
"""

import argparse
from pathlib import Path

from harness.cli import ArgumentParser, check_writable, fail
from report import draw, traces
from report.results import Unusable


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
            return traces.slim(args.folder, args.slim)
        ranks = traces.read_traces(args.folder)
    except Unusable as error:
        fail(str(error))
    check_writable(output.parent, f"--output {output}")
    draw.draw(output, {"ranks": ranks, "words": {}})
    print(f"drawn: {output}")


if __name__ == "__main__":
    main()
