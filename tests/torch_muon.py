"""A hook of hooks.py: PyTorch's own Muon for the matrices of the blocks, AdamW for all other
parameters.

The Newton-Schulz iteration is in the dtype of the weights, for which PyTorch has no argument. Each
step prints the FLOPs of this rank's matrix products. pytorch_Muon.py is unchanged.
"""

import functools
import inspect
import sys
from collections import defaultdict

import torch
from torch.distributed.tensor import DTensor
from torch.optim import _muon
from torch.utils._python_dispatch import TorchDispatchMode

import common
from harness.world import world
from jobs.model_parts import blocks_of

source = inspect.getsource(_muon._zeropower_via_newtonschulz)
for cast in ("grad.to(dtype=torch.bfloat16, copy=True)", "grad.bfloat16()"):  # the latter: 2.11
    source = source.replace(cast, "grad.clone()")
assert source.count("grad.clone()") == 1
exec(source, vars(_muon))


class CountFlops(TorchDispatchMode):
    """Of products of matrices, as this rank computes them."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with what is in it
        if func._schema.name in ("aten::mm", "aten::addmm"):
            first, second = args[-2:]
            self.flops += 2 * first.numel() * second.shape[1]
        return func(*args, **(kwargs or {}))


class MuonAndAdamW(torch.optim.Optimizer):
    """Both, with their groups in a row."""

    def __init__(self, matrices, groups, **options):
        own = {"lr": options["lr"], "weight_decay": options["weight_decay"]}
        muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **own)
        super().__init__(groups, options)
        self.both = (muon, torch.optim.AdamW(groups, **options))
        self.state = defaultdict(dict)
        self.param_groups = [group for each in self.both for group in each.param_groups]
        for each in self.both:
            each.state = self.state

    def step(self, closure=None):
        for each in self.both:
            each.step()


def make_optimizer(args, model, fused=True):
    matrices = [p for block in blocks_of(model) for p in block.parameters() if p.ndim == 2]
    ours = {id(p) for p in matrices}
    groups = common.parameter_groups(args, model)
    groups = [g | {"params": [p for p in g["params"] if id(p) not in ours]} for g in groups]
    return MuonAndAdamW(matrices, groups, **common.optimizer_class(args)[1])


def make_scheduler(args, optimizer, *rest):
    scheduler = scheduled(args, optimizer, *rest)
    step = optimizer.step

    @functools.wraps(step)  # with the mark of the scheduler, which looks for it
    def counted(*arguments, **options):
        with CountFlops() as counter:
            result = step(*arguments, **options)
        sys.stdout.write(f"flops {world().rank} {counter.flops}\n")
        return result

    optimizer.step = counted
    return scheduler


scheduled = common.make_scheduler
common.make_optimizer = make_optimizer
common.make_scheduler = make_scheduler
