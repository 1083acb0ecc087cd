"""GPU utilization from the driver: of which GPUs, when, and what is unknown (harness/gpus.py)."""

import sys
import types

import pytest
import torch

from harness import gpus


class NVML(types.SimpleNamespace):
    """Stands in for pynvml: a machine with three GPUs, of which one is split (MIG)."""

    class NVMLError(Exception):
        pass

    busy = {"GPU-a": 90, "GPU-b": 30, "GPU-split": None}

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlDeviceGetUtilizationRates(self, gpu):
        if self.busy[gpu] is None:
            raise self.NVMLError
        return types.SimpleNamespace(gpu=self.busy[gpu])

    def nvmlDeviceGetPowerManagementLimit(self, gpu):
        return {"GPU-a": 250_000, "GPU-b": 700_000}.get(gpu, 300_000)


@pytest.fixture(autouse=True)
def three_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", NVML())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    uuids = [types.SimpleNamespace(uuid=uuid) for uuid in ("a", "b", "split")]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: uuids[gpu.index])


def test_utilization_is_of_the_gpus_and_the_time_that_trained(monkeypatch):
    """By UUID, however CUDA_VISIBLE_DEVICES named them; not other GPUs, loading or evaluation."""
    nvml, samples = NVML(), []
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    for second, busy in enumerate([0, 100, 100, 40, 60, 0, 100, 80, 0]):
        nvml.busy = {"GPU-a": busy, "GPU-b": 30, "GPU-split": None}
        samples.append((float(second), gpus.utilization()))
    spans = [(2.0, 4.0), (6.0, 7.0)]  # of which the samples 3, 4 and 7 tell
    assert gpus.summarize(samples, ["GPU-a"], spans) == {"utilization_percent": 60}
    both = gpus.summarize(samples, ["GPU-a", "GPU-b"], spans)
    assert both == {"utilization_percent": 45}
    for unknown in (["MIG-c"], ["GPU-split"], ["GPU-a", "MIG-c"], []):
        assert gpus.summarize(samples, unknown, spans) is None
    assert gpus.summarize(samples, ["GPU-a"], [(2.0, 2.9)]) is None, "too short to tell"


def test_without_the_bindings_there_are_no_figures(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert set(gpus.utilization().values()) == {None} and gpus.power_limits() == []


def test_power_limits_are_of_the_visible_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # of three
    assert gpus.power_limits() == ["250 W", "700 W"]
