"""Inference on a GPU, as far as it can be tested without one: what PyTorch and ONNX Runtime are
asked to do, and whether ONNX Runtime's CUDA provider supports what an exported file needs."""

import argparse
import contextlib
import functools
import mmap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import model_inference
from inference import bfloat16, export
from inference.classifier import Classifier, load_classifier
from inference.measure import is_worth_it
from inference.runtimes import TorchRunner, make_session
from jobs.classifiers import make_model

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
# The kernels that ONNX Runtime 1.31's CUDA provider registers for what classifiers consist of, by
# the opset of the operator. (A kernel "since 12" does not do for MaxPool, which changed in 22.)
CUDA_KERNELS = {
    "Add": 14, "Cast": 21, "Concat": 13, "Conv": 22, "Div": 14, "Expand": 13, "Flatten": 21,
    "Gather": 13, "Gemm": 13, "HardSigmoid": 22, "HardSwish": 22, "MatMul": 13, "Max": 13,
    "Mul": 14, "ReduceMean": 18, "Relu": 14, "Reshape": 21, "Sigmoid": 13, "Split": 18,
    "Squeeze": 21, "Sub": 14, "Transpose": 21, "Unsqueeze": 21,
}  # fmt: skip


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


def small_classifier():
    """A convolution that notes how its images lie in memory, and a matrix product."""
    layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 2)]
    classifier = Classifier(torch.nn.Sequential(*layers), torch.float32).eval()
    classifier.seen = []
    layers[0].register_forward_pre_hook(
        lambda _, inputs: classifier.seen.append(
            inputs[0].is_contiguous(memory_format=torch.channels_last)
        )
    )
    return classifier


def test_torch_on_a_gpu(pretend_gpu):
    """channels_last, cuDNN's search, and TF32 in convolutions and matrix products alike."""
    classifier = small_classifier()
    weight, images = classifier.model[0].weight, torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    expected = TorchRunner(classifier, "cpu")(images)
    assert torch_settings() == (False, "tf32", "none")
    runner = TorchRunner(classifier, "cuda")
    assert torch_settings() == (True, "tf32", "tf32")
    assert weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(runner.run(runner.put(images)), expected)
    assert classifier.seen == [False, True]
    TorchRunner(classifier, "cuda", use_tf32=False)
    assert torch_settings() == (True, "ieee", "ieee")


def test_comparing_without_tf32(monkeypatch):
    """On both sides."""
    asked = []
    monkeypatch.setattr(export, "load_classifier", lambda *_: None)
    monkeypatch.setattr(export, "OnnxRunner", lambda *_: None)
    monkeypatch.setattr(export, "make_session", lambda *_, **options: asked.append(options))

    def end(*_, **options):
        asked.append(options)
        raise InterruptedError

    monkeypatch.setattr(export, "TorchRunner", end)
    with pytest.raises(InterruptedError):
        export.compare(argparse.Namespace(provider=CUDA, device="cuda"), Path("model.onnx"))
    assert asked == [{"use_tf32": False}] * 2


def test_every_batch_size_is_compiled_once(monkeypatch):
    """Also beyond Dynamo's limit of 8, and none for a range of sizes."""
    compiled = []

    def backend(graph, inputs):
        compiled.append([x.shape[0] for x in inputs if x.dtype == torch.uint8])
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(torch.compiler.config, "recompile_limit", 8)
    classifier = small_classifier()
    classifier.model[0]._forward_pre_hooks.clear()
    runner = TorchRunner(classifier, "cpu", compiled=True)
    for _ in range(2):
        for size in range(1, 11):
            assert runner(torch.zeros(size, 3, 8, 8, dtype=torch.uint8)).shape == (size, 2)
    assert compiled == [[size] for size in range(1, 11)]
    assert all(type(size) is int for [size] in compiled)


# ---------------------------------------------------------------------------------- ONNX Runtime


