"""Run a script with one silent mistake in it.

Used in place of a script's name, after its launcher; the environment variable MISTAKE names it:

    MISTAKE='tied gradients not summed' torchrun --standalone --nproc_per_node=2 \\
        tests/mistakes.py pytorch_PP.py ...

tables.yaml has the right and the wrong lines; it fails if the script has not the right ones.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import yaml
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
script = next(word for word in sys.argv[1:] if word.endswith(".py"))
sys.argv = [script, *(word for word in sys.argv[1:] if word != script)]  # launch adds a flag before

from jobs import experts, gpt, sizes  # noqa: E402

MISTAKES = yaml.safe_load((ROOT / "tests/tables.yaml").read_text())["silent_mistakes"]


class FusedAttention(gpt.Attention):
    """Queries, keys and values by one matrix, as many GPTs have it."""

    def __init__(self, size: sizes.Size, dropout: float):
        super().__init__(size, dropout)
        del self.query, self.key, self.value
        self.fused = nn.Linear(size.width, 3 * size.width, bias=False)

    def forward(self, x: torch.Tensor, places) -> torch.Tensor:
        q, k, v = (self.split(part) for part in self.fused(x).chunk(3, -1))
        return self.dropout(self.out(self.attend(q, k, v, *places[1]).transpose(1, 2).flatten(2)))


def main():
    text = (ROOT / script).read_text()
    mistake = os.environ["MISTAKE"]
    if "fused" in mistake:
        gpt.Attention = FusedAttention
    if "on each rank alone" in mistake:
        experts.dist = SimpleNamespace(is_initialized=lambda: False)
    lines = {} if mistake.startswith("none") else MISTAKES[mistake]["lines"]
    for right, wrong in lines.items():
        assert right in text, f"{script} has no {right}"
        text = text.replace(right, wrong)
    exec(compile(text, script, "exec"), {"__name__": "__main__", "__doc__": "", "__file__": script})


if __name__ == "__main__":
    main()
