"""Run a script and print what each rank drops in its first step: a line per call of a dropout.

Used in place of a script's name, after its launcher. A line has the rank and a hash of the mask.
"""

import hashlib
import runpy
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
script = next(word for word in sys.argv[1:] if word.endswith(".py"))
sys.argv = [script, *(word for word in sys.argv[1:] if word != script)]

from torch.distributed.tensor import DTensor  # noqa: E402

from harness.world import world  # noqa: E402

forward = nn.Dropout.forward


def noted(layer, x: torch.Tensor) -> torch.Tensor:
    dropped = forward(layer, x)
    if layer.training:
        local = dropped.to_local() if isinstance(dropped, DTensor) else dropped
        mask = (local == 0).cpu().numpy().tobytes()
        sys.stdout.write(f"mask {world().rank} {hashlib.md5(mask).hexdigest()}\n")
        sys.stdout.flush()
    return dropped


nn.Dropout.forward = noted
runpy.run_path(script, run_name="__main__")
