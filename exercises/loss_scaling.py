"""Loss scaling: train in float16 although its numbers end at 65,504 and 6e-8.

Problem     A gradient below 6e-8 is 0 in float16. So the loss is multiplied by a scale before
            backward, and gradients are divided by it afterwards. If one overflows, the step is
            skipped, and the scale halved. With sharded gradients, the other ranks do not see it.
Write       unscale() and step().
The judge   compares the update and the scale of each of ten steps, in two of which a gradient of
            the last rank overflows.
"""

import torch
import torch.distributed as dist
from torch import nn

INTERVAL = 3  # good steps in a row, after which the scale is doubled


def unscale(parameters: list[nn.Parameter], scale: float) -> bool:
    """Divide the gradients by the scale, in place. Return whether every gradient on every rank is
    finite: the same on all ranks.

    Hint: ``tensor.isfinite()`` is False where there is Inf or NaN. Ranks agree with an all-reduce
    of the number of bad values, on all ranks, not only on those that have some.
    """
    raise NotImplementedError("unscale() divides, and asks all ranks for Inf and NaN")


def step(
    parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, state: dict[str, float]
) -> None:
    """Called after backward of ``loss * state["scale"]``: update, or skip the step.

    Args:
        parameters: this rank's shards, with gradients.
        state: "scale", and "good", the number of good steps since the scale last changed. After
            an overflow the scale is halved; after INTERVAL good steps in a row it is doubled.
            Either way, the count begins again at 0.
    """
    raise NotImplementedError("step() skips a step with an overflow, and adapts the scale")