class Session:
    """Stands in for onnxruntime.InferenceSession: refuses, as told, what would run on the CPU."""

    opened = []
    on_cpu = ()
    providers = [CUDA, CPU]

    def __init__(self, path, options, providers, enable_fallback):
        entries = {}
        for name in ("disable_cpu_ep_fallback", "record_ep_graph_assignment_info"):
            with contextlib.suppress(RuntimeError):  # it is not set
                entries[name] = options.get_session_config_entry(f"session.{name}")
        self.opened.append((providers, entries, enable_fallback))
        assert options.get_session_config_entry("session.disable_quant_qdq") == "1"
        if "disable_cpu_ep_fallback" in entries and (self.on_cpu or self.providers == [CPU]):
            raise onnxruntime.capi.onnxruntime_pybind11_state.Fail(
                "[ONNXRuntimeError] : 1 : FAIL : This session contains graph nodes that are "
                "assigned to the default CPU EP, but fallback to CPU EP has been explicitly "
                "disabled by the user."
            )

    def get_providers(self):
        return self.providers

    def get_provider_graph_assignment_info(self):
        for name, ops in ((CUDA, ["Conv", "MaxPool"]), (CPU, self.on_cpu)):
            nodes = [SimpleNamespace(op_type=op) for op in ops]
            yield SimpleNamespace(ep_name=name, get_nodes=lambda nodes=nodes: nodes)


STRICT = {"disable_cpu_ep_fallback": "1"}


@pytest.fixture
def sessions(monkeypatch):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: None, raising=False)
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    monkeypatch.setattr(Session, "opened", [])
    return Session


def test_all_on_the_gpu(sessions):
    for use_tf32 in (True, False):
        make_session(Path("model.onnx"), CUDA, use_tf32)
        settings = {"use_tf32": int(use_tf32)}
        assert sessions.opened.pop() == ([(CUDA, settings)], STRICT, False)


def test_shapes_may_be_on_the_cpu(sessions, monkeypatch):
    monkeypatch.setattr(sessions, "on_cpu", ("Concat", "Slice"))
    make_session(Path("vit.onnx"), CUDA)
    recorded = {"record_ep_graph_assignment_info": "1"}
    assert [entries for _, entries, _ in sessions.opened] == [STRICT, recorded]


@pytest.mark.parametrize("on_cpu, named", [(["MaxPool", "Slice"], "would run MaxPool of"),
                                           ([], f"falls back to {CPU}")])  # fmt: skip
def test_nothing_else_is(on_cpu, named, sessions, monkeypatch, capsys):
    monkeypatch.setattr(sessions, "on_cpu", on_cpu)
    monkeypatch.setattr(sessions, "providers", [CUDA, CPU] if on_cpu else [CPU])
    with pytest.raises(SystemExit) as ended:
        make_session(Path("model.onnx"), CUDA)
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and named in line and f"--provider {CUDA}" in line
    assert "--device cpu" in line


# -------------------------------------------------------------------------------------- bfloat16


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    """A ResNet whose BatchNorm does something, and its file in bfloat16."""
    folder = tmp_path_factory.mktemp("bfloat16")
    args = argparse.Namespace(
        model="resnet18", norm="batch", image_size=64, batch_size=2, weights="none", seed=0,
        dataset="synthetic", data_dir="data", eval_samples=None,
        classes=[f"class {i}" for i in range(10)],
    )  # fmt: skip
    torch.manual_seed(0)
    weights = make_model(args, args.classes).state_dict()
    for name in weights:
        if "bn" in name and name.endswith(("bias", "weight", "var")):
            weights[name].uniform_(0.5, 1)
    args.weights = folder / "model.pt"
    torch.save(weights, args.weights)
    export.write_onnx(args, "bf16", folder / "model.onnx")
    return args, onnx.load(folder / "model.onnx")


