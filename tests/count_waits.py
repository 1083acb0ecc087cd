"""Run a script and count, step by step, what would make the CPU wait for a GPU.

Used in place of a script's name, after its launcher. Each rank writes ``waits-RANK.json`` into
--output-dir: by step, the calls that read a value from a tensor, from when the step has its batch
until the next step has one. On a GPU, such a call between two prints is also an error.
"""

import collections
import functools
import json
import runpy
import sys
from pathlib import Path

import small_resnet  # noqa: F401  a model to choose
import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
script = next(word for word in sys.argv if word.startswith("pytorch_"))
sys.argv = [script, *(word for word in sys.argv[1:] if word != script)]  # launch adds a flag before

from harness import run  # noqa: E402
from harness.world import world  # noqa: E402

# `tolist` of a CPU tensor is not dispatched: hence the methods, besides the dispatcher's own.
METHODS = ["item", "tolist", "cpu", "__bool__", "__float__", "__int__", "__index__"]
waits = collections.defaultdict(collections.Counter)
step = None  # the one that is counted


class SeeDispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if step and "_local_scalar_dense" in func.__name__:
            waits[step][func.__name__] += 1
        return func(*args, **(kwargs or {}))


def count(name):
    original = getattr(torch.Tensor, name)

    @functools.wraps(original)
    def counted(tensor, *args, **kwargs):
        if step:
            waits[step][name] += 1
        return original(tensor, *args, **kwargs)

    setattr(torch.Tensor, name, counted)


batches = run.Run.batches


def counted_batches(run, loader, epoch, *dtype):
    global step
    with SeeDispatched():
        for batch in batches(run, loader, epoch, *dtype):
            step = run.step
            waits[step].update()
            if run.device.type == "cuda":
                prints = step % run.args.print_freq == 0
                torch.cuda.set_sync_debug_mode("default" if prints else "error")
            yield batch
        step = None
        if run.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    path = run.args.output_dir / f"waits-{world().rank}.json"
    path.write_text(json.dumps(waits, indent=2) + "\n")


for method in METHODS:
    count(method)
run.Run.batches = counted_batches
runpy.run_path(script, run_name="__main__")
