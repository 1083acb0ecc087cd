"""Use the weights that a script has trained: predict, export to ONNX, run in ONNX Runtime, measure.

Predict     python model_inference.py --weights runs/pytorch_DDP/model.pt --input test
            IMAGE or FOLDER in the place of test prints the likeliest classes of each file.
Export      python model_inference.py --weights runs/pytorch_DDP/model.pt --export model.onnx
            One file that takes uint8 images, normalizes them itself and knows its classes.
Run         python model_inference.py --weights model.onnx --input IMAGE
            In ONNX Runtime; --runtime torch or compile runs a model.pt in PyTorch.
Measure     python model_inference.py --weights runs/pytorch_DDP/model.pt --benchmark
            Every runtime and precision at several batch sizes, in turns, into inference.json.

What the weights are of (model, classes, image size, test split) is read from result.json beside
them, or from the ONNX file itself; flags go before it.
"""

import argparse
import contextlib
import importlib.metadata
import json
import multiprocessing
import os
import shlex
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import common

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PRECISIONS = [*DTYPES, "int8"]
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
INPUT = "uint8 [batch, 3, side, side]: RGB, 0 to 255. Normalization is part of the graph."
CALIBRATION_IMAGES = 200


def main():
    args = parse_args()
    if args.benchmark:
        benchmark(args)
    elif args.export:
        export(args)
    else:
        sys.exit(predict(args))


def parse_args() -> argparse.Namespace:
    """The command line, completed by what the weights say of themselves."""
    parser = common.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        fromfile_prefix_chars="@", allow_abbrev=False,
    )  # fmt: skip
    positive = common.number(int, 1)
    # fmt: off
    parser.add_argument("--weights", type=Path, required=True, metavar="FILE",
                        help="a model.pt that a script wrote, or an .onnx that --export wrote")
    flag = parser.add_argument_group("what to do (one of these)").add_argument
    flag("--input", metavar="IMAGE|FOLDER|test",
         help="predict these; test: the accuracy on the test split that training used")
    flag("--export", type=Path, metavar="FILE", help="write the model as ONNX")
    flag("--benchmark", action="store_true", help="measure, and write --output-dir/inference.json")
    flag = parser.add_argument_group("how").add_argument
    flag("--runtime", choices=["torch", "compile", "onnxruntime"],
         help="(default: onnxruntime for an .onnx, else torch; --benchmark: all)")
    flag("--precision", choices=PRECISIONS,
         help="(default: fp32; --benchmark: all that run here)")
    flag("--device", choices=["auto", "cpu", "cuda"], default="auto", help="(default: auto)")
    flag("--provider", metavar="NAME", help="of ONNX Runtime (default: that of the device)")
    flag("-b", "--batch-size", type=positive, default=32, metavar="N", help="(default: 32)")
    flag("--batch-sizes", type=positive, nargs="+", default=[1, 8, 32, 128], metavar="N",
         help="of --benchmark (default: 1 8 32 128)")
    flag("--rounds", type=positive, default=3, metavar="N", help="of --benchmark (default: 3)")
    flag("--top-k", type=positive, default=3, metavar="N", help="classes to show (default: 3)")
    flag("--json", action="store_true", help="print one JSON document instead of lines")
    flag("--output-dir", type=Path, metavar="DIR",
         help="of --benchmark (default: beside the weights)")
    flag = parser.add_argument_group("what the weights are of (default: as trained)").add_argument
    flag("--model", metavar="NAME")
    flag("--norm", choices=["batch", "group"])
    flag("--image-size", type=positive, metavar="PIXELS")
    flag("--dataset", choices=["cifar10", "folder", "synthetic"])
    flag("--data-dir", type=Path, metavar="DIR")
    flag("--eval-samples", type=positive, metavar="N")
    # fmt: on
    args = parser.parse_args()
    if bool(args.input) + bool(args.export) + args.benchmark != 1:
        common.fail("give one of --input, --export and --benchmark (--help lists the flags)")
    if not args.weights.is_file():
        common.fail(f"--weights {args.weights}: no such file; a training script writes a model.pt")
    args.onnx = args.weights.suffix == ".onnx"
    if args.onnx and (args.export or args.benchmark or args.runtime in ("torch", "compile")):
        common.fail(f"--weights {args.weights} runs in ONNX Runtime only; give the model.pt")
    if args.onnx and args.precision:
        common.fail(f"--weights {args.weights} has its precision already; leave out --precision")
    if args.device == "cuda" and not torch.cuda.is_available():
        common.fail("--device cuda: PyTorch finds no GPU here; use --device cpu")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.provider = args.provider or PROVIDERS[args.device]
    if not args.benchmark:
        args.runtime = args.runtime or ("onnxruntime" if args.onnx else "torch")
        args.precision = args.precision or "fp32"
        if args.precision == "int8" and args.runtime != "onnxruntime" and not args.export:
            common.fail("--precision int8 is for ONNX Runtime; add --runtime onnxruntime")
    if args.export:
        if args.export.is_dir():
            common.fail(f"--export {args.export} is a folder; give a file, such as model.onnx")
        common.check_writable(args.export.parent, f"--export {args.export}")
    if args.benchmark:
        args.output_dir = args.output_dir or args.weights.parent
        common.check_writable(args.output_dir, f"--output-dir {args.output_dir}")
    # What was trained: settings of the run and its classes.
    if args.onnx:
        args.session = make_session(args, args.weights)
        trained = args.session.get_modelmeta().custom_metadata_map
        if not {"settings", "classes"} <= trained.keys():
            common.fail(f"--weights {args.weights} is of another program; export it with --export")
        settings, classes = trained["settings"], json.loads(trained["classes"])
    else:
        settings, classes = read_result(args)
    run = vars(common.argument_parser("").parse_known_args(shlex.split(settings))[0])
    for name in ("model", "norm", "image_size", "dataset", "data_dir", "eval_samples"):
        if getattr(args, name) is None:
            setattr(args, name, run[name])
    args.seed, args.train_samples, args.classes = run["seed"], CALIBRATION_IMAGES, classes
    args.norm = "batch" if args.norm == "sync" else args.norm  # which has the same parameters
    return args