def test_what_is_in_bfloat16(resnet):
    """Nothing of a type or version that the CUDA provider lacks, such as MaxPool-22."""
    _, model = resnet
    onnx.checker.check_model(model, full_check=True)
    assert [entry.version for entry in model.opset_import] == [bfloat16.OPSET]
    graph = onnx.shape_inference.infer_shapes(model).graph
    types = {v.name: v.type.tensor_type.elem_type for v in [*graph.value_info, *graph.output]}
    computed = set()
    for node in graph.node:
        since = onnx.defs.get_schema(node.op_type, bfloat16.OPSET).since_version
        assert since == CUDA_KERNELS[node.op_type]
        if types[node.output[0]] == TensorProto.BFLOAT16:
            computed.add(node.op_type)
    assert computed == {"Conv", "Relu", "Add", "Gather", "Max", "Reshape", "Gemm", "Cast"}
    assert types["logits"] == TensorProto.FLOAT
    stored = {t.data_type for t in graph.initializer if len(t.dims) > 1 and t.dims[0] >= 10}
    assert stored == {TensorProto.BFLOAT16}


def test_the_library_has_these_kernels():
    """By the names of its classes, which say for which types they are."""
    path = Path(onnxruntime.__file__).parent / "capi/libonnxruntime_providers_cuda.so"
    if not path.exists():
        pytest.skip("this onnxruntime is built without CUDA")
    only_move = {"Concat", "Expand", "Flatten", "Gather", "Reshape", "Squeeze", "Transpose"}
    only_move |= {"Unsqueeze"}  # one class for all types
    names = {
        op: f"4cuda{len(op)}{op}{'E' if op in only_move else 'INS_8BFloat16E'}"
        for op in bfloat16.OPS | {"Cast"}
    }
    types = "jmilNS_9MLFloat16EfdNS_8BFloat16E"  # the last of these is what counts
    names |= {"Max": f"variadic_elementwise_ops3MaxEJ{types}", "Split": "4cuda8Split_18E"}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        assert [op for op, name in names.items() if library.find(name.encode()) < 0] == []


def run_on_cpu(model, images):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=[CPU])
    [logits] = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    return torch.from_numpy(logits)


def test_its_answers(resnet):
    """Those of PyTorch in fp32, but for the rounding: computed on a CPU, where bfloat16 becomes
    float32 after every Cast."""
    args, model = resnet
    nodes = []
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.BFLOAT16:
            values = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for node in model.graph.node:
        nodes.append(node)
        if node.op_type == "Cast" and node.attribute[0].i == TensorProto.BFLOAT16:
            [result], node.output[0] = node.output, f"rounded {node.output[0]}"
            nodes.append(helper.make_node("Cast", node.output, [result], to=TensorProto.FLOAT))
    bfloat16.keep_what_is_used(model.graph, nodes)
    images = torch.randint(0, 256, (16, 3, 64, 64), dtype=torch.uint8)
    ours, theirs = (
        run_on_cpu(model, images),
        TorchRunner(load_classifier(args, "fp32"), "cpu")(images),
    )
    assert 0 < (ours - theirs).abs().max() < 0.02 * theirs.abs().max()


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 3, "stride": 2, "ceil_mode": True},
        {"kernel_size": (2, 3), "stride": (1, 2), "padding": (0, 1)},
    ],
)
def test_max_pool_as_max_and_gather(options):
    images, pool = torch.randn(2, 3, 8, 11), torch.nn.MaxPool2d(**options).eval()
    version = {"opset_version": bfloat16.OPSET}
    model = torch.onnx.export(pool, (images,), dynamo=True, verbose=False, **version).model_proto
    bfloat16.replace_max_pools(model)
    assert {node.op_type for node in model.graph.node} == {"Max", "Gather"}
    assert run_on_cpu(model, images).equal(pool(images))


@pytest.mark.parametrize("supported", [False, True])
def test_bfloat16_is_measured_where_it_runs(supported, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    assert is_worth_it("cuda", "onnxruntime", "bf16") == supported
    assert is_worth_it("cuda", "torch", "bf16") and not is_worth_it("cpu", "onnxruntime", "bf16")


def test_a_gpu_without_bfloat16_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    (tmp_path / "model.pt").touch()
    flags = ["--weights", f"{tmp_path}/model.pt", "--input", "test", "--precision", "bf16"]
    args = model_inference.argument_parser().parse_args(flags)
    with pytest.raises(SystemExit) as exit:
        model_inference.check_flags(args)
    assert exit.value.code == 2 and "Tesla T4 lacks bf16" in capsys.readouterr().err
