"""Write a classifier as one ONNX file, in any precision, and compare it with PyTorch."""

from dataclasses import replace
from pathlib import Path

import torch

from inference import onnx_file
from inference.classifier import load_classifier
from inference.images import batches, load_split
from inference.trained import Trained
from jobs.images import Images

INPUT = "uint8 [batch, 3, side, side]: RGB, 0 to 255. Normalization is part of the graph."
CALIBRATION_IMAGES = 200


def write_onnx(args: Trained, precision: str, path: Path) -> None:
    """Export, convert to the precision, add the metadata, check.

    fp16: converted by ONNX Runtime's own tool. int8: post-training static quantization of weights
    (per channel) and activations, calibrated on :data:`CALIBRATION_IMAGES` training images.
    """
    if precision == "bf16":
        raise ValueError("ONNX files are in fp32, fp16 or int8")
    images = torch.zeros(2, 3, args.image_size, args.image_size, dtype=torch.uint8)
    shape = {0: torch.export.Dim("batch")}
    onnx_file.write(load_classifier(args, "fp32"), images, "images", shape, path)
    if precision == "fp16":
        import onnx
        from onnxruntime.transformers.float16 import convert_float_to_float16

        onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=True), path)
    if precision == "int8":
        quantize(args, path)
    onnx_file.complete(args, precision, INPUT, path)


def quantize(args: Trained, path: Path) -> None:
    """Quantize to int8 in place, in ONNX's QDQ format."""
    from onnxruntime import quantization

    few = replace(args, train_samples=CALIBRATION_IMAGES)
    images = batches(load_split(few, "train"), 1, args.image_size, "calibrating")

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
    runners = onnx_file.open_both(args, load_classifier(args, "fp32"), path)
    same, correct = 0, torch.zeros(2)
    if args.dataset == "auto":  # the dataset is not known
        noise = torch.randint(0, 256, (64, 3, args.image_size, args.image_size), dtype=torch.uint8)
        images = Images(noise, torch.zeros(64), args.classes, args.image_size)
    else:
        images = load_split(args, "eval")
    firsts = (next(batches(images, n, args.image_size, "comparing"))[0] for n in (1, 3, 16))
    difference = onnx_file.difference(*runners, firsts)
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
