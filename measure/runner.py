"""Run the suites of benchmark.py: rows, each in processes of its own, or steps."""

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tqdm import tqdm

from harness.cli import check_writable, fail
from harness.measure import git_commit, gpu_uuids, hardware, versions
from measure import again
from measure.outcome import is_parameter, read_curve, reason, record
from report import suites
from report.blocks import machine_line, origin
from report.results import load

ROOT = Path(__file__).resolve().parents[1]
SUITES = ROOT / "measure" / "suites"
RESULTS = ROOT / "results"
RUNS = ROOT / "runs" / "benchmark"
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Of result.json, in each run of a row: what tables show, and what it depends on
KEPT = ("technique", "options", "command", "world_size", "devices", "device", "threads", "model")
KEPT += ("context", "image_size", "tie", "experts", "train_samples", "precision", "tf32", "steps")
KEPT += ("global_batch_size", "optimizer", "peak_memory_gib", "state_bytes")
TIMES = ("images_per_second", "tokens_per_second", "step_ms", "first_step_seconds")
TIMES += ("model_tflops", "mfu")


def measure(args: argparse.Namespace) -> None:
    """Run the rows in turns. Write partial results after each run, and the result at the end."""
    suite = read_suite(args.suite)
    names = [row["name"] for row in suite["rows"]]
    for name in args.only:
        if name not in names:
            fail(f"--only {name!r}: suite {args.suite} has {', '.join(names)}")
    suite["rows"] = [row for row in suite["rows"] if not args.only or row["name"] in args.only]
    if args.dry_run:
        return print_plan(suite)
    if suite.get("device") == "cuda" and not torch.cuda.is_available():
        fail(f"--suite {args.suite} needs a GPU and PyTorch finds none; try --suite gpt")
    has_rows = bool(names)
    if args.again and not has_rows:
        fail(f"--again measures rows, and suite {args.suite} has none: --dry-run prints its steps")
    if args.again:
        return measure_again(suite)
    some = ".only" if args.only else ""  # some rows must not replace all
    output = RESULTS / f"{args.suite}{some}.json"
    check_writable(RESULTS, str(RESULTS))
    if has_rows:
        found = measure_rows(suite, output)
    else:
        found = run_steps(suite, RUNS / output.stem)
    old = load(output)
    kept = again.keep_old(found, old, origin_of(suite, old)) if old else found
    write_json(output, kept)
    if has_rows:
        output.with_name(f"{output.stem}.partial.json").unlink(missing_ok=True)  # if a row ran
        print_tables(suite, found)
    print(summary(output, found, kept))
    failed = {row["failed"] for row in found.get("rows", [])}
    if failed - {None, "out of memory"}:  # too little memory is a result
        raise SystemExit(1)


def origin_of(suite: dict, found: dict) -> str:
    """The line that says where a result of a suite is from."""
    if suite.get("predicted"):
        return origin(found, "predicted")
    if "outputs" in suite:  # as below the answers that show them
        return origin(found, found["hardware"]["cpu"])
    return origin(found, machine_line(found["hardware"], suite.get("device") != "cuda"))


def measure_rows(suite: dict, output: Path) -> dict:
    """The result of a suite of rows, whose partial results stay if it is stopped."""
    partial = output.with_name(f"{output.stem}.partial.json")
    found = start_or_continue(partial, suite)
    try:
        run_rows(suite, found, partial, RUNS / output.stem)
    except KeyboardInterrupt:
        print(f"stopped; the same command resumes from {partial}", file=sys.stderr)
        raise SystemExit(130) from None
    return found | {"complete": True}


def measure_again(suite: dict) -> None:
    """Print the figures of rows beside those in results/, which stays as it is."""
    stored = again.by_name(load(RESULTS / f"{suite['name']}.json").get("rows", []))
    for row in suite["rows"]:
        print(f"{row['name']}: {shlex.join(row['command'])}", flush=True)
        if row["left_out"]:
            print(f"    left out: {row['left_out']}")
            continue
        to = RUNS / "again" / slug(row["name"])
        run, why = run_row(row["command"], to, row["timeout"], suite.get("times", True))
        if why:
            fail(f"{row['name']} failed: {why}", code=3)
        for line in again.side_by_side({"runs": [run]}, stored.get(row["name"], {"runs": []})):
            print(f"    {line}")


def print_tables(suite: dict, found: dict) -> None:
    for table in suite["tables"]:
        if any(row["table"] == table for row in found["rows"]):
            print(suites.suite_table(found, table), end="\n\n")


