"""World: rank and world size from the launcher; what all ranks do together; process setup."""

import contextlib
import ctypes
import functools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import psutil
import torch
import torch.distributed as dist
import torch.distributed.nn  # noqa: F401  here and not later: see wait_for_gloo()

LAUNCHERS = {"torchrun", "deepspeed", "accelerate", "fabric"}  # programs


@dataclass(frozen=True)
class World:
    """The ranks of a run, as the launcher describes them to a process."""

    rank: int
    local_rank: int
    size: int
    local_size: int  # number of ranks on this machine
    launched: bool  # by torchrun, torch.distributed.launch or deepspeed; not by plain python
    restarts: int  # number of times that the launcher has restarted the run


def count_local_ranks(env: Mapping[str, str]) -> int | None:
    """Number of ranks on this machine; ``None`` if unknown."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    for name in names:  # torchrun's, deepspeed's; mpirun's: Open MPI, MPICH
        if env.get(name):
            return int(env[name])
    here = env.get("MASTER_ADDR", "localhost") in ("localhost", "127.0.0.1", "::1")
    size = int(env.get("WORLD_SIZE", 1))
    return size if size == 1 or here else None


@functools.cache
def world() -> World:
    """The ranks of this run, by the variables that every launcher sets; read on first use."""
    names = ("RANK", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
    rank, local_rank, restarts = (int(os.environ.get(name, 0)) for name in names)
    size = int(os.environ.get("WORLD_SIZE", 1))
    local_size = count_local_ranks(os.environ) or size
    return World(rank, local_rank, size, local_size, "LOCAL_RANK" in os.environ, restarts)


def this_script() -> str:
    """The name of the technique: pytorch_DDP, pytorch_FSDP, ..."""
    return Path(sys.argv[0]).stem


def why_ranks_are_unclear() -> str | None:
    """Which variable a launcher such as srun or mpirun did not set; ``None`` if all are set."""
    if world().launched and count_local_ranks(os.environ) is None:
        why = "LOCAL_WORLD_SIZE, the number of ranks on this machine, is not set; export it"
        under = "under srun: LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE"
        return f"WORLD_SIZE is {world().size}, and {why} ({under})"
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        if not world().launched and int(os.environ.get(name, 1)) > 1:
            instead = "start one torchrun per machine, as docs/multi_node.md shows"
            return f"{name} is {os.environ[name]}, but RANK and LOCAL_RANK are not set; {instead}"
    return None


def count_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: by its affinity, and by the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    v1 = "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"
    for names in (("cpu.max",), v1):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no quota
            texts = [(cgroup / name).read_text() for name in names]
            quota, period = map(int, " ".join(texts).split())
            if quota > 0:
                cores = min(cores, max(1, quota // period))
    return cores


def print0(message: str, file=None) -> None:
    """Print a line, on rank 0 only. If its reader is gone, as after ``| head`` or on a closed
    terminal, the run stops as at SIGHUP; under nohup, which ignores that, it goes on."""
    if world().rank == 0:
        try:
            print(message, file=file, flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), (file or sys.stdout).fileno())
            signal.raise_signal(signal.SIGHUP)


def make_store(args) -> dist.Store:
    """Where ranks find each other's addresses: the launcher's store, or none for a single process.
    ``torchrun`` keeps one store for all attempts, in which a restarted rank may find the address of
    a dead rank, and hang. So each attempt has its own key prefix. On several machines, whose agents
    count attempts separately, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is needed instead."""
    if not world().launched:
        return dist.HashStore()
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=args.timeout)))
    one_machine = world().local_size == world().size
    return dist.PrefixStore(f"attempt {world().restarts}", store) if one_machine else store


def gather_objects(value) -> list:
    """Gather the values of all ranks on every rank. All ranks call it."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def max_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """The maximum of each number over all ranks, on every rank. All ranks call it."""
    everyone = gather_objects(values)
    highest = {}
    for name in values:
        highest[name] = max(theirs[name] for theirs in everyone)
    return highest


class Failed(Exception):
    """A task of :func:`together` failed; the message says why."""


def together(task: Callable, *args, here: bool = True) -> list:
    """Run a task, on ranks that are ``here``, and gather its results on every rank. All ranks call
    it, and on all of them it raises :class:`Failed` if the task failed on any."""
    why = result = None
    try:
        result = task(*args) if here else None
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    everyone = [None]
    while None in everyone:  # from a rank whose task still runs, but takes part in collectives
        everyone = gather_objects((why, result))
    if failures := [why for why, _ in everyone if why]:
        raise Failed(failures[0])
    return [result for _, result in everyone]


def wait_for_gloo() -> None:
    """Wait for all ranks, so that gloo's threads free what they sent before Python shuts down: one
    that still has a tensor then aborts the process (pytorch/pytorch#179291). A process group waits
    for its threads when it is freed, but ``torch.distributed.nn`` (hence the import above), FSDP
    and DeepSpeed keep it. ``barrier()`` would keep tensors sent before it."""
    if dist.is_initialized() and "gloo" in (backend := dist.get_backend()):
        # PyTorch 2.14 takes one that has gloo beside nccl, too
        dist.monitored_barrier(None if backend == "gloo" else dist.new_group(backend="gloo"))


def exit_all(code: int) -> NoReturn:
    """Stop this run early. All ranks call it."""
    wait_for_gloo()
    if dist.is_initialized():
        dist.destroy_process_group()
    raise SystemExit(code)


@functools.cache
def parent() -> int:
    """The process that started this one: the launcher, if there is one. Read on first use."""
    return os.getppid()


def launcher_words() -> list[str]:
    """The command line of the launcher, such as torchrun; empty without one."""
    words = command_of(parent()) if world().launched else []
    if "deepspeed.launcher.launch" in words:  # itself a child of the `deepspeed` command
        words = command_of(psutil.Process(parent()).ppid())
    if len(words) > 1 and Path(words[1]).name in LAUNCHERS:  # a program, after its Python
        return words[1:]
    modules = {"torch.distributed.run", "torch.distributed.launch"}
    return words if (modules | LAUNCHERS) & {Path(word).name for word in words[:4]} else []


def command_of(process: int) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(process).cmdline()
    return []


def sees_one_gpu() -> bool:
    """Whether each rank sees only its own GPU, as device 0, and has LOCAL_RANK 0."""
    words = {word.replace("_", "-") for word in launcher_words()}
    return "--virtual-local-rank" in words or os.environ.get("PET_VIRTUAL_LOCAL_RANK") == "1"


def is_first_here() -> bool:
    """Whether this is the rank that downloads for its machine."""
    return world().local_rank == 0 and not (sees_one_gpu() and world().rank % world().local_size)


def launch_id() -> str:
    """An identifier of the launch: the same for all attempts, different for the next launch."""
    if (run := os.environ.get("TORCHELASTIC_RUN_ID", "none")) != "none":
        return run
    stat = Path(f"/proc/{parent()}/stat")  # Linux; psutil's time changes when the clock is set
    started = stat.read_text().rpartition(")")[2].split()[19] if stat.exists() else ""
    return f"process {parent()} {started}"  # in a container the same number every time


def die_with_launcher() -> None:
    """Have the kernel kill this process when the launcher dies, even of SIGKILL (Linux only).
    Otherwise the ranks would continue, or wait for each other, without supervision."""
    if not world().launched or sys.platform != "linux":
        return
    launcher = parent()
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    orphan = os.getppid() != launcher  # the launcher died before this call
    if os.getppid() == 1 and "TORCHELASTIC_RUN_ID" in os.environ:  # or before PyTorch was imported
        orphan = not any("torch" in word for word in command_of(1))
    if orphan:
        raise SystemExit(1)
    if "deepspeed.launcher.launch" in command_of(launcher):
        threading.Thread(target=stop_with_runner, daemon=True).start()


def stop_with_runner() -> None:
    """Stop this rank when ``deepspeed`` exits, which on one machine does not forward signals."""
    launcher = psutil.Process(parent())
    runner = launcher.ppid()
    while launcher.ppid() == runner:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


def report_interrupts() -> None:
    """Let Ctrl-C end the process with one line of rank 0, which says where it was, instead of a
    traceback of every rank: before the training, and at a second Ctrl-C in it."""
    others = sys.excepthook

    def report(kind, error, trace) -> None:
        if kind is not KeyboardInterrupt:
            return others(kind, error, trace)
        if world().launched:  # the terminal and the launcher send it to a rank, maybe once more
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        stack = traceback.extract_tb(trace)
        lines = [one for one in stack if one.filename == os.path.abspath(sys.argv[0])] or stack
        at = f"line {lines[-1].lineno}: {lines[-1].line}"
        print0(f"{this_script()}: interrupted at {at}", file=sys.stderr)

    sys.excepthook = report


def listen_on_loopback() -> None:
    """Let ranks that share a machine connect by loopback only, unless the user chose an interface;
    torchrun's store listens on all."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo0" if sys.platform == "darwin" else "lo")


def keep_no_free_memory() -> None:
    """Let the C library return freed blocks to the system at once, so that the resident set is the
    memory in use. A step may take twice as long."""
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(-3, 65536)  # bytes; M_MMAP_THRESHOLD of malloc.h
