"""Make one small wrong change after the other, and see whether the tests find it.

    python measure/mutations.py [NAME ...]

Each row of mutations.json replaces a piece of text in a copy of git's index, and runs the
pytest arguments of the row until a test fails. A change is

    found       a test failed, which is printed, or the tests did not end within LIMIT
    survived    all these tests passed
    outdated    the text to be replaced is not in the file exactly once

Exit code: 0 if all changes were found, else 1.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".json")
LIMIT = 900  # seconds for the tests of a change


def try_out(row: dict[str, str]) -> tuple[str, str]:
    """Make the change in a copy, and run its tests. The outcome, and the test that failed."""
    with tempfile.TemporaryDirectory() as folder:
        copy = ["git", "checkout-index", "--all", f"--prefix={folder}/"]
        subprocess.run(copy, cwd=ROOT, check=True)
        path = Path(folder, row["file"])
        text = path.read_text() if path.exists() else ""
        if text.count(row["old"]) != 1:
            return "outdated", ""
        path.write_text(text.replace(row["old"], row["new"]))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
        command += shlex.split(row["tests"])
        env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        options = {"cwd": folder, "env": env, "capture_output": True, "text": True}
        try:
            finished = subprocess.run(command, **options, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return "found", f"no end within {LIMIT} s"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", finished.stdout, re.MULTILINE)
    if finished.returncode and not failed:  # no test was selected, or pytest itself failed
        raise RuntimeError(f"{row['name']}: {shlex.join(command)}\n{finished.stdout[-2000:]}")
    return ("found", failed[1]) if failed else ("survived", "")


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    rows = {row["name"]: row for row in json.loads(TABLE.read_text())}
    parser.add_argument("names", nargs="*", metavar="NAME", help="these changes (default: all)")
    names = parser.parse_args().names or rows
    if unknown := set(names) - set(rows):
        parser.error(f"{unknown.pop()}: not in {TABLE.name}")
    outcomes = []
    for name in names:
        outcome, by = try_out(rows[name])
        print(f"{name:24} {outcome:9} {by}", flush=True)
        outcomes.append(outcome)
    sys.exit(any(outcome != "found" for outcome in outcomes))


if __name__ == "__main__":
    main()