def read_result(args: argparse.Namespace) -> tuple[str, list[str] | None]:
    """Settings and classes of the run that wrote ``model.pt``, from ``result.json`` beside it."""
    path = args.weights.with_name("result.json")
    try:
        result = json.loads(path.read_text())
        return f"{result['settings']} --dataset {result['dataset']}", result["classes"]
    except FileNotFoundError:
        if args.model and args.image_size:
            return "", None
        common.fail(f"{path} is missing, which says what the weights are of; "
                    "give --model and --image-size")  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        common.fail(f"{path} cannot be used ({type(error).__name__}: {error}); "
                    "remove it, and give --model and --image-size")  # fmt: skip


# --------------------------------------------------------------------------------------- model


class Classifier(nn.Module):
    """The trained model with its normalization: uint8 images to logits.

    Shapes: ``[n, 3, side, side]`` to float32 ``[n, classes]``.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.model, self.dtype = model.to(dtype), dtype
        for name, values in (("pixel_mean", common.MEAN), ("pixel_std", common.STD)):
            self.register_buffer(name, 255 * torch.tensor(values)[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        images = (images.to(self.pixel_mean.dtype) - self.pixel_mean) / self.pixel_std
        return self.model(images.to(self.dtype)).float()


def make_classifier(args: argparse.Namespace, precision: str) -> Classifier:
    """``--weights``, loaded strictly, in evaluation mode on the CPU."""
    state = common.load_file(args.weights, "--weights")
    if args.classes is None:  # the last tensor of a classifier is the bias of its last layer
        args.classes = [f"class {i}" for i in range(len(list(state.values())[-1]))]
    common.check_model_name(args.model)
    job = argparse.Namespace(model=args.model, norm=args.norm, weights=args.weights, batch_size=2,
                             image_size=args.image_size)  # fmt: skip
    return Classifier(common.make_model(job, args.classes), DTYPES[precision]).eval()


# -------------------------------------------------------------------------------------- images


def resize(images: Tensor, side: int) -> Tensor:
    """uint8 ``[n, 3, any, any]`` to uint8 ``[n, 3, side, side]``, as training does it."""
    if images.shape[-1] == side:
        return images
    shrinks = images.shape[-1] > side
    resized = F.interpolate(images.float(), size=side, mode="bilinear", antialias=shrinks)
    return resized.round().clamp(0, 255).to(torch.uint8)


def read_image(path: Path, side: int) -> Tensor:
    """Decode a file to uint8 ``[1, 3, side, side]``; raises :class:`common.UnreadableImage`."""
    with common.open_image(path) as image:
        short_side = min(image.size)
    return resize(common.read_image(path, min(side, short_side))[None], side)


def load_split(args: argparse.Namespace, split: str) -> common.Images:
    """The ``eval`` or ``train`` split that training used; of the latter only a part."""
    make = {"cifar10": common.cifar10, "folder": common.folder, "synthetic": common.synthetic}
    if args.dataset not in make:
        common.fail("--dataset: which one the weights were trained on is not known; give it")
    images = make[args.dataset](args, split)
    if len(images.classes) != len(args.classes):
        common.fail(
            f"--dataset {args.dataset} has {len(images.classes)} classes and the weights have "
            f"{len(args.classes)}; give the dataset they were trained on"
        )
    return images


def batches(images: common.Images, batch_size: int, side: int, title: str):
    """uint8 images ``[n, 3, side, side]`` and labels ``[n]``, with a bar on a terminal."""
    starts = range(0, len(images), batch_size)
    for start in tqdm(starts, title, leave=False, disable=None):
        indices = list(range(start, min(start + batch_size, len(images))))
        try:
            pixels, labels = images.__getitems__(indices)
        except common.UnreadableImage as error:
            common.fail(error)
        yield resize(pixels, side), labels


# ------------------------------------------------------------------------------------- runtimes


class TorchRunner:
    """PyTorch, as it is or compiled.

    A runner has three steps: ``put`` uint8 images on its device, ``run`` them there, and ``get``
    float32 logits back. Called, it does all three.
    """

    def __init__(self, classifier: Classifier, device: str, compiled: bool = False):
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

    def __call__(self, images: Tensor) -> Tensor:
        return self.get(self.run(self.put(images)))

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class OnnxRunner(TorchRunner):
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


def make_session(args: argparse.Namespace, path: Path, use_tf32: bool = True):
    """An ``InferenceSession`` on the provider that was asked for, and on no other."""
    import onnxruntime

    available = onnxruntime.get_available_providers()
    if args.provider not in available:
        common.fail(f"--provider {args.provider}: onnxruntime has {', '.join(available)} here; "
                    "give one of these")  # fmt: skip
    if args.provider == PROVIDERS["cuda"]:
        onnxruntime.preload_dlls()  # CUDA's and cuDNN's, from PyTorch's packages
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()  # as PyTorch, to be comparable
    options.log_severity_level = 4  # what matters is reported below
    on_cuda = args.provider == PROVIDERS["cuda"]
    provider = (args.provider, {"use_tf32": int(use_tf32)}) if on_cuda else args.provider
    try:
        session = onnxruntime.InferenceSession(path, options, providers=[provider])
    except Exception as error:  # of a damaged or foreign file, any of several types
        why = str(error).strip().splitlines()[0][:200]
        common.fail(f"{path} cannot be run by ONNX Runtime on {args.provider} ({why}); "
                    "export it again, or use another precision or provider")  # fmt: skip
    if session.get_providers()[0] != args.provider:
        common.fail(
            f"--provider {args.provider}: ONNX Runtime falls back to {session.get_providers()[0]}; "
            "install the CUDA and cuDNN that it needs (onnxruntime.ai lists them), or --device cpu"
        )
    return session


def make_runner(args: argparse.Namespace, runtime: str, precision: str, path: Path | None = None):
    """A runner of ``--weights``.

    Args:
        path: the ONNX file, if there is one already.
    """
    if runtime != "onnxruntime":
        return TorchRunner(make_classifier(args, precision), args.device, runtime == "compile")
    if args.onnx:
        return OnnxRunner(args.session, args.device)
    with tempfile.TemporaryDirectory() as folder:
        if path is None:
            path = Path(folder, "model.onnx")
            write_onnx(args, precision, path)
        return OnnxRunner(make_session(args, path), args.device)


# ------------------------------------------------------------------------------------- 1 predict


def predict(args: argparse.Namespace) -> int:
    """Answer ``--input``. Returns the exit code: 1 if some files could not be read."""
    if args.input == "test":
        accuracy, n = measure_accuracy(args, make_runner(args, args.runtime, args.precision))
        if args.json:
            print(json.dumps({"weights": str(args.weights), "accuracy": accuracy, "samples": n}))
        else:
            print(f"accuracy {accuracy:.2%} of {n:,} ({args.dataset}, {args.runtime})")
        return 0
    paths = find_images(Path(args.input))
    runner = make_runner(args, args.runtime, args.precision)
    answers, unreadable = [], []
    for start in tqdm(range(0, len(paths), args.batch_size), "images", leave=False, disable=None):
        read, images = [], []
        for path in paths[start : start + args.batch_size]:
            try:
                images.append(read_image(path, args.image_size))
                read.append(path)
            except common.UnreadableImage as error:
                if len(paths) == 1:
                    common.fail(error)
                unreadable.append(str(path))
                tqdm.write(f"{common.SCRIPT}: {error}", file=sys.stderr)
        if not read:
            continue
        probabilities = runner(torch.cat(images)).softmax(1)
        values, indices = probabilities.topk(min(args.top_k, len(args.classes)))
        for path, top, which in zip(read, values.tolist(), indices.tolist(), strict=True):
            classes = [args.classes[i] for i in which]
            answers.append({"file": str(path), "classes": classes, "probabilities": top})
            if not args.json:
                likely = (f"{name} {p:.1%}" for name, p in zip(classes, top, strict=True))
                tqdm.write(f"{path}: {', '.join(likely)}")
    if args.json:
        found = {"weights": str(args.weights), "answers": answers, "unreadable": unreadable}
        print(json.dumps(found, indent=1))
    if not answers:
        common.fail(f"--input {args.input}: none of its images can be read; give another")
    if unreadable:
        print(f"{common.SCRIPT}: {len(unreadable)} of {len(paths)} images cannot be read",
              file=sys.stderr)  # fmt: skip
    return 1 if unreadable else 0


def find_images(path: Path) -> list[Path]:
    """A file itself, or the images in a folder and below, sorted."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    if path.is_file():
        return [path]
    if not path.is_dir():
        common.fail(f"--input {path}: no such file or folder; give an image, a folder, or test")
    found = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMG_EXTENSIONS)
    if not found:
        common.fail(f"--input {path}: no image in it ({' '.join(IMG_EXTENSIONS)}); give another")
    return found


