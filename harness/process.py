"""What a process is set up for: to end with its launcher, to listen on loopback only, to return
freed memory, and to name the ranks that are missing after a collective has timed out."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from harness.ranks import LAUNCHED, PARENT, RANK, RESTARTS, WORLD_SIZE, command_of, parent_of

TIMED_OUT = ("Timed out", "timed out", "Application timeout")  # in messages of gloo and the store


def die_with_launcher() -> None:
    """Have the kernel kill this process when the launcher dies, even of SIGKILL (Linux only).

    Otherwise the ranks would go on, or wait for each other, with nobody to look after them.
    """
    if not LAUNCHED or sys.platform != "linux":
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    orphan = os.getppid() != PARENT  # it died before this call
    if os.getppid() == 1 and "TORCHELASTIC_RUN_ID" in os.environ:  # or before PyTorch was imported
        orphan = not any("torch" in word for word in command_of(1))
    if orphan:
        raise SystemExit(1)
    if "deepspeed.launcher.launch" in command_of(PARENT):
        threading.Thread(target=stop_with_runner, daemon=True).start()


def stop_with_runner() -> None:
    """``deepspeed`` itself starts a process that starts the ranks, and on one machine passes no
    signal on to it: when ``deepspeed`` is gone, this rank is asked to stop."""
    runner = parent_of(PARENT)
    while parent_of(PARENT) == runner:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


def listen_on_loopback() -> None:
    """Let ranks that share a machine listen on loopback only, unless the user chose an interface.

    That is for the connections among ranks. The store in which they find each other is torchrun's
    own and listens everywhere.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)


def keep_no_free_memory() -> None:
    """Have the C library return freed blocks to the system at once, so that the process is only as
    large as it needs to be. It keeps them to be fast: a step may take twice as long now."""
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(-3, 65536)  # bytes; M_MMAP_THRESHOLD of malloc.h


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
    """Tell the other ranks where this one waited, and hear from those who waited as well."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(host, port, timeout=timedelta(seconds=5))
        store = dist.PrefixStore(f"timeout {RESTARTS}", store)
        store.set(str(RANK), where)
        time.sleep(3)  # they give up at about the same time
        waited = [rank for rank in range(WORLD_SIZE) if store.check([str(rank)])]
        places = {rank: store.get(str(rank)).decode() for rank in waited}
    except (OSError, RuntimeError):  # the process of the store has ended
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
