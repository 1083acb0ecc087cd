"""Run a script in which one fault happens, at its first start only.

Used in place of a script's name, after its launcher; inject.py does so. The environment variable
FAULT says what happens: a JSON object with

    kind     kill (SIGKILL), term (SIGTERM), stop (SIGSTOP) or exception, of this very process; loop
             (for ever) or sleep (for a minute); skip, order, shape or dtype: what this rank gets
             wrong of collectives that all ranks call
    rank     whose
    step     at which step; of a phase that belongs to a snapshot, or "in state": while the first is
             written, or sent, at this step or a later one
    phase    data, forward, backward, optimizer; before sum, in sum, before vote, after vote,
             in state, of pytorch_fault_tolerance.py; during write, before rename, after rename
    samples  optional, by step: the positions in its batch that a single process trains on
    hold     optional: a step, and files that a rank waits for before it
    events   a file; a line is added at every start, at the fault, and at every first step: when,
             what, after how many restarts, and at which epoch and step of it, counted from 0

A rank that does not write snapshots has the last three at the points where it waits for the one
that does. Of checkpoints that torch.distributed.checkpoint writes by itself, every rank has them:
half of its shards are written, or all; and, at the latest when the next one is begun, the last one
is whole, which adds a line, too.
"""

import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, filesystem
from torch.optim import optimizer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
script = next(word for word in sys.argv[1:] if word.endswith(".py"))
sys.argv = [script, *(word for word in sys.argv[1:] if word != script)]

import small_resnet  # noqa: E402, F401  a model to choose

from harness import snapshots, stop  # noqa: E402
from harness.world import world  # noqa: E402
from jobs import images, text  # noqa: E402

FAULT = json.loads(os.environ["FAULT"])
COLLECTIVES = "skip", "order", "shape", "dtype"
step = 0  # of this start, the first is 1
place = 0, 0  # the same, as epoch and step
stop.VOTE_EVERY = 0  # the job ends sooner than half a second from a signal
armed = world().restarts == 0 and world().rank == FAULT["rank"]


class InjectedFault(Exception):
    """No type that anything catches."""


def note(event, at=None):
    epoch, index = at or place
    with open(FAULT["events"], "a") as file:
        file.write(f"{time.time():.3f} {event} {world().restarts} {epoch} {index}\n")


def happen(phase):
    """The fault, if this is its place."""
    global armed
    if phase == "enters a list" and world().restarts:
        Path(f"{FAULT['events']}-again").touch()
    first = phase in ("during write", "before rename", "after rename", "in state")
    due = step >= FAULT["step"] if first else step == FAULT["step"]
    if not armed or phase != FAULT["phase"] or not due or FAULT["kind"] in COLLECTIVES:
        return
    armed = False
    note("fault")
    if FAULT["kind"] == "exception":
        raise InjectedFault(phase)
    while FAULT["kind"] == "loop":
        pass
    if FAULT["kind"] == "sleep":
        time.sleep(60)
        return
    signals = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
    os.kill(os.getpid(), signals[FAULT["kind"]])


def call_collectives(kind, wrong):
    """As a user may add them to a loop, and what one rank may get wrong of them."""
    first = torch.zeros(8 if wrong and kind == "shape" else 7)
    first = first.double() if wrong and kind == "dtype" else first
    if wrong and kind == "order":
        dist.broadcast(torch.zeros(3), 0)
    if not (wrong and kind == "skip"):
        dist.all_reduce(first)
    if kind == "order":
        dist.broadcast(torch.zeros(3), 0)


def cut_and_complete(path):
    """Let the fault happen when half of a file is written."""
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    happen("during write")
    path.write_bytes(whole)


def wait_for_files():
    at, files = FAULT.get("hold", (0, []))
    end = time.monotonic() + 60
    while step == at and not all(map(os.path.exists, files)) and time.monotonic() < end:
        time.sleep(0.05)


