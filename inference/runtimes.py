"""The runtimes: PyTorch, eager or compiled, and ONNX Runtime, on a CPU or a GPU."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from harness.cli import fail

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# Operations on shapes; on images and features, a GPU computes these itself.
SHAPE_OPS = {"Shape", "Size", "Gather", "Slice", "Concat", "Squeeze", "Unsqueeze", "Cast"}
SHAPE_OPS |= {"Add", "Sub", "Mul", "Div", "Range"}


class Runner:
    """Runs a model in three steps: ``put`` uint8 images on its device, ``run`` them there, and
    ``get`` float32 logits back. Called, it does all three."""

    def __call__(self, images: Tensor) -> Tensor:
        return self.get(self.run(self.put(images)))

    def synchronize(self) -> None:
        """Wait for the device; ``run`` may return earlier."""


class TorchRunner(Runner):
    """PyTorch, eager or compiled: once per batch size, as static shapes are faster."""

    def __init__(
        self, classifier: nn.Module, device: str, compiled: bool = False, use_tf32: bool = True
    ):
        self.device = torch.device(device)
        self.model = classifier.to(self.device)
        if self.device.type == "cuda":  # what ONNX Runtime does by default on a GPU
            torch.backends.cudnn.benchmark = True
            precision = "tf32" if use_tf32 else "ieee"
            torch.backends.cudnn.conv.fp32_precision = precision
            torch.backends.cuda.matmul.fp32_precision = precision
            self.model = self.model.to(memory_format=torch.channels_last)
        if compiled:
            torch.compiler.config.recompile_limit = 256  # default 8: then it stops compiling
            self.model = torch.compile(self.model, dynamic=False)

    def put(self, images: Tensor) -> Tensor:
        images = images.to(self.device)
        if self.device.type == "cuda" and images.ndim == 4:  # a GPU does it faster
            images = images.contiguous(memory_format=torch.channels_last)
        return images

    @torch.inference_mode()
    def run(self, images: Tensor) -> Tensor:
        return self.model(images)

    def get(self, logits: Tensor) -> Tensor:
        return logits.cpu()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class OnnxRunner(Runner):
    """ONNX Runtime. On a GPU, images and logits stay there, by I/O binding."""

    def __init__(self, session, device: str):
        self.session, self.device = session, torch.device(device)
        self.input = session.get_inputs()[0].name  # images or tokens

    def put(self, images: Tensor):
        if self.device.type == "cpu":
            return {self.input: images.numpy()}
        images = images.to(self.device).contiguous()
        kind = np.int64 if images.dtype == torch.int64 else np.uint8
        binding = self.session.io_binding()
        binding.bind_input(self.input, "cuda", 0, kind, tuple(images.shape), images.data_ptr())
        binding.bind_output("logits", "cuda")
        torch.cuda.synchronize()  # ONNX Runtime has its own stream
        return binding, images

    def run(self, images):
        if self.device.type == "cpu":
            return self.session.run(None, images)[0]
        self.session.run_with_iobinding(images[0])  # returns when the GPU is done
        return images[0]

    def get(self, logits) -> Tensor:
        if self.device.type == "cuda":
            [logits] = logits.copy_outputs_to_cpu()
        return torch.from_numpy(logits)


def make_session(path: Path, provider: str, use_tf32: bool = True):
    """An ``onnxruntime.InferenceSession`` on the requested provider only.

    Only the computation of shapes may run on the CPU: ONNX Runtime does this on purpose, as a shape
    is a few integers that the CPU needs.
    """
    import onnxruntime

    available = onnxruntime.get_available_providers()
    if provider not in available:
        fail(f"--provider {provider}: onnxruntime has {', '.join(available)} here; "
             "give one of these")  # fmt: skip
    options, settings = onnxruntime.SessionOptions(), {}
    options.intra_op_num_threads = torch.get_num_threads()  # as in PyTorch, to be comparable
    options.log_severity_level = 4  # relevant errors are reported below
    if provider == PROVIDERS["cuda"]:
        onnxruntime.preload_dlls()  # CUDA's and cuDNN's, from PyTorch's packages
        settings = {"use_tf32": int(use_tf32)}  # as TorchRunner has it
    if provider != PROVIDERS["cpu"]:
        # CUDA has no int8 convolutions: it computes them in float32, and needs no int32 biases.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    try:
        session = onnxruntime.InferenceSession(
            path, options, [(provider, settings)], enable_fallback=False
        )
    except Exception as error:  # of a damaged or foreign file, any of several types
        why = str(error).strip().splitlines()[0][:200]
        fail(f"{path} cannot be run by ONNX Runtime on {provider} ({why}); "
             "export it again, or use another precision or provider")  # fmt: skip
    if provider != PROVIDERS["cpu"]:
        check_providers(session, path, provider)
    return session


def check_providers(session, path: Path, provider: str) -> None:
    """Reject a session that runs on the CPU, except for :data:`SHAPE_OPS`."""
    if session.get_providers()[0] != provider:
        fail(
            f"--provider {provider}: ONNX Runtime falls back to {session.get_providers()[0]}; "
            "install the CUDA and cuDNN that it needs (onnxruntime.ai lists them), or --device cpu"
        )
    parts = session.get_provider_graph_assignment_info()
    on_cpu = [part for part in parts if part.ep_name == PROVIDERS["cpu"]]
    ops = {node.op_type for part in on_cpu for node in part.get_nodes()} - SHAPE_OPS
    if ops:
        fail(
            f"--provider {provider}: ONNX Runtime would run {', '.join(sorted(ops))} of {path} on "
            "the CPU; export it again here, use another precision, or --device cpu"
        )
