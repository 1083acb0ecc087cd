"""Flags, their defaults, and one-line errors."""

import argparse
import importlib
import math
import os
import shlex
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

from harness.world import this_script, why_ranks_are_unclear, world


def fail(message: object, code: int = 2) -> NoReturn:
    """Report a user error in one line and exit with code 2. A bug keeps its traceback.
    Code 3 is for an error that ended a run after it had started training.

    Usually all ranks of a machine find the same error. Rank 0 prints it and exits, and the launcher
    stops the others while they wait; a rank that is still alive after the wait prints its own.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the signal by which the launcher stops ranks
    if world().local_rank:
        time.sleep(2 + world().local_rank)
    print(f"{this_script()}: error: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def check_writable(folder: Path, flag: str) -> None:
    """Create the folder, and check that files can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        fail(f"{flag} cannot be written ({error.strerror}); give another path")


def import_optional(library: str):
    """Import a library that few scripts need, or fail with the command that installs it."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        fail(f"{library} cannot be imported ({error}); pip install -r requirements-ecosystem.txt")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the docstring, and does not break words of help texts."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


class ArgumentParser(argparse.ArgumentParser):
    """argparse with one-line errors, help from rank 0 only, and comments in ``@FILE``."""

    def add_argument(self, *names: str, **options):
        if "--local-rank" in names:  # the launcher sets it
            options.setdefault("help", argparse.SUPPRESS)
        return super().add_argument(*names, **options)

    def add_flags(self, title: str, shown: bool = True) -> Callable:
        """Add a group of flags.

        Args:
            shown: whether the help shows the flags; they are accepted in any case.

        Returns:
            a function that adds a flag to the group, as ``add_argument()`` does.
        """
        group = self.add_argument_group(title)

        def add_flag(*names: str, help: str, **options):
            group.add_argument(*names, help=help if shown else argparse.SUPPRESS, **options)

        return add_flag

    def error(self, message: str) -> NoReturn:
        fail(f"{message} (--help lists the flags)")

    def print_help(self, file=None) -> None:
        if world().rank == 0:
            super().print_help(file)

    def convert_arg_line_to_args(self, line: str) -> list[str]:
        return shlex.split(line, comments=True)


def number(kind: type, low: float, below: float = math.inf, above: float = -1):
    """An argparse ``type``: an int or float with ``low <= value < below`` and ``value > above``."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text} is not a valid {kind.__name__}") from None
        if not (low <= value < below and value > above):
            limits = f"more than {above}" if above >= low else f"{low} or more"
            limits += f" and less than {below}" if below < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text} is out of range, it must be {limits}")
        return value

    return parse


def trim_url(text: str) -> str:
    """An argparse ``type``: strip the trailing slashes of a URL; leave other text as it is."""
    protocol, is_url, rest = text.partition("://")
    return f"{protocol}://{rest.rstrip('/')}" if is_url else text


def place(text: str) -> Path | str:
    """An argparse ``type``: a local path, or a URL."""
    return trim_url(text) if "://" in text else Path(text)


positive, not_negative = number(int, 1), number(int, 0)


def make_parser(doc: str) -> ArgumentParser:
    """A parser without flags. Flags that the script adds directly come first in its help.

    Args:
        doc: the script's docstring, shown by ``--help``.
    """
    parser = ArgumentParser(
        description=doc,
        usage="%(prog)s [flags]",
        add_help=False,  # --help is in the last group
        formatter_class=HelpFormatter,
        fromfile_prefix_chars="@",
        allow_abbrev=False,
        epilog="@FILE reads flags from a file, for example @config/reference.args",
    )
    parser._optionals.title = "this technique"
    return parser


def add_training_flags(parser: ArgumentParser) -> None:
    """Add the flags of training, for any model."""
    # fmt: off
    flag = parser.add_flags("training")
    flag("-b", "--batch-size", type=positive, default=128, metavar="N",
         help="GLOBAL batch size, divided among the ranks (default: 128)")
    flag("--epochs", type=positive, default=5, metavar="N", help="number of epochs (default: 5)")
    flag("--max-steps", type=positive, metavar="N",
         help="stop after N optimizer steps (default: no limit)")
    flag("--optimizer", choices=["sgd", "adamw"],
         help="optimizer (default: sgd for images, else adamw)")
    flag("--lr", type=number(float, 0, above=0), metavar="X",
         help="peak learning rate (default: sgd 0.05, or 0.01 without BatchNorm; adamw 0.001)")
    flag("--schedule", choices=["cosine", "plateau", "none"], default="cosine",
         help="learning-rate schedule: cosine decay after a linear warm-up (default); plateau: "
         "divide by ten after two evaluations without improvement; none: constant")
    flag("--warmup-steps", type=not_negative, metavar="N",
         help="warm-up steps of the cosine schedule (default: a tenth of all steps)")
    flag("--momentum", type=number(float, 0, 1), default=0.9, metavar="X",
         help="momentum of sgd (default: 0.9)")
    flag("--weight-decay", type=number(float, 0), metavar="X",
         help="weight decay (default: sgd 0.0005, adamw 0.01; GPT 0.1 except norms and embeddings)")
    flag("--clip-grad", type=number(float, 0, above=0), metavar="NORM",
         help="clip the global gradient norm to this value (default: off)")
    flag("--on-nan", choices=["watch", "stop", "skip", "ignore"], default="watch",
         help="NaN or Inf: watch (default) checks the loss at every --print-freq-th step and the "
         "weights before a snapshot, and stops the run; stop and skip check before every step, "
         "and stop the run or skip the step; ignore does not check")
    # fmt: on