def summary(output: Path, found: dict, kept: dict) -> str:
    """Where the results are, which rows have none, and which keep an earlier measurement's."""
    said = f"done: {output}"
    for how in ("failed", "left_out"):
        names = [row["name"] for row in found.get("rows", []) if row.get(how)]
        if names:
            said += f"; {how.replace('_', ' ')}: {', '.join(names)}"
    if kept is not found:
        said += "; figures that are close to those before stay as they were"
    return said


def read_suite(name: str) -> dict:
    """``measure/suites/NAME.json``, with one row for each number of ranks."""
    suite = json.loads((SUITES / f"{name}.json").read_text())
    gpus = torch.cuda.device_count()
    defaults = {"table": name, "timeout": suite.get("timeout", 900), "needs": []}
    rows = []
    for row in suite.get("rows", []):  # a suite of steps or outputs has none
        ranks = row.get("ranks", [None])
        if ranks == "gpus":  # one, and all of them
            ranks = sorted({1, max(1, gpus)})
        job = suite.get("jobs", {}).get(row.get("table"), suite.get("job", ""))
        for n in ranks:
            words = shlex.split(f"{row['command'].replace('{ranks}', str(n))} {job}")
            label = row["name"] if n is None else f"{row['name']} x{n}"
            own = {key: row[key] for key in defaults if key in row}
            spelled = {**defaults, "name": label, "command": words, "ranks": n or 1, **own}
            rows.append(spelled | {"left_out": "; ".join(reasons_against(spelled)) or None})
    return suite | {"name": name, "rows": rows}


def reasons_against(row: dict) -> list[str]:
    """Why this machine would skip a row."""
    flags = dict(itertools.pairwise(row["command"]))  # and what follows them
    ranks = row["ranks"]
    gpus = torch.cuda.device_count()
    missing = [package for package in row["needs"] if not importlib.util.find_spec(package)]
    why = [f"{package} is not installed" for package in missing]
    if flags.get("--device") == "cuda":
        if not gpus:
            why.append("this machine has no GPU")
        elif gpus < ranks:
            why.append(f"{ranks} ranks need as many GPUs, and this machine has {gpus}")
        if flags.get("--dtype") == "bfloat16":
            old = [i for i in range(gpus) if torch.cuda.get_device_capability(i) < (8, 0)]
            names = dict.fromkeys(torch.cuda.get_device_name(i) for i in old)
            why += [f"{name} has no bfloat16" for name in names]
    if ranks % int(flags.get("--tp", 1)):
        why.append(f"{ranks} ranks cannot be divided into groups of {flags['--tp']}")
    parts = ranks * int(flags.get("--accumulate", 1))
    if int(flags.get("--batch-size", 0)) % parts:
        why.append(f"a batch of {flags['--batch-size']} cannot be divided into {parts} parts")
    return why


def print_plan(suite: dict) -> None:
    """Print what measuring would start, and why a row would be skipped."""
    for step in suite.get("steps", []):
        print(step.format(folder=(RUNS / suite["name"]).relative_to(ROOT)))
    for name, command in suite.get("outputs", {}).items():
        print(f"{name}: {command}")
    for row in suite["rows"]:
        print(f"{row['name']}: {shlex.join(row['command'])}")
        if row["left_out"]:
            print(f"    left out: {row['left_out']}")


def start_or_continue(partial: Path, suite: dict) -> dict:
    """The partial results of this suite, commit and machine, or new ones."""
    about = {
        "suite": suite["name"], "about": suite["about"], "complete": False,
        "job": suite.get("job", ""), "jobs": suite.get("jobs", {}), "repeats": suite["repeats"],
        "times": suite.get("times", True),
        "hardware": hardware() | {"power_limits": power_limits()},
        "versions": all_versions(), "git_commit": git_commit(),
    }  # fmt: skip
    if found := load(partial):
        same = ("suite", "job", "jobs", "repeats", "hardware", "versions", "git_commit")
        changed = [key for key in same if found.get(key) != about[key]]
        if {row["name"] for row in found["rows"]} != {row["name"] for row in suite["rows"]}:
            changed.append("rows")
        if changed:
            fail(f"{partial} differs in {', '.join(changed)}; remove it to start from scratch")
        runs = sum(len(row["runs"]) for row in found["rows"])
        print(f"resuming from {partial}, which has {runs} runs")
        return found
    return about | {"date": today(), "rows": []}


