"""Measure the duration of training steps on the device, without synchronizing with it, and their
peak memory."""

import itertools
import time

import torch

from harness.measure import peak_memory_gib, reset_peak_memory
from harness.phases import Phases

STARTED = time.perf_counter()
WARMUP_STEPS = 10  # not measured: allocator, autotuner and caches warm up


def seconds_between(begin, end) -> float:
    """Seconds between two times, or between two events that a GPU has reached."""
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3


class StepClock:
    """Measures the time of each step and of the epoch, and the peak memory of the training steps.

    The first steps of a process are slow, even if it resumes from a snapshot, so the speed is that
    of :meth:`settled` steps. Peak memory counts from the end of the warm-up, without evaluation and
    snapshots: it is read before them, and reset at the next step.

    Args:
        devices: that this process computes on. Steps are timed on the first one.
        data_bytes: size of a dataset on the first device, which does not count as peak memory.
        look: a profiler for the last steps. ``lasts`` is their number; it has a ``start()``, and a
            ``tick()`` to call after each of them. These steps are not timed, so it is not used if
            there are no other steps.
    """

    def __init__(self, devices: list[torch.device], data_bytes: int = 0, look=None):
        self.devices, self.on_gpu = devices, devices[0].type == "cuda"
        self.data_gib = data_bytes / 2**30
        self.ticks, self.seconds = [], []  # of this process
        self.before = []  # settled steps of earlier processes, from the snapshot
        self.epoch_seconds = 0.0
        self.first_step = None  # seconds, including compilation and autotuning
        self.peak_memory = {}  # GiB by kind: see peak_memory_gib()
        self.paused = False
        self.look, self.looking = look, False
        self.spans = []  # start and end of this process's training, in Unix time
        self.phases = Phases(self.now, seconds_between, self.on_gpu)
        self.wall_seconds, self.since = 0.0, STARTED  # up to a snapshot, and when it was loaded

    def start(self) -> None:
        """Start to measure: the next step begins now."""
        self.ticks, self.paused = [self.now()], False
        self.spans.append([time.time()] * 2)
        self.reset_memory()
        self.phases.begin_step()

    def tick(self) -> None:
        """A step has ended, and the next one starts."""
        self.phases.end_step()
        if self.looking:
            self.look.tick(self)
            self.ticks = []
            return self.phases.begin_step()
        self.ticks.append(self.now())
        steps = len(self.seconds) + len(self.ticks) - 1
        if steps == WARMUP_STEPS:
            self.pause()
        if steps == WARMUP_STEPS + 1:
            self.peak_memory = {}  # discard what cuDNN tried in the warm-up
        if self.paused:
            self.reset_memory()
        self.phases.begin_step()

    def begin_step(self, left: int) -> None:
        """A batch is loaded.

        Args:
            left: how many steps of the run follow this one.
        """
        timed = len(self.seconds) + len(self.ticks) > 1
        if self.look and not self.looking and left < self.look.lasts and timed:
            self.read()
            self.pause()
            self.looking = True
            self.look.start()

    def now(self):
        """The time; on a GPU an event in its stream, without waiting for it."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.devices[0]))
        return event

    def read(self) -> None:
        """Turn the ticks so far into seconds. On a GPU this waits for the last of them."""
        self.phases.read()
        if len(self.ticks) < 2:
            return
        if self.on_gpu:
            self.ticks[-1].synchronize()
        seconds = [seconds_between(a, b) for a, b in itertools.pairwise(self.ticks)]
        self.ticks = self.ticks[-1:]
        self.seconds += seconds
        self.first_step = self.seconds[0]
        self.epoch_seconds += sum(seconds)
        self.spans[-1][1] = time.time()

    @property
    def warmup(self) -> int:
        """Number of warm-up steps of this process: half of a short run."""
        return min(WARMUP_STEPS, len(self.seconds) // 2)

    def settled(self) -> list[float]:
        """Seconds of the steps after each process's warm-up."""
        return self.before + self.seconds[self.warmup :]

    def state_dict(self) -> dict:
        """The state for a snapshot."""
        self.read()
        seconds = {"steps": self.settled(), "epoch": self.epoch_seconds}
        return seconds | {"wall": self.read_wall_clock()}

    def load_state_dict(self, state: dict) -> None:
        self.before, self.epoch_seconds = state["steps"], state["epoch"]
        self.wall_seconds = state["wall"]

    def pause(self) -> None:
        """Read the peak memory before anything that is not training; the next tick resets it."""
        self.phases.leave_out()
        if self.paused:
            return
        self.paused = True
        for device in self.devices:
            apart = self.data_gib if device == self.devices[0] else 0.0
            for kind, gib in peak_memory_gib(device).items():
                self.peak_memory[kind] = max(gib - apart, self.peak_memory.get(kind, 0.0))

    def reset_memory(self) -> None:
        self.paused = False
        for device in self.devices:
            reset_peak_memory(device)

    def read_wall_clock(self) -> float:
        """Seconds of this run so far, up to a snapshot and since it was loaded."""
        now = time.perf_counter()
        self.wall_seconds, self.since = self.wall_seconds + now - self.since, now
        return self.wall_seconds
