"""Draw what --trace wrote: a picture of each rank's steps in time.

Draw        python timeline.py runs/pytorch_torchrun_DDP/trace
            writes timeline.svg beside the traces: ranks from top to bottom, phases and compute
            above, communication below, dark where it lies under compute.
Keep        python timeline.py runs/pytorch_torchrun_DDP/trace --slim results/traces/torchrun_DDP
            copies what the picture needs: a few kilobytes of each rank. Pictures of what is there
            are drawn by benchmark.py --render.
"""

import argparse
from pathlib import Path

from harness.command_line import ArgumentParser, check_writable, fail
from report import timeline_picture
from report.results import Unusable


def main():
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    # fmt: off
    parser.add_argument("folder", type=Path, help="with a trace of each rank")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="(default: FOLDER/timeline.svg)"
    )
    parser.add_argument("--slim", type=Path, metavar="DIR", help="copy small traces to it instead")
    # fmt: on
    args = parser.parse_args()
    output = args.output or args.folder / "timeline.svg"
    try:
        if args.slim:
            check_writable(args.slim, f"--slim {args.slim}")
            return timeline_picture.slim(args.folder, args.slim)
        picture = timeline_picture.draw(timeline_picture.read_traces(args.folder))
    except Unusable as error:
        fail(str(error))
    check_writable(output.parent, f"--output {output}")
    output.write_text(picture)
    print(f"drawn: {output}")


if __name__ == "__main__":
    main()
