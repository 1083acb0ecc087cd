"""Write a model as one ONNX file, and compare its logits with those of PyTorch."""

import contextlib
import sys
import warnings

import torch
from torch import Tensor, nn

from harness.cli import fail
from inference.runtimes import OnnxRunner, Runner, TorchRunner, make_session
from inference.trained import Trained, make_metadata

MOST = 2e9  # bytes of weights: a file is a message of protobuf, which has less than 2 GiB


def write(
    args: Trained, model: nn.Module, examples: list[Tensor], shape: dict[str, dict], what: str
) -> None:
    """Export a model with one input, compare the result with it, and write ``--export``.

    Args:
        examples: inputs of several sizes, to compare; the first one is traced.
        shape: dynamic dimensions of the input, by its name in the model's forward.
        what: description of the input.
    """
    import onnx

    tensors = [*model.parameters(), *model.buffers()]  # one that is tied counts once
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if size > MOST:
        why = f"the weights take {size / 1e9:.1f} GB, and an ONNX file has at most {MOST / 1e9:g}"
        fail(f"ONNX: {why}; use them in PyTorch, which needs no export")
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")  # from PyTorch's own code during tracing
        program = torch.onnx.export(
            model, (examples[0],), dynamo=True, verbose=False, input_names=list(shape),
            output_names=["logits"], dynamic_shapes=shape,
        )  # fmt: skip
    # program.save() would write a second file for weights above 1.5 GB, whatever it is told.
    exported = program.model_proto
    onnx.helper.set_model_props(exported, make_metadata(args, what))
    onnx.checker.check_model(exported, full_check=True)
    print(f"{args.export}: {args.model}, {what}")
    compare(args, model, exported.SerializeToString(), examples)
    onnx.save(exported, args.export)
    print(f"done: {args.export.stat().st_size / 2**20:.1f} MiB")


def compare(args: Trained, model: nn.Module, exported: bytes, inputs: list[Tensor]) -> None:
    """Compare the logits in ONNX Runtime with those of the model in PyTorch.

    Raises:
        RuntimeError: one differs by more than 1e-4 of the largest logit of its input.
    """
    if args.device == "cuda":  # in neither TF32, which rounds the factors of products to ten bits
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    in_torch = TorchRunner(model, args.device)
    in_onnx = OnnxRunner(make_session(exported, args.device, use_tf32=False))
    difference = largest_difference(in_torch, in_onnx, inputs)
    print(f"compared with PyTorch: logits within {difference:.1e}")
    if not difference <= 1e-4:  # or NaN
        raise RuntimeError("the exported model does not compute the same")


def largest_difference(in_torch: Runner, in_onnx: Runner, inputs: list[Tensor]) -> float:
    """Of the logits, relative to the largest logit of an input; NaN if any is."""
    differences = []
    for x in inputs:
        expected = in_torch(x)
        differences.append((expected - in_onnx(x)).abs().max() / expected.abs().max())
    return torch.stack(differences).max().item()
