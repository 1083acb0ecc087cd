"""Write a trained model as one ONNX file, a classifier in fp32, fp16 or int8, and compare it with
PyTorch; inference/language.py uses the same for a GPT."""

import contextlib
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from harness.cli import fail
from inference.classifier import load_classifier
from inference.images import batches, load_split
from inference.runtimes import OnnxRunner, Runner, TorchRunner, make_session
from inference.trained import Trained, make_metadata
from jobs.images import Images

INPUT = "uint8 [batch, 3, side, side]: RGB, 0 to 255. Normalization is part of the graph."
CALIBRATION_IMAGES = 200
MOST = 2e9  # bytes of weights: a file is a message of protobuf, which has less than 2 GiB


def save(
    model: nn.Module, example: Tensor, shape: dict[str, dict], path: Path, metadata: dict[str, str],
    convert: Callable[[Path], None] = lambda path: None,
) -> None:  # fmt: skip
    """Export a model with one input, add the metadata, check.

    Args:
        shape: dynamic dimensions of the input, by its name in the model's forward.
        convert: changes the file to another precision.
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
            model, (example,), dynamo=True, verbose=False, input_names=list(shape),
            output_names=["logits"], dynamic_shapes=shape,
        )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as folder:
        # Above 1.5 GB torch writes a second file for the weights, whatever it is told.
        whole = Path(folder, "model.onnx")
        program.save(whole, external_data=False)
        convert(whole)
        exported = onnx.load(whole)
    onnx.helper.set_model_props(exported, metadata)
    onnx.checker.check_model(exported, full_check=True)
    onnx.save(exported, path)


def open_both(args: Trained, model: nn.Module, path: Path) -> tuple[TorchRunner, OnnxRunner]:
    """The model in PyTorch and the file in ONNX Runtime, both without TF32, which rounds to ten
    bits."""
    session = make_session(path, args.provider, use_tf32=False)
    return TorchRunner(model, args.device, use_tf32=False), OnnxRunner(session, args.device)


def differ(in_torch: Runner, in_onnx: Runner, inputs: Iterable[Tensor]) -> float:
    """The largest difference of the logits, relative to the largest logit of an input."""
    pairs = [(in_torch(x), in_onnx(x)) for x in inputs]
    return torch.stack([(a - b).abs().max() / a.abs().max() for a, b in pairs]).max().item()


# ------------------------------------------------------------------------------------ a classifier


def write_onnx(args: Trained, precision: str, path: Path) -> None:
    """Export in fp32, fp16 or int8.

    fp16: converted by ONNX Runtime's own tool. int8: post-training static quantization of weights
    (per channel) and activations, calibrated on at most :data:`CALIBRATION_IMAGES` training images.
    """
    convert = {"fp32": lambda path: None, "fp16": halve, "int8": partial(quantize, args)}[precision]
    images = torch.zeros(2, 3, args.image_size, args.image_size, dtype=torch.uint8)
    shape = {"images": {0: torch.export.Dim("batch")}}
    metadata = make_metadata(args, precision, INPUT)
    save(load_classifier(args, "fp32"), images, shape, path, metadata, convert)


def halve(path: Path) -> None:
    """Convert to fp16 in place, except input and output."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=True), path)


def quantize(args: Trained, path: Path) -> None:
    """Quantize to int8 in place, in ONNX's QDQ format."""
    from onnxruntime import quantization

    images = load_split(args, "train", CALIBRATION_IMAGES)
    images = batches(images, 1, args.image_size, "calibrating")

    class Reader(quantization.CalibrationDataReader):
        def get_next(self):
            pixels, _ = next(images, (None, None))
            return None if pixels is None else {"images": pixels.numpy()}

    quantization.shape_inference.quant_pre_process(path, path, skip_symbolic_shape=True)
    quantization.quantize_static(  # uint8 activations and int8 weights: what CPUs multiply fastest
        path, path, Reader(), per_channel=True, activation_type=quantization.QuantType.QUInt8
    )


def compare(args: Trained, precision: str, path: Path) -> None:
    """Compare the file in ONNX Runtime with the model in PyTorch, in fp32.

    In fp32 logits must be within 1e-4 of the largest, at batches of 1, 3 and 16, and 99.9% of the
    predictions the same. For other precisions, the difference is printed. Without a test split, the
    images are noise.
    """
    runners = open_both(args, load_classifier(args, "fp32"), path)
    same, correct = 0, torch.zeros(2)
    if args.dataset == "auto":  # the dataset is not known
        noise = torch.randint(0, 256, (64, 3, args.image_size, args.image_size), dtype=torch.uint8)
        images = Images(noise, torch.zeros(64), args.classes, args.image_size)
    else:
        images = load_split(args, "eval")
    firsts = (next(batches(images, n, args.image_size, "comparing"))[0] for n in (1, 3, 16))
    difference = differ(*runners, firsts)
    for pixels, labels in batches(images, args.batch_size, args.image_size, "comparing"):
        theirs, ours = (runner(pixels).argmax(1) for runner in runners)
        same += (ours == theirs).sum().item()
        correct += torch.stack([(theirs == labels).sum(), (ours == labels).sum()])
    line = f"compared on {len(images):,} images with PyTorch in fp32: "
    line += f"logits within {difference:.1e}, {same / len(images):.2%} the same class"
    if args.dataset != "auto":
        in_torch, in_onnx = (correct / len(images)).tolist()
        line += f", accuracy {in_torch:.2%} -> {in_onnx:.2%}"
    print(line)
    if precision == "fp32" and not (difference <= 1e-4 and same >= 0.999 * len(images)):
        raise RuntimeError("the exported model does not compute the same")
