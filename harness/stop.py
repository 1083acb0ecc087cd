"""SIGTERM, SIGUSR1, SIGHUP and Ctrl-C stop all ranks after the same step, with a snapshot."""

import signal
import threading
import time

import torch
import torch.distributed as dist

from harness.world import world

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # the last: Slurm's
VOTE_EVERY = 0.5  # seconds, about; a slower step has a vote every time


class StopRequest:
    """Records a signal, and lets the ranks agree on it by all-reduces (votes), whose result is read
    one step later, so that no step waits for them."""

    def __init__(self):
        self.signum = 0  # that this process received
        self.agreed = 0  # that all ranks know
        self.pending = None  # the vote in progress
        self.next_vote = 1  # the step of the next vote
        self.voted = 0, time.perf_counter()  # step and time of the last one

    def listen(self) -> None:
        if threading.current_thread() is threading.main_thread():  # not in a notebook's thread
            for signum in SIGNALS:
                if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # nohup
                    signal.signal(signum, self.note)  # Python calls it between two operations

    def note(self, signum: int, frame) -> None:
        self.signum = signum
        if world().size == 1:
            self.agreed = signum
        if not world().launched:  # a second Ctrl-C ends the run at once
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def vote(self, step: int) -> None:
        """Read the vote of an earlier step, if any, and start another if it is time."""
        if self.pending:
            votes, wait = self.pending
            self.pending = None
            wait()
            signum, pace = votes.numpy()
            self.agreed = self.agreed or int(signum)
            self.next_vote = self.voted[0] + max(1, int(VOTE_EVERY / pace))
        if world().size > 1 and step >= self.next_vote:
            last, then = self.voted
            now = time.perf_counter()
            pace = (now - then) / max(1, step - last)  # seconds of a step
            self.voted = step, now
            self.next_vote = step + 2  # unless this vote changes it
            self.pending = self.reduce([float(self.signum), max(pace, 1e-6)])

    @staticmethod
    def reduce(values: list[float]):
        """Start an all-reduce of the maximum. Returns the tensor, and its waiting function."""
        # Also if gloo is beside it, whose thread must not end a vote while a profiler stops
        on_gpu = "nccl" in dist.get_backend()
        votes = torch.tensor(values, dtype=torch.float64, pin_memory=on_gpu)
        if not on_gpu:
            return votes, dist.all_reduce(votes, dist.ReduceOp.MAX, async_op=True).wait
        ballot = votes.to("cuda", non_blocking=True)  # all of this is queued, nothing waits
        dist.all_reduce(ballot, dist.ReduceOp.MAX)
        votes.copy_(ballot, non_blocking=True)
        counted = torch.cuda.Event()
        counted.record()
        return votes, counted.synchronize
