"""Run a script with an optimizer whose step is not fused.

Used in place of a script's name, after its launcher. A fused step rounds the last elements of a
tensor differently from those before, so the result depends on where a tensor ends.
"""

import runpy
import sys
from pathlib import Path

import small_resnet  # noqa: F401  a model to choose

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
script = next(word for word in sys.argv if word.startswith("pytorch_"))
sys.argv = [script, *(word for word in sys.argv[1:] if word != script)]

import common  # noqa: E402

fused_class = common.optimizer_class
make_fused = common.make_optimizer


def optimizer_class(args):
    kind, options = fused_class(args)
    return kind, options | {"fused": False}


common.optimizer_class = optimizer_class
common.make_optimizer = lambda args, model: make_fused(args, model, fused=False)
runpy.run_path(script, run_name="__main__")
