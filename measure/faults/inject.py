"""Break a training run again and again, and see whether it ends as if nothing had happened.

    python measure/faults/inject.py --trials 200 --seed 7 --script pytorch_torchrun_DDP.py

A trial is a small deterministic job on some ranks, in which one fault happens: of a random kind, on
a random rank, at a random step and phase (see victim.py). Its ranks are started as by ``torchrun
--standalone --max-restarts 3``, but forked (see agent.py): three times as fast. It is

    clean    it finished after one restart, from the last snapshot, with the same bits in every
             weight as a run without a fault, and left no process behind
    wrong    it ended in another way
    hung     it did not end within four minutes

Exit code: 0 if all trials were clean, else 1.
"""

import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from fork_server import Server  # noqa: E402

from harness.measure import git_commit  # noqa: E402
from techniques import TECHNIQUES  # noqa: E402

KINDS = {"kill": 4, "term": 2, "exception": 2, "stop": 1}  # with weights: the last takes long
PHASES = ["data", "forward", "backward", "optimizer"]
PHASES += ["during write", "before rename", "after rename"]
# Three epochs of four steps, with dropout and BatchNorm
JOB = (
    "--dataset synthetic --train-samples 96 --eval-samples 24 --batch-size 24 --epochs 3 "
    "--model small_resnet_dropout --snapshot-every 2 --deterministic --device cpu --timeout 10"
)
GPT = "--model gpt-4x4x16 --context 16"
APART = ("DDP", "compile", "checkpoint")  # another launcher, minutes to compile, own snapshots
MORE = {"LoRA": "--merge", "QLoRA": "--merge"}  # to write all weights
STEPS_PER_EPOCH = 4
SNAPSHOT_EVERY = 2
RANKS = 2
LIMIT = 240  # seconds of a trial
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PATH": PATH}


def main():
    parser = parser_of_trials(__doc__)
    parser.add_argument("--script", nargs="+", metavar="'SCRIPT FLAGS'",
        help="each trial takes one of them, at random (default: all techniques)")  # fmt: skip
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    args = parser.parse_args()
    args.script = args.script or list(every_script(RANKS))
    if missing := [one for one in args.script if not (ROOT / one.split()[0]).is_file()]:
        parser.error(f"--script {missing[0]}: no such script; try pytorch_torchrun_DDP.py")
    carry_out(args, run_trials, f"{', '.join(args.script)}: {JOB}")


def parser_of_trials(doc):
    """With the flags that this program shares with replicas.py."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="trials at the same time")
    return parser


def carry_out(args, run_trials, about):
    """Say what is run, where, and end with exit code 0 if ``run_trials``'s outcomes are clean."""
    print(f"$ python {os.path.relpath(sys.argv[0], ROOT)} {shlex.join(sys.argv[1:])}")
    where = f"commit {git_commit()}, torch {torch.__version__}, {os.cpu_count()} cores"
    print(f"{where}; {about}", flush=True)
    args.server = Server(os.environ | ENVIRONMENT)
    try:
        with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
            outcomes = run_trials(args, Path(folder))
    finally:
        args.server.close()
    sys.exit(outcomes.count("clean") != args.trials)


def every_script(ranks):
    """Of techniques.py, with the flags of the first case that is proven on so many ranks."""
    for row in TECHNIQUES:
        if row.name not in APART and "one_process" not in row.traits:
            first = next((case.flags for case in row.cases if ranks in case.ranks), "")
            flags = "--tp 2" if row.name == "ND_parallel" else first  # to split a layer
            words = [f"{row.script}.py", flags, GPT * ("needs_gpt" in row.traits)]
            yield " ".join(filter(None, [*words, MORE.get(row.name)]))


def run_trials(args, folder):
    expected = {script: weights_without_fault(args, folder / "whole", script)
                for script in args.script}  # fmt: skip

    rng = random.Random(args.seed)
    faults = []
    for _ in range(args.trials):
        [kind] = rng.choices(args.kinds, [KINDS[kind] for kind in args.kinds])
        phase = rng.choice(args.phases)
        script = rng.choice(args.script) if len(args.script) > 1 else args.script[0]
        rank = rng.randrange(RANKS)
        step = rng.randint(1, 10)
        faults.append({"kind": kind, "rank": rank, "step": step, "phase": phase, "script": script})
    outcomes = []
    waits = []
    folders = [folder / str(number) for number in range(args.trials)]
    with ThreadPoolExecutor(args.jobs) as pool:
        results = pool.map(partial(try_one, args, expected), folders, faults)
        for number, (fault, result) in enumerate(zip(faults, results, strict=True), 1):
            verdict, seconds, why = result
            outcomes.append(verdict)
            print(
                f"trial {number:3}: {fault['kind']:9} rank {fault['rank']} step {fault['step']:2} "
                f"{fault['phase']:13}  {verdict}{why}"
                + (f", {seconds:.1f} s to the next step" if seconds else "")
                + (f"; {fault['script']}" if len(args.script) > 1 else ""),
                flush=True,
            )
            if seconds and fault["kind"] in ("kill", "exception"):
                waits.append(seconds)
    clean, wrong, hung = (outcomes.count(verdict) for verdict in ("clean", "wrong", "hung"))
    median = f"{statistics.median(waits):.1f} s" if waits else "not measured"
    print(
        f"{args.trials} trials: {clean} clean, {wrong} wrong, {hung} hung; from a kill or an "
        f"exception to the next step: median {median}"
    )
    return outcomes


