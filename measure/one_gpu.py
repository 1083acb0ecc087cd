"""One rank of many, alone on a GPU: its memory and its compute are real, its communication is not.

    python -m measure.one_gpu --output-dir runs/one_gpu

Each row of measure/suites/one_gpu.json is a script with its flags, a rank, and the number of ranks.
The script's own training loop runs as this rank of PyTorch's ``fake`` process group, which sends
nothing: from an all-gather or an all-to-all a rank gets its own data, from a reduce-scatter its own
part. Weights and tokens are random. Five steps are run, of which the last three are measured, and a
batch is evaluated. The same row is predicted on fake tensors, as ``estimate.py`` does it.

Every row has processes of its own, which import PyTorch side by side and use the GPU in turns. On a
CPU, live tensors are counted instead (estimator/live_bytes.py), and nothing is timed.
"""

import concurrent.futures
import contextlib
import itertools
import json
import os
import runpy
import shlex
import statistics
import subprocess
import sys
import threading
from argparse import Namespace, RawDescriptionHelpFormatter
from pathlib import Path

import torch
import torch.distributed as dist

import common
from estimator import fakes, trial
from estimator.live_bytes import LiveBytes
from harness import cli, measure
from jobs import language_models
from measure.outcome import reason

ROOT = Path(__file__).resolve().parents[1]
SUITE = ROOT / "measure" / "suites" / "one_gpu.json"
STEPS = 5
WARMUP = 2  # steps that are not measured
GPU = threading.Lock()
PATIENCE = 60  # seconds that a row may use it


