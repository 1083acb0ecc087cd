"""Measure the scripts on the same work, and write the results into these pages.

Measure     python benchmark.py --suite gpt
            The suites are the files of measure/suites/. Each row runs in fresh processes with its
            own launch command, and the rows alternate (A B C, A B C, ...). The results go to
            results/SUITE.json, with --only to results/SUITE.only.json; a row within 10% (memory:
            2%) of its last measurement keeps the old figures and their date. A row that fails
            reports why, and the others continue. Suites without rows have steps, of which the last
            one measures, or commands whose output is recorded. shakespeare needs its text in data/,
            and gpu data/gpt2.txt, which measure/gpu_session.sh writes.
Doubt       python benchmark.py --suite gpt --only "FSDP x4" --again
            Measures rows once more, prints each figure beside the one in results/ with the ratio,
            and writes nothing.
Dry run     python benchmark.py --suite gpu --dry-run
            Prints each row's command, and why this machine would skip it. Starts nothing.
Resume      Run the same command again: an interrupted measurement continues where it stopped.
Release     measure/release.sh
            Measures all that the pages show.
Render      python benchmark.py --render
            Rewrites the tables in README and docs/, in both languages, and the plots, from
            results/.
Check       python benchmark.py --check
            Fails if a table or a plot does not match results/.
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from report import pages
from report.results import Unusable
from website import schematics

ROOT = Path(__file__).resolve().parent
SUITES = ROOT / "measure" / "suites"


def main():
    args = parse_args()
    try:
        if args.suite:
            from measure import runner  # imports PyTorch, which tables do not need

            runner.measure(args)
        else:
            render(check=args.check)
    except Unusable as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    print(f"benchmark: error: {message}", file=sys.stderr)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors, like that of harness/cli.py, which imports PyTorch."""

    def error(self, message: str) -> NoReturn:
        fail(f"{message} (--help lists the flags)")


def parse_args() -> argparse.Namespace:
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    # fmt: off
    flag = parser.add_argument
    flag("--suite", choices=sorted(path.stem for path in SUITES.glob("*.json")),
         help="measure the suite of measure/suites/NAME.json")
    flag("--only", nargs="+", metavar="ROW", default=[], help="measure only these rows")
    flag("--again", action="store_true",
         help="compare with results/SUITE.json, and write nothing")
    flag("--dry-run", action="store_true", help="print the commands without running them")
    flag("--render", action="store_true", help="write the results into pages and plots")
    flag("--check", action="store_true", help="fail if pages or plots differ from the results")
    # fmt: on
    args = parser.parse_args()
    if bool(args.suite) + args.render + args.check != 1:
        fail("give one of --suite, --render and --check (--help lists the flags)")
    if not args.suite and (args.only or args.again or args.dry_run):
        fail("--only, --again and --dry-run need --suite")
    return args


def render(check: bool) -> None:
    """Rewrite the pages and draw the plots; with ``check``, only fail if anything would change."""
    changed, drawn = pages.find_changes()
    for path, text in schematics.pictures(ROOT).items():
        if not path.is_file() or path.read_text() != text:
            changed[path] = text
    names = ", ".join(str(path.relative_to(ROOT)) for path in [*changed, *drawn])
    if check and names:
        print(f"out of date: {names}; run python benchmark.py --render", file=sys.stderr)
        raise SystemExit(1)
    if not check:
        pages.render(changed, drawn)
        print(f"rendered: {names or 'nothing, all are up to date'}")


if __name__ == "__main__":
    main()
