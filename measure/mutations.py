"""Make one small wrong change after the other, and see whether the tests find it.

    python measure/mutations.py --jobs 2
    python measure/mutations.py --only set_epoch no_rename

Each row of mutations.json replaces a piece of text in a copy of the tracked files, and runs the
pytest arguments of the row until a test fails. A change is

    found       a test failed; results/mutations.json names it
    survived    all these tests passed
    outdated    the text to be replaced is not in the file exactly once

Exit code: 0 if all changes were found, else 1.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.measure import git_commit, versions  # noqa: E402

TABLE = Path(__file__).with_suffix(".json")
LIMIT = 900  # seconds for the tests of a change


def copy_checkout(target: Path) -> None:
    """Copy the tracked files, as they are."""
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def try_out(row: dict[str, str]) -> dict:
    """Make the change in a copy, run its tests, and say what became of it.

    Args:
        row: ``name``, ``file``, ``old``, ``new`` and ``tests``.

    Returns:
        the row with ``outcome``, the test that failed in ``by``, and ``seconds``.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy_checkout(Path(folder))
        path = Path(folder, row["file"])
        text = path.read_text() if path.exists() else ""
        if text.count(row["old"]) != 1:
            return row | {"outcome": "outdated", "by": "", "seconds": 0}
        path.write_text(text.replace(row["old"], row["new"]))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "1", "-p", "no:cacheprovider"]
        command += shlex.split(row["tests"])
        env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        finished = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT
        )
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", finished.stdout, re.MULTILINE)
    if finished.returncode and not failed:  # no test was selected, or pytest itself failed
        raise RuntimeError(f"{row['name']}: {shlex.join(command)}\n{finished.stdout[-2000:]}")
    about = {"outcome": "found", "by": failed[1]} if failed else {"outcome": "survived", "by": ""}
    return row | about | {"seconds": round(time.monotonic() - begin)}


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these changes (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="changes at the same time (default: 1)")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "mutations.json")
    args = parser.parse_args()
    rows = json.loads(TABLE.read_text())
    if unknown := set(args.only or []) - {row["name"] for row in rows}:
        parser.error(f"--only {' '.join(sorted(unknown))}: not in {TABLE.name}")
    rows = [row for row in rows if not args.only or row["name"] in args.only]
    found = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(try_out, rows):
            print(f"{row['name']:24} {row['outcome']:9} {row['seconds']:4} s  {row['by']}")
            found.append({name: row[name] for name in ("name", "file", "outcome", "by")})
    about = {"git_commit": git_commit(), "versions": versions(), "mutations": found}
    args.output.write_text(json.dumps(about, indent=1) + "\n")
    sys.exit(any(row["outcome"] != "found" for row in found))


if __name__ == "__main__":
    main()
