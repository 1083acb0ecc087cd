"""Process setup: end with the launcher, listen on loopback only, and return freed memory."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time

from harness.ranks import LAUNCHED, PARENT, command_of, parent_of


def die_with_launcher() -> None:
    """Have the kernel kill this process when the launcher dies, even of SIGKILL (Linux only).

    Otherwise the ranks would continue, or wait for each other, without supervision.
    """
    if not LAUNCHED or sys.platform != "linux":
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    orphan = os.getppid() != PARENT  # the launcher died before this call
    if os.getppid() == 1 and "TORCHELASTIC_RUN_ID" in os.environ:  # or before PyTorch was imported
        orphan = not any("torch" in word for word in command_of(1))
    if orphan:
        raise SystemExit(1)
    if "deepspeed.launcher.launch" in command_of(PARENT):
        threading.Thread(target=stop_with_runner, daemon=True).start()


def stop_with_runner() -> None:
    """Ask this rank to stop if ``deepspeed`` has exited: it starts a process that starts the ranks,
    and on one machine does not forward signals to that process."""
    runner = parent_of(PARENT)
    while parent_of(PARENT) == runner:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


def listen_on_loopback() -> None:
    """Let ranks that share a machine listen on loopback only, unless the user chose an interface.

    This affects the connections between ranks. The store for the rendezvous is torchrun's and
    listens on all interfaces.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)


def keep_no_free_memory() -> None:
    """Let the C library return freed blocks to the system at once, so that the resident set is the
    memory in use. A step may take twice as long."""
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(-3, 65536)  # bytes; M_MMAP_THRESHOLD of malloc.h
