"""The solution of exercises/loss_scaling.py."""

import torch
import torch.distributed as dist

INTERVAL = 3


def unscale(parameters, scale):
    bad = torch.zeros(())
    for p in parameters:
        p.grad /= scale
        bad += (~p.grad.isfinite()).sum()
    dist.all_reduce(bad)
    return bad.item() == 0


def step(parameters, optimizer, state):
    if not unscale(parameters, state["scale"]):
        state["scale"] /= 2
        state["good"] = 0
        return
    optimizer.step()
    state["good"] += 1
    if state["good"] == INTERVAL:
        state["scale"] *= 2
        state["good"] = 0
