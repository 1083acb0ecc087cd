"""Which job a command line asks for: a model that begins with "gpt" reads text, others see images.

Both jobs offer the same functions, so that nothing above them asks which one it is.
"""

import argparse
from pathlib import Path
from types import ModuleType

import jobs.classifiers
import jobs.gpt
import jobs.images
import jobs.text
from harness.command_line import fail, place, positive

DATASETS = {
    jobs.images: ["auto", "cifar10", "folder", "synthetic"],
    jobs.text: ["auto", "shakespeare", "text", "synthetic"],
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say which data, and which model."""
    # fmt: off
    flag = parser.add_argument_group("the job").add_argument
    flag("--model", metavar="NAME",
         help="any torchvision classifier, or a GPT: gpt-nano, gpt-mini, gpt2 or gpt-LxHxD, such "
         "as gpt-4x4x128 (default: resnet50 on a GPU, resnet18 on a CPU)")
    flag("--dataset", default="auto",
         choices=["auto", "cifar10", "folder", "shakespeare", "text", "synthetic"],
         help="auto (default): CIFAR-10, or for a GPT Shakespeare, if present or downloadable, "
         "else synthetic")
    flag("--data-dir", type=place, default=Path("data"), metavar="DIR",
         help="of what is downloaded; of a folder dataset: holds train/ and test/ or val/; of "
         "text: its files, or one file (default: data)")
    flag("--train-samples", type=positive, metavar="N",
         help="use the first N (default: all; 2048 on a CPU, except of folder and text)")
    flag("--eval-samples", type=positive, metavar="N",
         help="use the first N (default: all; 1000 on a CPU, except of folder and text)")
    flag("--weights", default="none", metavar="none|imagenet|PATH",
         help="start from these weights (default: none)")
    # fmt: on
    jobs.images.add_flags(parser)
    jobs.text.add_flags(parser)


def data_of(args: argparse.Namespace) -> ModuleType:
    return jobs.text if is_gpt(args) else jobs.images


def models_of(args: argparse.Namespace) -> ModuleType:
    return jobs.gpt if is_gpt(args) else jobs.classifiers


def is_gpt(args: argparse.Namespace) -> bool:
    return (args.model or "").startswith("gpt")


def complete(args: argparse.Namespace) -> None:
    """Fill in what the job's defaults are, and report what belongs to the other one."""
    ours = data_of(args)
    other = jobs.images if ours is jobs.text else jobs.text
    model = args.model or "a classifier"
    for name in other.FLAGS:
        if getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            if ours is jobs.text:
                fail(f"{flag} is for images, and {model} reads text; leave it out")
            fail(f"{flag} is for a GPT; add --model gpt-nano, or leave it out")
    if args.dataset not in DATASETS[ours]:
        fail(
            f"--dataset {args.dataset} is not for --model {model}; "
            f"use {', '.join(DATASETS[ours])}, or another --model"
        )
    ours.complete(args)
    here = args.weights not in ("none", "imagenet") and "://" not in args.weights
    if here and not Path(args.weights).is_file():
        fail(f"--weights {args.weights}: no such file; give none, imagenet or a model.pt")
    output = getattr(args, "urls", {}).get("output_dir", args.output_dir)
    if Path(args.weights).resolve() == Path(output, "model.pt").resolve():
        fail(f"--weights {args.weights} is what this run will replace; give another --output-dir")
