"""Write a trained model as one ONNX file, in any precision, and compare it with PyTorch."""

import argparse
import contextlib
import sys
import warnings
from pathlib import Path

import torch

from inference.classifier import load_classifier
from inference.images import batches, load_split
from inference.runtimes import OnnxRunner, TorchRunner, make_session
from inference.trained import make_metadata
from jobs.images import Images

INPUT = "uint8 [batch, 3, side, side]: RGB, 0 to 255. Normalization is part of the graph."
CALIBRATION_IMAGES = 200


def write_onnx(args: argparse.Namespace, precision: str, path: Path) -> None:
    """Export, convert to the precision, add the metadata, check.

    fp16: converted by ONNX Runtime's own tool. int8: post-training static quantization of weights
    (per channel) and activations, calibrated on :data:`CALIBRATION_IMAGES` training images.
    bf16: :func:`inference.bfloat16.to_bfloat16`.
    """
    import onnx

    from inference.bfloat16 import OPSET, to_bfloat16

    classifier = load_classifier(args, "fp32")
    images = torch.zeros(2, 3, args.image_size, args.image_size, dtype=torch.uint8)
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")  # from PyTorch's own code during tracing
        program = torch.onnx.export(
            classifier, (images,), dynamo=True, verbose=False,
            input_names=["images"], output_names=["logits"],
            dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
            opset_version=OPSET if precision == "bf16" else None,
        )  # fmt: skip
    program.save(path, external_data=False)
    if precision == "fp16":
        from onnxruntime.transformers.float16 import convert_float_to_float16

        onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=True), path)
    if precision == "int8":
        quantize(args, path)
    model = onnx.load(path)
    if precision == "bf16":
        to_bfloat16(model)
    onnx.helper.set_model_props(model, make_metadata(args, precision, INPUT))
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


def quantize(args: argparse.Namespace, path: Path) -> None:
    """Quantize to int8 in place, in ONNX's QDQ format."""
    from onnxruntime import quantization

    few = argparse.Namespace(**vars(args) | {"train_samples": CALIBRATION_IMAGES})
    images = batches(load_split(few, "train"), 1, args.image_size, "calibrating")

    class Reader(quantization.CalibrationDataReader):
        def get_next(self):
            pixels, _ = next(images, (None, None))
            return None if pixels is None else {"images": pixels.numpy()}

    quantization.shape_inference.quant_pre_process(path, path, skip_symbolic_shape=True)
    quantization.quantize_static(  # uint8 activations and int8 weights: what CPUs multiply fastest
        path, path, Reader(), per_channel=True, activation_type=quantization.QuantType.QUInt8
    )


def compare(args: argparse.Namespace, path: Path) -> None:
    """Compare the file in ONNX Runtime with the model in PyTorch, in fp32.

    In fp32 logits must be within 1e-4 of the largest, at batches of 1, 3 and 16, and 99.9% of the
    predictions the same. For other precisions, the difference is printed. Without a test split, the
    images are noise.
    """
    exact = {"use_tf32": False}  # in neither: TF32 rounds to ten bits
    onnx_runner = OnnxRunner(make_session(path, args.provider, **exact), args.device)
    torch_runner = TorchRunner(load_classifier(args, "fp32"), args.device, **exact)
    difference, same, correct = 0.0, 0, torch.zeros(2)
    if args.dataset == "auto":  # the dataset is not known
        noise = torch.randint(0, 256, (64, 3, args.image_size, args.image_size), dtype=torch.uint8)
        images = Images(noise, torch.zeros(64), args.classes, args.image_size)
    else:
        images = load_split(args, "eval")
    for batch_size in (1, 3, 16):
        pixels, _ = next(batches(images, batch_size, args.image_size, "comparing"))
        ours, theirs = onnx_runner(pixels), torch_runner(pixels)
        difference = max(difference, ((ours - theirs).abs().max() / theirs.abs().max()).item())
    for pixels, labels in batches(images, args.batch_size, args.image_size, "comparing"):
        ours, theirs = onnx_runner(pixels).argmax(1), torch_runner(pixels).argmax(1)
        same += (ours == theirs).sum().item()
        correct += torch.stack([(theirs == labels).sum(), (ours == labels).sum()])
    line = f"compared on {len(images):,} images with PyTorch in fp32: "
    line += f"logits within {difference:.1e}, {same / len(images):.2%} the same class"
    if args.dataset != "auto":
        in_torch, in_onnx = (correct / len(images)).tolist()
        line += f", accuracy {in_torch:.2%} -> {in_onnx:.2%}"
    print(line)
    if args.precision == "fp32" and (difference > 1e-4 or same < 0.999 * len(images)):
        raise RuntimeError("the exported model does not compute the same")