def measure_accuracy(args: argparse.Namespace, runner) -> tuple[float, int]:
    images = load_split(args, "eval")
    correct = sum(
        (runner(pixels).argmax(1) == labels).sum().item()
        for pixels, labels in batches(images, args.batch_size, args.image_size, "test")
    )
    return correct / len(images), len(images)


# -------------------------------------------------------------------------------------- 2 export


def export(args: argparse.Namespace) -> None:
    """Write ``--export``, compared with PyTorch in fp32; nothing is left if that fails."""
    started = time.perf_counter()
    temporary = args.export.with_name(f".{args.export.name}.part")
    try:
        write_onnx(args, args.precision, temporary)
        print(f"{args.export}: {args.model} in {args.precision}, {INPUT}")
        if args.precision == "bf16" and args.provider == PROVIDERS["cpu"]:
            print("not compared: ONNX Runtime computes bfloat16 on GPUs only")
        else:
            compare(args, temporary)
        os.replace(temporary, args.export)
    finally:
        temporary.unlink(missing_ok=True)
    size, seconds = args.export.stat().st_size / 2**20, time.perf_counter() - started
    print(f"done: {size:.1f} MiB, {seconds:.0f} s")


def write_onnx(args: argparse.Namespace, precision: str, path: Path) -> None:
    """Export, convert to the precision, add the metadata, check.

    fp16: converted by ONNX Runtime's own tool. int8: weights per channel and activations, scaled by
    what :data:`CALIBRATION_IMAGES` training images show (post-training static quantization).
    bf16: exported in it.
    """
    import onnx

    classifier = make_classifier(args, "bf16" if precision == "bf16" else "fp32")
    images = torch.zeros(2, 3, args.image_size, args.image_size, dtype=torch.uint8)
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")  # of PyTorch's own code while it traces
        program = torch.onnx.export(
            classifier, (images,), dynamo=True, verbose=False,
            input_names=["images"], output_names=["logits"],
            dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
            opset_version=22 if precision == "bf16" else None,  # the first with it in Conv
            optimize=precision != "bf16",  # it would fold BatchNorm into weights of another type
        )  # fmt: skip
    program.save(path, external_data=False)
    if precision == "fp16":
        from onnxruntime.transformers.float16 import convert_float_to_float16

        onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=True), path)
    if precision == "int8":
        quantize(args, path)
    model = onnx.load(path)
    settings = f"--model {args.model} --norm {args.norm} --image-size {args.image_size}"
    settings += f" --dataset {args.dataset} --data-dir {shlex.quote(str(args.data_dir))}"
    settings += f" --seed {args.seed}"
    settings += f" --eval-samples {args.eval_samples}" if args.eval_samples else ""
    about = {"classes": json.dumps(args.classes), "input": INPUT, "settings": settings}
    onnx.helper.set_model_props(model, about | {"precision": precision})
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


