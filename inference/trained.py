"""Model, classes and data of trained weights, from result.json beside them or the ONNX file."""

import argparse
import json
import shlex

from common import argument_parser
from harness.cli import fail
from jobs.decoder import is_decoder

# Settings of the run that define the weights and the test data
NAMES = ["model", "norm", "image_size", "context", "tokenizer", "tie", "dataset", "data_dir"]
NAMES += ["eval_samples", "kv_heads", "mlp_width"]


def make_metadata(args: argparse.Namespace, precision: str, what: str) -> dict[str, str]:
    """Metadata for an ONNX file, to use and test it without ``result.json``.

    Args:
        what: description of the input.
    """
    words = ["--seed", str(args.seed)]
    for name in NAMES:
        value = getattr(args, name, None)
        if value:
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    sizes = {name: getattr(args, name, None) for name in ("image_size", "context")}
    sizes = {name: str(size) for name, size in sizes.items() if size}
    classes, settings = json.dumps(args.classes), shlex.join(words)
    about = {"classes": classes, "input": what, "settings": settings, "precision": precision}
    return about | sizes


def complete_as_trained(args: argparse.Namespace) -> None:
    """Fill in classes and seed of the run that wrote ``--weights``, and its settings for flags that
    are not given."""
    settings, args.classes = read_metadata(args) if args.onnx else read_result(args)
    run = vars(argument_parser("").parse_known_args(shlex.split(settings))[0])
    for name in NAMES:
        if getattr(args, name, None) is None:
            setattr(args, name, run[name])
    args.seed = run["seed"]


def read_metadata(args: argparse.Namespace) -> tuple[str, list[str]]:
    """Settings and classes, as :func:`inference.export.write_onnx` put them into the file."""
    trained = args.session.get_modelmeta().custom_metadata_map
    if not {"settings", "classes"} <= trained.keys():
        fail(f"--weights {args.weights} was not exported by this script; use --export")
    return trained["settings"], json.loads(trained["classes"])


def read_result(args: argparse.Namespace) -> tuple[str, list[str] | None]:
    """Settings and classes of the run that wrote ``model.pt``, from ``result.json`` next to it."""
    path = args.weights.with_name("result.json")
    try:
        result = json.loads(path.read_text())
        return f"{result['settings']} --dataset {result['dataset']}", result["classes"]
    except FileNotFoundError:
        if args.model and (args.image_size or is_decoder(args.model)):
            return "", None
        fail(f"{path} is missing, which describes the weights; "
             "give --model and, for a classifier, --image-size")  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"{path} cannot be used ({type(error).__name__}: {error}); "
             "remove it, and give --model and --image-size")  # fmt: skip
