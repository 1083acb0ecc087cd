"""The machine's GPUs as their driver knows them: utilization, memory and power limit, by UUID.

The driver counts all GPUs, whatever CUDA_VISIBLE_DEVICES says, and in an order of its own. UUIDs
tell which of them a program uses, however that variable names them: by number, by UUID or as a part
of a GPU (MIG).
"""

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterable

import torch

from harness.measure import gpu_uuids

LAG = 1.0  # seconds: the utilization that is read is that of up to a second before


class GpuWatch:
    """The figures of all GPUs while the block runs, four times a second."""

    def __enter__(self):
        self.samples, self.stop = [], threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        if torch.cuda.is_available():
            self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        if self.thread.is_alive():
            self.thread.join(5)

    def watch(self):
        while not self.stop.wait(0.25):
            self.samples.append((time.time(), read_gpus()))

    def summary(self, uuids: Iterable[str], spans: Iterable[tuple[float, float]]) -> dict | None:
        """Mean utilization and largest memory of these GPUs in these spans of the wall clock.

        Returns:
            ``None`` where one of the GPUs told nothing: on a CPU, of a part of a GPU (MIG), and of
            spans within :data:`LAG`, which is left out of the beginning of each.
        """
        spans = list(spans)
        within = [
            figures
            for moment, figures in self.samples
            if any(begin + LAG <= moment <= end for begin, end in spans)
        ]
        told = {uuid: [figures[uuid] for figures in within if uuid in figures] for uuid in uuids}
        figures = [figure for theirs in told.values() for figure in theirs]
        percents = [f["utilization_percent"] for f in figures]
        if not all(told.values()) or not percents or None in percents:
            return None
        memory = [f["memory_used_gib"] for f in figures]
        return {
            "utilization_percent": sum(percents) / len(percents),
            "memory_used_gib": None if None in memory else max(memory),
        }


def read_gpus() -> dict[str, dict[str, float | None]]:
    """Figures of every GPU of the machine, by UUID: asked of NVIDIA's Python bindings, or else of
    its program; empty without both. What a GPU does not tell is ``None``."""
    for read in (read_bindings, read_program):
        with contextlib.suppress(Exception):  # not installed, no driver, not permitted
            return read()
    return {}


def read_bindings() -> dict[str, dict[str, float | None]]:
    import pynvml  # of the package nvidia-ml-py

    pynvml.nvmlInit()
    gpus = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    return {pynvml.nvmlDeviceGetUUID(gpu): read_one(pynvml, gpu) for gpu in gpus}


def read_one(pynvml, gpu) -> dict[str, float | None]:
    def ask(figure: Callable[[], float]) -> float | None:
        try:
            return figure()
        except pynvml.NVMLError:  # not supported: utilization, where the GPU is split (MIG)
            return None

    return {
        "utilization_percent": ask(lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
        "memory_used_gib": ask(lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**30),
        "power_limit_w": ask(lambda: pynvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1000),
    }


def read_program() -> dict[str, dict[str, float | None]]:
    what = "uuid,utilization.gpu,memory.used,power.limit"
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    found = {}
    for line in printed.stdout.splitlines():
        uuid, *words = (word.strip() for word in line.split(","))
        percent, mebibytes, watts = map(number_or_none, words)
        found[uuid] = {
            "utilization_percent": percent,
            "memory_used_gib": None if mebibytes is None else mebibytes / 1024,
            "power_limit_w": watts,
        }
    return found


def number_or_none(word: str) -> float | None:
    """``None`` of "[N/A]" and the like."""
    with contextlib.suppress(ValueError):
        return float(word)
    return None


def power_limits() -> list[str]:
    """Of the GPUs that CUDA sees; empty where the driver tells none. CUDA is asked for their UUIDs
    only, which makes no context, so this takes no memory on them."""
    uuids = gpu_uuids([torch.device("cuda", i) for i in range(torch.cuda.device_count())])
    figures = read_gpus() if uuids else {}
    watts = [figures.get(uuid, {}).get("power_limit_w") for uuid in uuids]
    return [f"{value:.0f} W" for value in watts if value is not None]
