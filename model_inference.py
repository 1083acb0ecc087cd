"""Use trained weights: predict, export to ONNX, run in ONNX Runtime, measure.

Predict     python model_inference.py --weights runs/pytorch_DDP/model.pt --input test
            IMAGE or FOLDER instead of test prints the most likely classes of each file.
Write       python model_inference.py --weights runs/pytorch_DDP/model.pt --prompt "O God, O God!"
            A GPT continues the text by --tokens tokens.
Export      python model_inference.py --weights runs/pytorch_DDP/model.pt --export model.onnx
            Writes one file that takes uint8 images, normalizes them and contains its class names.
Weights     python model_inference.py --weights runs/NAME/snapshots/step-N --export DIR/model.pt
            Writes the weights of a snapshot, such as that of a run that was stopped.
Run         python model_inference.py --weights model.onnx --input IMAGE
            In ONNX Runtime; --runtime torch or compile runs a model.pt in PyTorch.
Measure     python model_inference.py --weights runs/pytorch_DDP/model.pt --benchmark
            Every runtime and precision at several batch sizes, interleaved, to inference.json.

Model, classes, image size and test split are read from result.json beside the weights, or from the
ONNX file itself; flags override them.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

import common
from inference import classifier, language
from inference.export import INPUT, compare, write_onnx
from inference.images import batches, find_images, load_split, read_image
from inference.measure import PRECISIONS, measure
from inference.runtimes import PROVIDERS, OnnxRunner, Runner, TorchRunner, make_session
from inference.trained import Trained, as_trained
from libraries import hub, weights


def main() -> int:
    args, code = parse_args(), 0
    if args.benchmark:
        benchmark(args)
    elif args.export:
        (write_weights if args.export.suffix == ".pt" else export)(args)
    elif args.prompt is not None:
        write(args)
    else:
        code = predict(args)
    sys.stdout.flush()
    return code


# -------------------------------------------------------------------------------- command line


def argument_parser() -> argparse.ArgumentParser:
    parser = common.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        fromfile_prefix_chars="@", allow_abbrev=False,
    )  # fmt: skip
    positive = common.number(int, 1)
    # fmt: off
    parser.add_argument("--weights", type=Path, required=True, metavar="PATH",
                        help="a model.pt of a training script, the folder of its run, a snapshot, "
                        "a Llama's folder with config.json, or an .onnx file of --export")
    flag = parser.add_argument_group("what to do (one of these)").add_argument
    flag("--input", metavar="IMAGE|FOLDER|test",
         help="predict an image or a folder of images; test: evaluate on the test split that "
         "training used")
    flag("--prompt", metavar="TEXT", help="let a GPT continue this text")
    flag("--export", type=Path, metavar="FILE", 
         help="export the model to ONNX; DIR/model.pt: write its weights, those of a snapshot, too")
    flag("--benchmark", action="store_true", help="measure, and write --output-dir/inference.json")
    flag = parser.add_argument_group("how").add_argument
    flag("--runtime", choices=["torch", "compile", "onnxruntime"],
         help="runtime (default: onnxruntime for an .onnx, else torch; --benchmark: all)")
    flag("--precision", choices=PRECISIONS,
         help="precision (default: fp32; --benchmark: all that run here)")
    flag("--device", choices=["auto", "cpu", "cuda"], default="auto",
         help="device (default: auto, a GPU if there is one)")
    flag("--provider", metavar="NAME",
         help="execution provider of ONNX Runtime (default: the device's)")
    flag("-b", "--batch-size", type=positive, default=32, metavar="N",
         help="batch size (default: 32)")
    flag("--batch-sizes", type=positive, nargs="+", default=[1, 8, 32, 128], metavar="N",
         help="batch sizes of --benchmark (default: 1 8 32 128)")
    flag("--rounds", type=positive, default=3, metavar="N",
         help="rounds of --benchmark (default: 3)")
    flag("--top-k", dest="most", type=positive, metavar="N",
         help="number of classes to print (default: 3); number of tokens to sample from "
         "(default: all)")
    flag("--tokens", type=positive, default=200, metavar="N",
         help="number of tokens to generate (default: 200)")
    flag("--no-cache", dest="cache", action="store_false",
         help="recompute all positions for each token instead of caching keys and values")
    flag("--temperature", type=common.number(float, 0), default=0.8, metavar="X",
         help="sampling temperature; 0: always the most likely token (default: 0.8)")
    flag("--sample-seed", type=common.number(int, 0, 2**63), default=0, metavar="N",
         help="seed of sampling (default: 0)")
    flag("--json", action="store_true", help="print one JSON document instead of lines")
    flag("--output-dir", type=Path, metavar="DIR",
         help="folder for inference.json (default: that of the weights)")
    flag = parser.add_argument_group("the trained model (default: as in result.json)").add_argument
    flag("--model", metavar="NAME", help="model")
    flag("--norm", choices=["batch", "group"], help="normalization layers")
    flag("--image-size", type=positive, metavar="PIXELS", help="side of the model's input")
    flag("--dataset", choices=["cifar10", "folder", "shakespeare", "text", "chat", "synthetic"],
         help="data set of the test split")
    flag("--data-dir", type=Path, metavar="DIR", help="folder of the data set")
    flag("--eval-samples", type=positive, metavar="N", help="use the first N test samples")
    # fmt: on
    return parser


def parse_args() -> Trained:
    """Read the command line; the file of the weights fills in flags that are not set."""
    args = check_flags(common.read_flags(argument_parser(), Trained))
    if args.onnx:
        args = replace(args, session=make_session(args.weights, args.provider))
    args = as_trained(args)
    if args.export and args.export.suffix == ".pt":
        return args
    if args.dataset == "reviews" or args.model.startswith("encoder"):
        common.fail(
            f"{args.weights}: {args.model} classifies text, which this script does not support; "
            "docs/ecosystem.md shows how to use it"
        )
    return check_gpt(args) if args.gpt else check_classifier(args)


def check_gpt(args: Trained) -> Trained:
    """Reject flags for classifiers."""
    if args.benchmark or args.runtime == "compile" or args.precision not in ("fp32", None):
        common.fail(
            f"--benchmark, --runtime compile and --precision do not support {args.model}, which "
            "generates text; leave them out"
        )
    if args.input and args.input != "test":
        common.fail(f"--input {args.input}: {args.model} needs --input test or --prompt TEXT")
    args = common.fill(args, tokenizer="chars")
    return args if args.onnx else language.complete(args)


def check_classifier(args: Trained) -> Trained:
    """Reject flags for a GPT."""
    if args.prompt is not None:
        common.fail(f"--prompt needs a GPT, and {args.model} classifies images; use --input")
    norm = "group" if args.norm == "group" else "batch"  # sync has the same parameters
    args = common.fill(replace(args, norm=norm), most=3)
    return args if args.onnx else classifier.complete(args)


def check_flags(args: Trained) -> Trained:
    """Reject invalid combinations, and fill in defaults that depend on other flags."""
    if bool(args.input) + (args.prompt is not None) + bool(args.export) + args.benchmark != 1:
        common.fail("give one of --input, --prompt, --export and --benchmark (--help: flags)")
    if args.prompt == "":
        common.fail("--prompt is empty; give at least one character")
    if (why := weights.why_unusable(args.weights)) and not hub.is_folder(args.weights):
        use = "a model.pt, the folder of a run, a snapshot or a Llama's folder"
        common.fail(f"--weights {args.weights}: {why}; give {use}")
    args = replace(args, weights=weights.locate(args.weights))
    beside = {path.name for path in args.weights.parent.iterdir()}
    if args.weights.name == "model.pt" and "config.json" in beside - {"result.json"} == beside:
        args = replace(args, weights=args.weights.parent)  # a Llama's folder, without its run
    if args.onnx and (args.export or args.benchmark or args.runtime in ("torch", "compile")):
        common.fail(f"--weights {args.weights} runs in ONNX Runtime only; give the model.pt")
    if args.onnx and args.precision:
        common.fail(f"--weights {args.weights} has a fixed precision; leave out --precision")
    if args.device == "cuda" and not torch.cuda.is_available():
        common.fail("--device cuda: PyTorch finds no GPU here; use --device cpu")
    if args.device == "auto":
        args = replace(args, device="cuda" if torch.cuda.is_available() else "cpu")
    if args.precision == "bf16" and (args.export or args.runtime == "onnxruntime"):
        common.fail("--precision bf16 runs in PyTorch only; for ONNX use fp32, fp16 or int8")
    if args.precision == "bf16" and args.device == "cuda":
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            common.fail(f"--precision bf16: {torch.cuda.get_device_name()} lacks bf16; use fp16")
    args = common.fill(args, provider=PROVIDERS[args.device], output_dir=args.weights.parent)
    if not args.benchmark:
        runtime = "onnxruntime" if args.onnx else "torch"
        args = common.fill(args, runtime=runtime, precision="fp32")
        if args.precision == "int8" and args.runtime != "onnxruntime" and not args.export:
            common.fail("--precision int8 needs ONNX Runtime; add --runtime onnxruntime")
    if args.export:
        if args.export.is_dir():
            common.fail(f"--export {args.export} is a folder; give a file, such as model.onnx")
        if args.export.suffix == ".pt" and (args.export.name != "model.pt" or args.onnx):
            common.fail(f"--export {args.export}: weights are written to a file named model.pt")
        common.check_writable(args.export.parent, f"--export {args.export}")
    if args.benchmark:
        common.check_writable(args.output_dir, f"--output-dir {args.output_dir}")
    return args


# ---------------------------------------------------------------------------------- load weights


def make_runner(args: Trained) -> Runner:
    """Load ``--weights`` into the selected runtime and precision."""
    if args.gpt and args.runtime == "torch":
        return TorchRunner(language.load_gpt(args), args.device)
    if args.runtime != "onnxruntime":
        model = classifier.load_classifier(args, args.precision)
        return TorchRunner(model, args.device, compiled=args.runtime == "compile")
    if args.onnx:
        return OnnxRunner(args.session, args.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        language.write_onnx(args, path) if args.gpt else write_onnx(args, args.precision, path)
        return OnnxRunner(make_session(path, args.provider), args.device)


# --------------------------------------------------------------------------------------- predict


def predict(args: Trained) -> int:
    """Run ``--input``. Returns the exit code: 1 if some files could not be read."""
    if args.input == "test":
        print_accuracy(args)
        return 0
    paths = find_images(Path(args.input))
    runner = make_runner(args)
    answers, unreadable = [], []
    for start in tqdm(range(0, len(paths), args.batch_size), "images", leave=False, disable=None):
        read, images = [], []
        for path in paths[start : start + args.batch_size]:
            try:
                images.append(read_image(path, args.image_size))
                read.append(path)
            except common.Unreadable as error:
                if len(paths) == 1:
                    common.fail(error)
                unreadable.append(str(path))
                tqdm.write(f"{common.this_script()}: {error}", file=sys.stderr)
        if not read:
            continue
        probabilities = runner(torch.cat(images)).softmax(1)
        values, indices = probabilities.topk(min(args.most, len(args.classes)))
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
        print(f"{common.this_script()}: {len(unreadable)} of {len(paths)} images cannot be read",
              file=sys.stderr)  # fmt: skip
    return 1 if unreadable else 0


def print_accuracy(args: Trained) -> None:
    """Print the accuracy on the test split that training used."""
    runner = make_runner(args)
    if args.gpt:
        found = {"weights": str(args.weights), **language.measure(args, runner)}
        print(json.dumps(found) if args.json else (
            f"loss {found['loss']:.4f}, perplexity {found['perplexity']:.2f}, accuracy "
            f"{found['accuracy']:.2%} of {found['tokens']:,} ({args.dataset}, {args.runtime})"
        ))  # fmt: skip
        return
    images = load_split(args, "eval")
    correct = sum(
        (runner(pixels).argmax(1) == labels).sum().item()
        for pixels, labels in batches(images, args.batch_size, args.image_size, "test")
    )
    accuracy, n = correct / len(images), len(images)
    if args.json:
        print(json.dumps({"weights": str(args.weights), "accuracy": accuracy, "samples": n}))
    else:
        print(f"accuracy {accuracy:.2%} of {n:,} ({args.dataset}, {args.runtime})")


def write(args: Trained) -> None:
    """Print ``--prompt`` and the text that the GPT generates."""
    runner = make_runner(args)
    began = time.perf_counter()
    text = language.continue_text(args, runner)
    found = {"weights": str(args.weights), "text": text}
    found["tokens_per_second"] = args.tokens / (time.perf_counter() - began)
    print(json.dumps(found) if args.json else text)


# ---------------------------------------------------------------------------------------- export


def export(args: Trained) -> None:
    """Write ``--export`` and compare it with PyTorch in fp32; leave no file if that fails."""
    started = time.perf_counter()
    temporary = args.export.with_name(f".{args.export.name}.part")
    try:
        if args.gpt:
            language.write_onnx(args, temporary)
            print(f"{args.export}: {args.model}, {language.INPUT}")
            language.compare(args, temporary)
        else:
            write_onnx(args, args.precision, temporary)
            print(f"{args.export}: {args.model} in {args.precision}, {INPUT}")
            compare(args, args.precision, temporary)
        os.replace(temporary, args.export)
    finally:
        temporary.unlink(missing_ok=True)
    size, seconds = args.export.stat().st_size / 2**20, time.perf_counter() - started
    print(f"done: {size:.1f} MiB, {seconds:.0f} s")


def write_weights(args: Trained) -> None:
    """Write ``--export`` as training does: in fp32, or float64 of ``--double``; for a Llama also
    its folder's other files."""
    if args.double:
        torch.set_default_dtype(torch.float64)
    args = replace(args, output_dir=args.export.parent)
    common.save_model(args, weights.load(args.weights))
    print(f"{args.export}: the weights of {args.model}")


# --------------------------------------------------------------------------------------- measure


def benchmark(args: Trained) -> None:
    """Measure every runtime and precision that runs here, and write ``inference.json``."""
    from report.measured import inference_table

    result = measure(args)
    path = args.output_dir / "inference.json"
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(temporary, path)
    print(inference_table(result))
    print(f"done: {path}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # of `| head`. Python flushes stdout again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