def count_steps(kind):
    """Of a data set, which is asked for each batch."""
    prepare = kind.prepare

    def prepare_and_count(data, batch, device, seed, epoch, index, *args):
        global step, place
        step += 1
        place = epoch, index
        happen("data")
        wait_for_files()
        found = prepare(data, batch, device, seed, epoch, index, *args)
        kept = FAULT.get("samples", {}).get(str(step))
        return tuple(tensor[kept] for tensor in found) if kept else found

    kind.prepare = prepare_and_count


count_steps(images.Images)
count_steps(text.Text)


def in_forward(module, args):
    if module.training:
        happen("forward")


def in_backward(module, args, output):
    """A hook on what convolutions, or norms of a GPT, returned."""
    has_hook = isinstance(module, (nn.Conv2d, nn.LayerNorm)) and torch.is_tensor(output)
    if module.training and has_hook and output.requires_grad:
        output.register_hook(lambda gradient: happen("backward"))


def between(kind, name, before, after=None, which=lambda *_: True):
    """Let the fault happen before or after a function or method that the script itself calls."""
    method = getattr(kind, name)

    def replacement(*args, **kwargs):
        due = which(*args)
        happen(before if due else None)
        found = method(*args, **kwargs)
        happen(after if due else None)
        return found

    setattr(kind, name, replacement)


between(dist.ProcessGroupGloo, "allreduce", "before sum", "in sum")
between(dist.ProcessGroupGloo, "broadcast", None, "in state")
between(dist.PrefixStore, "append", None, "enters a list")
between(dist.PrefixStore, "add", "before vote", "after vote", lambda _, key, *n: "votes" in key)
nn.modules.module.register_module_forward_pre_hook(in_forward)
nn.modules.module.register_module_forward_hook(in_backward)


def after_first_step(*_):
    if step == 1 and world().rank == 0:
        note("step")


def before_optimizer(*_):
    happen("optimizer")
    if FAULT["kind"] in COLLECTIVES and step == FAULT["step"]:
        call_collectives(FAULT["kind"], world().rank == FAULT["rank"])


optimizer.register_optimizer_step_pre_hook(before_optimizer)
optimizer.register_optimizer_step_post_hook(after_first_step)

write_data = FileSystemWriter.write_data
rename = filesystem.FileSystem.rename
written = 0  # checkpoints of torch.distributed.checkpoint


def write_in_halves(writer, plan, planner):
    global written
    results = write_data(writer, plan, planner)
    if Path(writer.path).parent.name != "snapshots":  # it is a part of one of the harness's
        return results
    if world().rank > 0 and written:
        happen("after rename")
    written += 1
    for path in Path(writer.path).glob(f"__{world().rank}_*.distcp"):
        cut_and_complete(path)
    happen("before rename")
    return results


def rename_and_note(files, path, new_path):
    rename(files, path, new_path)
    folder = Path(new_path).parent
    if folder.parent.name == "snapshots":
        note("whole", at=(0, int(folder.name.split("-")[1]) - 1))
        happen("after rename")


FileSystemWriter.write_data = write_in_halves
filesystem.FileSystem.rename = rename_and_note
if world().rank == 0:
    note("start")
    save = torch.save

    def save_in_halves(state, path, *args, **kwargs):
        save(state, path, *args, **kwargs)
        if isinstance(path, Path):  # not memory
            cut_and_complete(path)

    torch.save = save_in_halves
    between(os, "replace", "before rename")
    between(snapshots, "list_snapshots", "after rename")  # looks for older ones then
else:
    together = snapshots.together

    def together_and_more(task, *args, **kwargs):
        name = getattr(task, "__name__", "")
        happen({"write_all": "during write", "seal_and_rename": "before rename"}.get(name))
        results = together(task, *args, **kwargs)
        if name == "seal_and_rename":
            happen("after rename")
        return results

    snapshots.together = together_and_more

runpy.run_path(script, run_name="__main__")
