"""Use trained weights: predict, generate text, export to ONNX, run in ONNX Runtime.

Predict     python model_inference.py --weights runs/pytorch_DDP/model.pt --input test
            IMAGE or FOLDER instead of test prints the most likely classes of each file.
Write       python model_inference.py --weights runs/pytorch_DDP/model.pt --prompt "O God, O God!"
            A GPT continues the text by --tokens tokens.
Export      python model_inference.py --weights runs/pytorch_DDP/model.pt --export model.onnx
            Writes one file that takes uint8 images, normalizes them and contains its class names;
            its results are compared with those of PyTorch.
            DIR/model.pt instead of model.onnx writes the weights, those of a snapshot, too.
Run         python model_inference.py --weights model.onnx --input IMAGE
            In ONNX Runtime, on a GPU if onnxruntime was built for it.

Model, classes, image size and test split are read from result.json beside the weights, or from the
ONNX file itself; flags override them.
"""

import argparse
import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

import common
from inference import classifier, language
from inference.images import find_images, read_image
from inference.runtimes import OnnxRunner, Runner, TorchRunner, can_use, make_session
from inference.trained import Trained, as_trained
from libraries import hub, weights


def main() -> int:
    args = parse_args()
    if args.export and args.export.suffix == ".pt":
        write_weights(args)
    elif args.export:
        task_of(args).write_onnx(args)
    elif args.prompt is not None:
        write(args)
    elif args.input == "test":
        evaluate(args)
    else:
        return predict(args)
    return 0


def argument_parser() -> argparse.ArgumentParser:
    parser = common.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        fromfile_prefix_chars="@", allow_abbrev=False,
    )  # fmt: skip
    positive = common.number(int, 1)
    # fmt: off
    parser.add_argument("--weights", type=path_or_name, required=True, metavar="PATH",
                        help="a model.pt of a training script, the folder of its run, a snapshot, "
                        "a Llama's folder with config.json, or an .onnx file of --export")
    flag = parser.add_argument_group("what to do (one of these)").add_argument
    flag("--input", metavar="IMAGE|FOLDER|test",
         help="predict an image or a folder of images; test: evaluate on the test split that "
         "training used")
    flag("--prompt", metavar="TEXT", help="let a GPT continue this text")
    flag("--export", type=Path, metavar="FILE",
         help="export the model to ONNX; DIR/model.pt: write its weights, those of a snapshot, too")
    flag = parser.add_argument_group("how").add_argument
    flag("--device", choices=["auto", "cpu", "cuda"], default="auto",
         help="device (default: auto, a GPU if PyTorch, and for ONNX onnxruntime, can use one)")
    flag("-b", "--batch-size", type=positive, default=32, metavar="N",
         help="batch size of --input test (default: 32)")
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


def path_or_name(text: str) -> Path:
    """The type of ``--weights``. As a ``Path``, ./a/b is a/b, which could be a name on the hub."""
    path = Path(text)
    return path if path.exists() or str(path) == text else path.absolute()


def parse_args() -> Trained:
    """Read the command line; the file of the weights fills in flags that are not set."""
    args = check_flags(common.read_flags(argument_parser(), Trained))
    if args.onnx:
        args = replace(args, session=make_session(args.weights, args.device))
    args = as_trained(args)
    if args.export and args.export.suffix == ".pt":
        return args
    args = check_gpt(args) if args.gpt else check_classifier(args)
    return args if args.onnx else task_of(args).complete(args)


def task_of(args: Trained):
    """The module with what the two kinds of models do differently."""
    return language if args.gpt else classifier


def check_flags(args: Trained) -> Trained:
    """Reject invalid combinations, and fill in what depends on the machine."""
    tasks = [bool(args.input), args.prompt is not None, args.export is not None]
    if sum(tasks) != 1:
        common.fail("give one of --input, --prompt and --export (--help: flags)")
    if args.prompt == "":
        common.fail("--prompt is empty; give at least one character")
    args = locate_weights(args)
    if args.onnx and args.export:
        common.fail(f"--weights {args.weights} is exported already; give the model.pt")
    if args.export and args.export.is_dir():
        common.fail(f"--export {args.export} is a folder; give a file, such as model.onnx")
    if args.export and args.export.suffix == ".pt" and args.export.name != "model.pt":
        common.fail(f"--export {args.export}: weights are written to a file named model.pt")
    if args.export:
        common.check_writable(args.export.parent, f"--export {args.export}")
    return choose_device(args)


