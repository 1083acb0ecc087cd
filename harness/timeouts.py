"""After a collective that timed out: which operation it was, and which ranks were missing."""

import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from harness.ranks import RANK, RESTARTS, WORLD_SIZE

TIMED_OUT = ("Timed out", "timed out", "Application timeout")  # in messages of gloo and the store


def explain_timeouts(script: Path) -> None:
    """After the traceback of a collective that timed out, name the operation and who is missing.

    Args:
        script: the file whose line is named.
    """

    def hook(kind, error, trace):
        sys.__excepthook__(kind, error, trace)
        if dist.is_initialized() and any(words in str(error) for words in TIMED_OUT):
            frames = traceback.extract_tb(trace)
            frames = [frame for frame in frames if Path(frame.filename).absolute() == script]
            if frames:
                name_missing_ranks(f"{frames[-1].line} (line {frames[-1].lineno})", script.stem)

    sys.excepthook = hook


def name_missing_ranks(where: str, script: str) -> None:
    """Tell the others where this rank waited, and hear from those who waited as well."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(host, port, timeout=timedelta(seconds=5))
        store = dist.PrefixStore(f"timeout {RESTARTS}", store)
        store.set(str(RANK), where)
        time.sleep(3)  # they give up at about the same time
        waited = [rank for rank in range(WORLD_SIZE) if store.check([str(rank)])]
        places = {rank: store.get(str(rank)).decode() for rank in waited}
    except (OSError, RuntimeError):  # whose process has ended
        return
    if RANK != min(places):
        return
    if missing := sorted(set(range(WORLD_SIZE)) - set(places)):
        names = ", ".join(map(str, missing))
        why = f"rank {names} did not come to {where} within --timeout: it hangs, or is elsewhere"
    else:
        why = "ranks waited at different places: " + "; ".join(
            f"rank {rank} at {place}" for rank, place in places.items()
        )
    print(f"{script}: error: {why}", file=sys.stderr, flush=True)
