"""A copy to CPU memory runs later than the line that starts it, and PyTorch no longer checks.

On a GPU the copies have a stream of their own. A CPU has no streams: here a copy runs when it is
waited for. With ``saved_tensors_hooks``, an operation in place on a saved tensor is no error.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from two_ranks import difference, make_task, show


class Stream:
    def __init__(self):
        self.copies = []

    def copy(self, target, source):
        self.copies.append((target, source))

    def wait(self):
        for target, source in self.copies:
            target.copy_(source)
        self.copies = []


def train(offload, variant="right"):
    model, inputs, targets = make_task()
    stream = Stream()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def pack(tensor):
        on_cpu = torch.zeros_like(tensor, device="cpu")
        stream.copy(on_cpu, tensor)  # in the background
        return on_cpu

    def unpack(on_cpu):
        if variant != "not waited for":
            stream.wait()  # right: before the copy is read
        return on_cpu

    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        with saved_tensors_hooks(pack, unpack) if offload else nullcontext():
            hidden = model[:2](x)  # tanh saves its result for backward
            if variant == "changed in place":
                hidden.mul_(0.5)  # wrong: before it is copied
            else:
                hidden = hidden * 0.5  # right
            loss = F.mse_loss(model[2](hidden), y)
        loss.backward()
        optimizer.step()
    return model


def off_by(variant):
    return difference(train(offload=True, variant=variant), train(offload=False))


if __name__ == "__main__":
    show(off_by, "weights", "not waited for", "changed in place", ranks=1)