def locate_weights(args: Trained) -> Trained:
    """``--weights`` as a local path: of a file, a snapshot, or a Llama's folder."""
    why = weights.why_unusable(args.weights)
    if why and not hub.is_folder(args.weights):
        use = "a model.pt, the folder of a run, a snapshot or a Llama's folder"
        common.fail(f"--weights {args.weights}: {why}; give {use}")
    if hub.is_name(str(args.weights)):
        return replace(args, weights=hub.folder_of(args.weights))
    path = weights.locate(args.weights)
    beside = {file.name for file in path.parent.iterdir()}
    if path.name == "model.pt" and "config.json" in beside and "result.json" not in beside:
        path = path.parent  # a Llama's folder, without its run
    return replace(args, weights=path)


def choose_device(args: Trained) -> Trained:
    """``--device auto`` is a GPU if all that this command needs can use one."""
    if args.device == "cuda" and not torch.cuda.is_available():
        common.fail("--device cuda: PyTorch finds no GPU here; use --device cpu")
    if args.device != "auto":
        return args
    in_onnx = args.onnx or (args.export and args.export.suffix != ".pt")
    usable = torch.cuda.is_available() and (not in_onnx or can_use("cuda"))
    return replace(args, device="cuda" if usable else "cpu")


def check_gpt(args: Trained) -> Trained:
    if args.input and args.input != "test":
        common.fail(f"--input {args.input}: {args.model} needs --input test or --prompt TEXT")
    return common.fill(args, tokenizer="chars")


def check_classifier(args: Trained) -> Trained:
    if args.dataset == "reviews" or args.model.startswith("encoder"):
        why = "classifies text, which this script does not support"
        common.fail(f"{args.weights}: {args.model} {why}; docs/job.md shows how to use it")
    if args.prompt is not None:
        common.fail(f"--prompt needs a GPT, and {args.model} classifies images; use --input")
    norm = "group" if args.norm == "group" else "batch"  # sync has the same parameters
    return common.fill(replace(args, norm=norm), most=3)


def make_runner(args: Trained) -> Runner:
    """Load ``--weights``: an ONNX file into ONNX Runtime, anything else into PyTorch."""
    if args.onnx:
        return OnnxRunner(args.session)
    return TorchRunner(task_of(args).load_model(args), args.device)


def predict(args: Trained) -> int:
    """Predict the files of ``--input``. Returns the exit code: 1 if some could not be read."""
    paths = find_images(Path(args.input))
    runner = make_runner(args)
    answers = []
    unreadable = []
    for path in tqdm(paths, "images", leave=False, disable=None):
        try:
            image = read_image(path, args.image_size)
        except common.Unreadable as error:
            if len(paths) == 1:
                common.fail(error)
            unreadable.append(str(path))
            tqdm.write(f"{common.this_script()}: {error}", file=sys.stderr)
            continue
        values, indices = runner(image)[0].softmax(0).topk(min(args.most, len(args.classes)))
        classes = [args.classes[i] for i in indices]
        probabilities = values.tolist()
        answers.append({"file": str(path), "classes": classes, "probabilities": probabilities})
        if not args.json:
            likely = [f"{name} {p:.1%}" for name, p in zip(classes, values, strict=True)]
            tqdm.write(f"{path}: {', '.join(likely)}")
    if args.json:
        found = {"weights": str(args.weights), "answers": answers, "unreadable": unreadable}
        print(json.dumps(found, indent=1))
    if not answers:
        common.fail(f"--input {args.input}: none of its images can be read; give another")
    if unreadable:
        line = f"{len(unreadable)} of {len(paths)} images cannot be read"
        print(f"{common.this_script()}: {line}", file=sys.stderr)
    return 1 if unreadable else 0


def evaluate(args: Trained) -> None:
    """Print accuracy, and of a GPT also the loss, on the test split that training used."""
    found = task_of(args).measure(args, make_runner(args))
    if args.json:
        print(json.dumps({"weights": str(args.weights), **found}))
        return
    line = f"accuracy {found['accuracy']:.2%} of "
    if args.gpt:
        line = f"loss {found['loss']:.4f}, perplexity {found['perplexity']:.2f}, {line}"
    n = found["tokens"] if args.gpt else found["samples"]
    print(f"{line}{n:,} ({args.dataset}, {'onnxruntime' if args.onnx else 'torch'})")


def write(args: Trained) -> None:
    """Print ``--prompt`` and the text that the GPT generates."""
    runner = make_runner(args)
    began = time.perf_counter()
    text = language.continue_text(args, runner)
    found = {"weights": str(args.weights), "text": text}
    found["tokens_per_second"] = args.tokens / (time.perf_counter() - began)
    print(json.dumps(found) if args.json else text)


def write_weights(args: Trained) -> None:
    """Write ``--export`` as training does, for a Llama with its folder's other files."""
    if args.double:
        torch.set_default_dtype(torch.float64)
    args = replace(args, output_dir=args.export.parent)
    common.save_model(args, weights.load(args.weights))
    print(f"{args.export}: the weights of {args.model}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    sys.exit(main())
