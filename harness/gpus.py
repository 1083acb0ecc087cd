"""The machine's GPUs as their driver knows them: utilization, memory and power limit, by UUID.

The driver counts all GPUs, whatever CUDA_VISIBLE_DEVICES says, and in an order of its own. A UUID
tells which GPU a program uses, however that variable names it: by number, by UUID or as a part of a
GPU (MIG).
"""

import contextlib
import threading
import time
from collections.abc import Iterator

import torch

from harness.measure import gpu_uuids

LAG = 1.0  # seconds: the driver's utilization is a mean over up to the last second


@contextlib.contextmanager
def watch_gpus() -> Iterator[list[tuple[float, dict]]]:
    """Sample all GPUs four times a second while the block runs: the time, and :func:`read_gpus`."""
    samples, stop = [], threading.Event()

    def watch() -> None:
        while torch.cuda.is_available() and not stop.wait(0.25):
            samples.append((time.time(), read_gpus()))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join(5)


def summarize(samples, uuids: list[str], spans: list[tuple[float, float]]) -> dict | None:
    """Mean utilization and peak memory of these GPUs in these spans of the wall clock.

    Returns:
        ``None`` if any of the GPUs has no figures: on a CPU, for a part of a GPU (MIG), and in
        spans shorter than :data:`LAG`, which is left out at the beginning of each span.
    """
    within = [
        figures
        for moment, figures in samples
        if any(begin + LAG <= moment <= end for begin, end in spans)
    ]
    found = [figures.get(uuid, {}) for figures in within for uuid in uuids]
    percents = [gpu.get("utilization_percent") for gpu in found]
    memory = [gpu.get("memory_used_gib") for gpu in found]
    if not found or None in percents:
        return None
    return {
        "utilization_percent": sum(percents) / len(percents),
        "memory_used_gib": None if None in memory else max(memory),
    }


def read_gpus() -> dict[str, dict[str, float | None]]:
    """Figures of every GPU of the machine, by UUID; ``None`` where a GPU does not support one.
    Empty without NVIDIA's driver or its Python bindings."""
    try:
        import pynvml  # of the package nvidia-ml-py

        pynvml.nvmlInit()
    except Exception:  # not installed, no driver, not permitted
        return {}

    def ask(question, gpu):
        with contextlib.suppress(pynvml.NVMLError):  # utilization of a GPU that is split (MIG)
            return question(gpu)

    questions = {
        "utilization_percent": lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
        "memory_used_gib": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**30,
        "power_limit_w": lambda gpu: pynvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1000,
    }
    gpus = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    return {
        pynvml.nvmlDeviceGetUUID(gpu): {name: ask(q, gpu) for name, q in questions.items()}
        for gpu in gpus
    }


def power_limits() -> list[str]:
    """Of the GPUs that CUDA sees; empty where the driver reports none. Asking CUDA for UUIDs takes
    no GPU memory, because it creates no context."""
    uuids = gpu_uuids([torch.device("cuda", i) for i in range(torch.cuda.device_count())])
    figures = read_gpus() if uuids else {}
    watts = [figures.get(uuid, {}).get("power_limit_w") for uuid in uuids]
    return [f"{value:.0f} W" for value in watts if value is not None]