def weights_without_fault(args, output, script):
    fault = {"kind": "none", "rank": 0, "step": 0, "phase": "none", "script": script}
    code, _ = run(args, output, fault)
    if code != 0:
        sys.exit(f"without a fault {script} ended with exit code {code}")
    weights = torch.load(output / "model.pt", weights_only=True)
    shutil.rmtree(output)
    return weights


def try_one(args, expected, output, fault):
    """Verdict, seconds from the fault to the first step after it, and what was wrong."""
    code, events = run(args, output, fault)
    try:
        if code is None:
            return "hung", None, f" (it was ended after {LIMIT} s)"
        starts = [event for event in events if event["what"] == "start"]
        broken = next((event for event in events if event["what"] == "fault"), None)
        if broken is None:
            return "wrong", None, " (the fault did not happen)"
        again = [e for e in events if e["what"] == "step" and e["restarts"] == 1]
        seconds = again[0]["time"] - broken["time"] if again else None
        lost = broken["step"] - again[0]["step"] if again else 0
        # A save in the background may still be in progress when the next one is due
        allowed = SNAPSHOT_EVERY * (2 if "--async-save" in fault["script"] else 1)
        if code != 0:
            return "wrong", seconds, f" (exit code {code})"
        if len(starts) != 2:
            return "wrong", seconds, f" ({len(starts) - 1} restarts)"
        whole = [e["step"] for e in events if e["what"] == "whole" and e["restarts"] == 0]
        if whole and again:  # of these it must be the newest, however long ago it was written
            lost = max(whole) + 1 - again[0]["step"]
            allowed = 0
        if lost > allowed:
            return "wrong", seconds, f" ({lost} steps were lost)"
        found = torch.load(output / "model.pt", weights_only=True)
        if not all(torch.equal(found[n], t) for n, t in expected[fault["script"]].items()):
            return "wrong", seconds, " (other weights)"
        if left := processes_of(output):
            return "wrong", seconds, f" (processes {left} are left)"
        return "clean", seconds, ""
    finally:
        end(processes_of(output))
        shutil.rmtree(output, ignore_errors=True)


def run(args, output, fault):
    """Exit code, ``None`` if it did not end; and the events, with the step from the beginning."""
    script, _, flags = fault["script"].partition(" ")  # its flags come last, and so they count
    command = (
        f"python measure/faults/agent.py --standalone --max-restarts 3 --nproc_per_node={RANKS} "
        f"measure/faults/victim.py {script} {JOB} {flags}"
    )
    process = start(args.server, command, output, fault)
    try:
        code = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        end([process.pid])
        process.wait()
        code = None
    found = []
    for line in (output / "events").read_text().splitlines():
        when, what, restarts, epoch, index = line.split()
        step = int(epoch) * STEPS_PER_EPOCH + int(index) + 1
        found.append({"time": float(when), "what": what, "restarts": int(restarts), "step": step})
    return code, found


def start(server, command, output, fault):
    """Start a trial, or a part of it, with everything that it writes in a new folder."""
    output.mkdir()
    events = output / "events"
    events.touch()
    env = os.environ | ENVIRONMENT | {"FAULT": json.dumps(fault | {"events": str(events)})}
    env["TMPDIR"] = str(output)  # where torchrun leaves a folder
    with open(output / "log", "w") as log:
        words = shlex.split(f"{command} --output-dir {output}")
        return server.start(words, stdout=log, stderr=log, cwd=ROOT, env=env)


def end(processes):
    """Kill those of these that still run."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def processes_of(output):
    """Numbers of the processes that write to the log of a trial."""
    files = Path("/proc").glob("[0-9]*/fd/1")
    return [int(file.parts[2]) for file in files if os.path.realpath(file) == f"{output}/log"]


if __name__ == "__main__":
    main()