def run_rows(suite: dict, found: dict, partial: Path, folder: Path) -> None:
    """Do the runs that ``found`` lacks, and write each one to ``partial`` when it ends."""
    by_name = {row["name"]: row for row in found["rows"]}
    for row in suite["rows"]:
        if row["name"] not in by_name:
            entry = {"name": row["name"], "table": row["table"], "failed": None, "runs": []}
            entry |= {"left_out": row["left_out"]} if row["left_out"] else {}
            by_name[row["name"]] = entry
            found["rows"].append(entry)
    possible = [row for row in suite["rows"] if not row["left_out"]]
    todo = [
        row
        for repeat in range(found["repeats"])
        for row in possible
        if len(by_name[row["name"]]["runs"]) <= repeat and not by_name[row["name"]]["failed"]
    ]
    for row in tqdm(todo, suite["name"], unit="run", disable=None):
        entry = by_name[row["name"]]
        if entry["failed"]:
            continue
        tqdm.write(row["name"], file=sys.stderr)  # also where there is no terminal for the bar
        to = folder / slug(row["name"])
        run, why = run_row(row["command"], to, row["timeout"], suite.get("times", True))
        if run and suite.get("curves"):
            run["curve"] = read_curve(to)
        if run:
            entry["runs"].append(run)
        else:
            entry["failed"] = why
            tqdm.write(f"{row['name']} failed: {why}", file=sys.stderr)
        write_json(partial, found)


def run_row(words: list[str], folder: Path, timeout: float, times: bool):
    """One run of a row, in its own processes; with its times, or without.

    Returns:
        its results and ``None``, or ``None`` and why it failed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryFile("w+") as log:
        try:
            process = subprocess.Popen(
                [*words, "--output-dir", os.path.relpath(folder, ROOT)], cwd=ROOT,
                env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        except FileNotFoundError:
            return None, f"{words[0]} is not installed"
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout)
        finally:
            end(process)
        log.seek(0)
        text = log.read()
    if code is None:
        return None, f"timed out after {timeout:.0f} s"
    if code or not (folder / "result.json").is_file():
        return None, reason(text, code)
    result = json.loads((folder / "result.json").read_text())
    run = {key: result[key] for key in KEPT + TIMES * times if key in result}
    run["eval_accuracy"] = result["eval_accuracy"][-1]
    run["eval_loss"] = result["eval_loss"][-1]
    weights = folder / "model.pt"
    if weights.is_file():
        state = torch.load(weights, weights_only=True)
        run["parameters"] = sum(t.numel() for name, t in state.items() if is_parameter(name))
    shutil.rmtree(folder / "snapshots", ignore_errors=True)  # large, and never resumed from
    return run, None


def end(process: subprocess.Popen) -> None:
    """Terminate a launcher that still runs, which then ends its workers in their own sessions. If
    it does not react, kill its process group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_steps(suite: dict, folder: Path) -> dict:
    """The result of a suite whose last step writes its own file with all results, or of commands
    whose output is recorded; with hardware, versions and commit, if that file lacks them."""
    about = {"hardware": hardware(), "versions": all_versions(), "git_commit": git_commit()}
    about["date"] = today()
    if "outputs" in suite:
        return about | {"outputs": record(suite["outputs"], ROOT, environment())}
    for step in suite["steps"]:
        command = step.format(folder=folder.relative_to(ROOT))
        code = subprocess.run(shlex.split(command), cwd=ROOT, env=environment()).returncode
        if code:
            raise SystemExit(code)
    about["command"] = re.sub(r" --output-dir \S+", "", command)
    return about | json.loads((folder / suite["writes"]).read_text())


def all_versions() -> dict[str, str]:
    found = versions()
    for package in ("deepspeed", "accelerate", "lightning", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def power_limits() -> list[str]:
    """Power limits of the visible GPUs, if the driver reports them."""
    uuids = gpu_uuids([torch.device("cuda", i) for i in range(torch.cuda.device_count())])
    words = ["nvidia-smi", f"--id={','.join(uuids)}", "--query-gpu=power.limit"]
    try:
        run = subprocess.run(
            [*words, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True
        )
        return [f"{float(limit):.0f} W" for limit in run.stdout.split()] if uuids else []
    except (OSError, ValueError, subprocess.CalledProcessError):
        return []


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def environment() -> dict[str, str]:
    """The environment without a launcher's variables, and with our Python's programs first."""
    env = {key: value for key, value in os.environ.items() if key not in LAUNCHERS}
    return env | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])}


def slug(name: str) -> str:
    return re.sub(r"[^\w.]+", "-", name).strip("-")


def write_json(path: Path, value: dict) -> None:
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(temporary, path)
