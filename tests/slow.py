"""Hooks of hooks.py by which a run is slow on purpose: see docs/slow.md.

HOOKS=loader torchrun --standalone --nproc_per_node=2 tests/hooks.py pytorch_torchrun_DDP.py ...
"""

import atexit
import os
import subprocess
import sys
import time

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ.get("RANK", 0))
LATE = 0.08  # seconds of a batch
LATENCY = 0.06  # seconds of a message
BURNERS = 6  # processes
STALL = 0.4  # seconds of every fifth batch


def slow_loader(seconds):
    """Seconds by the number of a batch."""
    from harness import run

    batches_of = run.batches_of

    def late(loader):
        for number, batch in enumerate(batches_of(loader)):
            time.sleep(seconds(number))
            yield batch

    run.batches_of = late


def blocked_in_forward():
    """Rank 1, by something that is no message."""
    forward = DistributedDataParallel.forward

    def late(*args):
        time.sleep(LATE * RANK)
        return forward(*args)

    DistributedDataParallel.forward = late


def shared_core():
    """Rank 1 has one core together with others."""
    if RANK == 1:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        for _ in range(BURNERS):
            burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            atexit.register(burner.kill)


def change_ddp(**options):
    init = DistributedDataParallel.__init__
    DistributedDataParallel.__init__ = lambda *args, **kwargs: init(*args, **kwargs | options)


def slow_network():
    """For what is sent by the script itself, not for DDP's buckets."""
    all_reduce = dist.all_reduce

    def late(*args, **kwargs):
        time.sleep(LATENCY)
        return all_reduce(*args, **kwargs)

    dist.all_reduce = late


WAYS = {  # by the name of the hook
    "loader": lambda: slow_loader(lambda number: LATE * RANK),
    "loaders": lambda: slow_loader(lambda number: LATE),
    "stall": lambda: slow_loader(lambda number: STALL * (number % 5 == 4)),
    "blocked": blocked_in_forward,
    "core": shared_core,
    "network": slow_network,
    "buckets": lambda: change_ddp(bucket_cap_mb=0.01),
    "unused": lambda: change_ddp(find_unused_parameters=True),
}
