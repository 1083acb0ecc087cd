"""Gradients are unscaled before they are clipped.

At first a GradScaler multiplies the loss, and so the gradients, by 65536. Their norm is always
above the limit then, and unscaling divides the clipped gradients by 65536.
"""

import torch
import torch.nn.functional as F
from torch import nn
from two_ranks import difference, make_task, show, train_alone

LIMIT = 0.1


def off_by(variant):
    model, inputs, targets = make_task()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        if variant == "right":
            scaler.unscale_(optimizer)  # right: first
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)  # wrong: they are still scaled
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return difference(model, train_alone(LIMIT))


if __name__ == "__main__":
    show(off_by, "weights", ranks=1)
