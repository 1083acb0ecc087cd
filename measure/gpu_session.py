"""What measure/gpu_session.sh computes: the text of GPT-2's size, whether two runs ended alike, and
the results of a session.

    python -m measure.gpu_session --compare runs/gpu_session/runs/resume-adamw
"""

import json
import random
import shutil
from pathlib import Path

import torch

from harness.cli import ArgumentParser, fail
from harness.measure import git_commit, hardware
from measure.runner import RESULTS, all_versions, today, write_json
from report.results import load

FAR = 0.02  # of what the last steps change: a GPU may add up in another order
CHARACTERS = 50_257  # as many as GPT-2 has tokens
MEASURED = ("gpu_session.json", "one_gpu.json", "gpu.json", "gpu.partial.json")


def write_text(path: Path) -> None:
    """A text of so many different characters, in a random order, that GPT-2 has all its
    124 million parameters."""
    some = [*range(0x4E00, 0x9FA6), *range(0x20000, 0x2A6D7)][:CHARACTERS]
    shuffled = some * 17
    random.Random(0).shuffle(shuffled)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(map(chr, some + shuffled)))


def compare(folder: Path) -> None:
    """How far the weights of a run that resumed are from those of one that was never stopped."""
    names = ("half", "straight", "resumed")
    states = [torch.load(folder / name / "model.pt", weights_only=True) for name in names]
    vectors = []
    for state in states:
        parts = [tensor.flatten().double() for tensor in state.values()]
        vectors.append(torch.cat(parts))
    half, straight, resumed = vectors
    off = ((resumed - straight).norm() / (straight - half).norm()).item()
    found = f"after a resume, weights are off by {off:.1e} of what its steps change"
    if not off <= FAR:
        fail(f"{found}, more than {FAR}", code=1)
    print(found)


def about(device: str) -> dict:
    """Where, with what and of which code a session is."""
    found = {"device": device, "hardware": hardware(), "versions": all_versions()}
    return found | {"git_commit": git_commit()}


def begin(device: str, work: Path) -> None:
    """Forget the steps of another machine or commit, and print the number of GPUs."""
    gpus = torch.cuda.device_count()
    if device == "cuda" and not gpus:
        fail("PyTorch finds no GPU; --device cpu tries what a CPU can run")
    path = work / "about.json"
    now = json.dumps(about(device), indent=1)
    if path.is_file() and path.read_text() != now:
        for line in work.glob("*.line"):
            line.unlink()
    path.write_text(now)
    print(gpus if device == "cuda" else 0)


def report(device: str, work: Path, results: Path, out: Path | None) -> None:
    """Write what the steps printed and, from a suite that was stopped, what it has measured."""
    steps = []
    for path in sorted(work.glob("*.line"), key=lambda path: path.stat().st_mtime):
        seconds, outcome, name = path.read_text().rstrip("\n").split("\t")
        command = path.with_suffix(".command")
        steps.append({"name": name, "seconds": int(seconds), "outcome": outcome})
        steps[-1]["command"] = command.read_text().strip() if command.is_file() else None
    found = {"gpu_session.json": about(device) | {"date": today(), "steps": steps}}
    suite = load(RESULTS / "gpu.partial.json")
    if suite and not load(RESULTS / "gpu.json").get("complete"):
        suite["rows"] = [row for row in suite["rows"] if row["runs"] or row["failed"]]
        found["gpu.json"] = suite
    for name, value in found.items():
        write_json(results / name, value)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        measured = [results / name for name in MEASURED]
        for path in [*measured, *work.glob("*.log"), *work.glob("*.line")]:
            if path.is_file():
                shutil.copy(path, out)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    flag = parser.add_argument
    flag("--write-text", type=Path, metavar="FILE")
    flag("--compare", type=Path, metavar="DIR")
    flag("--begin", metavar="DEVICE")
    flag("--report", metavar="DEVICE")
    flag("--work", type=Path, metavar="DIR")
    flag("--results", type=Path, metavar="DIR")
    flag("--out", type=Path, metavar="DIR")
    args = parser.parse_args()
    if args.write_text:
        write_text(args.write_text)
    if args.compare:
        compare(args.compare)
    if args.begin:
        begin(args.begin, args.work)
    if args.report:
        report(args.report, args.work, args.results, args.out)


if __name__ == "__main__":
    main()
