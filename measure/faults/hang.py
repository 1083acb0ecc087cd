"""Make runs hang or abort, and see whether their last lines name the rank, the collective and the
line.

    python measure/faults/hang.py
    python measure/faults/hang.py --script all --jobs 2

Each is a small run of a technique on four ranks, of which one, rank 1, does what FAULTS says in the
third step (see victim.py). PyTorch's own tool has to read what the ranks have recorded. Exit code:
0 if all that could be named was.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from concurrent.futures import ThreadPoolExecutor

from inject import ENVIRONMENT, ROOT, Server, every_script

JOB = "--dataset synthetic --train-samples 192 --eval-samples 48 --batch-size 48 --epochs 1"
JOB += " --device cpu --timeout 5"
RANKS = 4
OURS = r"victim\.py:\d+ dist\.all_reduce\(first\)"
NEXT = r"victim\.py:\d+ dist\.broadcast\("
SEVEN = r"(?=.*differs: .*all_reduce of float32 \[7\] on ranks 0, 2, 3[,;]).*"  # first or last
OTHER = r"\w+ of .* on rank 1[,;]|rank 1 did not join .* all_reduce of float32 \[7\]"
FORWARD = r"pytorch_\w+\.py:\d+ (.*model\(|schedule\.step\(|output = self\.stage\()"
FAULTS = {  # the collective, and the line of rank 1, as regular expressions
    "skip": (SEVEN + OTHER, r"rank 1(:| waits at) .*pytorch_\w+\.py:\d+ (?!.*victim)"),
    "order": (SEVEN + r"broadcast of float32 \[3\] on rank 1[,;]", rf"rank 1: .*{NEXT}"),
    "shape": (SEVEN + r"all_reduce of float32 \[8\] on rank 1[,;]", rf"rank 1: .*{OURS}"),
    "dtype": (SEVEN + r"all_reduce of float64 \[7\] on rank 1[,;]", rf"rank 1: .*{OURS}"),
    "loop": (None, r"rank 1 is at .*victim\.py:\d+ (while FAULT|pass)"),
    "stop": (None, rf"rank 1 \(stopped by a signal\) is at {FORWARD}"),
    "kill": (None, r"rank 1: its process has ended"),
    "sleep": (None, r"rank 1 is at .*victim\.py:\d+ time\.sleep\(60\)"),
}
WAITED = r"ranks? 1(, \d)* did not join collective \d+, \w+ of \w+ \[[\d, ]*\]"
WAITED += r"|ranks? [\d, ]+ waits? for a message: (send|recv) of \w+ \[[\d, ]+\] (to|from) rank 1;"
WAITED += r"|waiting for rank 1;"  # of works that the script waits for itself


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument(
        "--script", default="pytorch_FSDP.py", help="a script, or all (%(default)s)"
    )
    parser.add_argument("--fault", choices=FAULTS, nargs="+", default=FAULTS, help="default: all")
    args = parser.parse_args()
    scripts = every_script(RANKS) if args.script == "all" else [args.script]
    trials = [(script, fault) for fault in args.fault for script in scripts]
    with tempfile.TemporaryDirectory(prefix="hang-") as folder:
        server = Server(os.environ | ENVIRONMENT | {"TMPDIR": folder})
        try:
            with ThreadPoolExecutor(args.jobs) as pool:
                missed = list(pool.map(lambda trial: try_one(server, *trial), trials))
        finally:
            server.close()
    sys.exit(any(missed))


def try_one(server, script, fault):
    """Print the diagnosis of a run, and return what of it is not as it should be."""
    with tempfile.TemporaryDirectory(prefix="hang-", ignore_cleanup_errors=True) as folder:
        phase = "data" if fault == "sleep" else "forward"
        order = {"kind": fault, "rank": 1, "step": 3, "phase": phase, "events": f"{folder}/events"}
        name = script.partition(".py")[0]
        command = f"torchrun --standalone --nproc_per_node={RANKS} measure/faults/victim.py "
        command += f"{script} {JOB} --output-dir {folder}/run"
        command += "" if "--model" in script else " --model small_resnet"
        env = os.environ | ENVIRONMENT | {"FAULT": json.dumps(order)}
        with open(f"{folder}/log", "w+") as log:
            run = server.start(shlex.split(command), stdout=log, stderr=log, cwd=ROOT, env=env)
            run.wait(90)
            log.seek(0)
            said = log.read()
        lines = read_lines(said.replace(f"{folder}/run", f"runs/{name}"))
        missed = judge(fault, lines)
        missed += [] if said.count("; recorded in ") == 1 else ["printed once"]
        tool = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
        tool += [f"{folder}/run/flight_recorder", "--allow-incomplete-ranks"]
        read = subprocess.run(tool, capture_output=True, text=True)
        if read.returncode and "gloo != 'nccl'" not in read.stderr:  # that of 2.11 knows nccl only
            missed += ["PyTorch's tool"]
    said = "named" if not missed else f"missed: {missed}"
    print("\n  ".join([f"{script}, {fault}: {said}", *lines]), flush=True)
    return missed


def read_lines(log):
    """The error line, and those that follow it."""
    log = re.sub(r"^\[rank\d\]: ?", "", log, flags=re.MULTILINE)
    found = re.search(r"^pytorch_\w+: error: (.*\n(?:  ranks? .*\n)*)", log, re.MULTILINE)
    return [line.strip() for line in found[1].splitlines()] if found else []


def judge(fault, lines):
    collective, place = FAULTS[fault]
    text = "\n".join(lines)
    missed = [] if re.search(collective or WAITED, text) else ["collective"]
    missed += [] if re.search(r"^rank 1\b(?!,)", text, re.MULTILINE) else ["rank"]
    return missed + ([] if re.search(place, text) else ["line"])


if __name__ == "__main__":
    main()
