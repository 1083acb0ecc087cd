"""Measure the scripts on the same work, and write the results into these pages.

Measure     python benchmark.py --suite cpu
            The suites are files in config/: quick, gpt, models, shakespeare (needs its text in
            data/), by_hand, cpu, gpu (needs data/gpt2.txt, which measure/gpu_session.sh writes),
            ecosystem, reviews (needs data/movie_reviews), parallel, local_sgd, peers, scaling,
            inference, collectives, estimate, one_gpu, published, front and outputs. Each row runs
            in fresh processes with its own launch command, and the rows alternate (A B C, A B C,
            ...). The results go to results/SUITE.json. A row that fails reports why, and the others
            continue. (The last seven suites have steps instead of rows, of which the last one
            measures, or commands whose output is recorded.)
Dry run     python benchmark.py --suite gpu --dry-run
            Prints each row's command, and why this machine would skip it. Starts nothing.
Resume      Run the same command again: an interrupted measurement continues where it stopped.
All         python benchmark.py --suite all
            Runs the commands in config/measure_all.json, on a machine that does nothing else. With
            --plan it prints how long they take.
Render      python benchmark.py --render
            Rewrites the tables in README and docs/, in both languages, and the plots, from
            results/.
Check       python benchmark.py --check
            Fails if a table or a plot does not match results/, or does not list which of the
            measured code has changed since.
"""

import argparse
import contextlib
import datetime
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
import time
from pathlib import Path

import torch
from tqdm import tqdm

from harness.cli import ArgumentParser, check_writable, fail, number
from harness.measure import git_commit, gpu_uuids, hardware, versions
from measure import everything
from measure.outcome import is_parameter, read_curve, reason, record
from report import fresh, pages, suites
from report.results import SCHEMA, Unusable, load
from website import schematics

ROOT = Path(__file__).resolve().parent
CONFIG, RESULTS, RUNS = ROOT / "config", ROOT / "results", ROOT / "runs" / "benchmark"
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Of result.json, not in each run of a row
LEFT_OUT = ("settings", "versions", "git_commit", "gpu_uuids", "trained_between", "breakdown")
LEFT_OUT += ("seconds", "train_loss", "eval_step", "classes")
LAG = 1.0  # seconds: the driver's utilization is a mean over up to the last second


def main():
    args = parse_args()
    try:
        if args.suite == "all":
            measure_all(args)
        elif args.suite:
            measure(args)
        else:
            render(check=args.check)
    except Unusable as error:
        fail(str(error))


def measure_all(args: argparse.Namespace) -> None:
    gpu = torch.cuda.is_available()
    if args.plan:
        return everything.print_plan(ROOT, gpu)
    if failed := everything.measure(ROOT, git_commit(), gpu, args.only):
        fail(f"failed: {', '.join(failed)}; see runs/all/, then run the same command", code=3)
    print("measured; python benchmark.py --render updates the pages")


def parse_args() -> argparse.Namespace:
    suites = sorted(path.stem.removeprefix("suite_") for path in CONFIG.glob("suite_*.json"))
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    # fmt: off
    flag = parser.add_argument
    flag("--suite", choices=[*suites, "all"],
         help="measure config/suite_NAME.json, or all that the pages show")
    flag("--plan", action="store_true", help="with --suite all: print how long it takes")
    flag("--only", nargs="+", metavar="ROW", default=[],
         help="measure only these rows; with --suite all, only these parts")
    flag("--dry-run", action="store_true", help="print the commands without running them")
    flag("--repeats", type=number(int, 1), metavar="N", help="runs per row (default: the suite's)")
    flag("--output", type=Path, metavar="FILE",
         help="result file (default: results/SUITE.json; SUITE.only.json with --only)")
    flag("--render", action="store_true", help="write the results into pages and plots")
    flag("--check", action="store_true", help="fail if pages or plots differ from the results")
    # fmt: on
    args = parser.parse_args()
    if bool(args.suite) + args.render + args.check != 1:
        fail("give one of --suite, --render and --check (--help lists the flags)")
    if args.plan and args.suite != "all":
        fail("--plan is for --suite all")
    if args.suite == "all" and (args.repeats or args.output or args.dry_run):
        fail("--suite all takes no other flags than --only and --plan; give one suite")
    if not args.suite and (args.only or args.repeats or args.output or args.dry_run):
        fail("--only, --dry-run, --repeats and --output need --suite")
    return args


def read_suite(name: str) -> dict:
    """``config/suite_NAME.json``, with one row for each number of ranks."""
    suite = json.loads((CONFIG / f"suite_{name}.json").read_text())
    gpus = torch.cuda.device_count()
    defaults = {"table": name, "timeout": suite.get("timeout", 900), "needs": []}
    rows = []
    for row in suite["rows"]:
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
    ranks, gpus = row["ranks"], torch.cuda.device_count()
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
    elif flags.get("--dtype") == "float16" and not computes_float16():
        why.append("this CPU has no float16 arithmetic")
    if ranks % int(flags.get("--tp", 1)):
        why.append(f"{ranks} ranks cannot be divided into groups of {flags['--tp']}")
    parts = ranks * int(flags.get("--accumulate", 1))
    if int(flags.get("--batch-size", 0)) % parts:
        why.append(f"a batch of {flags['--batch-size']} cannot be divided into {parts} parts")
    return why


