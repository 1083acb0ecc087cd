"""The runtimes: PyTorch, as it is or compiled, and ONNX Runtime, on a CPU or a GPU."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from harness.command_line import fail

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


class Runner:
    """Runs a model in three steps: ``put`` uint8 images on its device, ``run`` them there, and
    ``get`` float32 logits back. Called, it does all three."""

    def __call__(self, images: Tensor) -> Tensor:
        return self.get(self.run(self.put(images)))


class TorchRunner(Runner):
    """PyTorch, as it is or compiled."""

    def __init__(self, classifier: nn.Module, device: str, compiled: bool = False):
        self.device = torch.device(device)
        self.model = classifier.to(self.device)
        if compiled:
            self.model = torch.compile(self.model)

    def put(self, images: Tensor) -> Tensor:
        return images.to(self.device)

    @torch.inference_mode()
    def run(self, images: Tensor) -> Tensor:
        return self.model(images)

    def get(self, logits: Tensor) -> Tensor:
        return logits.cpu()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class OnnxRunner(Runner):
    """ONNX Runtime. On a GPU images and logits stay there, bound to its inputs and outputs."""

    def __init__(self, session, device: str):
        self.session, self.device = session, torch.device(device)

    def put(self, images: Tensor):
        if self.device.type == "cpu":
            return {"images": images.numpy()}
        images = images.to(self.device).contiguous()
        binding = self.session.io_binding()
        binding.bind_input("images", "cuda", 0, np.uint8, tuple(images.shape), images.data_ptr())
        binding.bind_output("logits", "cuda")
        torch.cuda.synchronize()  # ONNX Runtime has a stream of its own
        return binding, images

    def run(self, images):
        if self.device.type == "cpu":
            return self.session.run(None, images)[0]
        self.session.run_with_iobinding(images[0])
        return images[0]

    def get(self, logits) -> Tensor:
        if self.device.type == "cuda":
            [logits] = logits.copy_outputs_to_cpu()
        return torch.from_numpy(logits)

    def synchronize(self) -> None:
        pass  # run_with_iobinding returns when the GPU is done


def make_session(path: Path, provider: str, use_tf32: bool = True):
    """An ``onnxruntime.InferenceSession`` on the provider that was asked for, and on no other."""
    import onnxruntime

    available = onnxruntime.get_available_providers()
    if provider not in available:
        fail(f"--provider {provider}: onnxruntime has {', '.join(available)} here; "
             "give one of these")  # fmt: skip
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()  # as PyTorch, to be comparable
    options.log_severity_level = 4  # what matters is reported below
    settings = {}
    if provider == PROVIDERS["cuda"]:
        onnxruntime.preload_dlls()  # CUDA's and cuDNN's, from PyTorch's packages
        settings = {"use_tf32": int(use_tf32)}
    try:
        session = onnxruntime.InferenceSession(path, options, providers=[(provider, settings)])
    except Exception as error:  # of a damaged or foreign file, any of several types
        why = str(error).strip().splitlines()[0][:200]
        fail(f"{path} cannot be run by ONNX Runtime on {provider} ({why}); "
             "export it again, or use another precision or provider")  # fmt: skip
    if session.get_providers()[0] != provider:
        fail(
            f"--provider {provider}: ONNX Runtime falls back to {session.get_providers()[0]}; "
            "install the CUDA and cuDNN that it needs (onnxruntime.ai lists them), or --device cpu"
        )
    return session
