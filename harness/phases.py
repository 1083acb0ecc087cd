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

TOGETHER = "forward and backward"  # where no hook of the model is called between them
PHASES = ("data", "forward", "backward", TOGETHER, "optimizer", "rest")  # as a step has them
KEPT = 1000  # steps, the last ones: memory is bounded


class Phases:
    """Seconds of each phase of this process's steps, and how long it waited in them.

    A mark ends one phase and begins the next. On a GPU it is an event in the queue, read when the
    GPU has come to it. On a CPU it is the time, and how long the main thread had been blocked until
    then: neither on a core nor queueing for one. That is waiting for other ranks: gloo's waits
    block, and PyTorch's own threads are waited for by spinning, but for a moment.

    Args:
        now: the time, or an event in a GPU's queue.
        between: seconds between two of these.
    """

    def __init__(self, now: Callable, between: Callable, on_gpu: bool):
        self.now, self.between, self.on_gpu = now, between, on_gpu
        self.attached = self.traced = False
        self.marks = None  # of the present step; None between steps
        self.number = 0  # steps of this process so far
        self.unread = collections.deque(maxlen=KEPT)  # numbers and marks
        self.steps = collections.deque(maxlen=KEPT)  # numbers, seconds and waits by phase
        self.after_data, self.range, self.queue = "rest", None, None
        with contextlib.suppress(OSError):  # Linux only
            self.queue = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def attach(self, model: nn.Module, optimizer, threads: int = 1) -> None:
        """Have the model's forward and the optimizer's step set marks.

        Args:
            model: what the loop calls: in its wrapper; or DeepSpeed's engine, which is both.
            threads: in which forward is called, as nn.DataParallel does. Like a model that is
                compiled as a whole, where a hook would cut the graph, it gets no hooks then.
        """
        self.attached = True
        if threads == 1 and not (model._compiled_call_impl or hasattr(model, "_orig_mod")):
            # first, and last, of the hooks: FSDP's are part of forward
            model.register_forward_pre_hook(lambda *_: self.mark("forward"), prepend=True)
            model.register_forward_hook(lambda *_: self.mark("backward"))
        if step := getattr(model, "step", None):  # DeepSpeed's, in which optimizers step

            def marked_step(*args, **kwargs):
                self.mark("optimizer")
                step(*args, **kwargs)
                self.mark("rest")

            model.step = marked_step
        else:
            optimizer.register_step_pre_hook(lambda *_: self.mark("optimizer"))
            optimizer.register_step_post_hook(lambda *_: self.mark("rest"))

    def begin_step(self) -> None:
        """What follows, from now on, is loading."""
        if self.attached:
            self.marks = []
            self.mark("data")

    def has_data(self) -> None:
        self.mark(self.after_data)

    def mark(self, phase: str) -> None:
        """A phase begins; outside of a step, as in an evaluation, that means nothing."""
        if self.marks is not None:
            self.end_range()
            self.marks.append((phase, self.point()))
            if self.traced and phase in PHASES:
                self.range = record_function(phase)
                self.range.__enter__()

    def point(self) -> tuple:
        """A point in time, and on a CPU the seconds until then that were spent blocked."""
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
        """The present step has something else in it, a snapshot, or is none."""
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
