"""An ONNX file: write one, add metadata, and compare it with PyTorch in ONNX Runtime."""

import contextlib
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from inference.runtimes import OnnxRunner, TorchRunner, make_session
from inference.trained import Trained, make_metadata


def write(model: nn.Module, example: Tensor, name: str, shape: dict, path: Path) -> None:
    """Export a model with one input.

    Args:
        name: of the input, and of the argument of the model's forward.
        shape: the dynamic dimensions of the input.
    """
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")  # from PyTorch's own code during tracing
        program = torch.onnx.export(
            model, (example,), dynamo=True, verbose=False, input_names=[name],
            output_names=["logits"], dynamic_shapes={name: shape},
        )  # fmt: skip
    program.save(path, external_data=False)


def complete(args: Trained, precision: str, what: str, path: Path) -> None:
    """Add the metadata, and check the file.

    Args:
        what: description of the input.
    """
    import onnx

    model = onnx.load(path)
    onnx.helper.set_model_props(model, make_metadata(args, precision, what))
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


def open_both(args: Trained, model: nn.Module, path: Path) -> tuple[TorchRunner, OnnxRunner]:
    """The model in PyTorch and the file in ONNX Runtime, both without TF32, which rounds to ten
    bits."""
    exact = {"use_tf32": False}
    session = make_session(path, args.provider, **exact)
    return TorchRunner(model, args.device, **exact), OnnxRunner(session, args.device)


def difference(torch_runner, onnx_runner, inputs: Iterable[Tensor]) -> float:
    """The largest difference of the logits, relative to the largest logit of an input."""
    pairs = [(torch_runner(x), onnx_runner(x)) for x in inputs]
    return torch.stack([(a - b).abs().max() / a.abs().max() for a, b in pairs]).max().item()
