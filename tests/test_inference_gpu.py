"""Inference on a GPU, as far as it can be tested without one: what PyTorch and ONNX Runtime are
asked to do, and whether ONNX Runtime's CUDA provider supports what an exported file needs."""

import functools
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
from inference.classifier import Classifier
from inference.runtimes import TorchRunner, make_session
from inference.trained import Trained

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


@pytest.fixture
def pretend_gpu(monkeypatch):
    """Tensors stay where they are when they are sent to a GPU. PyTorch's settings are restored."""
    to = torch.Tensor.to

    def stay(tensor, *args, **kwargs):
        sent = args and isinstance(args[0], torch.device) and args[0].type == "cuda"
        return tensor if sent else to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", stay)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    yield
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    torch.backends.cuda.matmul.fp32_precision = "none"


def torch_settings():
    conv, matmul = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    return torch.backends.cudnn.benchmark, conv.fp32_precision, matmul.fp32_precision


def is_channels_last(tensor):
    return tensor.is_contiguous(memory_format=torch.channels_last)


def small_classifier():
    """A convolution and a matrix product."""
    layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 2)]
    return Classifier(torch.nn.Sequential(*layers), torch.float32).eval()


def test_torch_on_a_gpu(pretend_gpu):
    """channels_last, cuDNN's search, and TF32 in convolutions and matrix products alike."""
    classifier = small_classifier()
    conv, images, seen = classifier.model[0], torch.zeros(2, 3, 8, 8, dtype=torch.uint8), []
    conv.register_forward_pre_hook(lambda _, inputs: seen.append(is_channels_last(*inputs)))
    expected = TorchRunner(classifier, "cpu")(images)
    assert torch_settings() == (False, "tf32", "none")
    runner = TorchRunner(classifier, "cuda")
    assert torch_settings() == (True, "tf32", "tf32")
    assert is_channels_last(conv.weight)
    torch.testing.assert_close(runner.run(runner.put(images)), expected)
    assert seen == [False, True]
    TorchRunner(classifier, "cuda", use_tf32=False)
    assert torch_settings() == (True, "ieee", "ieee")


def test_nan_is_a_difference():
    runners = [lambda x: x, lambda x: x / x]
    assert math.isnan(export.differ(*runners, [torch.ones(1), torch.zeros(1)]))


def test_every_batch_size_is_compiled_once(monkeypatch):
    """Also beyond Dynamo's limit of 8, and none for a range of sizes."""
    compiled = []

    def backend(graph, inputs):
        compiled.append([x.shape[0] for x in inputs if x.dtype == torch.uint8])
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(torch.compiler.config, "recompile_limit", 8)
    runner = TorchRunner(small_classifier(), "cpu", compiled=True)
    for _ in range(2):
        for size in range(1, 11):
            assert runner(torch.zeros(size, 3, 8, 8, dtype=torch.uint8)).shape == (size, 2)
    assert compiled == [[size] for size in range(1, 11)]
    assert all(type(size) is int for [size] in compiled)


# ---------------------------------------------------------------------------------- ONNX Runtime
class Session:
    """Stands in for onnxruntime.InferenceSession, with some operations on the CPU."""

    opened = []
    on_cpu = ()
    providers = [CUDA, CPU]

    def __init__(self, path, options, providers, enable_fallback):
        self.opened.append((providers, enable_fallback))
        for name in ("disable_quant_qdq", "record_ep_graph_assignment_info"):
            assert options.get_session_config_entry(f"session.{name}") == "1"

    def get_providers(self):
        return self.providers

    def get_provider_graph_assignment_info(self):
        for name, ops in ((CUDA, ["Conv", "MaxPool"]), (CPU, self.on_cpu)):
            nodes = [SimpleNamespace(op_type=op) for op in ops]
            yield SimpleNamespace(ep_name=name, get_nodes=lambda nodes=nodes: nodes)


@pytest.fixture
def sessions(monkeypatch):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: None, raising=False)
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    monkeypatch.setattr(Session, "opened", [])
    return Session


@pytest.mark.parametrize("on_cpu", [(), ("Concat", "Slice")], ids=["all", "but shapes"])
def test_what_is_on_the_gpu(on_cpu, sessions, monkeypatch):
    monkeypatch.setattr(sessions, "on_cpu", on_cpu)
    for use_tf32 in (True, False):
        make_session(Path("model.onnx"), CUDA, use_tf32)
        assert sessions.opened.pop() == ([(CUDA, {"use_tf32": int(use_tf32)})], False)


@pytest.mark.parametrize("on_cpu, named", [(["MaxPool", "Slice"], "would run MaxPool of"),
                                           ([], f"falls back to {CPU}")])  # fmt: skip
def test_nothing_else_is_on_the_cpu(on_cpu, named, sessions, monkeypatch):
    monkeypatch.setattr(sessions, "on_cpu", on_cpu)
    monkeypatch.setattr(sessions, "providers", [CUDA, CPU] if on_cpu else [CPU])
    with refused(named, f"--provider {CUDA}", "--device cpu"):
        make_session(Path("model.onnx"), CUDA)


def test_a_gpu_without_bfloat16_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    (tmp_path / "model.pt").touch()
    flags = ["--weights", f"{tmp_path}/model.pt", "--input", "test", "--precision", "bf16"]
    args = common.read_flags(model_inference.argument_parser(), Trained, flags)
    with refused("Tesla T4 lacks bf16"):
        model_inference.check_flags(args)
    with refused("Tesla T4 lacks it; use --dtype float16"):
        common.get_dtype(SimpleNamespace(dtype="bfloat16"), torch.device("cuda"))
