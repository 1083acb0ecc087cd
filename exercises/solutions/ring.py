"""The solution of exercises/ring.py."""

import torch
import torch.distributed as dist

from exercises.ring import attend, pass_on


def merge(out, log, more, log_more):
    both = torch.logaddexp(log, log_more)
    share = (log - both).exp()[..., None]
    share_more = (log_more - both).exp()[..., None]
    return out * share + more * share_more, both


def ring_attention(q, k, v):
    out, log = attend(q, k, v)
    for _ in range(dist.get_world_size() - 1):
        k, v = pass_on(torch.stack([k, v]))
        out, log = merge(out, log, *attend(q, k, v))
    return out
