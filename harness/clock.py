"""Time of each step and of its phases, without synchronizing with the device; peak memory."""

import collections
import contextlib
import itertools
import math
import os
import time

import numpy as np
import torch
from torch import nn
from torch.profiler import record_function

from harness.measure import peak_memory_gib, reset_peak_memory
from harness.world import gather_objects

STARTED = time.perf_counter()
WARMUP_STEPS = 10  # not measured: allocator, autotuner and caches warm up
TOGETHER = "forward and backward"  # if no hook of the model separates them
PHASES = ("data", "forward", "backward", TOGETHER, "optimizer", "rest")  # in the order of a step
KEPT = 1000  # last steps with phases, to bound the memory
LATE = 0.1  # of a step: a rank this much later, in three of four steps, is a straggler


def seconds_between(begin, end) -> float:
    """Seconds between two times, or two events that a GPU has reached."""
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3


class StepClock:
    """Measures the steps of a run.

    A mark ends one phase and begins the next. On a GPU it is an event in the stream, read when the
    GPU has reached it. On a CPU it is the time, and how long the main thread was blocked so far:
    neither on a core nor queueing for one. This measures waiting for other ranks: gloo blocks while
    it waits, but PyTorch mostly spins while it waits for its own threads.

    The first steps of a process are slow, so the speed is that of :meth:`settled` steps. Peak
    memory counts from the end of the warm-up, and is read before evaluation and snapshots; it does
    not count ``data_bytes``, a dataset on the first device, on which steps are timed. The last
    steps are not timed if ``look``, a :class:`profile.Look`, profiles them, and others are.
    """

    def __init__(self, devices: list[torch.device], data_bytes: int = 0, look=None):
        self.devices = devices
        self.on_gpu = devices[0].type == "cuda"
        self.data_gib = data_bytes / 2**30
        self.peak_memory = {}  # GiB by kind
        self.marks = None  # of the current step; None between epochs
        self.unread = collections.deque()  # marks of earlier steps, and whether they are spoilt
        self.seconds = []  # of each step of this process
        self.steps = collections.deque(maxlen=KEPT)  # number, seconds and waits by phase
        self.before = []  # settled steps of earlier processes, from the snapshot
        self.epoch_seconds = 0.0
        self.paused = False  # what follows is not training
        self.spoilt = False  # the current step contains a pause
        self.look = look
        self.looking = False
        self.after_data = "rest"  # the phase that begins when the batch is on the device
        self.traced = False  # phases are ranges in a trace
        self.range = contextlib.ExitStack()
        self.spans = []  # start and end of this process's epochs, in Unix time
        self.wall_before = 0.0  # seconds of earlier processes, up to the snapshot
        self.queue = None  # a file that says how long the thread was queueing for a core
        with contextlib.suppress(OSError):  # Linux only
            self.queue = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def attach(self, model: nn.Module, optimizer=None) -> None:
        """Register hooks that set marks at the model's forward, and at the optimizer's step unless
        the caller does. A model gets no hooks if it runs in threads, as in nn.DataParallel, or is
        compiled as a whole, where a hook would break the graph."""
        compiled = model._compiled_call_impl or hasattr(model, "_orig_mod")
        if len(self.devices) == 1 and not compiled:
            # before and after all other hooks: those of FSDP are part of forward
            model.register_forward_pre_hook(lambda *_: self.mark("forward"), prepend=True)
            model.register_forward_hook(lambda *_: self.mark("backward"))
        if optimizer is not None:
            optimizer.register_step_pre_hook(lambda *_: self.mark("optimizer"))
            optimizer.register_step_post_hook(lambda *_: self.mark("rest"))

    def start(self) -> None:
        """Start to measure an epoch: the next step begins now."""
        now = time.time()
        self.spans.append([now, now])
        self.paused = True
        self.start_step()

    def start_step(self) -> None:
        if self.paused and not self.looking:
            self.paused = False
            for device in self.devices:
                reset_peak_memory(device)
        self.marks = []
        self.spoilt = False
        self.mark("data")

    def begin_step(self, left: int) -> None:
        """A batch is loaded; ``left`` steps of the run follow its own."""
        timed = len(self.seconds) + len(self.unread) > 0
        if self.look and not self.looking and left < self.look.lasts and timed:
            self.read()
            self.pause()
            self.looking = True
            self.look.start()

    def mark(self, phase: str) -> None:
        """Begin a phase; outside of a step, as in evaluation, this does nothing."""
        if self.marks is None:
            return
        self.range.close()
        self.marks.append((phase, *self.now()))
        if self.traced and phase in PHASES:
            self.range.enter_context(record_function(phase))

    def now(self) -> tuple:
        """The time, and how long the thread was blocked so far; on a GPU an event in its stream."""
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.devices[0]))
            return event, 0.0
        now = time.perf_counter()
        queued = 0.0
        if self.queue is not None:
            queued = int(os.pread(self.queue, 64, 0).split()[1]) / 1e9
        return now, now - time.thread_time() - queued

    def tick(self) -> None:
        """A step has ended, and the next one starts."""
        self.mark("end")
        if "forward" not in {phase for phase, *_ in self.marks}:
            self.after_data = TOGETHER  # from the next step on
        if self.looking:
            self.look.tick(self)
            return self.start_step()
        self.unread.append((self.marks, self.spoilt))
        if len(self.unread) > KEPT:  # to bound the memory; the GPU reached this step long ago
            self.read_step(*self.unread.popleft())
        steps = len(self.seconds) + len(self.unread)
        if steps == WARMUP_STEPS:
            self.pause()
        if steps == WARMUP_STEPS + 1:
            self.peak_memory = {}  # discard what cuDNN tried in the warm-up
        self.start_step()

    def pause(self) -> None:
        """Read the peak memory before what is not training. This step's phases are discarded."""
        self.spoilt = True
        self.range.close()
        if self.paused:
            return
        self.paused = True
        for device in self.devices:
            apart = self.data_gib if device == self.devices[0] else 0.0
            for kind, gib in peak_memory_gib(device).items():
                self.peak_memory[kind] = max(gib - apart, self.peak_memory.get(kind, 0.0))

    def end_epoch(self) -> None:
        """Stop to measure, until the next epoch starts."""
        self.read()
        self.pause()
        self.marks = None

    def read(self) -> None:
        """Turn the marks so far into seconds. On a GPU this waits for the last of them."""
        while self.unread:
            self.read_step(*self.unread.popleft())
            self.spans[-1][1] = time.time()

    def read_step(self, marks: list[tuple], spoilt: bool) -> None:
        if self.on_gpu:
            marks[-1][1].synchronize()
        seconds = collections.Counter()
        waits = collections.Counter()
        for (phase, begin, before), (_, end, after) in itertools.pairwise(marks):
            waited = max(0.0, after - before) if phase != "data" else 0.0
            seconds[phase] += seconds_between(begin, end) - waited
            waits[phase] += waited
        self.seconds.append(seconds_between(marks[0][1], marks[-1][1]))
        self.epoch_seconds += self.seconds[-1]
        if not spoilt:
            self.steps.append((len(self.seconds), seconds, waits))

    @property
    def warmup(self) -> int:
        """Number of warm-up steps of this process: half of a short run."""
        return min(WARMUP_STEPS, len(self.seconds) // 2)

    def settled(self) -> list[float]:
        """Seconds of the steps after each process's warm-up."""
        return self.before + self.seconds[self.warmup :]

    def wall_clock(self) -> float:
        """Seconds of this run so far: of this process, and of earlier ones up to the snapshot."""
        return self.wall_before + time.perf_counter() - STARTED

    def state_dict(self) -> dict:
        """The state for a snapshot."""
        self.read()
        return {"steps": self.settled(), "epoch": self.epoch_seconds, "wall": self.wall_clock()}

    def load_state_dict(self, state: dict) -> None:
        self.before = state["steps"]
        self.epoch_seconds = state["epoch"]
        self.wall_before = state["wall"]


def break_down(clock: StepClock) -> dict:
    """The breakdown for ``result.json``, in milliseconds. All ranks call it."""
    own = [step for step in clock.steps if step[0] > clock.warmup]
    everyone = gather_objects((own, clock.look and clock.look.found))
    traces = [trace for _, trace in everyone]
    hidden = None
    if all(traces):
        under = sum(trace["overlapped_ms"] for trace in traces)
        besides = sum(trace["exposed_ms"] for trace in traces)
        hidden = under / (under + besides) if under + besides else None
    return {
        "steps": len(everyone[0][0]),
        "ranks": [describe_rank(steps, trace, clock.on_gpu) for steps, trace in everyone if steps],
        "straggler": None if clock.on_gpu else find_straggler([steps for steps, _ in everyone]),
        "overlap": hidden,
        "collectives": traces[0] and traces[0]["collectives"],
    }


def describe_rank(steps: list[tuple], trace: dict | None, on_gpu: bool) -> dict:
    """The phases of a rank. On a GPU they include waiting; only a trace shows how much of it."""
    seen = set().union(*(seconds for _, seconds, _ in steps))
    phases = {}
    for kind in PHASES:
        if kind in seen:
            phases[kind] = spread([seconds[kind] for _, seconds, _ in steps])
    if on_gpu:
        exposed = trace and trace["exposed_ms"]
        waiting = trace and {"p50": exposed, "p95": None, "mean": exposed}
        return phases | {"waiting": waiting, "waiting_in": None}
    waits = [waited for _, _, waited in steps]
    waiting_in = {}
    for kind in list(phases)[1:]:  # all but the data
        waiting_in[kind] = spread([waited[kind] for waited in waits])["p50"]
    waiting = spread([sum(waited.values()) for waited in waits])
    return phases | {"waiting": waiting, "waiting_in": waiting_in}


def spread(seconds: list[float]) -> dict[str, float]:
    """Mean and median, in milliseconds. Rare events show in the mean, not in the median."""
    found = {f"p{p}": np.percentile(seconds, p) for p in (50, 95)} | {"mean": np.mean(seconds)}
    return {name: round(1e3 * float(value), 6) for name, value in found.items()}


def find_straggler(ranks: list[list[tuple]]) -> dict | None:
    """The rank for which the other ranks wait: its work, without waiting, takes longest. ``None``
    unless it is later than all others in three of four steps, by :data:`LATE` of a step."""
    own = []  # of each rank: seconds of work in each step
    for steps in ranks:
        own.append([sum(seconds.values()) for _, seconds, _ in steps])
    if len(own) < 2 or not own[0] or len(set(map(len, own))) > 1:
        return None
    slowest = int(np.median(own, axis=1).argmax())
    mine = own[slowest]
    late = mine - np.median(np.delete(own, slowest, axis=0), axis=0)  # than the others
    if np.percentile(late, 25) <= 0 or np.median(late) < LATE * np.median(mine):
        return None
    return {"rank": slowest, "late_ms": spread(late)["p50"]}


def describe_step(result: dict) -> str:
    """The line at the end of a run: mean step time, share of each phase, and a straggler."""
    found = result["breakdown"]
    took = result["step_ms"]
    shares = {}
    for rank in found["ranks"]:
        for kind in (*PHASES[:4], "waiting", *PHASES[4:]):
            if rank.get(kind) and (kind != "waiting" or rank["waiting_in"]):
                shares[kind] = shares.get(kind, 0.0) + rank[kind]["mean"]
    whole = sum(shares.values()) or 1.0
    names = {"mean": "mean", "p95": "95% within"}
    far = [key for key in names if not math.isclose(took[key], took["p50"], rel_tol=0.1)]
    more = ", ".join(f"{names[key]} {took[key]:,.0f} ms" for key in far)
    words = [f"step: {took['p50']:,.0f} ms" + (f" ({more})" if more else "")]
    words += [f"{kind} {share / whole:.0%}" for kind, share in shares.items()]
    line = ", ".join(words)
    if late := found["straggler"]:
        others = "the other" if len(found["ranks"]) == 2 else "the others"
        line += f"; rank {late['rank']} is {late['late_ms']:,.0f} ms slower than {others}"
    if found["overlap"] is not None:
        line += f"; {found['overlap']:.0%} of communication overlaps with compute"
    return line
