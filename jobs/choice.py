"""Which task a command line selects: a GPT or a Llama learns from text, an encoder from reviews,
any other model from images.

All tasks have the same functions, so their callers need not know which one it is.
"""

import argparse
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import jobs.classifiers
import jobs.decoder
import jobs.encoder
import jobs.images
import jobs.reviews
import jobs.text
from harness.cli import ArgumentParser, fail, place, positive, trim_url
from harness.world import this_script, world

DATASETS = {
    jobs.images: ["auto", "cifar10", "folder", "synthetic"],
    jobs.text: ["auto", "shakespeare", "text", "synthetic"],
    jobs.reviews: ["auto", "reviews"],
}
MODELS = {jobs.images: jobs.classifiers, jobs.text: jobs.decoder, jobs.reviews: jobs.encoder}


def add_flags(parser: ArgumentParser, only_gpt: bool, experts: bool) -> None:
    """Add the flags that select data and model.

    Args:
        only_gpt: the help does not show flags of other models.
        experts: the help shows the flags of a mixture of experts.
    """
    gpts = jobs.decoder.NAMES
    model = "any torchvision classifier (default: resnet50 on a GPU, resnet18 on a CPU); or"
    model = f"{model} {gpts}"
    data = "CIFAR-10, or Shakespeare for a GPT"
    if only_gpt:
        model, data = f"{gpts} (default: gpt-mini on a GPU, gpt-nano on a CPU)", "Shakespeare"
    # fmt: off
    flag = parser.add_flags("task")
    flag("--model", metavar="NAME",
         help=model if only_gpt else f"{model}; for reviews: distilbert, or encoder-LxHxD")
    flag("--dataset", default="auto", metavar="NAME",
         choices=["auto", "cifar10", "folder", "shakespeare", "text", "reviews", "synthetic"],
         help=f"auto (default): {data}, if present or downloadable, else synthetic; "
         + ("or shakespeare, text, synthetic" if only_gpt else
            "or cifar10, folder; shakespeare, text; reviews; synthetic"))
    flag("--data-dir", type=place, default=Path("data"), metavar="DIR",
         help="folder of the data set; text: files, or one file" + ("" if only_gpt else
         "; folder: train/ and test/ or val/; reviews: train.tsv and test.tsv")
         + " (default: data)")
    flag("--train-samples", type=positive, metavar="N",
         help="use the first N training samples (default: all; 2048 on a CPU)")
    flag("--eval-samples", type=positive, metavar="N",
         help="use the first N evaluation samples (default: all; 1000 on a CPU)")
    flag("--weights", default="none", metavar="PATH", type=trim_url,
         help="initial weights: a model.pt; for a Llama also a folder with config.json and "
         "*.safetensors" + ("" if only_gpt else
         "; for images also imagenet; for reviews also a folder or a name on huggingface.co")
         + " (default: none)")
    # fmt: on
    jobs.images.add_flags(parser, shown=not only_gpt)
    jobs.text.add_flags(parser, experts)


def data_of(args: argparse.Namespace) -> ModuleType:
    model = args.model or ""
    if args.dataset == "reviews" or model.startswith("encoder") or model == "distilbert":
        return jobs.reviews
    return jobs.text if jobs.decoder.is_decoder(model) else jobs.images


def models_of(args: argparse.Namespace) -> ModuleType:
    return MODELS[data_of(args)]


def init_weights(args: argparse.Namespace, model: nn.Module, classes: list[str]) -> None:
    """Initialize a model that was made on the meta device, sharded and allocated, with the weights
    of ``make_model()``; each rank gets its shards. For a decoder, ranks draw or read one parameter
    at a time. For other models, rank 0 has the whole model on its CPU. All ranks call it."""
    models = models_of(args)
    if one_by_one := getattr(models, "init_weights", None):
        return one_by_one(args, model, classes)
    weights = models.make_model(args, classes).state_dict() if world().rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)


def check_is_gpt(args: argparse.Namespace) -> None:
    if data_of(args) is not jobs.text:
        fail(
            f"--model {args.model}: {this_script()}.py supports only decoders; use "
            "gpt-nano, gpt-mini, gpt2, gpt-LxHxD or llama-LxHxD"
        )
    if args.experts and this_script() != "pytorch_EP":
        fail(
            f"--experts {args.experts}: {this_script()}.py has no mixture of experts; use "
            "pytorch_EP.py"
        )


def fill_defaults(args: argparse.Namespace) -> None:
    """Fill in the defaults of the task, and reject flags of other tasks."""
    if args.model in (None, "gpt") and args.dataset != "reviews" and jobs.decoder.is_folder(args):
        args.model = "llama"
    ours = data_of(args)
    for name in sorted({name for job in DATASETS for name in job.FLAGS} - set(ours.FLAGS)):
        if getattr(args, name) is not None:
            complain(args, ours, f"--{name.replace('_', '-')}", name in jobs.images.FLAGS)
    model = f"--model {args.model}" if args.model else "images"  # the default
    if args.dataset not in DATASETS[ours]:
        fail(
            f"--dataset {args.dataset} is not for {model}; "
            f"use {', '.join(DATASETS[ours])}, or another --model"
        )
    ours.fill_defaults(args)
    named = args.weights in ("none", "imagenet") or "://" in args.weights
    named |= ours is jobs.reviews and jobs.reviews.has_pretrained(args)
    named |= ours is jobs.text and jobs.decoder.is_folder(args)
    if not named and not Path(args.weights).is_file():
        fail(f"--weights {args.weights}: no such file; give none, imagenet or a model.pt")
    if Path(args.weights).resolve() == Path(args.output_dir, "model.pt").resolve():
        fail(f"--weights {args.weights} would be overwritten; give another --output-dir")


def complain(args: argparse.Namespace, ours: ModuleType, flag: str, of_images: bool) -> NoReturn:
    """Reject a flag that belongs to another task."""
    if ours is jobs.images:
        more = ", or --dataset reviews" if flag[2:] in jobs.reviews.FLAGS else ""
        fail(f"{flag} is for a GPT; add --model gpt-nano{more}, or leave it out")
    owner, model = "images" if of_images else "a GPT", args.model or "an encoder"
    fail(f"{flag} is for {owner}, and {model} reads text; leave it out")
