"""LoRA and its merge: train two thin matrices beside a frozen one.

Problem     Weights, gradients and AdamW's state of Llama-3-8B are 128 GB in float32. Frozen in
            bfloat16, the weights are 16 GB, and adapters of rank 16 have a thousandth of the rest.
Write       start(), forward() and merge().
The judge   checks that the first output is that of the frozen model, counts what autograd keeps,
            and merges into a weight in bfloat16.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def start(outputs: int, inputs: int, rank: int) -> tuple[Tensor, Tensor]:
    """The adapter before training: ``a`` [rank, inputs] and ``b`` [outputs, rank], in float32. They
    change nothing, but ``b`` gets a gradient. Hint: if both were 0, neither would get one."""
    raise NotImplementedError("start() makes one random matrix, and one of zeros")


def forward(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """What the layer and ``scale`` times its adapter compute, from [samples, inputs] to [samples,
    outputs]. Hint: ``b @ a`` is as large as the weight, and autograd would keep it: x goes through
    one thin matrix, then through the other."""
    raise NotImplementedError("forward() adds the adapter's output to the layer's")


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The weight of one layer that computes the same, in the dtype of ``weight`` [outputs, inputs],
    which stays as it is. Hint: in bfloat16, small changes are rounded away: add in the adapter's
    dtype, and round once."""
    raise NotImplementedError("merge() adds the product of both matrices to the weight")
