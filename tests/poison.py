"""Run a script in which NaN or Inf appears.

Used in place of a script's name, after its launcher. The environment variable POISON gives the
kind, the first and the last step, and the rank: "input 7 7 1", "loss 7 7 1" or "gradient 7 7 1".

    input      the batch is NaN, and with it the model's output and the loss
    loss       the loss is NaN, though the output is unchanged
    gradient   the gradient of the loss is infinite, though the loss is unchanged
"""

import os
import runpy
import sys
from pathlib import Path

import small_resnet  # noqa: F401  a model to choose
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
script = next(word for word in sys.argv if word.startswith(("pytorch_", "lightning_")))
sys.argv = [script, *(word for word in sys.argv[1:] if word != script)]  # launch adds a flag before

from harness import run  # noqa: E402
from harness.world import world  # noqa: E402

WHAT, FIRST, LAST, RANK = os.environ["POISON"].split()
batches, cross_entropy = run.Run.batches, F.cross_entropy
poisoned = False  # the present step


def poisoned_batches(run, loader, epoch, *dtype):
    global poisoned
    for images, labels in batches(run, loader, epoch, *dtype):
        poisoned = int(FIRST) <= run.step <= int(LAST) and world().rank == int(RANK)
        yield images * float("nan") if poisoned and WHAT == "input" else images, labels
        poisoned = False


def poisoned_cross_entropy(logits, *args, **kwargs):
    if poisoned and WHAT == "gradient":
        logits.register_hook(lambda gradient: gradient * float("inf"))
    loss = cross_entropy(logits, *args, **kwargs)
    return loss * float("nan") if poisoned and WHAT == "loss" else loss


run.Run.batches, F.cross_entropy = poisoned_batches, poisoned_cross_entropy
runpy.run_path(script, run_name="__main__")
