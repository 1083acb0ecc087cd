"""The solution of exercises/token_weights.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def accumulate(model, micro_batches):
    count = torch.stack([(labels >= 0).sum() for _, labels in micro_batches]).sum()
    dist.all_reduce(count)
    for tokens, labels in micro_batches:
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (loss / count).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
