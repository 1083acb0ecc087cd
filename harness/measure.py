"""Measure a process and describe its machine: memory, hardware, versions, command."""

import contextlib
import importlib.metadata
import os
import platform
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from harness.world import launcher_words


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: the local shard of a DTensor, or a plain tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor, whose ranks all call it; or a plain tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's storages of tensors or shards; one that several share counts once."""
    storages = [local(t).untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """This rank's tensors of an optimizer's state."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in states if torch.is_tensor(value)]


def peak_memory_gib(device: torch.device) -> dict[str, float]:
    """Peak memory of this process since :func:`reset_peak_memory`, in GiB. On a GPU: of tensors
    (allocated), held by PyTorch's allocator (reserved), and all used memory, as in nvidia-smi
    (process; includes other programs). On a CPU: the resident set size."""
    if device.type == "cpu":
        with contextlib.suppress(OSError):  # Linux; getrusage() would include the parent process
            [peak] = re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
            return {"process": int(peak) / 2**20}  # from KiB
        unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, else KiB
        return {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    reserved = torch.cuda.max_memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    process = total - free - torch.cuda.memory_reserved(device) + reserved
    figures = {"allocated": torch.cuda.max_memory_allocated(device), "reserved": reserved}
    return {name: size / 2**30 for name, size in (figures | {"process": process}).items()}


def reset_peak_memory(device: torch.device) -> None:
    """Reset what :func:`peak_memory_gib` returns. On a CPU only Linux supports this."""
    if device.type == "cuda":
        return torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak


def gpu_uuids(devices: list[torch.device]) -> list[str]:
    """UUIDs as in nvidia-smi, independent of CUDA_VISIBLE_DEVICES."""
    gpus = [device for device in devices if device.type == "cuda"]
    return [f"GPU-{torch.cuda.get_device_properties(gpu).uuid}" for gpu in gpus]


def launch_command() -> str:
    """The command that started this run: that of the launcher, the parent process, or this one."""
    program, *words = launcher_words() or sys.orig_argv
    return shlex.join([Path(program).name, *words])


def hardware() -> dict:
    """Names of the CPU and the GPUs, and the vector extensions of the CPU."""
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
        with contextlib.suppress(RuntimeError):  # a GPU that is too old
            found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def git_commit() -> str | None:
    """The commit, with ``-dirty`` if not only results and pages differ; ``None`` without git."""
    git = ["git", "-C", str(Path(__file__).resolve().parents[1])]
    written = [":!results", ":!docs", ":!README*", ":!website/data"]
    quiet = {"text": True, "stderr": subprocess.DEVNULL}
    try:
        commit = subprocess.check_output([*git, "rev-parse", "HEAD"], **quiet).strip()
        differs = subprocess.call([*git, "diff", "--quiet", "HEAD", "--", ".", *written])
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}-dirty" if differs else commit
