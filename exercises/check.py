"""Judge what you wrote in exercises/: on 1, 2 and more ranks, against one process in float64.

Command:    python exercises/check.py           what is done, and what is next
            python exercises/check.py fsdp      one exercise
            python exercises/check.py fsdp --answers exercises/solutions
Exit code   0 if all that was judged is right, 1 if not.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors; several ranks share the cores
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")

from exercises.judge import data_parallel, model_parallel, one_gpu  # noqa: E402
from exercises.judge.ranks import run  # noqa: E402
from exercises.judge.verdict import NOT_BEGUN, counted, judge  # noqa: E402
from harness.cli import fail, make_parser, number  # noqa: E402

EXERCISES = {  # in the order of the course: the check, and the numbers of ranks
    "mean": (data_parallel.mean, (1, 2, 3)),
    "buckets": (data_parallel.buckets, (1, 2, 3)),
    "token_weights": (data_parallel.token_weights, (1, 2, 3)),
    "contrastive": (data_parallel.contrastive, (1, 2, 3)),
    "recompute": (one_gpu.recompute, (1,)),
    "zero": (data_parallel.zero, (1, 2, 3)),
    "fsdp": (data_parallel.fsdp, (1, 2, 4)),
    "tensor_parallel": (model_parallel.tensor_parallel, (1, 2, 3)),
    "sequence_parallel": (model_parallel.sequence_parallel, (1, 2, 3)),
    "pipeline": (model_parallel.pipeline, (1,)),
    "ring": (model_parallel.ring, (1, 2, 3)),
    "experts": (model_parallel.experts, (1, 2, 3)),
    "lora": (one_gpu.lora, (1,)),
    "loss_scaling": (data_parallel.loss_scaling, (1, 2, 3)),
    "three_mistakes": (data_parallel.three_mistakes, (1, 2, 3)),
}
OPTIMIZERS = {"zero", "loss_scaling", "three_mistakes"}  # exercises with one


def findings_of(path: Path, check: Callable):
    """What a check finds in a file; called on every rank."""
    spec = importlib.util.spec_from_file_location("answer", path)
    answer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(answer)
    yield from check(answer)


def verdict(name: str, folder: Path, patience: float) -> tuple[bool, str]:
    """Whether an answer is right, and a sentence."""
    path = folder / f"{name}.py"
    if not path.is_file():
        return False, f"{NOT_BEGUN}: there is no file {path}"
    check, sizes = EXERCISES[name]
    if name in OPTIMIZERS:
        importlib.import_module("torch._dynamo")  # once here, and not by the optimizer of each rank
    outcomes = {}
    for ranks in sizes:
        outcomes[ranks] = run(partial(findings_of, path, check), ranks, path, patience)
        if outcomes[ranks].end:
            break  # more ranks would end in the same way
    wrong = judge(outcomes)
    return not wrong, wrong or f"right on {counted(sizes)}"


def show_all(folder: Path, patience: float) -> bool:
    """Print a line for each exercise; return whether all are done."""
    left = []
    for name in EXERCISES:
        is_right, said = verdict(name, folder, patience)
        if not is_right:
            left.append(name)
        state = NOT_BEGUN if said.startswith(NOT_BEGUN) else "not right yet"
        title = (HERE / f"{name}.py").read_text().splitlines()[0].strip('"')
        print(f"{'done' if is_right else state:14} {name:18} {title}", flush=True)
    following = ""
    if left:
        path = folder / f"{left[0]}.py"
        here = Path.cwd()
        path = path.relative_to(here) if path.is_relative_to(here) else path
        following = f" Next: write {path}"
    print(f"{len(EXERCISES) - len(left)} of {len(EXERCISES)} done.{following}")
    return not left


def main() -> None:
    parser = make_parser(__doc__)
    flag = parser.add_argument
    flag("exercise", nargs="?", help="one of " + ", ".join(EXERCISES))
    flag("--answers", type=Path, default=HERE, metavar="FOLDER", help="where the answers are")
    about = "seconds after which ranks that still run are asked where they are (default: 5)"
    flag("--patience", type=number(float, 0, above=0), default=5, metavar="S", help=about)
    flag("-h", "--help", action="help", help="print this help and exit")
    args = parser.parse_args()
    folder = args.answers.resolve()
    name = args.exercise
    if name is None:
        raise SystemExit(not show_all(folder, args.patience))
    if name not in EXERCISES:
        fail(f"{name} is no exercise; use one of {', '.join(EXERCISES)}")
    is_right, said = verdict(name, folder, args.patience)
    print(f"{name}: {said}")
    if is_right:
        print(f"Compare yours with exercises/solutions/{name}.py")
    raise SystemExit(not is_right)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
