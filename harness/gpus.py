"""Query the driver for utilization and power limit of the visible GPUs, by UUID."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import torch

from harness.measure import gpu_uuids

LAG = 1.0  # seconds: the driver's utilization is a mean over up to the last second


def ask_driver(question: Callable) -> dict[str, float | None]:
    """The driver's answer for every GPU; ``None`` if there is none: for a MIG slice, or without
    NVIDIA's Python bindings. Asking CUDA for UUIDs takes no GPU memory: it creates no context.

    Args:
        question: a function of pynvml and a handle.
    """
    answers = {}
    for uuid in gpu_uuids([torch.device("cuda", i) for i in range(torch.cuda.device_count())]):
        answers[uuid] = None
        with contextlib.suppress(Exception):  # not installed, not permitted, not supported
            import pynvml  # from the package nvidia-ml-py

            pynvml.nvmlInit()
            answers[uuid] = question(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
    return answers


def utilization() -> dict[str, float | None]:
    """Percentage of time in which any kernel ran."""
    return ask_driver(lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)


def power_limits() -> list[str]:
    """Power limits, if the driver reports them."""
    limits = ask_driver(lambda nvml, gpu: nvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1000)
    return [f"{limit:.0f} W" for limit in limits.values() if limit is not None]


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
    """Mean utilization of these GPUs in these spans of wall-clock time, without the first
    :data:`LAG` of each. ``None`` if any of the GPUs has no samples."""
    percents = [
        figures.get(uuid)
        for moment, figures in samples
        if any(begin + LAG <= moment <= end for begin, end in spans)
        for uuid in uuids
    ]
    if not percents or None in percents:
        return None
    return {"utilization_percent": sum(percents) / len(percents)}