def add_run_flags(parser: ArgumentParser) -> None:
    """Add the flags for output, hardware, and reproducibility and profiling."""
    # fmt: off
    flag = parser.add_flags("output")
    flag("--output-dir", type=place, default=Path("runs", this_script()), metavar="DIR",
         help="folder for everything that the run writes. This and --resume, --data-dir and "
         f"--weights may be URLs, such as s3://bucket/run (default: runs/{this_script()})")
    flag("--resume", metavar="auto|none|PATH", default="none", type=trim_url,
         help="resume from this snapshot; auto: from the newest valid one in --output-dir, if any "
         "(default: none, but a run that its launcher restarts resumes)")
    flag("--snapshot-every", type=positive, default=1000, metavar="N",
         help="write a snapshot every N steps, and after every epoch (default: 1000)")
    flag("--on-save-error", choices=["continue", "stop"], default="continue",
         help="what to do when a snapshot cannot be written (default: continue)")
    flag("--print-freq", type=positive, default=10, metavar="N",
         help="update the progress bar and TensorBoard every N steps (default: 10)")
    flag = parser.add_flags("hardware")
    flag("--device", choices=["auto", "cpu", "cuda"], default="auto",
         help="device to train on (default: auto, a GPU if there is one)")
    flag("-j", "--workers", type=not_negative, metavar="N",
         help="loader processes per rank (default: 0; 4 for an image folder larger than memory)")
    flag("--timeout", type=number(float, 0, above=0), default=1800, metavar="SECONDS",
         help="timeout of a collective and of a download (default: 1800)")
    flag = parser.add_flags("reproducibility and profiling")
    flag("--seed", type=number(int, 0, 2**32), default=0, metavar="N",
         help="seed of weights, data order and dropout (default: 0)")
    flag("--deterministic", action="store_true", help="bitwise reproducible results; slower")
    flag("--double", action="store_true", help="compute in float64")
    flag("--profile-memory", action="store_true",
         help="on a CPU, measure the peak memory of tensors in the last step; slower (on a GPU it "
         "is always measured)")
    flag("--trace", type=positive, metavar="N",
         help="write a Chrome trace per rank of the N steps before the last one, to the folder "
         "trace in --output-dir; timeline.py draws them (default: no trace)")
    flag("-h", "--help", action="help", help="print this help and exit")
    # fmt: on


def check_flags(args: argparse.Namespace) -> None:
    """Choose the device, and check the flags that all training tasks have.

    ``None`` stays where it means "no limit", or where the task has its own default.
    """
    if why := why_ranks_are_unclear():
        fail(why)
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: PyTorch finds no GPU here; use --device cpu")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.trace and args.profile_memory:
        fail("--trace and --profile-memory both profile the last step; leave out one of them")
    first = world().restarts == 0  # after a restart, the run resumes from its own snapshots
    here = args.resume not in ("auto", "none") and "://" not in args.resume
    if first and here and not Path(args.resume).exists():
        fail(f"--resume {args.resume}: no such folder; give auto, none or a snapshot's folder")


def settings(args: argparse.Namespace) -> list[str]:
    """The flags that repeat this run from its start, with all defaults."""
    words = []
    for name, value in vars(args).items():
        if name not in ("local_rank", "resume") and value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


def given_flags() -> str:
    """The flags on the command line, including those of ``@FILE``, without those that the launcher
    added."""
    words = []
    for word in sys.argv[1:]:
        is_file = word.startswith("@")
        words += shlex.split(Path(word[1:]).read_text(), comments=True) if is_file else [word]
    launchers = ("--local-rank", "--local_rank")
    return shlex.join(word for word in words if word.partition("=")[0] not in launchers)
