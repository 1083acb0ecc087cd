"""What the driver says of the GPUs while a row runs."""

import contextlib
import subprocess

import torch

from harness.measure import gpu_uuids

LAG = 1.0  # seconds: the driver's utilization is a mean over up to the last second


def utilization() -> dict[str, float | None]:
    """The percentage of time in which any kernel ran, of each GPU by its UUID; ``None`` where the
    driver does not tell: for a MIG slice, or without NVIDIA's Python bindings."""
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    found = {}
    for uuid, device in zip(gpu_uuids(devices), devices, strict=True):
        found[uuid] = None
        with contextlib.suppress(Exception):  # not installed, not permitted, not supported
            found[uuid] = torch.cuda.utilization(device)
    return found


def mean_utilization(samples: list, uuids: list[str], spans: list) -> dict | None:
    """The mean of these GPUs in these spans of wall-clock time, without the first :data:`LAG` of
    each. ``None`` if any of the GPUs has no samples."""
    percents = []
    for moment, figures in samples:
        if any(begin + LAG <= moment <= end for begin, end in spans):
            percents += [figures.get(uuid) for uuid in uuids]
    if not percents or None in percents:
        return None
    return {"utilization_percent": sum(percents) / len(percents)}


def power_limits() -> list[str]:
    """Power limits of the visible GPUs, if the driver reports them."""
    uuids = gpu_uuids([torch.device("cuda", i) for i in range(torch.cuda.device_count())])
    words = ["nvidia-smi", f"--id={','.join(uuids)}", "--query-gpu=power.limit"]
    try:
        run = subprocess.run(
            [*words, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True
        )
        return [f"{float(limit):.0f} W" for limit in run.stdout.split()] if uuids else []
    except (OSError, ValueError, subprocess.CalledProcessError):
        return []
