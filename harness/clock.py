"""How long steps take, as the device sees it, without waiting for it."""

import itertools
import time

import torch

WARMUP_STEPS = 10  # left out of the speed: allocator, autotuner and caches are settling


class StepClock:
    """Seconds of each step of this process, and of the epoch.

    The first steps of a process are slow, also of one that goes on from a snapshot: the speed is
    that of :meth:`settled` steps.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.ticks, self.seconds = [], []  # of this process
        self.before = []  # settled steps of the processes before, from the snapshot
        self.epoch_seconds = 0.0

    def start(self) -> None:
        """Begin to count: the next step starts now."""
        self.ticks = [self.now()]

    def tick(self) -> None:
        """A step has ended, and the next one starts."""
        self.ticks.append(self.now())
        if self.device.type == "cuda" and len(self.seconds) + len(self.ticks) - 1 == WARMUP_STEPS:
            torch.cuda.reset_peak_memory_stats(self.device)  # cuDNN has tried its algorithms

    def now(self):
        """On a GPU an event in its queue, for which nobody waits."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> None:
        """Turn the ticks so far into seconds. On a GPU this waits for the last of them."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            seconds = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(self.ticks)]
        else:
            seconds = [b - a for a, b in itertools.pairwise(self.ticks)]
        self.ticks = self.ticks[-1:]
        self.seconds += seconds
        self.epoch_seconds += sum(seconds)

    def settled(self) -> list[float]:
        """Seconds of the steps after each process's warm-up, which is half of a short one."""
        return self.before + self.seconds[min(WARMUP_STEPS, len(self.seconds) // 2) :]
