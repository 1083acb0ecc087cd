"""Buffers belong to a checkpoint: what is saved is the state dict, not the parameters.

Loaded with ``strict=False``, the model keeps the BatchNorm statistics of a new one.
"""

import io

import torch
import torch.nn.functional as F
from torch import nn
from two_ranks import make_task, show


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def off_by(variant):
    model = make_model()
    _, inputs, targets = make_task()
    for x in inputs:
        model(3 * x + 2)  # the running statistics learn
    if variant == "right":
        state = model.state_dict()  # right
    else:
        state = dict(model.named_parameters())  # wrong: no buffers
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    resumed = make_model()
    resumed.load_state_dict(torch.load(file), strict=False)  # strict=True would raise an error
    with torch.no_grad():
        loss = F.mse_loss(resumed.eval()(3 * inputs[0] + 2), targets[0])
        expected = F.mse_loss(model.eval()(3 * inputs[0] + 2), targets[0])
    return abs(loss / expected - 1).item()


if __name__ == "__main__":
    show(off_by, "evaluation loss", ranks=1)
