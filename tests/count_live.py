"""Run a script on real ranks and real tensors, and count live memory as estimate.py does.

Used in place of a script's name, after its launcher:

    torchrun --standalone --nproc_per_node=2 tests/count_live.py pytorch_FSDP.py --model ...
    python tests/count_live.py --on-fakes 2 pytorch_FSDP.py --model ...

The second command does the same as rank 0 of 2, on fake tensors. Images are contiguous, and
optimizers and autocast behave as on a CPU. The bytes at the peak of the third step, by kind, are
written to rank0.json, rank1.json, ... in --output-dir.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import small_resnet  # noqa: E402, F401  a model to choose

from estimator import trial  # noqa: E402


def main():
    at = next(i for i, word in enumerate(sys.argv) if word.startswith("pytorch_"))
    ranks, words = None, sys.argv[at:] + sys.argv[1:at]  # launch adds a flag before
    if "--on-fakes" in words:
        where = words.index("--on-fakes")
        ranks = int(words[where + 1])
        del words[where : where + 2]
    folder = Path(words[words.index("--output-dir") + 1])
    # In the second step DDP makes its buckets anew.
    live, _ = trial.run_script(words, ranks, block=1, steps=3, as_on_a_gpu=False)
    folder.mkdir(parents=True, exist_ok=True)
    rank = os.environ.get("RANK", "0")
    (folder / f"rank{rank}.json").write_text(json.dumps(live.peak()))
    sys.stdout.flush()
    os._exit(0)  # the others are not waited for


if __name__ == "__main__":
    main()
