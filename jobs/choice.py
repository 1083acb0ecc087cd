"""The settings of a training task, and which task they select: a GPT or a Llama learns from text,
an encoder from reviews, any other model from images.

All tasks have the same functions, so their callers need not know which one it is.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, NoReturn

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import jobs.classifiers
import jobs.decoder
import jobs.encoder
import jobs.images
import jobs.reviews
import jobs.text
from harness.cli import ArgumentParser, fail, place, positive
from harness.settings import Hardware, Output, Reproducibility, Training, add_flags, flag, flags_of
from harness.world import this_script, world
from jobs.experts import Experts
from jobs.images import ImageOptions
from jobs.text import TextOptions
from libraries import hub
from remote.storage import trim_url

GPTS = jobs.decoder.NAMES
ONLY_GPT = {  # help texts of a script that trains nothing else
    "model": f"{GPTS} (default: gpt-mini on a GPU, gpt-nano on a CPU)",
    "dataset": "auto (default): Shakespeare, if present or downloadable, else synthetic; "
    "or shakespeare, text, synthetic",
    "data_dir": "folder of the data set; text: files, or one file (default: data)",
    "weights": "initial weights: a model.pt; for a Llama also a folder with config.json and "
    "*.safetensors (default: none)",
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Data and model."""

    TITLE = "task"
    # fmt: off
    model: str | None = flag(None, metavar="NAME", identity=True,
        help="any torchvision classifier (default: resnet50 on a GPU, resnet18 on a CPU); or "
        f"{GPTS}; for reviews: distilbert, or encoder-LxHxD")
    dataset: str = flag("auto", metavar="NAME",
        choices=["auto", "cifar10", "folder", "shakespeare", "text", "reviews", "synthetic"],
        help="auto (default): CIFAR-10, or Shakespeare for a GPT, if present or downloadable, else "
        "synthetic; or cifar10, folder; shakespeare, text; reviews; synthetic")
    data_dir: Path | str = flag(Path("data"), type=place, metavar="DIR",
        help="folder of the data set; text: files, or one file; folder: train/ and test/ or val/; "
        "reviews: train.tsv and test.tsv (default: %(default)s)")
    train_samples: int | None = flag(None, type=positive, metavar="N", identity=True,
        help="use the first N training samples (default: all; 2048 on a CPU)")
    eval_samples: int | None = flag(None, type=positive, metavar="N",
        help="use the first N evaluation samples (default: all; 1000 on a CPU)")
    weights: str = flag("none", metavar="PATH", type=trim_url,
        help="initial weights: a model.pt; for a Llama also a folder with config.json and "
        "*.safetensors; for images also imagenet; for reviews also a folder or a name on "
        "huggingface.co (default: %(default)s)")
    # fmt: on


class Task(NamedTuple):
    """What the settings select.

    Args:
        data: a module with ``resolve``, ``describe`` and ``make_datasets``.
        models: a module with ``make_model``, ``parameter_groups`` and the checks of a model.
        datasets: choices of ``--dataset``.
        flags: names of the flags that it has and other tasks may not have.
    """

    data: ModuleType
    models: ModuleType
    datasets: list[str]
    flags: set[str]


OF_IMAGES = {field.name for field in flags_of(ImageOptions)}
OF_TEXT = {field.name for subject in (TextOptions, Experts) for field in flags_of(subject)}
IMAGES = Task(jobs.images, jobs.classifiers, ["auto", "cifar10", "folder", "synthetic"], OF_IMAGES)
TEXT = Task(jobs.text, jobs.decoder, ["auto", "shakespeare", "text", "synthetic"], OF_TEXT)
REVIEWS = Task(jobs.reviews, jobs.encoder, ["auto", "reviews"], jobs.reviews.FLAGS)


# The fields of the last base come first.
@dataclass(frozen=True, kw_only=True)
class Settings(
    Reproducibility, Hardware, Output, Experts, TextOptions, ImageOptions, Training, Choice
):
    """All settings of a training task; see harness/settings.py."""

    @property
    def task(self) -> Task:
        model = self.model or ""
        if self.dataset == "reviews" or model.startswith("encoder") or model == "distilbert":
            return REVIEWS
        return TEXT if jobs.decoder.is_decoder(model) else IMAGES


def add_all_flags(parser: ArgumentParser, only_gpt: bool = False, experts: bool = False) -> None:
    """Add the flags of all settings.

    Args:
        only_gpt: the help does not show flags of other models.
        experts: the help shows the flags of a mixture of experts.
    """
    add_flags(parser, Training)
    add_flags(parser, Choice, **(ONLY_GPT if only_gpt else {}))
    parser.set_defaults(model="gpt" if only_gpt else None)
    add_flags(parser, ImageOptions, shown=not only_gpt)
    add_flags(parser, TextOptions)
    add_flags(parser, Experts, shown=experts)
    for subject in (Output, Hardware, Reproducibility):
        add = add_flags(parser, subject)
    add("-h", "--help", action="help", help="print this help and exit")


def init_weights(args, model: nn.Module, classes: list[str]) -> None:
    """Initialize a model that was made on the meta device, sharded and allocated, with the weights
    of ``make_model()``; each rank gets its shards. For a decoder, ranks draw or read one parameter
    at a time. For other models, rank 0 has the whole model on its CPU. All ranks call it."""
    models = args.task.models
    if one_by_one := getattr(models, "init_weights", None):
        return one_by_one(args, model, classes)
    weights = models.make_model(args, classes).state_dict() if world().rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)


def check_is_gpt(args) -> None:
    if args.task is not TEXT:
        why = f"{this_script()}.py supports only decoders"
        fail(f"--model {args.model}: {why}; use gpt-nano, gpt-mini, gpt2, gpt-LxHxD or llama-LxHxD")


def resolve(args):
    """Fill in the defaults of the task, and reject flags of other tasks."""
    if args.model in (None, "gpt") and args.dataset != "reviews" and hub.is_folder(args.weights):
        args = replace(args, model="llama")
    ours = args.task
    for name in sorted((OF_IMAGES | OF_TEXT) - ours.flags):
        if getattr(args, name) is not None:
            complain(args, f"--{name.replace('_', '-')}", name in IMAGES.flags)
    if args.dataset not in ours.datasets:
        model = f"--model {args.model}" if args.model else "images"  # the default
        use = f"use {', '.join(ours.datasets)}, or another --model"
        fail(f"--dataset {args.dataset} is not for {model}; {use}")
    args = ours.data.resolve(args)
    named = args.weights in ("none", "imagenet") or "://" in args.weights
    named |= ours is REVIEWS and jobs.reviews.has_pretrained(args)
    named |= ours is TEXT and hub.is_folder(args.weights)
    if not named and not Path(args.weights).is_file():
        fail(f"--weights {args.weights}: no such file; give none, imagenet or a model.pt")
    if Path(args.weights).resolve() == Path(args.output_dir, "model.pt").resolve():
        fail(f"--weights {args.weights} would be overwritten; give another --output-dir")
    return args


def complain(args, flag: str, of_images: bool) -> NoReturn:
    """Reject a flag that belongs to another task."""
    if args.task is IMAGES:
        more = ", or --dataset reviews" if flag[2:] in REVIEWS.flags else ""
        fail(f"{flag} is for a GPT; add --model gpt-nano{more}, or leave it out")
    owner, model = "images" if of_images else "a GPT", args.model or "an encoder"
    fail(f"{flag} is for {owner}, and {model} reads text; leave it out")
