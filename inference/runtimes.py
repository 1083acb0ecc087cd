"""Run a model in PyTorch or in ONNX Runtime: inputs and float32 logits are on the CPU."""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from harness.cli import fail

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def progress(todo: Sequence, title: str) -> tqdm:
    """Iterate with a progress bar on a terminal; elsewhere a line on stderr says how much to do."""
    bar = tqdm(todo, title, leave=False, disable=None)
    if bar.disable:
        print(f"{title}: {len(todo):,} to do", file=sys.stderr)
    return bar


class TorchRunner:
    """Calls a model on ``device``, in PyTorch."""

    def __init__(self, model: nn.Module, device: str):
        self.device = torch.device(device)
        self.model = model.to(self.device)

    @torch.inference_mode()
    def __call__(self, inputs: Tensor) -> Tensor:
        return self.model(inputs.to(self.device)).cpu()


class OnnxRunner:
    """Calls an ONNX file, in ONNX Runtime."""

    def __init__(self, session):
        self.session = session
        self.input = session.get_inputs()[0].name  # images or tokens

    def __call__(self, inputs: Tensor) -> Tensor:
        [logits] = self.session.run(None, {self.input: inputs.numpy()})
        return torch.from_numpy(logits)


Runner = TorchRunner | OnnxRunner


def can_use(device: str) -> bool:
    """Whether the installed onnxruntime was built for this device."""
    import onnxruntime

    return PROVIDERS[device] in onnxruntime.get_available_providers()


def make_session(file: Path | bytes, device: str, use_tf32: bool = True):
    """An ``onnxruntime.InferenceSession`` that computes on ``device``.

    Args:
        file: an ONNX file, or what it would contain.
        use_tf32: round the factors of products to ten bits on a GPU, which is faster.
    """
    import onnxruntime

    if not can_use(device):
        has = ", ".join(onnxruntime.get_available_providers())
        fail(f"--device {device}: onnxruntime has only {has} here; use --device cpu")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()  # of OMP_NUM_THREADS
    options.log_severity_level = 4  # errors are reported below
    settings = {}
    if device == "cuda":
        onnxruntime.preload_dlls()  # CUDA's and cuDNN's, from PyTorch's packages
        settings["use_tf32"] = int(use_tf32)
    providers = [(PROVIDERS[device], settings)]
    try:
        session = onnxruntime.InferenceSession(file, options, providers, enable_fallback=False)
    except Exception as error:  # of a damaged or foreign file, any of several types
        why = str(error).strip().splitlines()[0][:200]
        name = file if isinstance(file, Path) else "the exported model"
        fail(f"{name} cannot be run by ONNX Runtime on {device} ({why}); export it again")
    if session.get_providers()[0] != PROVIDERS[device]:  # without a word, if it finds no CUDA
        install = "install the CUDA and cuDNN that it needs (onnxruntime.ai lists them)"
        fail(f"--device {device}: ONNX Runtime falls back to the CPU; {install}, or use cpu")
    return session
