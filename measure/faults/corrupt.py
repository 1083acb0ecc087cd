"""Damage the newest snapshot of a run again and again, and see what a resume makes of it.

    python measure/faults/corrupt.py --trials 500 --seed 7

A small job is trained until it has two snapshots. In a trial the newer one is damaged in one of
five ways, at a place drawn at random, and then chosen from as ``--resume auto`` does:

    flip      one bit, of any file
    truncate  any file, at any length
    missing   any file, or all
    swapped   the older one's state.pt in the place of the newer one's
    stale     all files of the older one under the newer one's name

A trial is

    fallback  the newer one was named and left out, and the older one loaded
    silent    the damaged one was loaded
    failed    anything else

Exit code: 0 if all trials fell back, else 1.
"""

import contextlib
import io
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import torch
from torch.utils.data import DataLoader

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import common  # noqa: E402
from harness.measure import git_commit  # noqa: E402

WAYS = ["flip", "truncate", "missing", "swapped", "stale"]
JOB = "pytorch_SingleGPU.py --dataset synthetic --train-samples 48 --eval-samples 12 "
JOB += "--batch-size 24 --epochs 2 --model shufflenet_v2_x0_5 --device cpu"


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corrupt-") as folder:
        run_trials(args, Path(folder))


def run_trials(args, folder):
    print(f"$ python measure/faults/corrupt.py {shlex.join(sys.argv[1:])}")
    print(f"commit {git_commit()}, torch {torch.__version__}; {JOB}", flush=True)
    command = f"{sys.executable} {JOB} --output-dir {folder}/whole"
    subprocess.run(shlex.split(command), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    older = sorted((folder / "whole" / "snapshots").iterdir())[0]
    expected = torch.load(older / "state.pt", weights_only=True)

    sys.argv = shlex.split(f"{JOB} --resume auto --output-dir {folder}/damaged")
    job = common.parse_args(common.argument_parser(__doc__))
    with contextlib.redirect_stdout(io.StringIO()):
        train_set, _ = common.make_datasets(job)
        run = common.Run(job, torch.device("cpu"), DataLoader(train_set))
    rng = random.Random(args.seed)
    counts = dict.fromkeys(["fallback", "silent", "failed"], 0)
    for number in range(1, args.trials + 1):
        shutil.rmtree(job.output_dir, ignore_errors=True)
        shutil.copytree(folder / "whole" / "snapshots", job.output_dir / "snapshots")
        first, last = sorted((job.output_dir / "snapshots").iterdir())
        what = damage(rng, first, last)
        verdict, said = judge(run, first, last, expected)
        counts[verdict] += 1
        print(f"trial {number:3}: {what}: {verdict}{said}", flush=True)
    print(f"{args.trials} trials: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    sys.exit(counts["fallback"] != args.trials)


def damage(rng, first, last):
    """Damage the snapshot ``last``; in words, how."""
    way = rng.choice(WAYS)
    file = rng.choice(sorted(path for path in last.rglob("*") if path.is_file()))
    content = bytearray(file.read_bytes())
    if way == "flip":
        place, bit = rng.randrange(len(content)), rng.randrange(8)
        content[place] ^= 1 << bit
        file.write_bytes(content)
        return f"flip bit {bit} of byte {place} of {file.name}"
    if way == "truncate":
        length = rng.randrange(len(content))
        file.write_bytes(content[:length])
        return f"truncate {file.name} to {length} of {len(content)} bytes"
    if way == "missing":
        if rng.random() < 0.3:
            shutil.rmtree(last)
            last.mkdir()
            return "missing all files"
        file.unlink()
        return f"missing {file.name}"
    if way == "swapped":
        shutil.copy(first / "state.pt", last / "state.pt")
        return "swapped state.pt"
    shutil.copytree(first, last, dirs_exist_ok=True)
    return "stale files, all"


def judge(run, first, last, expected):
    """Verdict, and what was said about the damaged one."""
    screen = io.StringIO()
    try:
        with contextlib.redirect_stdout(screen):
            state, path = run.store.find(), run.store.resumed
    except (Exception, SystemExit) as error:
        return "failed", f" ({type(error).__name__}: {error})"
    if path == last:
        return "silent", ""
    same = path == first and state["run"]["history"] == expected["run"]["history"]
    named = [line for line in screen.getvalue().splitlines() if str(last) in line]
    if not same or len(named) != 1:
        return "failed", f" (took {path}, said {named})"
    return "fallback", f" ({named[0].rpartition('ignored: ')[2]})"


if __name__ == "__main__":
    main()