def computes_float16() -> bool:
    """Whether PyTorch's convolution library supports float16 on this CPU. Where it does not, a step
    takes dozens of times as long."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported()


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


def measure(args: argparse.Namespace) -> None:
    """Run the rows in turns. Write partial results after each run, and the result at the end."""
    suite = read_suite(args.suite)
    names = [row["name"] for row in suite["rows"]]
    for name in args.only:
        if name not in names:
            fail(f"--only {name!r}: suite {args.suite} has {', '.join(names)}")
    rows = [row for row in suite["rows"] if not args.only or row["name"] in args.only]
    if args.dry_run:
        return print_plan(suite | {"rows": rows})
    if suite.get("device") == "cuda" and not torch.cuda.is_available():
        fail(f"--suite {args.suite} needs a GPU and PyTorch finds none; try --suite cpu")
    some = ".only" if args.only else ""  # some rows must not replace all
    output = args.output or RESULTS / f"{args.suite}{some}.json"
    check_writable(output.parent, f"--output {output}")
    if output.is_dir():
        fail(f"--output {output} is a folder; give a file")
    if suite.get("steps") or suite.get("outputs"):
        return run_steps(suite, output)
    partial = output.with_name(f"{output.stem}.partial.json")
    found = start_or_continue(partial, suite, args)
    try:
        run_rows(suite | {"rows": rows}, found, partial, RUNS / output.stem)
    except KeyboardInterrupt:
        print(f"stopped; the same command resumes from {partial}", file=sys.stderr)
        raise SystemExit(130) from None
    commands = [run["command"] for row in found["rows"] for run in row["runs"]]
    found |= {"complete": True, "files": fresh.files_of(ROOT, commands)}
    write_json(partial, found)
    os.replace(partial, output)
    for table in suite["tables"]:
        if any(row["table"] == table for row in found["rows"]):
            print(suites.suite_table(ROOT, found, table), end="\n\n")
    done = f"done: {output}"
    for how in ("failed", "left_out"):
        if names := [row["name"] for row in found["rows"] if row.get(how)]:
            done += f"; {how.replace('_', ' ')}: {', '.join(names)}"
    print(done)


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


def run_rows(suite: dict, found: dict, partial: Path, folder: Path) -> None:
    """Do the runs that ``found`` lacks, and write each one to ``partial`` when it ends."""
    by_name = {row["name"]: row for row in found["rows"]}
    for row in suite["rows"]:
        if row["name"] not in by_name:
            entry = {"name": row["name"], "table": row["table"], "failed": None, "runs": []}
            entry |= {"memory": None} if "memory" in suite else {}
            entry |= {"left_out": row["left_out"]} if row["left_out"] else {}
            by_name[row["name"]] = entry
            found["rows"].append(entry)
    possible = [row for row in suite["rows"] if not row["left_out"]]
    todo = [
        (row, "")
        for repeat in range(found["repeats"])
        for row in possible
        if len(by_name[row["name"]]["runs"]) <= repeat and not by_name[row["name"]]["failed"]
    ]
    if "memory" in suite:
        todo += [(row, suite["memory"]) for row in possible if not by_name[row["name"]]["memory"]]
    with tqdm(todo, suite["name"], unit="run", disable=None) as bar:
        for row, flags in bar:
            entry = by_name[row["name"]]
            if entry["failed"]:
                continue
            bar.set_postfix_str(row["name"])
            to = folder / slug(row["name"])
            run, why = run_row(row["command"] + shlex.split(flags), to, row["timeout"])
            if run and suite.get("curves"):
                run["curve"] = read_curve(to)
            if run and flags:  # measures memory only, but completely
                entry["memory"] = {key: run[key] for key in ("command", "peak_memory_gib")}
                for timed in entry["runs"]:
                    timed["peak_memory_gib"] = run["peak_memory_gib"]
            elif run:
                entry["runs"].append(run)
            else:
                entry["failed"] = why
                tqdm.write(f"{row['name']} failed: {why}", file=sys.stderr)
            write_json(partial, found)


def start_or_continue(partial: Path, suite: dict, args: argparse.Namespace) -> dict:
    """The partial results of this suite, commit and machine, or new ones."""
    repeats = args.repeats or suite["repeats"]
    about = {
        "schema": SCHEMA, "suite": args.suite, "about": suite["about"], "complete": False,
        "job": suite.get("job", ""), "jobs": suite.get("jobs", {}), "repeats": repeats,
        "times": suite.get("times", True),
        "hardware": hardware() | {"power_limits": power_limits()},
        "versions": all_versions(), "git_commit": git_commit(),
    }  # fmt: skip
    if found := load(partial):
        same = ("suite", "job", "jobs", "hardware", "versions", "git_commit")
        changed = [key for key in same if found.get(key) != about[key]]
        if changed:
            fail(f"{partial} has another {' and '.join(changed)}; remove it to start from scratch")
        runs = sum(len(row["runs"]) for row in found["rows"])
        print(f"resuming from {partial}, which has {runs} runs")
        return found | {"repeats": repeats}
    return about | {"date": today(), "rows": []}


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def all_versions() -> dict[str, str]:
    import importlib.metadata as metadata

    found = versions()
    for package in ("deepspeed", "accelerate", "lightning", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def run_steps(suite: dict, output: Path) -> None:
    """A suite whose last step writes its own file with all results, or of commands whose output is
    recorded. Adds hardware, versions and commit, if that file lacks them."""
    folder, outputs = RUNS / output.stem, suite.get("outputs", {})
    commands, found = [*outputs.values()], {"outputs": record(outputs, ROOT, environment())}
    for step in suite.get("steps", ()):
        commands = [step.format(folder=folder.relative_to(ROOT))]
        code = subprocess.run(shlex.split(commands[0]), cwd=ROOT, env=environment()).returncode
        if code:
            raise SystemExit(code)
    if not outputs:
        found = {"command": re.sub(r" --output-dir \S+", "", commands[0])}
        found |= json.loads((folder / suite["writes"]).read_text())
    about = {
        "hardware": hardware(), "versions": all_versions(), "git_commit": git_commit(),
        "date": today(),
        "files": fresh.files_of(ROOT, commands, (*fresh.BELOW, *suite.get("uses", ()))),
    }  # fmt: skip
    write_json(output, about | found)
    print(f"done: {output}")


def environment() -> dict[str, str]:
    """The environment without a launcher's variables, and with our Python's programs first."""
    env = {key: value for key, value in os.environ.items() if key not in LAUNCHERS}
    return env | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])}


def run_row(words: list[str], folder: Path, timeout: float):
    """One run of a row, in its own processes.

    Returns:
        its results and ``None``, or ``None`` and why it failed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        try:
            process = subprocess.Popen(
                [*words, "--output-dir", os.path.relpath(folder, ROOT)], cwd=ROOT,
                env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        except FileNotFoundError:
            return None, f"{words[0]} is not installed"
        samples, code = [], None
        try:
            while code is None and time.perf_counter() - started < timeout:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(0.25)
                samples += [(time.time(), utilization())] if torch.cuda.is_available() else []
        finally:
            end(process)
        log.seek(0)
        text = log.read()
    if code is None:
        return None, f"timed out after {timeout:.0f} s"
    if code or not (folder / "result.json").is_file():
        return None, reason(text, code)
    result = json.loads((folder / "result.json").read_text())
    run = {key: value for key, value in result.items() if key not in LEFT_OUT}
    run["gpu"] = mean_utilization(samples, result["gpu_uuids"], result["trained_between"])
    run["eval_accuracy"], run["eval_samples"] = result["eval_accuracy"][-1], result["eval_samples"]
    run["eval_loss"] = result["eval_loss"][-1]
    run["seconds_process"] = time.perf_counter() - started
    weights = folder / "model.pt"
    if weights.is_file():
        state = torch.load(weights, weights_only=True)
        run["parameters"] = sum(t.numel() for name, t in state.items() if is_parameter(name))
    shutil.rmtree(folder / "snapshots", ignore_errors=True)  # large, and never resumed from
    return run, None


def utilization() -> dict[str, float | None]:
    """The percentage of time in which any kernel ran, of each GPU by its UUID; ``None`` where the
    driver does not tell: for a MIG slice, or without NVIDIA's Python bindings."""
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    found = {}
    for uuid, device in zip(gpu_uuids(devices), devices, strict=True):
        found[uuid] = None
        with contextlib.suppress(Exception):  # not installed, not permitted, not supported
            found[uuid] = torch.cuda.utilization(device)
    return found


def mean_utilization(samples: list, uuids: list[str], spans: list) -> dict | None:
    """The mean of these GPUs in these spans of wall-clock time, without the first :data:`LAG` of
    each. ``None`` if any of the GPUs has no samples."""
    percents = [
        figures.get(uuid)
        for moment, figures in samples
        if any(begin + LAG <= moment <= end for begin, end in spans)
        for uuid in uuids
    ]
    if not percents or None in percents:
        return None
    return {"utilization_percent": sum(percents) / len(percents)}


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


def slug(name: str) -> str:
    return re.sub(r"[^\w.]+", "-", name).strip("-")


def write_json(path: Path, value: dict) -> None:
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(temporary, path)


if __name__ == "__main__":
    main()
