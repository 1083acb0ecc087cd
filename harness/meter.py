"""LossMeter: loss and throughput since the last printed line, over all ranks."""

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
        """Reset the sums, after they were printed or loaded from an earlier run."""
        self.shown = *self.totals(), time.perf_counter()

    def add(self, loss: Tensor, samples: float) -> None:
        """Add the mean loss of a number of samples. It stays on the device."""
        self.state.loss_sum += local(loss.detach()) * samples
        self.state.samples += samples

    def read(self) -> tuple[float, float] | None:
        """The mean loss and the samples per second since the last call, over all ranks; ``None``
        if all these steps were skipped."""
        loss_sum, samples, then = self.shown
        self.begin()
        samples = self.shown[1] - samples
        if not samples:
            return None
        return (self.shown[0] - loss_sum) / samples, samples / (self.shown[2] - then)

    def totals(self) -> tuple[float, float]:
        """Sum of losses and number of samples of this epoch so far, over all ranks."""
        own = self.state.loss_sum
        totals = torch.stack([own, own.new_tensor(self.state.samples)])
        if dist.is_initialized():
            dist.all_reduce(totals)
        loss_sum, samples = totals.tolist()
        return loss_sum, samples
