"""Measure the overhead of a training script's own code, in interleaved steps of one process, so
that the load of the machine affects all of them. The last line always gives both medians.

    python measure/overhead.py loop pytorch_SingleGPU.py --max-steps 60
    torchrun --standalone --nproc_per_node=2 measure/overhead.py marks pytorch_DDP.py ...
    torchrun --standalone --nproc_per_node=2 measure/overhead.py saves \\
        pytorch_checkpoint.py --async-save --snapshot-every 5 --model gpt-6x6x384 ...

loop   alternates the script's steps with those of a bare loop: same model, optimizer and DDP
       options, on tensors that are already on the device, without loader, crops, losses, progress
       bar or TensorBoard. A ratio of 1.00 means no overhead.
marks  compares steps with and without the breakdown (harness/clock.py), and measures how long the
       breakdown's own calls take.
saves  alternates synchronous and asynchronous checkpoints of DCP: how long the call takes, from
       when all ranks have arrived. Also written to results/saves.json.

On a GPU, its events time the steps, without waiting for any step (harness/clock.py).
"""

import json
import runpy
import statistics
import sys
import time
from argparse import REMAINDER, ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import common  # noqa: E402
from harness.clock import WARMUP_STEPS, StepClock  # noqa: E402
from harness.measure import git_commit, hardware, launch_command, versions  # noqa: E402
from report.fresh import files_of  # noqa: E402


def write_result(name: str, **found) -> None:
    """Into results/, with the command, the machine and the commit."""
    found |= {"hardware": hardware(), "versions": versions(), "git_commit": git_commit()}
    found |= {"command": launch_command(), "files": files_of(ROOT, [launch_command()])}
    if common.world().rank == 0:
        (ROOT / "results" / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


def compare_with_bare_loop() -> str:
    batches = common.Run.batches
    script_seconds, bare_seconds = [], []

    def interleaved(run, loader, epoch, *dtype):
        args = run.args
        model = common.make_model(args, run.train_set.classes).to(run.device).train()
        if dist.is_initialized():
            model = DistributedDataParallel(
                model,
                device_ids=[run.device] if run.device.type == "cuda" else None,
                gradient_as_bucket_view=True,
            )
            model.broadcast_buffers = False
        optimizer = common.make_optimizer(args, model)
        batch = run.train_set.__getitems__(list(range(args.batch_size // common.world().size)))
        images, labels = run.train_set.prepare(batch, run.device, args.seed, 0, 0)

        clock = StepClock([run.device])
        clock.start()
        for batch in batches(run, loader, epoch, *dtype):
            yield batch
            clock.tick()
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            clock.tick()
        clock.read()
        script_seconds.extend(clock.seconds[::2])
        bare_seconds.extend(clock.seconds[1::2])

    common.Run.batches = interleaved
    runpy.run_path(sys.argv[0], run_name="__main__")
    seconds = {"script": script_seconds[WARMUP_STEPS:], "bare": bare_seconds[WARMUP_STEPS:]}
    script, bare = map(statistics.median, seconds.values())
    return (
        f"median of {len(bare_seconds) - WARMUP_STEPS} steps: script {script * 1e3:.1f} ms, "
        f"bare {bare * 1e3:.1f} ms, the script runs at {bare / script:.3f} of the bare loop"
    )


def compare_with_unmarked_steps() -> str:
    tick, start_step = StepClock.tick, StepClock.start_step
    mark, unmarked = StepClock.mark, [True]
    marked, spent, clocks = [], [0.0], []  # of each step: whether it has marks, seconds in them

    def timed(call):
        def wrapped(*args):
            began = time.perf_counter()
            result = call(*args)
            spent[-1] += time.perf_counter() - began
            return result

        return wrapped

    def take_turns(clock):
        unmarked[0] = not unmarked[0]
        start_step(clock)

    def mark_every_other_step(clock, phase):
        if phase in ("data", "end") or not unmarked[0]:
            mark(clock, phase)

    def note(clock):
        marked.append(not unmarked[0])
        tick(clock)
        spent.append(0.0)
        clocks[:] = [clock]

    StepClock.start_step, StepClock.tick = take_turns, note
    StepClock.mark = timed(mark_every_other_step)
    runpy.run_path(sys.argv[0], run_name="__main__")
    steps = list(zip(clocks[0].seconds, spent, marked, strict=False))[WARMUP_STEPS:]
    with_marks, without = (
        statistics.median(s for s, _, m in steps if m == kind) for kind in (True, False)
    )
    own = statistics.median(t for _, t, m in steps if m)
    return (
        f"median of {len(steps)} steps: with marks {with_marks * 1e3:.2f} ms, without "
        f"{without * 1e3:.2f} ms; the marks of a step take {own * 1e6:.0f} µs, "
        f"{own / with_marks:.3%} of it"
    )


def compare_saves() -> str:
    async_save, seconds, whole_after = dcp.async_save, {"save": [], "async_save": []}, []

    def take_turns(tensors, **where):
        kind = "async_save" if len(seconds["save"]) > len(seconds["async_save"]) else "save"
        dist.barrier()
        began = time.perf_counter()
        writing = (async_save if kind == "async_save" else dcp.save)(tensors, **where)
        seconds[kind].append(time.perf_counter() - began)
        if kind == "async_save":
            writing.add_done_callback(lambda _: whole_after.append(time.perf_counter() - began))
            return writing

    dcp.async_save = take_turns
    runpy.run_path(sys.argv[0], run_name="__main__")
    seconds = {kind: spent[1:] for kind, spent in seconds.items()}  # the first of each warms up
    at_once, in_background = map(statistics.median, seconds.values())
    whole = statistics.median(whole_after[1:])
    write_result("saves", seconds=seconds, whole_after=whole_after[1:])
    return (
        f"median of {len(seconds['save'])} saves: save holds a step for {at_once * 1e3:.1f} ms, "
        f"async_save for {in_background * 1e3:.1f} ms, {in_background / at_once:.3f} of it, and "
        f"is whole after {whole * 1e3:.1f} ms"
    )


KINDS = {
    "loop": compare_with_bare_loop, "marks": compare_with_unmarked_steps, "saves": compare_saves,
}  # fmt: skip

if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("script", help="a training script, and its flags after it")
    parser.add_argument("flags", nargs=REMAINDER)
    args = parser.parse_args()
    sys.argv = [str(ROOT / args.script), *args.flags]
    common.print0(KINDS[args.kind]())
