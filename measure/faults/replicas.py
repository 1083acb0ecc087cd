"""Kill replicas of pytorch_fault_tolerance.py, and see whether the others end with right weights.

    python measure/faults/replicas.py --trials 100 --seed 7

A trial is a small job in float64 on three replicas of two ranks, each with its own torchrun (see
agent.py). A random rank of one or two of them is killed, or stopped for ever, at a random step and
phase (see victim.py). In half of the trials torchrun starts a killed replica again. What the other
replicas print says whose samples are in which step. A single process repeats the job on them.

    clean    the replicas that nothing happened to, and those that were started again, finished with
             the same bits in every weight, and these are the weights of the single process, up to
             the rounding of float64
    wrong    it ended in another way
    hung     it did not end within four minutes

Exit code: 0 if all trials were clean, else 1.
"""

import functools
import json
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from measure.faults import inject  # noqa: E402

PHASES = ["data", "forward", "backward", "optimizer"]
PHASES += ["before sum", "in sum", "before vote", "after vote"]
REPLICAS = 3
RANKS = 2  # of a replica
BATCH = 14  # which neither six nor four ranks can divide
STEPS = 20
HOLD = 14  # before this step, replicas wait for one that torchrun starts again, for the test's sake
# AdamW and clipping: a gradient that is wrong by a factor changes the weights
JOB = (
    f"--dataset synthetic --train-samples 60 --eval-samples 8 --batch-size {BATCH} --epochs 5 "
    "--model gpt-2x4x16 --context 16 --double --deterministic --optimizer adamw --clip-grad 0.5 "
    "--device cpu --print-freq 100 --timeout 60"
)
TOLERANCE = 1e-11
START = re.compile(r"^step (\d+): replicas \[([\d, ]+)\]; this is \d+$", re.M)
DEATH = re.compile(r"^step (\d+): .* dead, \[([\d, ]+)\] continue; (\d+) of \d+ samples", re.M)


class Fault(NamedTuple):
    """What happens to a replica."""

    replica: int
    rank: int
    step: int
    phase: str
    kind: str

    def __str__(self):
        return f"{self.kind} {self.replica}.{self.rank} step {self.step:2} {self.phase}"


def main():
    parser = inject.parser_of_trials(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=["kill", "stop"], default=["kill", "stop"])
    parser.add_argument("--in-state", action="store_true",
        help="one returns, and one of those that send it their state is killed")  # fmt: skip
    parser.add_argument("--patience", type=float, default=8, help="that of the script, in seconds")
    args = parser.parse_args()
    inject.carry_out(args, run_trials, f"{REPLICAS} replicas of {RANKS} ranks: {JOB}")


