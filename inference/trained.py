"""Settings of the run that trained some weights, from result.json beside them or the ONNX file."""

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import argument_parser
from harness.cli import fail
from harness.settings import fill
from jobs.choice import Settings
from jobs.sizes import is_decoder
from libraries import hub, weights

# Settings of the run that define the weights and the test data
NAMES = ["model", "norm", "image_size", "context", "tokenizer", "tie", "dataset", "data_dir"]
NAMES += ["eval_samples", "kv_heads", "mlp_width", "experts", "top_k", "balance", "packed"]


@dataclass(frozen=True, kw_only=True)
class Trained(Settings):
    """Weights, with the settings of the run that wrote them.

    Attributes:
        classes: names of the classes, or tokens of the vocabulary; ``None``: not known yet.
        most: number of classes to print, or of tokens to sample from.
        session: of ONNX Runtime, for a file of it.
    """

    classes: list[str] | None = None
    most: int | None = None
    session: Any = None

    @property
    def onnx(self) -> bool:
        return Path(self.weights).suffix == ".onnx"

    @property
    def gpt(self) -> bool:
        return is_decoder(self.model)


def make_metadata(args: Trained, what: str) -> dict[str, str]:
    """Metadata for an ONNX file, to use and test it without ``result.json``.

    Args:
        what: description of the input.
    """
    words = ["--seed", str(args.seed)]
    for name in NAMES:
        value = getattr(args, name)
        if value:
            words.append(f"--{name.replace('_', '-')}")
        if value and value is not True:
            words.append(str(value))
    return {"classes": json.dumps(args.classes), "input": what, "settings": shlex.join(words)}


def as_trained(args: Trained) -> Trained:
    """Fill in classes and seed of the run that wrote ``--weights``, and its settings for flags that
    are not given."""
    settings, classes = read_metadata(args) if args.onnx else read_result(args)
    run = argument_parser("").parse_known_args(shlex.split(settings))[0]
    args = fill(args, **{name: getattr(run, name) for name in NAMES})
    return replace(args, classes=classes, seed=run.seed, double=run.double)


def read_metadata(args: Trained) -> tuple[str, list[str]]:
    """Settings and classes, as :func:`make_metadata` describes them in the file."""
    trained = args.session.get_modelmeta().custom_metadata_map
    if not {"settings", "classes"} <= trained.keys():
        fail(f"--weights {args.weights} was not exported by this script; use --export")
    return trained["settings"], json.loads(trained["classes"])


def read_result(args: Trained) -> tuple[str, list[str] | None]:
    """Settings and classes of the run that wrote ``model.pt``, from ``result.json`` next to it; or
    of a snapshot; or of a folder in the format of huggingface.co."""
    if weights.is_snapshot(args.weights):
        state = weights.read_state(args.weights)
        if "settings" not in state:
            fail(f"--weights {args.weights}: an older snapshot; resume its run, and use model.pt")
        words = shlex.join([*state["settings"], "--dataset", state["identity"]["dataset"]])
        return words, state["identity"]["classes"]
    if hub.is_folder(args.weights):
        tie = " --tie" if hub.read_config(hub.folder_of(args.weights))["tie"] else ""
        return f"--model llama --tokenizer hub{tie}", None
    path = args.weights.with_name("result.json")
    try:
        result = json.loads(path.read_text())
        return f"{result['settings']} --dataset {result['dataset']}", result["classes"]
    except FileNotFoundError:
        if args.model and (args.image_size or args.gpt):
            return "", None
        fail(f"{path}, which describes the weights, is missing; give --model and --image-size")
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"{path} cannot be used ({type(error).__name__}: {error}); "
             "remove it, and give --model and --image-size")  # fmt: skip
