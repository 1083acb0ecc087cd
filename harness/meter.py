"""LossMeter: the loss and the speed since they were last shown, summed over all ranks."""

import time

import torch
import torch.distributed as dist
from torch import Tensor

from harness.measure import local
from harness.ranks import WORLD_SIZE
from harness.run_state import RunState
from harness.stop import StopRequest


class LossMeter:
    """Sums losses on the device, and fetches them when they are shown. All ranks call it alike.

    Args:
        stop: learns with each sum whether a rank was asked to stop.
    """

    def __init__(self, state: RunState, stop: StopRequest):
        self.state, self.stop = state, stop

    def begin(self) -> None:
        """What was summed so far was shown, or is of a run before."""
        self.shown = *self.totals(), self.state.step, time.perf_counter()

    def add(self, loss: Tensor, samples: float) -> None:
        """Count the mean loss of so many samples. It stays on the device."""
        self.state.loss_sum += local(loss.detach()) * samples
        self.state.samples += samples

    def read(self) -> tuple[float, float] | None:
        """The mean loss and the samples per second since the last time, over all ranks; ``None``
        if all these steps were left out."""
        loss_sum, samples, step, then = self.shown
        pace = (time.perf_counter() - then) / max(1, self.state.step - step)
        self.shown = *self.totals(pace), self.state.step, time.perf_counter()
        samples = self.shown[1] - samples
        if not samples:
            return None
        return (self.shown[0] - loss_sum) / samples, samples / (self.shown[3] - then)

    def totals(self, pace: float = 0.0) -> tuple[float, float]:
        """This epoch's sum of losses and number of samples so far, over all ranks. With these, the
        ranks learn whether one of them was asked to stop, and the pace: seconds of a step."""
        self.stop.finish_vote()
        loss_sum = self.state.loss_sum
        own = loss_sum.new_tensor([self.state.samples, pace, *self.stop.own_votes()])
        totals = torch.cat([loss_sum[None], own])
        if dist.is_initialized():
            dist.all_reduce(totals)
        loss_sum, samples, pace, *votes = totals.tolist()
        self.stop.count_votes(votes)
        if pace:
            self.stop.set_pace(pace / WORLD_SIZE)
        return loss_sum, samples
