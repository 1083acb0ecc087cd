"""Measure all that the pages show, by the commands of config/measure_all.json, in their order.

A part that was measured with the same code is not measured again, so the same command resumes an
interrupted measurement. results/all.json has the time and the commit of each part.
"""

import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from report import stale
from report.results import Unusable

QUIET = 0.25  # cores that other programs may use
SETTINGS = ("job", "jobs", "steps", "memory", "repeats")  # of a suite
CODE = (*stale.BELOW, "libraries")  # and the training scripts
FAILED, STOPPED = 1, 130  # exit codes


def measure(root: Path, commit: str, gpu: bool, only: Iterable[str] = ()) -> list[str]:
    """Run the parts that are not done; returns the names of those that failed.

    Args:
        commit: of the code.
        gpu: whether there is one, for the parts that need it.
        only: these parts; all if it is empty.

    Raises:
        Unusable: the machine is too busy for a part with times, or a part is unknown.
    """
    parts = list_parts(root, gpu)
    if unknown := set(only) - set(parts):
        raise Unusable(f"--only {unknown.pop()}: the parts are {', '.join(parts)}")
    parts = {name: parts[name] for name in only or parts}
    todo = to_do(root, parts)
    timed = [name for name in todo if not parts[name].get("untimed")]
    if timed and (busy := busy_cores()) > QUIET:
        raise Unusable(f"other programs use {busy:.1f} cores: {busiest()}; stop them, or wait")
    return [name for name in todo if run_part(root, name, parts[name], commit)]


def list_parts(root: Path, gpu: bool) -> dict[str, dict]:
    parts = json.loads((root / "config" / "measure_all.json").read_text())
    return {name: part for name, part in parts.items() if gpu or not part.get("needs_gpu")}


def run_part(root: Path, name: str, part: dict, commit: str) -> int:
    """Run a part, with its output in runs/all/NAME.log. Returns its exit code.

    If the last attempt failed (but was not stopped) with the same code as now, a part that has
    commands for ``again`` runs those instead.
    """
    log = root / "runs" / "all" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    before, commands = read(root).get(name, {}), part["commands"]
    if not before.get("code") or not is_current(root, name, part, before):
        before = {}
    elif before["code"] == FAILED and "again" in part:
        commands, commit = part["again"], before["git_commit"]
    about = {
        "commands": part["commands"], "git_commit": commit, "busy_cores": round(busy_cores(), 2),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }  # fmt: skip
    print(f"{name}: started; tail -f {log.relative_to(root)}", flush=True)
    started, code = time.monotonic(), STOPPED
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    try:
        with log.open("w") as output:
            code = subprocess.run(
                " && ".join(commands), shell=True, cwd=root, env=os.environ | {"PATH": path},
                stdout=output, stderr=output,
            ).returncode  # fmt: skip
            if failed := failed_rows(root, name):
                code = code or FAILED
                print(f"failed: {', '.join(failed)}", file=output)
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        raise SystemExit(STOPPED) from None
    finally:
        seconds = round(before.get("seconds", 0) + time.monotonic() - started)
        parts = read(root) | {name: about | {"seconds": seconds, "code": code}}
        (root / "results" / "all.json").write_text(json.dumps(parts, indent=1) + "\n")
    print(f"{name}: {minutes(seconds)}" + (f", exit code {code}" if code else ""), flush=True)
    return code


def failed_rows(root: Path, name: str) -> list[str]:
    """Rows of a suite's results that have to run again; too little memory is a result."""
    path = root / "results" / f"{name}.json"
    rows = json.loads(path.read_text()).get("rows", []) if path.is_file() else []
    return [row["name"] for row in rows if row.get("failed") not in (None, "out of memory")]


def read(root: Path) -> dict:
    path = root / "results" / "all.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def to_do(root: Path, parts: dict[str, dict]) -> list[str]:
    return [name for name, part in parts.items() if not is_done(root, name, part)]


def is_done(root: Path, name: str, part: dict) -> bool:
    found = read(root).get(name)
    return bool(found) and not found["code"] and is_current(root, name, part, found)


def is_current(root: Path, name: str, part: dict, found: dict) -> bool:
    """Whether a part was measured with the code as it is now (what all runs use, and the folders
    that it names in addition), and its suite has no more rows or other flags than it had then."""
    scripts = [path.name for path in root.glob("*_*.py")]
    code = (*CODE, *scripts, *part.get("uses", ()))
    if stale.note(root, found["git_commit"], part["commands"], code):
        return False
    suite = root / "config" / f"suite_{name}.json"
    before = stale.git(root, "show", f"{found['git_commit']}:config/{suite.name}")
    if not suite.is_file():
        return True
    if before is None:
        return False
    now, before = json.loads(suite.read_text()), json.loads(before)
    same = all(now.get(key) == before.get(key) for key in SETTINGS)
    return same and all(row in before.get("rows", []) for row in now.get("rows", []))


def print_plan(root: Path, gpu: bool) -> None:
    """Minutes of each part, by its last time or by the results of its suite."""
    whole, unknown, found = 0.0, [], read(root)
    for name, part in list_parts(root, gpu).items():
        seconds = found.get(name, {}).get("seconds") or seconds_of_suite(root, name)
        if is_done(root, name, part):
            print(f"{name:12} {minutes(seconds)}  done")
        elif seconds:
            print(f"{name:12} {minutes(seconds)}")
            whole += seconds
        else:
            print(f"{name:12} unknown")
            unknown.append(name)
    print(f"{'to do':12} {minutes(whole)}" + (f" and {', '.join(unknown)}" if unknown else ""))


def seconds_of_suite(root: Path, name: str) -> float:
    """By the runs in a suite's results; rows without one take as long as the median row."""
    config, path = (
        root / folder for folder in (f"config/suite_{name}.json", f"results/{name}.json")
    )
    if not config.is_file() or not path.is_file():
        return 0
    suite, measured = json.loads(config.read_text()), json.loads(path.read_text()).get("rows", [])
    runs = {row["name"]: [run["seconds_process"] for run in row["runs"] if "seconds_process" in run]
            for row in measured if row.get("runs")}  # fmt: skip
    known = {name: statistics.median(seconds) for name, seconds in runs.items() if seconds}
    if not known:
        return 0
    names = [f"{row['name']} x{n}" if n else row["name"]
             for row in suite["rows"] for n in row.get("ranks", [None])]  # fmt: skip
    usual = statistics.median(known.values())
    each = suite.get("repeats", 1) + ("memory" in suite)
    return each * sum(known.get(name, usual) for name in names)


def minutes(seconds: float) -> str:
    return f"{seconds / 60:5.1f} min"


def busy_cores(seconds: float = 1.0) -> float:
    """How many cores other programs use; by the load of the last minute where there is no /proc."""

    def worked() -> int:
        user, nice, system, _idle, _wait, *rest = map(int, stat.read_text().split()[1:9])
        return user + nice + system + sum(rest[:2])

    stat = Path("/proc/stat")
    if not stat.is_file():
        return os.getloadavg()[0]
    before = worked()
    time.sleep(seconds)
    return (worked() - before) / os.sysconf("SC_CLK_TCK") / seconds


def busiest() -> str:
    """The programs that use most of the CPU."""
    listed = subprocess.run(
        ["ps", "-eo", "pcpu,comm", "--sort=-pcpu"], capture_output=True, text=True
    )
    return ", ".join(line.split(None, 1)[1] for line in listed.stdout.splitlines()[1:4])
