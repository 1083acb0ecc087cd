"""Token weights under accumulation: every label counts once.

Problem     Sequences differ in length, so ranks and micro-batches hold different numbers of labels.
            A mean of their means lets a label of a short answer pull many times as hard as one of a
            long answer, and nothing reports it. The ``.loss`` of transformers is such a mean.
Write       accumulate().
The judge   compares with one process that has all labels in one batch. One of the micro-batches has
            no label at all.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def accumulate(model: nn.Module, micro_batches: list[tuple[Tensor, Tensor]]) -> None:
    """Leave in each ``p.grad`` the gradient of the mean loss of all labels, on all ranks.

    Args:
        model: from tokens [batch, time] to logits [batch, time, vocabulary]. No ``p.grad`` yet.
        micro_batches: of this rank, tokens and labels, both [batch, time]. Labels of -100 do not
            count. Every rank has equally many micro-batches, for one backward each.

    Hints: ``F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")`` is 0 if no
    label counts; a mean would be NaN, with a gradient of 0. The number of labels on all ranks is
    known before the first forward.
    """
    raise NotImplementedError("accumulate() divides sums of losses by the number of all labels")
