"""Run a script that is slow on purpose, as the environment variable SLOW says: see docs/slow.md.

SLOW=loader torchrun --standalone --nproc_per_node=2 tests/slow.py pytorch_torchrun_DDP.py ...
"""

import atexit
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import small_resnet  # noqa: F401  a model to choose
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

LATE, LATENCY, BURNERS = 0.08, 0.06, 6  # seconds of a batch and of a message; processes
STALL = 0.4  # seconds of every fifth batch
RANK = int(os.environ.get("RANK", 0))


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


def stop():
    """Asked to, in step 18: while --trace 10 looks at steps 14 to 23."""
    from harness.run import Run

    log = Run.log

    def log_and_stop(run, loss):
        if run.step == 18:
            os.kill(os.getpid(), signal.SIGTERM)
        log(run, loss)

    Run.log = log_and_stop


WAYS = {
    "": lambda: None,
    "stop": stop,
    "loader": lambda: slow_loader(lambda number: LATE * RANK),
    "loaders": lambda: slow_loader(lambda number: LATE),
    "stall": lambda: slow_loader(lambda number: STALL * (number % 5 == 4)),
    "blocked": blocked_in_forward,
    "core": shared_core,
    "network": slow_network,
    "buckets": lambda: change_ddp(bucket_cap_mb=0.01),
    "unused": lambda: change_ddp(find_unused_parameters=True),
}

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    script = next(word for word in sys.argv if word.startswith("pytorch_"))
    sys.argv = [script, *(word for word in sys.argv[1:] if word != script)]
    WAYS[os.environ.get("SLOW", "")]()
    runpy.run_path(script, run_name="__main__")