def quantize(args: argparse.Namespace, path: Path) -> None:
    """To int8 in place, in ONNX's QDQ form."""
    from onnxruntime import quantization

    images = batches(load_split(args, "train"), 1, args.image_size, "calibrating")

    class Reader(quantization.CalibrationDataReader):
        def get_next(self):
            pixels, _ = next(images, (None, None))
            return None if pixels is None else {"images": pixels.numpy()}

    quantization.shape_inference.quant_pre_process(path, path, skip_symbolic_shape=True)
    quantization.quantize_static(  # uint8 activations and int8 weights: what CPUs multiply fastest
        path, path, Reader(), per_channel=True, activation_type=quantization.QuantType.QUInt8
    )


def compare(args: argparse.Namespace, path: Path) -> None:
    """The file in ONNX Runtime against the model in PyTorch, in fp32.

    In fp32 logits must be within 1e-4 of the largest, at batches of 1, 3 and 16, and 99.9 % of the
    answers the same. The other precisions round; what that costs is printed. Without a test split,
    the images are noise.
    """
    torch.backends.cudnn.allow_tf32 = False  # in neither: it rounds to ten bits
    onnx_runner = OnnxRunner(make_session(args, path, use_tf32=False), args.device)
    torch_runner = TorchRunner(make_classifier(args, "fp32"), args.device)
    difference, same, correct = 0.0, 0, torch.zeros(2)
    if args.dataset == "auto":  # it is not known which
        noise = torch.randint(0, 256, (64, 3, args.image_size, args.image_size), dtype=torch.uint8)
        images = common.Images(noise, torch.zeros(64), args.classes, args.image_size)
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