class Tokens(trial.Job):
    """Random tokens, so that a router uses all experts, and random weights, drawn on the device."""

    def batch(self, n: int, dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
        size = n, self.args.context
        tokens = torch.randint(len(self.classes), size, device=self.args.device)
        return tokens, tokens.roll(-1, 1)

    def make_model(self, args, classes, channels_last: bool = True) -> torch.nn.Module:
        on = torch.empty(0).device  # meta, where a script says so
        with torch.device(args.device if on.type == "cpu" else on):
            return args.task.models.make_model(args, classes)


@torch.no_grad()
def fill(args, model: torch.nn.Module, vocabulary: list[str]) -> None:
    """Random weights, as quickly as the device draws them."""
    for tensor in [*model.parameters(), *model.buffers()]:
        own = measure.local(tensor)
        own.fill_(1) if own.ndim == 1 else own.normal_(std=0.02)


class TimedRun(trial.ShortRun):
    """Stands in for a run on a GPU: its clock, and the peak memory of the last steps."""

    seconds: list[float] = []

    def resume_or_exit(self, model: torch.nn.Module, optimizer, scheduler=None, **others) -> None:
        pass

    def batches(self, loader: trial.Loader, epoch: int, dtype: torch.dtype | None = None):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
        for step, mark in enumerate(marks):
            mark.record()
            if step == WARMUP:
                torch.cuda.reset_peak_memory_stats()
            if step < STEPS:
                yield loader.dataset.batch(loader.batch_size, dtype)
        marks[-1].synchronize()
        pairs = itertools.pairwise(marks[WARMUP:])
        type(self).seconds = [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def answer_alone() -> None:
    """Other ranks have the same data as this one: also where the fake backend of PyTorch 2.11
    leaves the output as it was. A pipeline's groups for each direction are the one that there is:
    the fake one cannot be split."""

    def reduce_scatter_tensor(output, input, *_, group=None, **__):
        output.copy_(input.chunk(dist.get_world_size(group))[dist.get_rank(group)])

    dist.reduce_scatter_tensor = reduce_scatter_tensor
    dist.all_to_all_single = lambda output, input, *_, **__: output.copy_(input)
    dist.split_group = lambda parent_pg=None, *_, **__: parent_pg or dist.group.WORLD


def run_alone(row: dict, device: str, folder: Path) -> dict:
    """Run a row's script in this process, which cannot be used for anything else afterwards."""
    trial.become_rank(row["rank"], row["ranks"])
    fakes.stand_in_for_ranks()
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # no other rank is on this machine
    answer_alone()
    live = LiveBytes(block=1)
    run = TimedRun if device == "cuda" else trial.ShortRun
    run.live = live
    run.total_steps = trial.STEPS
    job = Tokens(row["classes"], torch.contiguous_format)
    common.Run = run
    common.make_loader = trial.Loader
    common.make_datasets = job.make_datasets
    common.make_model = job.make_model
    common.init_weights = language_models.init_weights = fill
    common.make_store = common.hangs.listen = lambda _: None  # nobody else is there
    cli.check_writable = cli.lock = lambda folder, flag: None  # nothing is written
    sys.argv = [*row["command"], "--device", device, "--output-dir", str(folder / "run")]
    on_cpu = device == "cpu"
    with trial.counting(live, None) if on_cpu else contextlib.suppress(trial.Finished):
        runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
    if on_cpu:
        return {"allocated": sum(live.peak().values())}
    found = {"allocated": torch.cuda.max_memory_allocated()}
    found |= {"reserved": torch.cuda.max_memory_reserved()}
    return found | {"step_seconds": statistics.median(TimedRun.seconds)}


def predict(row: dict, device: str, folder: Path) -> dict:
    """Predict a row's memory, in this process, which cannot be used for anything else then."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fake tensors need none
    options = {"as_on_a_gpu": device == "cuda", "block": 512 if device == "cuda" else 1}
    words = [*row["command"], "--output-dir", str(folder / "run")]
    live, _ = trial.run_script(words, row["ranks"], row["classes"], rank=row["rank"], **options)
    return {"predicted": sum(live.peak().values())}


# ------------------------------------------------------------------------------- rows, in processes


def rows_of(suite: Path) -> dict[str, dict]:
    """The rows of a suite, by name, with all words of their commands."""
    found = json.loads(suite.read_text())
    rows = {}
    empty = dict.fromkeys(("predicted", "allocated", "reserved", "step_seconds", "failed"))
    for case in found["cases"]:
        row = found["usual"] | empty | case
        words = shlex.split(f"{row['command']} {found['job'].format(**row)}")
        rows[row["name"]] = row | {"command": words}
    return rows


def start_row(args: Namespace, do: str, name: str) -> dict:
    """The last line that a row prints in a process of its own, or why it failed."""
    words = [sys.executable, "-m", "measure.one_gpu", name, "--do", do, "--device", args.device]
    words += ["--suite", args.suite, "--output-dir", args.output_dir]
    path = args.output_dir / f"{do} {name}.txt"
    measures = do == "measure"
    with path.open("w") as log:
        options = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log}
        process = subprocess.Popen(words, cwd=ROOT, **options)
        with GPU if measures else contextlib.nullcontext():  # PyTorch is imported meanwhile
            try:
                process.communicate(b"begin", PATIENCE if measures else None)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                return {"failed": f"timed out after {PATIENCE} s"}
    text = path.read_text()
    if code := process.returncode:
        found = {"failed": reason(text, code)}
    else:
        found = json.loads(text.splitlines()[-1])
    print(f"{do} {name}: {found}", flush=True)
    return found


def main() -> None:
    parser = cli.ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("names", nargs="*", metavar="ROW", help="only these rows (default: all)")
    flag("--suite", type=Path, default=SUITE, metavar="FILE", help="file of the rows")
    flag("--output-dir", type=Path, default=ROOT / "runs" / "one_gpu", metavar="DIR")
    flag("--device", choices=["cpu", "cuda"], default="cuda")
    flag("--do", choices=["measure", "predict"], help="one row, in this process, once stdin ends")
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    rows = rows_of(args.suite)
    if unknown := set(args.names) - set(rows):
        cli.fail(f"row {unknown.pop()}: {args.suite} has {', '.join(rows)}")
    if args.do:
        sys.stdin.read()  # until it may begin
        do = predict if args.do == "predict" else run_alone
        print(json.dumps(do(rows[args.names[0]], args.device, args.output_dir)), flush=True)
        os._exit(0)  # without the threads of a group that has no other ranks
    chosen = {name: rows[name] for name in args.names or rows}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for do in ("predict", "measure"):  # predictions would slow down what is timed
            found = pool.map(lambda name, do=do: start_row(args, do, name), chosen)
            for row, one in zip(chosen.values(), found, strict=True):
                row |= one
    chosen = [row | {"command": shlex.join(row["command"])} for row in chosen.values()]
    (args.output_dir / "rows.json").write_text(json.dumps({"rows": chosen}, indent=1) + "\n")


if __name__ == "__main__":
    main()