def run_trials(args, folder):
    rng = random.Random(args.seed)
    trials = []
    for number in range(args.trials):
        victims = rng.sample(range(REPLICAS), rng.choice([1, 1, 2]))
        faults = []
        for replica in victims:
            kind = rng.choices(args.kinds, [4, 1][: len(args.kinds)])[0]
            step = rng.randint(1, STEPS // 2)
            faults.append(Fault(replica, rng.randrange(RANKS), step, rng.choice(PHASES), kind))
        again = rng.randrange(2)
        if args.in_state:  # an old replica, while another one that was killed is let in again
            again = 1
            faults = [faults[0]._replace(kind="kill")]
            other = rng.choice([r for r in range(REPLICAS) if r != faults[0].replica])
            faults.append(Fault(other, rng.randrange(RANKS), 1, "in state", "kill"))
        trials.append((folder / str(number), faults, again))

    lock = threading.Lock()  # a cache has none

    def expected(history):
        with lock:
            return train_alone(history)

    @functools.cache
    def train_alone(history):
        """Weights of a single process; ``history``: the positions that some steps keep, as JSON."""
        output = folder / f"single-{abs(hash(history))}"
        fault = {"kind": "none", "rank": 0, "step": 0, "phase": "none"}
        fault |= {"samples": json.loads(history)}
        command = f"python measure/faults/victim.py pytorch_SingleGPU.py {JOB}"
        process = inject.start(args.server, command, output, fault)
        if process.wait(inject.LIMIT):
            sys.exit(f"the single process failed: {(output / 'log').read_text()}")
        return weights_of(output)

    outcomes = []
    with ThreadPoolExecutor(args.jobs) as pool:
        results = pool.map(functools.partial(try_one, args, expected), *zip(*trials, strict=True))
        for number, ((_, faults, again), (verdict, why)) in enumerate(
            zip(trials, results, strict=True), 1
        ):
            outcomes.append(verdict)
            what = " and ".join(map(str, faults)) + ("; restarted" if again else "")
            print(f"trial {number:3}: {what}: {verdict}{why}", flush=True)
    counts = [f"{outcomes.count(each)} {each}" for each in ("clean", "wrong", "hung", "missed")]
    print(f"{args.trials} trials: {', '.join(counts)}")
    return outcomes


def try_one(args, expected, folder, faults, again):
    """Verdict, and what was wrong or who came back."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder.mkdir()
    broken = {fault.replica: fault for fault in faults}
    flags = f"--store 127.0.0.1:{store.port} --replicas {REPLICAS} --patience {args.patience}"
    script = f"measure/faults/victim.py pytorch_fault_tolerance.py {JOB} {flags}"
    launcher = f"--standalone --nproc_per_node={RANKS} --max-restarts={again}"
    returning = [r for r, fault in broken.items() if again and fault.kind == "kill"]
    returning = [r for r in returning if broken[r].phase != "in state"]  # which may be too late
    seen = [f"{folder}/{replica}/events-again" for replica in returning]
    agents = []
    for replica in range(REPLICAS):
        fault = {"kind": "none", "rank": 0, "step": 0, "phase": "none", "hold": (HOLD, seen)}
        if replica in broken:
            fault |= broken[replica]._asdict()
        command = f"python measure/faults/agent.py {launcher} {script}"
        agents.append(inject.start(args.server, command, folder / str(replica), fault))
    whole = [replica for replica in range(REPLICAS) if replica not in broken]
    try:
        codes = ends_of([agents[replica] for replica in whole], inject.LIMIT)
        if None in codes:
            return "hung", f" (it was ended after {inject.LIMIT} s): {folder}"
        codes += ends_of([agents[replica] for replica in returning], 20)
        idle = [r for r in broken if " fault" not in (folder / f"{r}/events").read_text()]
        if idle:
            return "missed", f" (nothing happened to replicas {idle})"
        return verdict_of(folder, expected, whole + returning, codes)
    finally:
        for replica, agent in enumerate(agents):
            inject.end([agent.pid, *inject.processes_of(folder / str(replica))])
            agent.wait()
        if all((folder / f"{replica}/model.pt").exists() for replica in whole):
            shutil.rmtree(folder, ignore_errors=True)


def verdict_of(folder, expected, ended, codes):
    said = (folder / f"{ended[0]}/log").read_text()
    if any(code != 0 for code in codes):
        return "wrong", f" (exit codes {codes})\n{said}"
    history = samples_of(said)
    single = expected(json.dumps(history))
    found = [weights_of(folder / str(replica)) for replica in ended]
    for weights in found:
        if not all(torch.equal(weights[name], found[0][name]) for name in weights):
            return "wrong", f" (replicas have different weights)\n{said}"
    far = max(
        ((found[0][name] - theirs).abs().max() / theirs.abs().max()).item()
        for name, theirs in single.items()
    )
    left = ", ".join(f"step {step} with {len(kept)}" for step, kept in history.items())
    if far > TOLERANCE:
        return "wrong", f" (weights differ by {far:.1e}: {left})\n{said}"
    lost = left or "no sample lost"
    return "clean", f", {far:.0e} from one process: {lost}; {len(ended)} finished"


def samples_of(said):
    """The positions in the global batch that are in each step that lost some, from what a replica
    printed: who was there when the batch was divided, and who is left."""
    kept = {}
    before = []
    lines = [*START.finditer(said), *DEATH.finditer(said)]
    for line in sorted(lines, key=lambda match: match.start()):
        members = list(map(int, line[2].split(",")))
        if line.re is DEATH:
            ranks = len(before) * RANKS
            alive = [before.index(member) for member in members]
            here = [i for i in range(BATCH) if i % ranks // RANKS in alive]
            if len(here) != int(line[3]):
                raise ValueError(f"{line[0]}: {len(here)} samples are of these replicas")
            kept[line[1]] = here
        before = members
    return kept


def weights_of(output):
    return torch.load(output / "model.pt", weights_only=True)


def ends_of(agents, seconds):
    """Exit codes; ``None`` of those that do not end in time."""
    end = time.monotonic() + seconds
    codes = []
    for agent in agents:
        try:
            codes.append(agent.wait(max(0.1, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
    return codes


if __name__ == "__main__":
    main()
