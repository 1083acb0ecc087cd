"""What is measured about a process and its machine: bytes, memory, hardware, versions, command."""

import contextlib
import importlib.metadata
import os
import platform
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from harness.ranks import launcher_words


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its shard of a DTensor, or all of a plain one."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a DTensor, on each of its ranks, which all call it; a plain one is whole."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory behind the tensors on this rank: of a sharded tensor those of its shard, and
    a buffer of which several tensors are views once and whole."""
    storages = [local(t).untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state, this rank's share of them."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in states if torch.is_tensor(value)]


def peak_memory_gib(device: torch.device) -> dict[str, float]:
    """Peak memory of this process since :func:`reset_peak_memory`, in GiB.

    On a GPU: what tensors took (allocated), what PyTorch's allocator kept (reserved), and all that
    was in use on the GPU, as nvidia-smi shows it (process; it counts other programs too). On a CPU:
    the resident set of the process.
    """
    if device.type == "cpu":
        with contextlib.suppress(OSError):  # Linux; getrusage() would count who started us, too
            lines = Path("/proc/self/status").read_text().splitlines()
            [peak] = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
            return {"process": int(peak) / 2**20}  # from KiB
        unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, else KiB
        return {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    allocated = torch.cuda.max_memory_allocated(device)
    reserved = torch.cuda.max_memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    process = total - free - torch.cuda.memory_reserved(device) + reserved
    figures = {"allocated": allocated, "reserved": reserved, "process": process}
    return {name: value / 2**30 for name, value in figures.items()}


def reset_peak_memory(device: torch.device) -> None:
    """Let :func:`peak_memory_gib` count from now on. On a CPU only Linux can."""
    if device.type == "cuda":
        return torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak becomes what it is now


def gpu_uuids(devices: list[torch.device]) -> list[str]:
    """As nvidia-smi names them, whatever CUDA_VISIBLE_DEVICES has made of their numbers."""
    gpus = [device for device in devices if device.type == "cuda"]
    return [f"GPU-{torch.cuda.get_device_properties(gpu).uuid}" for gpu in gpus]


def launch_command() -> str:
    """The command that started this run: the launcher's, which is our parent, or our own."""
    program, *words = launcher_words() or sys.orig_argv
    return shlex.join([Path(program).name, *words])


def hardware() -> dict:
    """Names of the processor and the GPUs, and what decides how fast the processor multiplies."""
    found = {}
    with contextlib.suppress(OSError):  # Linux only
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
    return {
        "cpu": found.get("model name") or platform.processor() or platform.machine(),
        "cpu_flags": [flag for flag in wanted if flag in found.get("flags", "").split()],
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found |= {name: importlib.metadata.version(name) for name in ("torchvision", "numpy")}
    if torch.cuda.is_available():
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        with contextlib.suppress(RuntimeError):  # of a GPU too old for it
            found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def git_commit() -> str | None:
    """The commit of this repository, with ``-dirty`` if files differ; ``None`` outside of one."""
    folder = Path(__file__).resolve().parents[1]
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty"]
    try:
        run = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()
