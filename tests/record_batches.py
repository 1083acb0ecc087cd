"""Run a script unchanged and record the batches that it trains on.

python tests/record_batches.py SCRIPT FOLDER [flags of the script]
"""

import os
import runpy
import sys
from pathlib import Path

import small_resnet  # noqa: F401  a model to choose
import torch

ROOT = Path(__file__).resolve().parents[1]


def main():
    folder = Path(sys.argv[2])
    sys.argv = [str(ROOT / sys.argv[1]), *sys.argv[3:]]
    sys.path.insert(0, str(ROOT))
    import common

    batches = common.Run.batches

    def recorded(run, loader, epoch, *dtype):
        for images, labels in batches(run, loader, epoch, *dtype):
            path = folder / f"step{run.step}-rank{os.environ.get('RANK', 0)}.pt"
            torch.save((images.clone(), labels.clone()), path)
            yield images, labels

    common.Run.batches = recorded
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