# ------------------------------------------------------------------------------------- 3 measure


def benchmark(args: argparse.Namespace) -> None:
    """Measure every runtime and precision that runs here, and write ``inference.json``.

    Each has a process of its own, so that its peak memory is its own, and they take turns, so that
    none has the machine's quiet minute. A call begins with uint8 images in the CPU's memory and
    ends with float32 logits there. The first calls of a batch size (compilation, allocation) are
    not counted; the time of the very first is given apart.
    """
    wanted = [
        (runtime, precision)
        for runtime in ([args.runtime] if args.runtime else ["torch", "compile", "onnxruntime"])
        for precision in ([args.precision] if args.precision else PRECISIONS)
        if precision == args.precision or worth_it(args, runtime, precision)
    ]
    context = multiprocessing.get_context("spawn")  # fork does not go with CUDA
    rows, workers = [], []
    folder = tempfile.TemporaryDirectory()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name  # empty: compilation is to be timed
    for runtime, precision in tqdm(wanted, "preparing", leave=False, disable=None):
        path = Path(folder.name, f"{precision}.onnx") if runtime == "onnxruntime" else None
        if path:
            try:  # here, as its memory is not that of running it
                write_onnx(args, precision, path)
            except Exception as error:  # no onnx, no kernel, no conversion, ...
                print(f"{runtime} {precision}: left out ({in_short(error)})", file=sys.stderr)
                continue
        ours, theirs = context.Pipe()
        job = (theirs, args, runtime, precision, path)
        process = context.Process(target=work, args=job, daemon=True)
        process.start()
        theirs.close()
        answer = receive(ours)  # one after the other: loading is not to disturb anyone
        if isinstance(answer, str):
            print(f"{runtime} {precision}: left out ({answer})", file=sys.stderr)
        else:
            workers.append((runtime, precision, ours, process))
    if not workers:
        common.fail("nothing to measure: none of these runs here")
    calls = {}
    turns = [(b, w) for b in args.batch_sizes for _ in range(args.rounds) for w in workers]
    for batch_size, (runtime, precision, pipe, _) in tqdm(turns, "measuring", disable=None):
        turn = ask(pipe, batch_size)
        calls.setdefault((runtime, precision, batch_size), []).append(turn)
    for runtime, precision, pipe, process in workers:
        memory = ask(pipe, None)
        process.join()
        for batch_size in args.batch_sizes:
            turns = calls[runtime, precision, batch_size]
            failed = next((turn for turn in [*turns, memory] if isinstance(turn, str)), None)
            if failed:
                left_out = f"{runtime} {precision} at batch {batch_size}: left out ({failed})"
                print(left_out, file=sys.stderr)
                continue
            row = {"runtime": runtime, "precision": precision, "batch_size": batch_size}
            row["first_call_s"] = turns[0]["first"]
            for kind in ("host_to_host", "on_device"):
                times = np.array([t for turn in turns for t in turn[kind]])
                if len(times):
                    p50, p95 = np.percentile(1e3 * times, [50, 95]).tolist()
                    latency = {"p50": p50, "p95": p95}
                    row[kind] = {"images_per_second": 1e3 * batch_size / p50}
                    row[kind] |= {"latency_ms": latency, "calls": len(times)}
            rows.append(row | {"peak_memory_gib": memory})
    folder.cleanup()
    device, versions = torch.device(args.device), common.versions()
    for package in ("onnxruntime-gpu", "onnxruntime"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    result = {
        "command": common.launch_command(), "model": args.model, "image_size": args.image_size,
        "device": common.device_name(device), "threads": torch.get_num_threads(),
        "rounds": args.rounds, "rows": rows,
        "hardware": common.hardware(), "versions": versions, "git_commit": common.git_commit(),
    }  # fmt: skip
    path = args.output_dir / "inference.json"
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(temporary, path)
    print(table(result))
    print(f"done: {path}")


def worth_it(args: argparse.Namespace, runtime: str, precision: str) -> bool:
    """Whether this runs, and not a hundred times slower than the rest."""
    if precision == "int8":
        return runtime == "onnxruntime"
    if args.device == "cpu":  # neither has the convolutions
        return (runtime == "onnxruntime", precision) not in [(False, "fp16"), (True, "bf16")]
    return True


def ask(pipe, batch_size: int | None):
    """A worker's answer to a batch size, or why there is none; ``None`` ends it."""
    with contextlib.suppress(OSError):  # it has ended before
        pipe.send(batch_size)
    return receive(pipe)


def receive(pipe):
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return "its process ended, see above"


def work(pipe, args, runtime: str, precision: str, path: Path | None) -> None:
    """A process that runs one runtime and precision: answers each batch size with its times."""

    def images_of(batch_size: int) -> Tensor:
        shape = (batch_size, 3, args.image_size, args.image_size)
        return torch.randint(0, 256, shape, dtype=torch.uint8)

    free = free_memory(args)
    try:
        runner = make_runner(args, runtime, precision, path)
        images = images_of(args.batch_sizes[0])
        first = {args.batch_sizes[0]: seconds(runner, runner, images)}
    except SystemExit:
        return
    except Exception as error:  # no kernel for this precision, no compiler, ...
        pipe.send(in_short(error))
        return
    pipe.send(True)
    taken = free - free_memory(args)
    with contextlib.suppress(EOFError):  # the other end is gone
        while (batch_size := pipe.recv()) is not None:
            free, images = free_memory(args), images_of(batch_size)
            try:
                first.setdefault(batch_size, seconds(runner, runner, images))
                times = {"first": first[batch_size], "on_device": []}
                times["host_to_host"] = repeat(runner, runner, images)
                if args.device == "cuda":
                    times["on_device"] = repeat(runner, runner.run, runner.put(images))
            except Exception as error:  # too little memory for so many images
                times = in_short(error)
            taken += free - free_memory(args)
            pipe.send(times)
        process = common.peak_memory_gib(torch.device("cpu"))["process"]
        pipe.send({"device": taken / 2**30 if args.device == "cuda" else None, "process": process})


def in_short(error: Exception) -> str:
    first, *_ = [*str(error).strip().splitlines(), ""]
    return f"{type(error).__name__}: {first[:150]}"


def free_memory(args: argparse.Namespace) -> int:
    """Bytes that are free on the GPU; 0 on a CPU. Others on the GPU are idle while one measures."""
    return torch.cuda.mem_get_info()[0] if args.device == "cuda" else 0


def repeat(runner, call, images) -> list[float]:
    """Seconds of each call: for a second, but twice at least."""
    times = []
    while len(times) < 2 or sum(times) < 1:
        times.append(seconds(runner, call, images))
    return times


def seconds(runner, call, images) -> float:
    runner.synchronize()
    started = time.perf_counter()
    call(images)
    runner.synchronize()
    return time.perf_counter() - started


def table(result: dict) -> str:
    """Markdown: images/s, and in brackets the p50 and p95 of a call in ms, per batch size."""
    sizes = list(dict.fromkeys(row["batch_size"] for row in result["rows"]))
    lines = [["runtime", "precision", *(f"batch {b}" for b in sizes), "memory GiB", "first call s"]]
    lines.append(["---"] * len(lines[0]))
    for key in dict.fromkeys((row["runtime"], row["precision"]) for row in result["rows"]):
        rows = [row for row in result["rows"] if (row["runtime"], row["precision"]) == key]
        cells = dict.fromkeys(sizes, "")
        for row in rows:
            now = row["host_to_host"]
            speed, latency = now["images_per_second"], now["latency_ms"]
            cells[row["batch_size"]] = f"{speed:,.1f} ({latency['p50']:.1f}, {latency['p95']:.1f})"
        memory = rows[0]["peak_memory_gib"]
        memory = f"{memory['device'] or memory['process']:.2f}"
        lines.append([*key, *cells.values(), memory, f"{rows[0]['first_call_s']:.2f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
