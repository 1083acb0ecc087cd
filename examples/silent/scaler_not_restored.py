"""A GradScaler has a state: the scale that it found. A checkpoint without it starts at 65536 again.

The gradients overflow in float16, and steps are skipped until the scale is small enough again.
"""

import torch
import torch.nn.functional as F
from two_ranks import difference, make_task, show

STEPS = 24


def off_by(variant):
    whole_run = make_state()
    train(*whole_run, range(STEPS))
    first_half = make_state()
    train(*first_half, range(STEPS // 2))
    saved = [part.state_dict() for part in first_half]
    model, optimizer, scaler = make_state()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    if variant == "right":
        scaler.load_state_dict(saved[2])  # wrong without this line
    train(model, optimizer, scaler, range(STEPS // 2, STEPS))
    return difference(model, whole_run[0])


def make_state():
    model = make_task()[0].float()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    return model, optimizer, torch.amp.GradScaler("cpu")


def train(model, optimizer, scaler, steps):
    _, inputs, targets = make_task()
    for step in steps:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(inputs[step % 4].float()), 1000 * targets[step % 4].float())
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # left out if a gradient is Inf or NaN
        scaler.update()


if __name__ == "__main__":
    show(off_by, "weights", ranks=1)
