"""What inference does on a GPU, where there is none: what onnxruntime is asked to do."""

import math
from pathlib import Path
from types import SimpleNamespace

import onnxruntime
import pytest
import torch
from conftest import refused

import common
import model_inference
from inference import export
from inference.runtimes import make_session
from inference.trained import Trained

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"


class Session:
    """Stands in for onnxruntime.InferenceSession."""

    opened = []
    providers = [CUDA, CPU]

    def __init__(self, path, options, providers, enable_fallback):
        self.opened.append((providers, enable_fallback))

    def get_providers(self):
        return self.providers


@pytest.fixture
def sessions(monkeypatch):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: None, raising=False)
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    monkeypatch.setattr(Session, "opened", [])
    return Session


@pytest.mark.parametrize("use_tf32", [True, False])
def test_onnxruntime_is_asked_for_cuda_alone(use_tf32, sessions):
    make_session(Path("model.onnx"), "cuda", use_tf32)
    assert sessions.opened == [([(CUDA, {"use_tf32": int(use_tf32)})], False)]


def test_nothing_falls_back_to_the_cpu(sessions, monkeypatch):
    monkeypatch.setattr(sessions, "providers", [CPU])
    with refused("falls back to the CPU", "--device cuda"):
        make_session(Path("model.onnx"), "cuda")


@pytest.mark.parametrize("task, providers, device", [
    ("--input test", [CPU], "cuda"),
    ("--export model.onnx", [CPU], "cpu"),
    ("--export model.onnx", [CUDA, CPU], "cuda"),
])  # fmt: skip
def test_a_gpu_is_used_if_all_can_use_it(task, providers, device, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    (tmp_path / "model.pt").touch()
    flags = ["--weights", "model.pt", *task.split()]
    args = common.read_flags(model_inference.argument_parser(), Trained, flags)
    assert model_inference.check_flags(args).device == device


def test_nan_is_a_difference():
    runners = [lambda x: x, lambda x: x / x]
    assert math.isnan(export.largest_difference(*runners, [torch.ones(1), torch.zeros(1)]))


def test_a_gpu_without_bfloat16_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    with refused("Tesla T4 lacks it; use --dtype float16"):
        common.get_dtype(SimpleNamespace(dtype="bfloat16"), torch.device("cuda"))
