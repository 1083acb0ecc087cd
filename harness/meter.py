"""LossMeter: the loss and the speed since they were last shown, summed over all ranks."""

import time

import torch
import torch.distributed as dist
from torch import Tensor

from harness.measure import local
from harness.run_state import RunState


class LossMeter:
    """Sums losses on the device, and fetches them when they are shown. All ranks call it."""

    def __init__(self, state: RunState):
        self.state = state

    def begin(self) -> None:
        """What was summed so far was shown, or is of a run before."""
        self.shown = *self.totals(), time.perf_counter()

    def add(self, loss: Tensor, samples: float) -> None:
        """Count the mean loss of so many samples. It stays on the device."""
        self.state.loss_sum += local(loss.detach()) * samples
        self.state.samples += samples

    def read(self) -> tuple[float, float] | None:
        """The mean loss and the samples per second since the last time, over all ranks; ``None``
        if all these steps were left out."""
        loss_sum, samples, then = self.shown
        self.begin()
        samples = self.shown[1] - samples
        if not samples:
            return None
        return (self.shown[0] - loss_sum) / samples, samples / (self.shown[2] - then)

    def totals(self) -> tuple[float, float]:
        """This epoch's sum of losses and number of samples so far, over all ranks."""
        own = self.state.loss_sum
        totals = torch.stack([own, own.new_tensor(self.state.samples)])
        if dist.is_initialized():
            dist.all_reduce(totals)
        loss_sum, samples = totals.tolist()
        return loss_sum, samples
