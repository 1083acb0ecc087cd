"""Measure all that the pages show, by the commands of config/measure_all.json, in their order.

A part that was measured with the same code is not measured again, so the same command resumes an
interrupted measurement. results/all.json has the time and the measured files of each part.
"""

import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from report import fresh
from report.results import Unusable

QUIET = 0.25  # cores that other programs may use while a part with times is measured
SETTINGS = ("job", "jobs", "steps", "memory", "repeats")  # of a suite
CODE = (*fresh.BELOW, "hangs")  # and the training scripts
FAILED, STOPPED = 1, 130  # exit codes


def measure(root: Path, commit: str, gpu: bool, only: Iterable[str] = ()) -> list[str]:
    """Run the parts that are not done, of ``only`` if it has any; returns the names of those that
    failed. ``Unusable``: a part is unknown, or the machine is too busy for one with times."""
    parts = list_parts(root, gpu)
    if unknown := set(only) - set(parts):
        raise Unusable(f"--only {unknown.pop()}: the parts are {', '.join(parts)}")
    todo = [name for name in to_do(root, parts) if not only or name in only]
    timed = any(not parts[name].get("untimed") for name in todo)
    if timed and (busy := busy_cores()) > QUIET:
        raise Unusable(f"other programs use {busy:.1f} cores (see top); stop them, or wait")
    return [name for name in todo if run_part(root, name, parts[name], commit)]


def list_parts(root: Path, gpu: bool) -> dict[str, dict]:
    parts = json.loads((root / "config" / "measure_all.json").read_text())
    return {name: part for name, part in parts.items() if gpu or not part.get("needs_gpu")}


def run_part(root: Path, name: str, part: dict, commit: str) -> int:
    """Run a part, with its output in runs/all/NAME.log. Returns its exit code."""
    log = root / "runs" / "all" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    about = {"git_commit": commit, "date": date, "measured": state_of(root, name, part)}
    print(f"{name}: started; tail -f {log.relative_to(root)}", flush=True)
    started, code = time.monotonic(), STOPPED
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    try:
        with log.open("w") as output:
            code = subprocess.run(
                " && ".join(part["commands"]), shell=True, cwd=root,
                env=os.environ | {"PATH": path}, stdout=output, stderr=output,
            ).returncode  # fmt: skip
            if failed := failed_rows(root, name):
                code = code or FAILED
                print(f"failed: {', '.join(failed)}", file=output)
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        raise SystemExit(STOPPED) from None
    finally:
        about |= {"seconds": round(time.monotonic() - started), "code": code}
        parts = read(root) | {name: about}
        (root / "results" / "all.json").write_text(json.dumps(parts, indent=1) + "\n")
    print(f"{name}: {minutes(about)}" + (f", exit code {code}" if code else ""), flush=True)
    return code


def failed_rows(root: Path, name: str) -> list[str]:
    """Rows of a suite's results that have to run again; too little memory is a result."""
    path = root / "results" / f"{name}.json"
    rows = json.loads(path.read_text()).get("rows", []) if path.is_file() else []
    return [row["name"] for row in rows if row.get("failed") not in (None, "out of memory")]


def read(root: Path) -> dict:
    path = root / "results" / "all.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def state_of(root: Path, name: str, part: dict) -> dict[str, str]:
    """Hashes of what a part measures: the code that all runs use and what it names in addition, and
    the settings and each row of its suite."""
    below = (*CODE, *(path.name for path in root.glob("*_*.py")), *part.get("uses", ()))
    found = {"code": fresh.files_of(root, part["commands"], below)}
    path = root / "config" / f"suite_{name}.json"
    suite = json.loads(path.read_text()) if path.is_file() else {}
    found["settings"] = {key: suite.get(key) for key in SETTINGS}
    found |= {row["name"]: row for row in suite.get("rows", [])}
    return {key: fresh.short_hash(value) for key, value in found.items()}


def to_do(root: Path, parts: dict[str, dict]) -> list[str]:
    """The parts that failed, or were measured with other code, or whose suite has new rows."""
    found, todo = read(root), []
    for name, part in parts.items():
        before = found.get(name, {"code": FAILED})
        now = {} if before["code"] else state_of(root, name, part)
        if before["code"] or not now.items() <= before["measured"].items():
            todo.append(name)
    return todo


def print_plan(root: Path, gpu: bool) -> None:
    """Minutes that each part took last time."""
    parts, found = list_parts(root, gpu), read(root)
    todo = to_do(root, parts)
    for name in parts:
        print(f"{name:12} {minutes(found.get(name, {}))}{'' if name in todo else '  done'}")
    known = [found[name] for name in todo if "seconds" in found.get(name, {})]
    print(f"{'to do':12} {minutes({'seconds': sum(part['seconds'] for part in known)})}")


def busy_cores() -> float:
    """How many cores other programs use; by the load of the last minute where there is no /proc."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return os.getloadavg()[0]
    before = list(map(int, stat.read_text().split()[1:9]))
    time.sleep(1)
    ticks = [b - a for a, b in zip(before, map(int, stat.read_text().split()[1:9]), strict=True)]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # without idle, waiting


def minutes(part: dict) -> str:
    return f"{part['seconds'] / 60:5.1f} min" if "seconds" in part else "unknown"
