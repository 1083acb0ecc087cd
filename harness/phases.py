"""The phases of each training step (data, forward, backward, optimizer, rest), timed by hooks, so
that no training loop needs a line for it."""

import collections
import contextlib
import itertools
import os
import time
from collections.abc import Callable

from torch import nn
from torch.profiler import record_function

TOGETHER = "forward and backward"  # if no hook of the model separates them
PHASES = ("data", "forward", "backward", TOGETHER, "optimizer", "rest")  # in the order of a step
KEPT = 1000  # last steps, to bound the memory


class Phases:
    """Time of each phase of this process's steps, and how much of it was waiting.

    A mark ends one phase and begins the next. On a GPU it is an event in the stream, read when the
    GPU has reached it. On a CPU it is the time, and how long the main thread was blocked so far:
    neither on a core nor queueing for one. This measures waiting for other ranks: gloo blocks while
    it waits, but PyTorch mostly spins while it waits for its own threads.

    Args:
        now: returns the time, or an event in the stream of a GPU.
        between: returns the seconds between two of these.
    """

    def __init__(self, now: Callable, between: Callable, on_gpu: bool):
        self.now, self.between, self.on_gpu = now, between, on_gpu
        self.attached = self.traced = False
        self.marks = None  # of the current step; None between steps
        self.number = 0  # steps of this process so far
        self.unread = collections.deque(maxlen=KEPT)  # numbers and marks
        self.steps = collections.deque(maxlen=KEPT)  # numbers, seconds and waits by phase
        self.after_data, self.range, self.queue = "rest", None, None
        with contextlib.suppress(OSError):  # Linux only
            self.queue = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def attach(self, model: nn.Module, optimizer, threads: int = 1) -> None:
        """Register hooks that set marks at the model's forward and the optimizer's step.

        Args:
            model: the model that the loop calls, with its wrapper; or DeepSpeed's engine.
            threads: whether forward runs in threads, as in nn.DataParallel. The model gets no hooks
                then, nor if it is compiled as a whole, where a hook would break the graph.
        """
        self.attached = True
        if threads == 1 and not (model._compiled_call_impl or hasattr(model, "_orig_mod")):
            # before and after all other hooks: those of FSDP are part of forward
            model.register_forward_pre_hook(lambda *_: self.mark("forward"), prepend=True)
            model.register_forward_hook(lambda *_: self.mark("backward"))
        if step := getattr(model, "step", None):  # DeepSpeed's, which calls the optimizer

            def marked_step(*args, **kwargs):
                self.mark("optimizer")
                step(*args, **kwargs)
                self.mark("rest")

            model.step = marked_step
        else:
            optimizer.register_step_pre_hook(lambda *_: self.mark("optimizer"))
            optimizer.register_step_post_hook(lambda *_: self.mark("rest"))

    def begin_step(self) -> None:
        """Begin a step with loading data."""
        if self.attached:
            self.marks = []
            self.mark("data")

    def has_data(self) -> None:
        self.mark(self.after_data)

    def mark(self, phase: str) -> None:
        """Begin a phase; outside of a step, as in evaluation, this does nothing."""
        if self.marks is not None:
            self.end_range()
            self.marks.append((phase, self.point()))
            if self.traced and phase in PHASES:
                self.range = record_function(phase)
                self.range.__enter__()

    def point(self) -> tuple:
        """A point in time, and on a CPU the seconds for which the thread was blocked so far."""
        now, queued = self.now(), 0.0
        if self.on_gpu:
            return now, 0.0
        if self.queue is not None:
            queued = int(os.pread(self.queue, 64, 0).split()[1]) / 1e9
        return now, now - time.thread_time() - queued

    def end_range(self) -> None:
        if self.range:
            self.range.__exit__(None, None, None)
            self.range = None

    def end_step(self) -> None:
        """Keep the step's marks."""
        self.number += 1
        if self.marks is None:
            return
        self.mark("end")
        if "forward" not in dict(self.marks):
            self.after_data = TOGETHER  # from the next step on
        if not self.traced:
            self.unread.append((self.number, self.marks))
        self.marks = None

    def leave_out(self) -> None:
        """Discard the current step, because it includes a snapshot or is incomplete."""
        self.end_range()
        self.marks = None

    def read(self) -> None:
        """Turn the marks so far into seconds. On a GPU this waits for the last of them."""
        if self.on_gpu and self.unread:
            self.unread[-1][1][-1][1][0].synchronize()
        while self.unread:
            self.read_step(*self.unread.popleft())

    def read_step(self, number: int, marks: list[tuple]) -> None:
        seconds, waits = collections.Counter(), collections.Counter()
        for (phase, (begin, before)), (_, (end, after)) in itertools.pairwise(marks):
            waited = max(0.0, after - before) if phase != "data" else 0.0
            seconds[phase] += self.between(begin, end) - waited
            waits[phase] += waited
        self.steps.append((number, seconds, waits))
