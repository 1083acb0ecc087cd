"""What these examples share: a small model on two ranks, and how a problem is shown.

Each example has the problems of a section of docs/troubleshooting.md. With its remedy, a function
ends well; without it, in the error that the page quotes, or in an assertion where PyTorch reports
nothing.
"""

import os
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

PATIENCE = 4  # seconds, where ranks wait for each other in vain


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x).sin()


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.used = [0, 1]

    def forward(self, x):
        for i in self.used:
            x = self.blocks[i](x)
        return x


def backward(model, *args, width=4):
    model(torch.ones(2, width, requires_grad=True), *args).sum().backward()


def show(*problems, hang=()):
    """Each of these, or those that the command line names: with its remedy, and without; what that
    ends in goes to stderr, in one piece.

    Args:
        hang: those that end by a timeout.
    """
    store, rank, size = next(dist.rendezvous("env://"))
    chosen = [p for p in problems if p.__name__ in (sys.argv[1:] or [p.__name__])]
    for problem in chosen:
        variables = dict(os.environ)
        said = [f"== {problem.__name__}, rank {rank}"]
        for remedy in (True, False):
            group = dist.PrefixStore(f"{problem.__name__} {remedy}", store)
            timeout = timedelta(seconds=PATIENCE if problem in hang else 60)
            dist.init_process_group("gloo", None, timeout, size, rank, group)
            dist.barrier()  # or one may leave before the other has connected
            torch.manual_seed(0)
            try:
                problem(remedy=remedy)
                said.append("remedied" if remedy else "nothing happened")
            except Exception:
                said.append(traceback.format_exc())
            dist.destroy_process_group()
            os.environ.clear()
            os.environ.update(variables)
        sys.stderr.write("\n".join([*said, "== end\n"]))
        sys.stderr.flush()
