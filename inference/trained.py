"""What the weights are of: model, classes, data, from result.json beside them or the ONNX file."""

import argparse
import json
import shlex

from common import argument_parser
from harness.command_line import fail


def complete_as_trained(args: argparse.Namespace) -> None:
    """Classes and seed of the run that wrote ``--weights``, and its settings where no flag is
    given."""
    settings, args.classes = read_metadata(args) if args.onnx else read_result(args)
    run = vars(argument_parser("").parse_known_args(shlex.split(settings))[0])
    for name in ("model", "norm", "image_size", "dataset", "data_dir", "eval_samples"):
        if getattr(args, name) is None:
            setattr(args, name, run[name])
    args.seed = run["seed"]
    args.norm = "batch" if args.norm == "sync" else args.norm  # which has the same parameters


def read_metadata(args: argparse.Namespace) -> tuple[str, list[str]]:
    """Settings and classes, as :func:`inference.export.write_onnx` put them into the file."""
    trained = args.session.get_modelmeta().custom_metadata_map
    if not {"settings", "classes"} <= trained.keys():
        fail(f"--weights {args.weights} is of another program; export it with --export")
    return trained["settings"], json.loads(trained["classes"])


def read_result(args: argparse.Namespace) -> tuple[str, list[str] | None]:
    """Settings and classes of the run that wrote ``model.pt``, from ``result.json`` beside it."""
    path = args.weights.with_name("result.json")
    try:
        result = json.loads(path.read_text())
        return f"{result['settings']} --dataset {result['dataset']}", result["classes"]
    except FileNotFoundError:
        if args.model and args.image_size:
            return "", None
        fail(f"{path} is missing, which says what the weights are of; "
             "give --model and --image-size")  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"{path} cannot be used ({type(error).__name__}: {error}); "
             "remove it, and give --model and --image-size")  # fmt: skip
