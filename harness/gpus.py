"""The machine's GPUs as their driver knows them: utilization and power limit, by UUID.

The driver counts all GPUs, whatever CUDA_VISIBLE_DEVICES says, and in an order of its own. A UUID
tells which GPU a program uses, however that variable names it: by number, by UUID or as a part of a
GPU (MIG).
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import torch

from harness.measure import gpu_uuids

LAG = 1.0  # seconds: the driver's utilization is a mean over up to the last second


def ask_gpus(question: Callable) -> dict[str, float | None]:
    """The answer of every GPU of the machine, by UUID; ``None`` where a GPU does not support it.
    Empty without NVIDIA's driver or its Python bindings.

    Args:
        question: of pynvml and a handle.
    """
    answers = {}
    with contextlib.suppress(Exception):  # not installed, no driver, not permitted
        import pynvml  # of the package nvidia-ml-py

        pynvml.nvmlInit()
        for gpu in map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount())):
            uuid = pynvml.nvmlDeviceGetUUID(gpu)
            answers[uuid] = None
            with contextlib.suppress(pynvml.NVMLError):  # utilization of a GPU that is split (MIG)
                answers[uuid] = question(pynvml, gpu)
    return answers


def utilization() -> dict[str, float | None]:
    """Percent of the time in which any kernel ran."""
    return ask_gpus(lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)


def power_limits() -> list[str]:
    """Of the GPUs that CUDA sees; empty where the driver reports none. Asking CUDA for UUIDs takes
    no GPU memory, because it creates no context."""
    uuids = gpu_uuids([torch.device("cuda", i) for i in range(torch.cuda.device_count())])
    limits = ask_gpus(lambda nvml, gpu: nvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1000)
    return [f"{limits[uuid]:.0f} W" for uuid in uuids if limits.get(uuid) is not None]


@contextlib.contextmanager
def watch_gpus() -> Iterator[list[tuple[float, dict]]]:
    """Sample all GPUs four times a second while the block runs: time and :func:`utilization`."""
    samples, stop = [], threading.Event()

    def watch() -> None:
        while torch.cuda.is_available() and not stop.wait(0.25):
            samples.append((time.time(), utilization()))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join(5)


def summarize(samples, uuids: list[str], spans: list[tuple[float, float]]) -> dict | None:
    """Mean utilization of these GPUs in these spans of the wall clock.

    Returns:
        ``None`` if any of the GPUs has no figures: on a CPU, for a part of a GPU (MIG), and in
        spans shorter than :data:`LAG`, which is left out at the beginning of each span.
    """
    percents = [
        figures.get(uuid)
        for moment, figures in samples
        if any(begin + LAG <= moment <= end for begin, end in spans)
        for uuid in uuids
    ]
    if not percents or None in percents:
        return None
    return {"utilization_percent": sum(percents) / len(percents)}
