"""SIGTERM and Ctrl-C are requests: all ranks grant them after the same step, with a snapshot."""

import signal
import threading

import torch
import torch.distributed as dist

from harness.ranks import LAUNCHED, WORLD_SIZE

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
VOTE_EVERY = 1.0  # seconds, about; a step that takes longer has a vote of its own


class StopRequest:
    """Remembers a signal, and has the ranks agree on it without a wait in the step.

    They agree with the totals that are summed for the screen, and, where these are further apart
    than a second, by votes between them, whose outcome is read one step later.
    """

    def __init__(self):
        self.signum = 0  # that this process was sent
        self.agreed = 0  # that all ranks know of
        self.vote_every, self.pending = 1, None

    def listen(self) -> None:
        if threading.current_thread() is threading.main_thread():  # not that of a notebook
            for signum in STOP_SIGNALS:
                signal.signal(signum, self.note)  # called between two operations

    def note(self, signum: int, frame) -> None:
        self.signum = signum
        if WORLD_SIZE == 1:
            self.agreed = signum
        if not LAUNCHED:  # pressed a second time, Ctrl-C ends the run at once
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def own_votes(self) -> list[int]:
        """Whether this rank was sent each of the signals."""
        return [int(self.signum == signum) for signum in STOP_SIGNALS]

    def count_votes(self, votes) -> None:
        """Learn what was summed over all ranks."""
        for signum, count in zip(STOP_SIGNALS, votes, strict=True):
            if count and not self.agreed:
                self.agreed = signum

    def set_pace(self, seconds: float) -> None:
        """Vote about once a second.

        Args:
            seconds: of a step, the same number on all ranks.
        """
        self.vote_every = max(1, int(VOTE_EVERY / max(seconds, 1e-6)))

    def vote_between_prints(self, step: int) -> None:
        """Read the vote of the last step, if there was one, and begin another, if it is time."""
        if WORLD_SIZE == 1:
            return
        self.finish_vote()
        if step % self.vote_every:
            return
        on_gpu = dist.get_backend() == "nccl"
        votes = torch.tensor(self.own_votes(), dtype=torch.int32, pin_memory=on_gpu)
        if on_gpu:  # all of this is queued: nobody waits
            ballot = votes.to("cuda", non_blocking=True)
            dist.all_reduce(ballot)
            votes.copy_(ballot, non_blocking=True)
            counted = torch.cuda.Event()
            counted.record()
            self.pending = votes.numpy(), counted.synchronize
        else:
            self.pending = votes.numpy(), dist.all_reduce(votes, async_op=True).wait

    def finish_vote(self) -> None:
        """Wait for the vote that is under way, if there is one, and count it: before anything else
        is summed, so that all ranks sum in the same order."""
        if self.pending:
            votes, wait = self.pending
            self.pending = None
            wait()
            self.count_votes(votes)
