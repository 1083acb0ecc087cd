"""The solution of exercises/experts.py."""

import torch
import torch.distributed as dist

from exercises.experts import Exchange


def dispatch(tokens, expert):
    order = expert.argsort(stable=True)
    outgoing = expert.bincount(minlength=dist.get_world_size())
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing)
    plan = order, outgoing.tolist(), incoming.tolist()
    return Exchange.apply(tokens[order], plan[1], plan[2]), plan


def combine(outputs, plan):
    order, outgoing, incoming = plan
    returned = Exchange.apply(outputs, incoming, outgoing)
    return returned[order.argsort()]
