"""Rank and world size from the launcher, and what all ranks do together."""

import contextlib
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.distributed.nn  # noqa: F401  here and not later: see wait_for_gloo()

SCRIPT = Path(sys.argv[0]).stem  # the name of the technique: pytorch_DDP, pytorch_FSDP, ...
PARENT = os.getppid()  # the launcher, if there is one
LAUNCHERS = {"torchrun", "deepspeed", "accelerate", "fabric"}  # programs

# Set by every launcher (torchrun, torch.distributed.launch, deepspeed), not by plain `python`.
RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
LAUNCHED = "LOCAL_RANK" in os.environ
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def count_local_ranks() -> int | None:
    """Number of ranks on this machine; ``None`` if unknown."""
    names = ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"]  # torchrun's, deepspeed's
    names += ["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"]  # mpirun's: Open MPI, MPICH
    for name in names:
        if os.environ.get(name):
            return int(os.environ[name])
    here = os.environ.get("MASTER_ADDR", "localhost") in ("localhost", "127.0.0.1", "::1")
    return WORLD_SIZE if WORLD_SIZE == 1 or here else None


LOCAL_WORLD_SIZE = count_local_ranks() or WORLD_SIZE


def why_ranks_are_unclear() -> str | None:
    """Which variable a launcher such as srun or mpirun did not set; ``None`` if all are set."""
    if LAUNCHED and count_local_ranks() is None:
        return (
            f"WORLD_SIZE is {WORLD_SIZE}, and LOCAL_WORLD_SIZE, the number of ranks on this "
            "machine, is not set; export it (under srun: LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE)"
        )
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        if not LAUNCHED and int(os.environ.get(name, 1)) > 1:
            return (
                f"{name} is {os.environ[name]}, but RANK and LOCAL_RANK are not set; start one "
                "torchrun per machine, as docs/multi_node.md shows"
            )
    return None


def print0(message: str) -> None:
    """Print a line, on rank 0 only."""
    if RANK == 0:
        print(message, flush=True)


# ------------------------------------------------------------------------ operations of all ranks


def make_store(args) -> dist.Store:
    """Where ranks find each other's addresses: the launcher's store, or none for a single process.

    ``torchrun`` keeps one store for all attempts, in which a restarted rank may find the address of
    a dead rank, and hang. So each attempt has its own key prefix. On several machines, whose agents
    count attempts separately, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is needed instead.
    """
    if not LAUNCHED:
        return dist.HashStore()
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=args.timeout)))
    if LOCAL_WORLD_SIZE == WORLD_SIZE:
        store = dist.PrefixStore(f"attempt {RESTARTS}", store)
    return store


def gather_objects(value) -> list:
    """Gather the values of all ranks on every rank. All ranks call it."""
    values = [value]
    if dist.is_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


class Failed(Exception):
    """A task of :func:`together` failed; the message says why."""


def together(task: Callable, *args, here: bool = True) -> list:
    """Run a task and gather its results on every rank. All ranks call it.

    Args:
        here: whether this rank runs the task; otherwise it waits.

    Raises:
        Failed: on all ranks, if the task failed on any.
    """
    why = result = None
    try:
        result = task(*args) if here else None
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    everyone = gather_objects((why, result))
    if failures := [why for why, _ in everyone if why]:
        raise Failed(failures[0])
    return [result for _, result in everyone]


def max_over_ranks(values: list[float]) -> list[float]:
    """The maximum of each number over all ranks, on every rank."""
    if not dist.is_initialized():
        return values
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def wait_for_gloo() -> None:
    """Wait for all ranks, so that gloo's threads free what they sent before Python shuts down.

    A thread that still has a tensor then aborts the process (pytorch/pytorch#179291). A process
    group waits for its threads when it is freed. But ``torch.distributed.nn``, imported after
    ``init_process_group``, keeps the group as a default argument: hence the import above. FSDP's
    caches and DeepSpeed keep it, too: hence this wait. It is not ``barrier()``, which keeps tensors
    sent just before it.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.monitored_barrier()


def exit_all(code: int) -> NoReturn:
    """Stop this run early. All ranks call it."""
    wait_for_gloo()
    if dist.is_initialized():
        dist.destroy_process_group()
    raise SystemExit(code)


# ------------------------------------------------------------------------------------ the launcher


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def launcher_words() -> list[str]:
    """The command line of the launcher: torchrun, torch.distributed.launch, deepspeed, accelerate
    or fabric; empty without one, or where there is no /proc."""
    words = command_of(PARENT) if LAUNCHED else []
    if "deepspeed.launcher.launch" in words:  # itself a child of the `deepspeed` command
        words = command_of(parent_of(PARENT))
    if len(words) > 1 and Path(words[1]).name in LAUNCHERS:  # a program, after its Python
        return words[1:]
    modules = {"torch.distributed.run", "torch.distributed.launch"}
    return words if (modules | LAUNCHERS) & {Path(word).name for word in words[:4]} else []


def command_of(process: int) -> list[str]:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{process}/cmdline").read_text(errors="replace")
        return text.strip("\0").split("\0")
    return []


def sees_one_gpu() -> bool:
    """Whether each rank sees only its own GPU, as device 0, and has LOCAL_RANK 0."""
    words = {word.replace("_", "-") for word in launcher_words()}
    return "--virtual-local-rank" in words or os.environ.get("PET_VIRTUAL_LOCAL_RANK") == "1"


def is_first_here() -> bool:
    """Whether this is the rank that downloads for its machine."""
    return LOCAL_RANK == 0 and not (sees_one_gpu() and RANK % LOCAL_WORLD_SIZE)


def launch_id() -> str:
    """An identifier of the launch: the same for all attempts, different for the next launch."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run != "none":
        return run
    started = ""
    with contextlib.suppress(OSError):  # Linux only; a container gives the same number every time
        started = Path(f"/proc/{PARENT}/stat").read_text().rpartition(")")[2].split()[19]
    return f"process {PARENT} {started}"
