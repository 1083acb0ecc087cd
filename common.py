"""What is the same in every training script: command line, data, model, metrics, files.

A script holds one technique and this file the job, so that two scripts differ by their technique
and by nothing else. From top to bottom:

    mistakes      one line, exit code 2
    command line  flags and their defaults
    device        which one, how many threads, seeds
    data          four datasets, one loader, crops and flips in batches on the device
    model         any torchvision classifier
    optimizer     SGD or AdamW, warm-up and cosine
    evaluation    every sample counted once
    files         written whole or not at all
    Run           progress, timing, memory, TensorBoard, snapshots, result.json

What a run does when something goes wrong is decided here and done in fault_tolerance.py.
"""

import argparse
import atexit
import contextlib
import difflib
import functools
import importlib.metadata
import itertools
import json
import math
import os
import platform
import resource
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # noqa: F401  here and not later: see let_go_of_tensors()
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, SequentialSampler
from tqdm import tqdm

import fault_tolerance

# torchvision and TensorBoard are imported where they are used: four ranks that share two cores
# take seconds over them, and a run should show its first line before that.

STARTED = time.perf_counter()
SCRIPT = Path(sys.argv[0]).stem  # names the technique: pytorch_DDP, pytorch_FSDP, ...

# Set by every launcher (torchrun, torch.distributed.launch, deepspeed), not by plain `python`.
RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_WORLD_SIZE = int(  # which deepspeed calls LOCAL_SIZE
    os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or WORLD_SIZE
)
LAUNCHED = "LOCAL_RANK" in os.environ

# ------------------------------------------------------------------------------------ mistakes


def fail(message: object, code: int = 2) -> NoReturn:
    """Report a mistake of the user's in one line and exit with code 2. A bug keeps its traceback.
    With code 3, report what ended a run that had begun well.

    Usually every rank finds the same mistake at about the same time: local rank 0 reports it, while
    the others wait to be stopped by the launcher and speak only if they turn out to be alone.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # with which the launcher stops them
    if LOCAL_RANK != 0:
        time.sleep(10)
    print(f"{SCRIPT}: error: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def say(message: str) -> None:
    """Print a line, on rank 0 only."""
    if RANK == 0:
        print(message, flush=True)


# -------------------------------------------------------------------------------- command line

# The reference job, and one that two CPU cores finish in about a minute.
DEFAULTS = {
    "cuda": {"model": "resnet50", "image_size": 224},
    "cpu": {"model": "resnet18", "image_size": 32, "train_samples": 2048, "eval_samples": 1000},
}
HALF = {"cuda": "float16", "cpu": "bfloat16"}  # what most GPUs, and what CPUs, are fast in


class ArgumentParser(argparse.ArgumentParser):
    """argparse with mistakes in one line, help from one rank, and comments in ``@FILE``."""

    def error(self, message: str) -> NoReturn:
        fail(f"{message} (--help lists the flags)")

    def print_help(self, file=None) -> None:
        if RANK == 0:
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


def argument_parser(doc: str) -> argparse.ArgumentParser:
    """The flags that all training scripts share; a script adds those of its technique.

    Args:
        doc: the script's docstring, shown by ``--help``.
    """
    parser = ArgumentParser(
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        fromfile_prefix_chars="@",
        allow_abbrev=False,
        epilog="@FILE reads flags from a file, for example @config/reference.args",
    )
    positive, not_negative = number(int, 1), number(int, 0)
    # fmt: off
    flag = parser.add_argument_group("the job").add_argument
    flag("--dataset", choices=["auto", "cifar10", "folder", "synthetic"], default="auto",
         help="auto (default): CIFAR-10 if present or downloadable, else synthetic")
    flag("--data-dir", type=Path, default=Path("data"), metavar="DIR",
         help="of CIFAR-10; of a folder dataset: holds train/ and test/ or val/ (default: data)")
    flag("--train-samples", type=positive, metavar="N",
         help="use the first N (default: all; 2048 on a CPU, except of a folder)")
    flag("--eval-samples", type=positive, metavar="N",
         help="use the first N (default: all; 1000 on a CPU, except of a folder)")
    flag("--model", metavar="NAME",
         help="any torchvision classifier (default: resnet50 on a GPU, resnet18 on a CPU)")
    flag("--norm", choices=["batch", "group", "sync"], default="batch",
         help="keep the model's BatchNorm (default), or put another norm in its place")
    flag("--weights", default="none", metavar="none|imagenet|PATH",
         help="start from these weights (default: none)")
    flag("--image-size", type=positive, metavar="PIXELS",
         help="side of the model's input (default: 224 on a GPU, 32 on a CPU)")
    flag("-b", "--batch-size", type=positive, default=128, metavar="N",
         help="GLOBAL batch, divided among the ranks (default: 128)")
    flag("--epochs", type=positive, default=5, metavar="N", help="(default: 5)")
    flag("--max-steps", type=positive, metavar="N", help="end after N steps (default: no limit)")
    flag("--optimizer", choices=["sgd", "adamw"], default="sgd", help="(default: sgd)")
    flag("--lr", type=number(float, 0, above=0), metavar="X",
         help="peak learning rate (default: sgd 0.05, without BatchNorm 0.01; adamw 0.001)")
    flag("--momentum", type=number(float, 0, 1), default=0.9, metavar="X",
         help="of sgd (default: 0.9)")
    flag("--weight-decay", type=number(float, 0), metavar="X",
         help="(default: sgd 0.0005, adamw 0.01)")
    flag("--warmup-steps", type=not_negative, metavar="N", help="(default: a tenth of all steps)")
    flag("--on-nan", choices=["stop", "skip", "ignore"], default="stop",
         help="when loss or gradients are not finite: stop all ranks before the weights change "
         "(default), leave out the step, or do not look")
    flag = parser.add_argument_group("the machine").add_argument
    flag("--device", choices=["auto", "cpu", "cuda"], default="auto", help="(default: auto)")
    flag("-j", "--workers", type=not_negative, metavar="N",
         help="loader processes per rank (default: 0; 4 for a folder too large for memory)")
    flag("--seed", type=number(int, 0, 2**32), default=0, metavar="N", help="(default: 0)")
    flag("--deterministic", action="store_true", help="the same bits in every run, more slowly")
    flag("--double", action="store_true", help="compute in float64, to compare techniques")
    flag("--timeout", type=number(float, 0, above=0), default=1800, metavar="SECONDS",
         help="the longest wait of a rank for the others, a download included (default: 1800)")
    flag = parser.add_argument_group("the files").add_argument
    flag("--output-dir", type=Path, default=Path("runs", SCRIPT), metavar="DIR",
         help=f"(default: runs/{SCRIPT})")
    flag("--resume", metavar="auto|none|PATH", default="none",
         help="continue from a snapshot; auto: from the newest good one in --output-dir, if any "
         "(default: none; but a job that its launcher restarts goes on)")
    flag("--snapshot-every", type=positive, default=1000, metavar="N",
         help="steps, besides the end of every epoch (default: 1000)")
    flag("--on-save-error", choices=["continue", "stop"], default="continue",
         help="when a snapshot cannot be written (default: continue)")
    flag("--print-freq", type=positive, default=10, metavar="N",
         help="steps from one update of bar and TensorBoard to the next (default: 10)")
    # fmt: on
    return parser


def parse_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line, fill in what depends on the device, and check it all at once.

    ``None`` is left where it means "no limit", "all of it" or "a tenth of all steps".
    """
    fault_tolerance.end_with_launcher()
    if WORLD_SIZE == LOCAL_WORLD_SIZE:
        fault_tolerance.stay_on_this_machine()
    args = parser.parse_args()
    fault_tolerance.explain_timeouts(Path(sys.argv[0]).absolute())
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: PyTorch finds no GPU here; use --device cpu")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, value in DEFAULTS[args.device].items():
        whole_folder = args.dataset == "folder" and name.endswith("_samples")
        if getattr(args, name) is None and not whole_folder:
            setattr(args, name, value)
    if args.lr is None:
        plain = args.model.startswith(("alexnet", "squeezenet", "vgg"))
        args.lr = 0.001 if args.optimizer == "adamw" else 0.01 if plain else 0.05
    if args.weight_decay is None:
        args.weight_decay = 0.01 if args.optimizer == "adamw" else 0.0005
    if getattr(args, "dtype", "") is None:
        args.dtype = HALF[args.device]
    if args.double and getattr(args, "dtype", "float32") != "float32":
        fail(
            f"--double computes in float64, and this run in {args.dtype}; leave out one of the two"
        )
    if args.norm == "sync" and args.device == "cpu":
        fail("--norm sync: SyncBatchNorm runs on GPUs only; use --norm batch or --norm group")
    if args.batch_size % WORLD_SIZE:
        near = max(args.batch_size // WORLD_SIZE, 1) * WORLD_SIZE
        fail(
            f"--batch-size {args.batch_size} is the global batch and is not divisible by "
            f"{WORLD_SIZE} ranks; use --batch-size {near}"
        )
    first = fault_tolerance.RESTARTS == 0  # later, the snapshots of this very run take its place
    if first and args.resume not in ("auto", "none") and not Path(args.resume).exists():
        fail(f"--resume {args.resume}: no such folder; give auto, none or that of a snapshot")
    if args.weights not in ("none", "imagenet") and not Path(args.weights).is_file():
        fail(f"--weights {args.weights}: no such file; give none, imagenet or a model.pt")
    if Path(args.weights).resolve() == (args.output_dir / "model.pt").resolve():
        fail(f"--weights {args.weights} is what this run will replace; give another --output-dir")
    if RANK == 0:
        check_writable(args.output_dir, f"--output-dir {args.output_dir}")
    if args.double:
        torch.set_default_dtype(torch.float64)
    return args


def check_writable(folder: Path, flag: str) -> None:
    """Make the folder, and see whether files can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        fail(f"{flag} cannot be written ({error.strerror}); give another")


def settings(args: argparse.Namespace) -> list[str]:
    """The flags that repeat this run from its start, defaults spelled out."""
    words = []
    for name, value in vars(args).items():
        if name not in ("local_rank", "resume") and value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


def announce(args: argparse.Namespace, device: torch.device) -> None:
    """Print what runs where, and all settings. Then check the model's name, before any data."""
    if WORLD_SIZE > 1 and not dist.is_initialized():
        fail(
            f"{SCRIPT}.py is one process but was started as {WORLD_SIZE} ranks; start it with "
            f"python {SCRIPT}.py, or use pytorch_torchrun_DDP.py"
        )
    backend = f" ({dist.get_backend()})" if dist.is_initialized() else ""
    batch = f"global batch {args.batch_size} = {WORLD_SIZE} x {args.batch_size // WORLD_SIZE}"
    say(
        f"{SCRIPT}: {WORLD_SIZE} x {device_name(device)}{backend}, {args.model} at "
        f"{args.image_size}x{args.image_size}, dataset {args.dataset}, {batch} per rank"
    )
    say(f"settings: {shlex.join(settings(args))}")
    check_model_name(args.model)


def check_model_name(model: str) -> None:
    import torchvision

    names = torchvision.models.list_models(module=torchvision.models)
    if model not in names:
        close = difflib.get_close_matches(model, names) or ["resnet18", "resnet50"]
        fail(f"--model {model} is not a torchvision classifier; try {', '.join(close)}")


# -------------------------------------------------------------------------------------- device


def make_store(args: argparse.Namespace) -> dist.Store:
    """Where ranks find each other's addresses: that of the launcher, or none for a world of one.

    ``torchrun`` keeps one store for all attempts, and a restarted rank may find there the address
    of one that is dead, and hang. So each attempt has keys of its own. On several machines, whose
    agents count the attempts apart, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 has to do that.
    """
    if not LAUNCHED:
        return dist.HashStore()
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=args.timeout)))
    if LOCAL_WORLD_SIZE == WORLD_SIZE:
        store = dist.PrefixStore(f"attempt {fault_tolerance.RESTARTS}", store)
    return store


def get_device(args: argparse.Namespace, local_rank: int = 0) -> torch.device:
    """GPU number ``local_rank``, or the CPU, whose cores the ranks of a machine share equally."""
    if args.device == "cuda":
        gpus = torch.cuda.device_count()
        if max(local_rank + 1, LOCAL_WORLD_SIZE) > gpus:
            fail(
                f"{LOCAL_WORLD_SIZE} ranks need as many GPUs, and this machine has {gpus}; "
                f"use --nproc_per_node={gpus}, or --device cpu"
            )
        return torch.device("cuda", local_rank)
    # For several ranks launchers set OMP_NUM_THREADS=1. Any other number is the user's own.
    if LOCAL_WORLD_SIZE > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, cores // LOCAL_WORLD_SIZE))
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def get_dtype(args: argparse.Namespace, device: torch.device) -> torch.dtype:
    """``--dtype``, if the device can train in it."""
    dtype = getattr(torch, args.dtype)
    other = "float16" if args.dtype == "bfloat16" else "bfloat16"
    if device.type == "cuda" and dtype == torch.bfloat16:
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            fail(f"--dtype bfloat16: {device_name(device)} has none; use --dtype {other}")
    try:
        ones = torch.ones(1, 1, 1, 1, device=device, dtype=dtype, requires_grad=True)
        F.conv2d(ones, ones).sum().backward()
    except RuntimeError as error:
        fail(f"--dtype {args.dtype}: {device_name(device)} cannot ({error}); use --dtype {other}")
    if device.type == "cpu" and dtype == torch.float16:
        say("float16 on a CPU: many CPUs have no fast convolution in it; bfloat16 is the usual one")
    return dtype


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seed the weights and dropout. Order and crops of the data have generators of their own."""
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = not deterministic  # pays off, as all batches have one shape
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


# ---------------------------------------------------------------------------------------- data

# ImageNet's, because torchvision's pretrained weights expect them; a network that is trained from
# scratch would do as well with others.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IN_MEMORY_BYTES = 4 * 2**30  # for the ranks of a machine together; more is decoded by the batch


class Images(Dataset):
    """Images in memory, as one tensor: a batch is one index operation.

    Args:
        images: uint8 ``[n, 3, side, side]``.
        labels: int64 ``[n]``.
        classes: the name of each class.
        image_size: side of the model's input, to which the device resizes a batch.
    """

    def __init__(self, images, labels: Tensor, classes: list[str], image_size: int):
        self.images, self.labels = images, labels
        self.classes, self.image_size = classes, image_size

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """What a DataLoader calls for a batch: ``[batch, 3, side, side]`` and ``[batch]``."""
        index = torch.tensor(indices)
        return self.images[index], self.labels[index]


class ImagesOnDisk(Images):
    """The same of files, decoded when a batch needs them: ``images`` is a list of paths."""

    def __init__(self, images: list[str], labels, classes, image_size: int, side: int):
        super().__init__(images, labels, classes, image_size)
        self.side = side

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        images = torch.stack([read_image(self.images[i], self.side) for i in indices])
        return images, self.labels[torch.tensor(indices)]


class UnreadableImage(Exception):
    """An image file that cannot be decoded."""


@contextlib.contextmanager
def open_image(path: str) -> Iterator[Image.Image]:
    try:
        with Image.open(path) as image:
            yield image
    except Exception as error:  # damaged files raise any of a dozen types
        raise UnreadableImage(
            f"cannot read the image {path} ({type(error).__name__}); repair or remove it"
        ) from error


def read_image(path: str, side: int) -> Tensor:
    """Decode a file to uint8 ``[3, side, side]``: short side resized, then the middle cut out."""
    with open_image(path) as file:
        if file.mode.startswith("I"):  # 16 bits, of which convert() would cut off the upper half
            file = Image.fromarray((np.asarray(file) // 256).clip(0, 255).astype(np.uint8))
        image = ImageOps.fit(file.convert("RGB"), (side, side), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def make_datasets(args: argparse.Namespace) -> tuple[Images, Images]:
    """The training and the evaluation set, of the same classes. Settles what ``auto`` means."""
    why = None
    if args.dataset in ("auto", "cifar10"):
        why = fetch_cifar10(args.data_dir)
        if why and args.dataset == "cifar10":
            fail(
                f"--dataset cifar10: not in {args.data_dir}, and could not be downloaded ({why}); "
                f"put cifar-10-batches-py into {args.data_dir}, or use --dataset synthetic"
            )
        args.dataset = "synthetic" if why else "cifar10"
    make = {"cifar10": cifar10, "folder": folder, "synthetic": synthetic}[args.dataset]
    train_set, eval_set = make(args, "train"), make(args, "eval")
    odd = set(train_set.classes) ^ set(eval_set.classes)
    if odd:
        fail(
            f"--data-dir {args.data_dir}: both splits need the same class folders; "
            f"only one of them has {', '.join(sorted(odd))}"
        )
    because = (
        f" (CIFAR-10 is not in {args.data_dir} and could not be downloaded: {why})" if why else ""
    )
    say(
        f"data: {args.dataset}{because}, {len(train_set):,} training and {len(eval_set):,} "
        f"evaluation images, {len(train_set.classes)} classes"
    )
    return train_set, eval_set


def how_many(args: argparse.Namespace, split: str, available: int) -> int:
    """``--train-samples`` or ``--eval-samples``, where it is given, of those available."""
    wanted = getattr(args, f"{split}_samples") or available
    if wanted > available:
        fail(f"--{split}-samples {wanted}: there are {available}; ask for no more than that")
    return wanted


def fetch_cifar10(data_dir: Path) -> str | None:
    """Download CIFAR-10 if it is missing: one attempt, by local rank 0, while the others wait.

    Returns:
        ``None`` where every rank finds it, else the reason, on every rank.
    """
    from torchvision.datasets import CIFAR10

    batches, why = data_dir / CIFAR10.base_folder, ""
    if LOCAL_RANK == 0 and not batches.is_dir():
        answers = ["no answer within 5 s"]

        def ask_for_headers():
            request = urllib.request.Request(CIFAR10.url, method="HEAD")
            try:
                urllib.request.urlopen(request, timeout=10).close()
                answers.append("")
            except Exception as error:  # of urllib, http.client, ssl or socket
                answers.append(str(error))

        # A thread, because looking up a host obeys no timeout; it may be left behind.
        thread = threading.Thread(target=ask_for_headers, daemon=True)
        thread.start()
        thread.join(timeout=5)
        why = answers[-1]
        if not why:
            if hasattr(tarfile, "data_filter"):  # nothing is extracted to outside of the folder
                tarfile.TarFile.extraction_filter = staticmethod(tarfile.data_filter)
            try:
                CIFAR10(data_dir, download=True)
            except Exception as error:  # the same, or of a damaged archive
                why = str(error)
    # Only those who downloaded vote: the others may be looking at a folder that is half there.
    failed = max_over_ranks([LOCAL_RANK == 0 and not batches.is_dir()])[0]
    return (why or "it failed on another machine") if failed else None


def cifar10(args: argparse.Namespace, split: str) -> Images:
    """CIFAR-10 (Krizhevsky 2009): 50,000 + 10,000 images of 32x32, checksums verified."""
    from torchvision.datasets import CIFAR10

    try:
        source = CIFAR10(args.data_dir, train=split == "train")
    except (OSError, RuntimeError, EOFError) as error:
        fail(f"CIFAR-10 in {args.data_dir} is damaged ({error}); remove it and start again")
    n = how_many(args, split, len(source))
    images = torch.from_numpy(source.data[:n]).permute(0, 3, 1, 2).contiguous()
    return Images(images, torch.tensor(source.targets[:n]), source.classes, args.image_size)


def folder(args: argparse.Namespace, split: str) -> Images:
    """A folder per class, below ``train/`` and below ``test/`` or ``val/`` of ``--data-dir``.

    The files come in a fixed shuffle: their first n would otherwise be of the first class.
    """
    from torchvision.datasets import ImageFolder

    names = ["train"] if split == "train" else ["test", "val"]
    roots = [args.data_dir / name for name in names if (args.data_dir / name).is_dir()]
    if not roots:
        fail(
            f"--data-dir {args.data_dir}: there is no {' or '.join(names)} folder in it; "
            "give the folder that holds train/ and test/"
        )
    try:
        source = ImageFolder(roots[0])
    except FileNotFoundError as error:
        fail(f"--data-dir {args.data_dir}: {error}; {roots[0]} needs a folder of images per class")
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))
    order = order[: how_many(args, split, len(source))]
    paths, labels = [source.samples[i][0] for i in order], torch.tensor(source.targets)[order]
    try:
        short_sides = []
        for path in paths[:100]:
            with open_image(path) as image:
                short_sides.append(min(image.size))
        # Large images are stored as small as the model's input, small ones as they are.
        side = min(args.image_size, max(short_sides))
        if len(paths) * 3 * side**2 * LOCAL_WORLD_SIZE > IN_MEMORY_BYTES:
            return ImagesOnDisk(paths, labels, source.classes, args.image_size, side)
        images = torch.empty(len(paths), 3, side, side, dtype=torch.uint8)
        hidden = None if RANK == 0 else True  # None: shown if there is a terminal
        for i, path in enumerate(tqdm(paths, f"reading {roots[0]}", leave=False, disable=hidden)):
            images[i] = read_image(path, side)
    except UnreadableImage as error:
        fail(error)
    return Images(images, labels, source.classes, args.image_size)


def synthetic(args: argparse.Namespace, split: str) -> Images:
    """Ten classes drawn from the seed, of CIFAR-10's shape: no file and no network needed.

    A class is a smooth random pattern; an image is the sum of its class's, another one and noise.
    Image i is the same however many there are.
    """
    n = getattr(args, f"{split}_samples") or {"train": 50_000, "eval": 10_000}[split]
    images, labels = torch.empty(n, 3, 32, 32, dtype=torch.uint8), torch.empty(n, dtype=torch.int64)
    of_class = smooth_patterns(np.random.default_rng((args.seed, 0)), 10)
    for start in range(0, n, 1000):
        rng = np.random.default_rng((args.seed, {"train": 1, "eval": 2}[split], start))
        chunk = slice(start, min(start + 1000, n))
        labels[chunk] = torch.from_numpy(rng.integers(10, size=1000))[: n - start]
        drawn = smooth_patterns(rng, 1000)
        drawn += torch.from_numpy(rng.standard_normal(drawn.shape, dtype=np.float32))
        drawn = of_class[labels[chunk]] + drawn[: n - start]
        images[chunk] = (128 + 32 * drawn).clamp(0, 255).to(torch.uint8)
    return Images(images, labels, [f"class {i}" for i in range(10)], args.image_size)


def smooth_patterns(rng: np.random.Generator, n: int) -> Tensor:
    """float32 ``[n, 3, 32, 32]``: 4x4 normal values, enlarged."""
    coarse = torch.from_numpy(rng.standard_normal((n, 3, 4, 4), dtype=np.float32))
    return F.interpolate(coarse, size=32, mode="bicubic")


def make_loader(
    args: argparse.Namespace,
    dataset: Images,
    batch_size: int,
    sampler: Sampler | None = None,
    drop_last: bool = False,
) -> DataLoader:
    """A loader of uint8 images ``[batch_size, 3, side, side]`` and int64 labels, on the CPU.

    Args:
        batch_size: of one rank.
        sampler: the order; ``None`` takes the images as they come.
        drop_last: leave out an incomplete last batch, as training does.
    """
    if drop_last and len(dataset) < args.batch_size:
        fail(
            f"--batch-size {args.batch_size} is more than the {len(dataset)} training images; "
            "use a smaller one"
        )
    workers = args.workers
    if workers is None:
        workers = 4 if isinstance(dataset, ImagesOnDisk) else 0
    if workers:
        atexit.register(fault_tolerance.end_loaders)
    return DataLoader(
        dataset,
        batch_sampler=Batches(sampler or SequentialSampler(dataset), batch_size, drop_last),
        collate_fn=as_it_is,  # the dataset hands out whole batches
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=args.device == "cuda",
        worker_init_fn=fault_tolerance.leave_signals_to_the_main_process,
        generator=torch.Generator(),  # it draws a seed every epoch: not out of dropout's sequence
    )


class Batches(BatchSampler):
    """Batches of indices. A run that goes on within an epoch leaves out the first ``begin``."""

    begin = 0

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(super().__iter__(), self.begin, None)


def as_it_is(batch):
    return batch


def readable(loader: DataLoader) -> Iterator[tuple[Tensor, Tensor]]:
    """The loader's batches, up to an image that cannot be read."""
    try:
        yield from loader
    except UnreadableImage as error:  # a worker process puts its traceback before the message
        fail(str(error).rpartition("UnreadableImage: ")[2])


def draw_crops(seed: int, epoch: int, step: int, batch_size: int, side: int) -> Tensor:
    """Random crops and flips of a GLOBAL batch: a function of (seed, epoch, step) only, so that
    they are the same at every world size and after a resume.

    Returns:
        int64 ``[batch_size, 3]``: row and column in the padded image, and whether to flip.
    """
    places = 2 * (side // 8) + 1
    rng = np.random.default_rng((seed, epoch, step))
    return torch.from_numpy(rng.integers([places, places, 2], size=(batch_size, 3)))


def crop_and_flip(images: Tensor, crops: Tensor) -> Tensor:
    """Pad by an eighth of the side, cut a window out of each image, mirror half of them: for 32x32
    the augmentation of He et al. 2016 (arXiv:1512.03385, section 4.2).

    Args:
        images: ``[n, 3, side, side]``.
        crops: int64 ``[n, 3]`` as drawn by :func:`draw_crops`, on the same device.
    """
    side = images.shape[-1]
    padded = F.pad(images, [side // 8] * 4)
    windows = padded.unfold(2, side, 1).unfold(3, side, 1)  # a view: all windows of all images
    rows, columns, flips = crops.unbind(1)
    images = windows[torch.arange(len(images), device=images.device), :, rows, columns]
    return torch.where(flips.bool()[:, None, None, None], images.flip(3), images)


def to_input(images: Tensor, image_size: int) -> Tensor:
    """uint8 ``[n, 3, side, side]`` to what the model takes: normalized, of the default dtype and
    ``[n, 3, image_size, image_size]``."""
    mean, std = normalization(images.device, torch.get_default_dtype())
    images = images.to(mean.dtype).sub_(mean).div_(std)
    if images.shape[-1] == image_size:
        return images
    shrinks = images.shape[-1] > image_size
    return F.interpolate(images, size=image_size, mode="bilinear", antialias=shrinks)


@functools.cache  # copying them to the GPU at every step would make the CPU wait for the GPU
def normalization(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor([MEAN, STD], dtype=dtype, device=device).mul(255)[..., None, None]


# --------------------------------------------------------------------------------------- model


def make_model(args: argparse.Namespace, classes: list[str]) -> nn.Module:
    """A torchvision classifier with one output per class, on the CPU."""
    import torchvision

    options = {}
    if args.model in ("googlenet", "inception_v3"):  # which have three outputs otherwise
        options = {"aux_logits": False, "init_weights": True}
    model = torchvision.models.get_model(args.model, num_classes=len(classes), **options)
    if args.norm == "group":
        use_group_norm(model)
    check_input(args, model)
    if args.norm == "sync":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if args.weights != "none":
        load_weights(args, model)
    return model


def use_group_norm(module: nn.Module) -> None:
    """Put GroupNorm, which looks at one image only, in the place of BatchNorm."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            groups = math.gcd(32, child.num_features)
            setattr(module, name, nn.GroupNorm(groups, child.num_features))
        else:
            use_group_norm(child)


def check_input(args: argparse.Namespace, model: nn.Module) -> None:
    """Send the shape of a batch through the model, without computing anything."""
    size = args.image_size
    at_once = args.batch_size // WORLD_SIZE // getattr(args, "accumulate", 1)
    images = torch.empty(min(at_once, 2), 3, size, size, device="meta")
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    try:
        torch.func.functional_call(model, {name: t.to("meta") for name, t in tensors}, images)
    except (RuntimeError, ValueError, AssertionError) as error:
        fail(
            f"--model {args.model} cannot train on {at_once} images of {size}x{size} at once "
            f"({error}); use a larger --image-size or --batch-size"
        )


def load_weights(args: argparse.Namespace, model: nn.Module) -> None:
    """Load ``--weights``: a ``model.pt`` as it is, or ImageNet's without the last layer."""
    expected = model.state_dict()
    if args.weights == "imagenet":
        weights = {k: v for k, v in imagenet_weights(args).items() if k in expected}
        weights = expected | {k: v for k, v in weights.items() if v.shape == expected[k].shape}
    else:
        weights = load_file(args.weights, "--weights")
    shapes = {name: t.shape for name, t in expected.items()}
    theirs = {name: getattr(t, "shape", None) for name, t in weights.items()}
    wrong = sorted(name for name, _ in shapes.items() ^ theirs.items())
    if wrong:
        fail(
            f"--weights {args.weights} does not fit --model {args.model} --norm {args.norm} with "
            f"this dataset's classes: entries such as {wrong[0]} differ; give its own settings"
        )
    model.load_state_dict(weights)


def imagenet_weights(args: argparse.Namespace) -> dict[str, Tensor]:
    """torchvision's own, downloaded by local rank 0 and then read by all."""
    import torchvision

    weights = None
    for my_turn in (LOCAL_RANK == 0, LOCAL_RANK != 0):
        if my_turn:
            try:
                source = torchvision.models.get_model_weights(args.model).DEFAULT
                weights = source.get_state_dict(progress=LOCAL_RANK == 0, check_hash=True)
            except (OSError, RuntimeError) as error:
                fail(f"--weights imagenet: could not be downloaded ({error}); give a file's path")
        max_over_ranks([0])  # a barrier
    return weights


# ----------------------------------------------------------------------- optimizer and schedule


def make_optimizer(args: argparse.Namespace, parameters: Iterable) -> torch.optim.Optimizer:
    kind, options = optimizer_class(args)
    return kind(parameters, **options)


def optimizer_class(args: argparse.Namespace) -> tuple[type[torch.optim.Optimizer], dict]:
    """What :func:`make_optimizer` makes, and with which options."""
    options = {"lr": args.lr, "weight_decay": args.weight_decay}
    if args.optimizer == "adamw":
        return torch.optim.AdamW, options
    return torch.optim.SGD, options | {"momentum": args.momentum}


def make_scheduler(
    args: argparse.Namespace, optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Linear warm-up (Goyal et al. 2017, arXiv:1706.02677), then half a cosine that reaches 0 after
    the last step (Loshchilov and Hutter 2017, arXiv:1608.03983). Stepped after every step."""
    total = total_steps(args, steps_per_epoch)
    warmup = total // 10 if args.warmup_steps is None else args.warmup_steps

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, total - warmup))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def total_steps(args: argparse.Namespace, steps_per_epoch: int) -> int:
    return min(args.epochs * steps_per_epoch, args.max_steps or sys.maxsize)


# ---------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> dict[str, float]:
    """Loss and accuracy over the whole set, every sample counted once at any world size.

    Ranks must run equally many forwards, so ``DistributedSampler`` repeats some samples to make the
    shards equal. Rank r's k-th sample is number ``r + k * world_size``: what lies beyond the end of
    the set is masked out of the sums.

    Args:
        model: the plain model. A wrapper whose forward communicates will do where all ranks
            call it, as all run equally many forwards. It gets images of its parameters' dtype.
        loader: in order; on several ranks with ``DistributedSampler(shuffle=False)``.

    Returns:
        ``loss`` (mean cross-entropy), ``accuracy`` (0 to 1) and ``samples``, equal on all ranks.
    """
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct answers, samples
    seen = 0
    dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
    for images, labels in readable(loader):
        labels = labels.to(device, non_blocking=True)
        images = to_input(images.to(device, non_blocking=True), loader.dataset.image_size)
        logits = model(images.to(dtype)).double()
        numbers = RANK + WORLD_SIZE * torch.arange(seen, seen + len(labels), device=device)
        real = numbers < len(loader.dataset)
        losses = F.cross_entropy(logits, labels, reduction="none")
        correct = logits.argmax(1) == labels
        sums += torch.stack([losses, correct, torch.ones_like(losses)]) @ real.double()
        seen += len(labels)
    if dist.is_initialized():
        dist.all_reduce(sums)
    loss, correct, samples = sums.tolist()
    if samples != len(loader.dataset):
        raise RuntimeError(f"evaluated {samples:.0f} samples instead of {len(loader.dataset)}")
    return {"loss": loss / samples, "accuracy": correct / samples, "samples": int(samples)}


# --------------------------------------------------------------------------------------- files


def save_file(state: dict, path: Path) -> None:
    """``torch.save`` that leaves the old file or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.part")
    torch.save(state, temporary)
    fault_tolerance.sync(temporary)
    os.replace(temporary, path)
    fault_tolerance.sync(path.parent)


def load_file(path: Path | str, flag: str) -> dict:
    """``torch.load`` of a dict of tensors and plain types, onto the CPU."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise any of a dozen types
        fail(
            f"{flag} {path} cannot be loaded ({type(error).__name__}: damaged, or not only of "
            "tensors); give another"
        )
    if not isinstance(state, dict):
        fail(f"{flag} {path} holds a {type(state).__name__}, not a dict; give another")
    return state


def save_model(state_dict: dict[str, Tensor], output_dir: Path) -> None:
    """Write ``model.pt``, in fp32 (float64 under ``--double``), as plain torchvision loads it."""
    dtype = torch.get_default_dtype()
    state = {
        k: v.to("cpu", dtype if v.is_floating_point() else None) for k, v in state_dict.items()
    }
    save_file(state, output_dir / "model.pt")


# ----------------------------------------------------------------------------------------- run

WARMUP_STEPS = 10  # left out of the speed: allocator, autotuner and caches are settling
# fmt: off
# A snapshot and the run that goes on from it must agree in these flags:
JOB = ["model", "norm", "dataset", "train_samples", "image_size", "batch_size", "optimizer", "lr",
       "momentum", "weight_decay", "seed", "double"]
# and of the run itself these go on:
RESUMED = ["step", "evaluated", "history", "step_seconds", "epoch_seconds", "eval_samples",
           "seconds"]
# fmt: on


class Run:
    """The meter and the files of one run. All ranks call it alike; rank 0 prints and writes.

    Args:
        train_loader: what an epoch consists of.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device, train_loader: DataLoader):
        self.args, self.device, self.train_set = args, device, train_loader.dataset
        self.steps_per_epoch = len(train_loader)
        self.total_steps = total_steps(args, self.steps_per_epoch)
        self.epochs = math.ceil(self.total_steps / self.steps_per_epoch)
        self.start_epoch = self.step = 0  # step: the optimizer's steps, over all epochs
        self.evaluated = 0  # the step after which the model was last evaluated
        self.history = {"train_loss": [], "eval_loss": [], "eval_accuracy": [], "seconds": []}
        self.step_seconds, self.epoch_seconds, self.eval_samples = [], 0.0, 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)  # of this epoch
        self.images = 0
        self.seconds, self.since = 0.0, STARTED
        self.ticks, self.good_buffers, self.stop = [], [], 0
        # torchrun waits for 30 s; nccl would wait for a dead rank longer than that
        patience = 20 if device.type == "cuda" and WORLD_SIZE > 1 else None
        self.stop_request = fault_tolerance.StopRequest(patience)

    def load_snapshot(self, model: nn.Module, optimizer, scheduler, **others) -> None:
        """Go on from the snapshot that ``--resume`` means. If there is none, begin.

        Args:
            others: what else has a ``state_dict()`` and a ``load_state_dict()``, by name.
        """
        path, snapshot = self.find_snapshot("model")
        if snapshot:
            model.load_state_dict(snapshot["model"])
            optimizer.load_state_dict(snapshot["optimizer"])
            for name, other in others.items():
                if snapshot.get(name):
                    other.load_state_dict(snapshot[name])
                else:
                    say(f"{path} has no {name}, which begins anew")
        self.keep_buffers(model)
        self.start(optimizer, scheduler, path, snapshot)

    def save_snapshot(self, model: nn.Module, optimizer, scheduler, **others) -> None:
        """Write a snapshot, from which ``--resume`` goes on: rank 0 does, and all ranks call it.

        It is the folder ``snapshots/step-*`` in ``--output-dir``. The last two are kept.
        """
        self.write_snapshot(model=model, optimizer=optimizer, scheduler=scheduler, **others)

    def load_sharded_snapshot(self, model: nn.Module, optimizer, scheduler) -> None:
        """:meth:`load_snapshot` of a sharded model: each rank reads what it needs, at any number of
        ranks (https://docs.pytorch.org/docs/stable/distributed.checkpoint.html)."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import state_dict as dcp_state

        path, snapshot = self.find_snapshot("param_groups")
        if snapshot:
            try:
                fault_tolerance.check_sharded(path / "shards")
            except fault_tolerance.UntrustedSnapshot as error:
                fail(f"--resume {path} is refused: {error}; give one that you trust")
            weights, state = dcp_state.get_state_dict(model, optimizer)
            shards = {"model": weights, "optimizer": state["state"]}
            dcp.load(shards, checkpoint_id=path / "shards")
            state["param_groups"] = snapshot["param_groups"]
            dcp_state.set_model_state_dict(model, weights)
            dcp_state.set_optimizer_state_dict(model, optimizer, state)
        self.keep_buffers(model)
        self.start(optimizer, scheduler, path, snapshot)

    def save_sharded_snapshot(self, model: nn.Module, optimizer, scheduler) -> None:
        """:meth:`save_snapshot` of a sharded model: each rank writes its shards."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import state_dict as dcp_state

        for buffer in model.buffers():  # of which any rank's may be written
            dist.broadcast(buffer, src=0)
        weights, state = dcp_state.get_state_dict(model, optimizer)
        shards = {"model": weights, "optimizer": state["state"]}

        def write(folder: Path) -> None:
            try:
                dcp.save(shards, checkpoint_id=folder / "shards")
            except dcp.CheckpointException as error:  # in which it wraps those of all ranks
                raise next(iter(error.failures.values()))[0] from None

        self.write_snapshot(
            write,
            count_bytes(tree_leaves(shards)) * WORLD_SIZE,
            scheduler=scheduler,
            param_groups=state["param_groups"],
        )

    def find_snapshot(self, needed: str) -> tuple[Path | None, dict | None]:
        """The snapshot to go on from, the same on all ranks, and what its ``state.pt`` holds.

        A job that its launcher restarts goes on from its own newest, and any other from the one
        that ``--resume`` means. One that does not verify is named and left out.

        Args:
            needed: an entry that the snapshots of this script have.
        """
        path = None
        restarted = max_over_ranks([fault_tolerance.RESTARTS])[0]  # each machine counts its own
        if RANK == 0:
            path = self.newest_of_this_launch() if restarted else None
            path = path or self.snapshot_to_resume()
        [path, *_] = fault_tolerance.everywhere(path)
        if path is None:
            return None, None
        if not path.exists():
            fail(f"{path} is not on this machine; give an --output-dir that all machines share")
        snapshot = load_file(path / "state.pt", "--resume")
        if "job" not in snapshot:
            fail(f"--resume {path} holds no snapshot of these scripts; give another, or none")
        check_job(self.args, path, snapshot)
        if needed not in snapshot:
            fail(
                f"--resume {path} was written by {snapshot['technique']}.py, in another form than "
                f"{SCRIPT}.py reads; give one of its own, or take a model.pt to --weights"
            )
        return path, snapshot

    def newest_of_this_launch(self) -> Path | None:
        """After a restart, the newest snapshot of the attempts before."""
        good = self.good_snapshots(self.args.output_dir / "snapshots")
        return next((path for path, launch in good if launch == fault_tolerance.launch_id()), None)

    def snapshot_to_resume(self) -> Path | None:
        """The snapshot that ``--resume`` means. It may name one, or a folder with several."""
        if self.args.resume == "none":
            return None
        folder = self.args.output_dir / "snapshots"
        if self.args.resume != "auto":
            folder = Path(self.args.resume)
            if not folder.exists():
                fail(f"--resume {folder}: no such folder; give auto, none or that of a snapshot")
            if (self.args.output_dir / "previous").resolve() in folder.resolve().parents:
                fail(f"--resume {folder}: a new run replaces previous/; move it elsewhere first")
            if (folder / "state.pt").exists() or (folder / fault_tolerance.SUMS).exists():
                if damage := fault_tolerance.find_damage(folder):
                    fail(f"--resume {folder} is damaged: {damage}; give another, or auto")
                return folder
            if (folder / "snapshots").is_dir():
                folder = folder / "snapshots"
            if not fault_tolerance.list_snapshots(folder):
                fail(
                    f"--resume {folder} holds no snapshot; give a folder such as "
                    "snapshots/step-00001000 (model.pt goes to --weights)"
                )
        return next((path for path, _ in self.good_snapshots(folder)), None)

    def good_snapshots(self, folder: Path) -> Iterator[tuple[Path, str]]:
        """Those that verify, newest first, each with the launch that wrote it."""
        for path in fault_tolerance.list_snapshots(folder):
            damage = fault_tolerance.find_damage(path)
            if not damage:
                state = load_file(path / "state.pt", "--resume")
                if path.name.split("-")[1] == f"{state.get('step', 0):08}":
                    yield path, state.get("launch")
                    continue
                damage = f"it is of step {state.get('step')}"
            say(f"snapshot {path} is damaged and left out: {damage}")

    def write_snapshot(self, write: Callable = lambda folder: None, size: int = 0, **parts) -> None:
        """Write ``state.pt`` and what else makes a snapshot; and leave, if this is the end.

        Args:
            write: puts further files into the folder that it is given; all ranks call it.
            size: how many bytes, of all ranks.
            parts: what rank 0 writes into ``state.pt``, by name: plain data, or what has a
                ``state_dict()``.
        """
        run_state, state = self.state_dict(), {}
        if RANK == 0:
            for name, part in parts.items():
                state[name] = part.state_dict() if hasattr(part, "state_dict") else part
            state |= run_state
            size += count_bytes(t for t in tree_leaves(state) if torch.is_tensor(t))

        def write_all(folder: Path) -> None:
            write(folder)  # first: if it communicates, all ranks must be there
            if RANK == 0:
                torch.save(state, folder / "state.pt")

        name = f"step-{self.step:08}" + ("-evaluated" if self.evaluated == self.step else "")
        folder = self.args.output_dir / "snapshots" / name
        failure = fault_tolerance.write_snapshot(folder, write_all, size)
        if failure and self.args.on_save_error == "stop":
            fail(f"step {self.step}: {failure}; make room, then go on with --resume auto", code=3)
        if failure:
            say(f"step {self.step}: {failure}; training goes on (--on-save-error continue)")
        if self.stop:
            where = "no snapshot of it" if failure else f"snapshot {folder}"
            say(
                f"stopped by {signal.Signals(self.stop).name} after step {self.step} of "
                f"{self.total_steps}: {where}; go on with --resume auto"
            )
            if RANK == 0:
                self.writer.close()
            leave(128 + self.stop)
        if RANK == 0:
            self.writer.flush()

    def state_dict(self) -> dict:
        """What a snapshot holds of the run itself. All ranks call it."""
        self.seconds_total()
        self.read_ticks()
        own = {"loss_sum": self.loss_sum.item(), "images": self.images}
        own["rng"] = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            own["rng"]["cuda"] = torch.cuda.get_rng_state(self.device)
        state = {name: getattr(self, name) for name in RESUMED}
        state["ranks"] = fault_tolerance.everywhere(own)
        state |= {"technique": SCRIPT, "launch": fault_tolerance.launch_id()}
        return state | {"job": {name: getattr(self.args, name) for name in JOB}}

    def load_state_dict(self, state: dict) -> None:
        """Take up what :meth:`state_dict` returned. At another number of ranks the sums of all go
        to rank 0, and random numbers, which dropout draws, begin anew."""
        for name in RESUMED:
            setattr(self, name, state[name])
        ranks = state["ranks"]
        if len(ranks) == WORLD_SIZE:
            own = ranks[RANK]
            torch.set_rng_state(own["rng"]["cpu"])
            if "cuda" in own["rng"] and self.device.type == "cuda":
                torch.cuda.set_rng_state(own["rng"]["cuda"], self.device)
        else:
            mine = ranks if RANK == 0 else []
            own = {name: sum(rank[name] for rank in mine) for name in ("loss_sum", "images")}
        self.loss_sum += own["loss_sum"]
        self.images = own["images"]
        # The epoch to go on with: one whose steps are done may still have to be evaluated.
        self.start_epoch = (self.step - (self.step > self.evaluated)) // self.steps_per_epoch
        if self.step == self.evaluated >= self.total_steps:
            self.start_epoch = self.epochs
        self.history = {k: v[: self.start_epoch] for k, v in self.history.items()}

    def start(self, optimizer, scheduler, path: Path | None, snapshot: dict | None) -> None:
        """Begin, or go on from a snapshot that is loaded already, and open TensorBoard's file.

        Args:
            scheduler: what :func:`make_scheduler` made; ``None`` if somebody else looks after it.
            snapshot: ``None`` to begin.
        """
        args, result = self.args, self.args.output_dir / "result.json"
        if snapshot and scheduler:
            scheduler.load_state_dict(snapshot["scheduler"])
            scheduler.last_epoch -= 1
            scheduler.step()  # to the rate of this run's schedule: --epochs may have changed
        if snapshot:
            self.load_state_dict(snapshot)
        done = self.start_epoch >= self.epochs
        if max_over_ranks([RANK == 0 and result.exists()])[0] and done:
            say(
                f"nothing left to do: {path} is at step {self.step} of {self.total_steps}; go on "
                "with more --epochs or --max-steps, or begin again with --resume none"
            )
            leave(0)
        if snapshot:
            at = f"epoch {self.start_epoch + 1}, step {self.step + 1}"
            say(f"resumed from {path} at {'the end' if done else at}")
        self.optimizer = optimizer
        if RANK == 0:
            from torch.utils.tensorboard import SummaryWriter  # slow, and only one rank needs it

            if snapshot:
                result.unlink(missing_ok=True)  # it comes back when this run ends
            put_aside_last_run(args.output_dir, path)
            self.writer = SummaryWriter(str(args.output_dir), purge_step=self.step + 1)
        self.stop_request.listen()

    def settle_buckets(self, model: nn.Module) -> None:
        """Let DDP sort its gradients into the buckets that it uses from its second step on.

        It sorts them as they were ready in the first step, and in another place of a bucket the sum
        of more than two ranks is rounded otherwise. So a run that goes on begins, where the bits
        count (``--deterministic``), with a step that changes nothing.
        """
        if not self.step or not self.args.deterministic:
            return
        buffers = [buffer.clone() for buffer in model.buffers()]
        size = self.args.image_size
        gpus = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(gpus):  # dropout draws from it
            model.train()
            model(torch.zeros(2, 3, size, size, device=self.device)).sum().backward()
        model.zero_grad()
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)

    def seconds_total(self) -> float:
        """Wall time of this run so far, up to a snapshot and since it was loaded."""
        now = time.perf_counter()
        self.seconds, self.since = self.seconds + now - self.since, now
        return self.seconds

    def batches(self, loader: DataLoader, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's batches of an epoch, cropped, flipped and normalized on the device.

        Yields:
            images ``[batch, 3, image_size, image_size]`` of the default dtype, and labels int64
            ``[batch]``; batch is the global batch divided by the number of ranks.
        """
        args = self.args
        begin = self.step - epoch * self.steps_per_epoch  # 0, unless --max-steps had cut it short
        end = min(self.steps_per_epoch, self.total_steps - epoch * self.steps_per_epoch)
        loader.batch_sampler.begin = begin
        self.shown = *self.totals(), time.perf_counter()  # what was shown last, and when
        self.bar = tqdm(
            desc=f"epoch {epoch + 1}/{self.epochs}",
            initial=begin * args.batch_size,
            total=end * args.batch_size,
            unit="img",
            unit_scale=True,
            leave=False,
            disable=None if RANK == 0 else True,  # None: shown if there is a terminal
        )
        self.ticks = [self.tick()]
        for index, (images, labels) in zip(range(begin, end), readable(loader), strict=False):
            crops = draw_crops(args.seed, epoch, index, args.batch_size, images.shape[-1])
            crops = crops[RANK::WORLD_SIZE].to(self.device, non_blocking=True)
            images = crop_and_flip(images.to(self.device, non_blocking=True), crops)
            images = to_input(images, args.image_size)
            labels = labels.to(self.device, non_blocking=True)
            self.step += 1
            self.batch = len(labels)
            self.lr = self.optimizer.param_groups[0]["lr"]
            yield images, labels
            self.ticks.append(self.tick())
            self.bar.update(args.batch_size)
            settled = len(self.step_seconds) + len(self.ticks) == WARMUP_STEPS
            if self.device.type == "cuda" and settled:  # cuDNN has tried its algorithms
                torch.cuda.reset_peak_memory_stats(self.device)
        self.bar.close()
        self.read_ticks()

    def tick(self):
        """Now, as the device sees it: on a GPU an event in its queue, for which nobody waits."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read_ticks(self) -> None:
        """Turn the ticks so far into seconds."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            seconds = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(self.ticks)]
        else:
            seconds = [b - a for a, b in itertools.pairwise(self.ticks)]
        self.ticks = self.ticks[-1:]
        self.step_seconds += seconds
        self.epoch_seconds += sum(seconds)

    def all_finite(self, loss: Tensor, model: nn.Module, gradients: bool = True) -> bool:
        """Whether to take this step: loss and gradients are finite, on every rank.

        One small all-reduce tells all ranks, and with it whether one of them was asked to stop. On
        a GPU it is waited for; ``--on-nan ignore`` does so only at every ``--print-freq``-th step.

        Args:
            loss: of this rank, a scalar.
            model: its gradients are looked at as well, ready for the optimizer ...
            gradients: ... unless they are somebody else's to look at.
        """
        ignore = self.args.on_nan == "ignore"
        if ignore and self.step % self.args.print_freq and self.step != self.total_steps:
            return True
        finite = torch.isfinite(loss.detach())
        if gradients and not ignore:
            tensors = [local(p.grad) for p in model.parameters() if p.grad is not None]
            finite &= torch.isfinite(nn.utils.get_total_norm(tensors))
        votes = torch.tensor([0.0, self.stop_request.signum], device=finite.device)
        votes[0] = ~finite
        if dist.is_initialized():
            dist.all_reduce(votes, dist.ReduceOp.MAX)
        bad, stop = votes.tolist()
        self.stop = int(stop)
        if ignore or not bad:
            self.keep_buffers(model)
            return True
        why = f"step {self.step}: {self.first_not_finite(loss, model)}"
        if self.args.on_nan == "stop":
            if RANK == 0:
                self.writer.close()
            fail(f"{why}; no weight was changed. Use a lower --lr, or --on-nan skip", code=3)
        say(f"{why}; the step is left out")
        for buffer, good in zip(model.buffers(), self.good_buffers, strict=True):
            buffer.copy_(good)  # BatchNorm's statistics have seen what was not finite
        return False

    def keep_buffers(self, model: nn.Module) -> None:
        """Remember BatchNorm's statistics, for ``--on-nan skip``."""
        if self.args.on_nan == "skip":
            self.good_buffers = [buffer.clone() for buffer in model.buffers()]

    def first_not_finite(self, loss: Tensor, model: nn.Module) -> str:
        """Of all ranks, a loss that is not finite, or else a gradient. All ranks call it."""
        found = f"the loss is {loss.item()}" if not loss.isfinite() else ""
        for name, parameter in model.named_parameters() if not found else []:
            if parameter.grad is not None and not local(parameter.grad).isfinite().all():
                found = f"the gradient of {name.removeprefix('module.')} is not finite"
                break
        everyone = fault_tolerance.everywhere(found)
        found = [theirs for theirs in everyone if theirs] or ["the gradients' norm is not finite"]
        first = min(found, key=lambda theirs: "gradient" in theirs)
        ranks = [str(rank) for rank, theirs in enumerate(everyone) if theirs == first]
        return f"{first} on rank {', '.join(ranks)}" if ranks else first

    def snapshot_is_due(self) -> bool:
        """Whether to save a snapshot after this step: one is, besides that of the end of an epoch,
        at every ``--snapshot-every``-th step, and when the run was asked to stop."""
        last = self.step == self.total_steps or self.step % self.steps_per_epoch == 0
        return bool(self.stop) or (self.step % self.args.snapshot_every == 0 and not last)

    def log(self, loss: Tensor) -> None:
        """Count the loss of a step that was taken.

        Args:
            loss: mean over this rank's batch, a scalar. It stays on the device; only at every
                ``--print-freq``-th step is the mean since the last time, over all ranks, shown.
        """
        self.loss_sum += loss.detach() * self.batch
        self.images += self.batch
        if self.step % self.args.print_freq and self.step != self.total_steps:
            return
        old_loss_sum, old_images, then = self.shown
        loss_sum, images = self.totals()
        self.shown = loss_sum, images, time.perf_counter()
        if RANK == 0:
            mean = (loss_sum - old_loss_sum) / (images - old_images)
            speed = (images - old_images) / (self.shown[-1] - then)
            self.bar.set_postfix(loss=f"{mean:.3f}", refresh=False)
            self.add_scalars("step", loss=mean, images_per_second=speed, learning_rate=self.lr)

    def totals(self) -> list[float]:
        """This epoch's sum of losses and number of images so far, over all ranks."""
        totals = torch.stack([self.loss_sum, self.loss_sum.new_tensor(self.images)])
        if dist.is_initialized():
            dist.all_reduce(totals)
        return totals.tolist()

    def add_scalars(self, group: str, **values: float) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{group}/{name}", value, self.step)

    def report(self, metrics: dict[str, float]) -> None:
        """End an epoch: a line on the screen, a point on each curve.

        Args:
            metrics: what :func:`evaluate` returned.
        """
        loss_sum, images = self.totals()
        self.evaluated = self.step
        epoch = {
            "train_loss": loss_sum / images if images else math.nan,
            "eval_loss": metrics["loss"],
            "eval_accuracy": metrics["accuracy"],
            "seconds": self.epoch_seconds,
        }
        for name, value in epoch.items():
            self.history[name].append(value)
        self.eval_samples = metrics["samples"]
        if RANK == 0:
            self.add_scalars("epoch", **epoch)
        say(
            f"epoch {len(self.history['seconds'])}/{self.epochs}: loss {epoch['train_loss']:.4f}, "
            f"evaluation loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.2%}, "
            f"{self.epoch_seconds:.1f} s"
        )
        if self.step % self.steps_per_epoch == 0:  # and not cut short by --max-steps
            self.loss_sum, self.images, self.epoch_seconds = torch.zeros_like(self.loss_sum), 0, 0.0

    def finish(self, model: nn.Module, optimizer, **held: Iterable[Tensor]) -> None:
        """Write ``result.json`` and TensorBoard's HPARAMS, and print the last line.

        Args:
            model, optimizer: as this rank holds them, with the gradients of the last step; the
                tensors are counted for ``state_bytes``.
            held: tensors to count besides, by name; or in place of ``parameters``, ``gradients``
                or ``optimizer``, where a library keeps them elsewhere.
        """
        args = self.args
        parameters = list(model.parameters())
        precision = str(parameters[0].dtype).removeprefix("torch.")
        if getattr(args, "dtype", "float32") != "float32":
            precision = args.dtype  # of the computation, if not of the parameters
        states = [value for state in optimizer.state.values() for value in state.values()]
        tensors = {
            "parameters": parameters,
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer": [value for value in states if torch.is_tensor(value)],
        }
        state_bytes = {name: count_bytes(kept) for name, kept in (tensors | held).items()}
        memory = peak_memory_gib(self.device)
        largest = max_over_ranks([*state_bytes.values(), *memory.values()])
        state_bytes = dict(zip(state_bytes, map(int, largest), strict=False))
        memory = dict(zip(memory, largest[len(state_bytes) :], strict=True))
        if RANK == 0:
            self.write_result(precision, state_bytes, memory)
        let_go_of_tensors()

    def write_result(self, precision: str, state_bytes: dict, memory: dict) -> None:
        """Write ``result.json`` and the HPARAMS entry, and print the last line. Rank 0 does."""
        args = self.args
        seconds = self.step_seconds[min(WARMUP_STEPS, len(self.step_seconds) // 2) :]
        speed = args.batch_size / statistics.median(seconds)
        accuracy = self.history["eval_accuracy"][-1]
        result = {
            "technique": SCRIPT,
            "command": launch_command(),
            "settings": shlex.join(settings(args)),
            "world_size": WORLD_SIZE,
            "device": device_name(self.device),
            "threads": torch.get_num_threads(),
            "model": args.model,
            "norm": args.norm,
            "dataset": args.dataset,
            "classes": self.train_set.classes,
            "train_samples": len(self.train_set),
            "image_size": args.image_size,
            "normalization": {"mean": MEAN, "std": STD},
            "precision": precision,
            "tf32": self.device.type == "cuda" and torch.backends.cudnn.allow_tf32,
            "global_batch_size": args.batch_size,
            "optimizer": args.optimizer,
            "epochs": self.epochs,
            "steps": self.step,
            "seed": args.seed,
            "seconds_total": self.seconds_total(),
            "seconds_train": sum(self.history["seconds"]),
            "images_per_second": speed,
            "step_ms": {f"p{p}": 1e3 * float(np.percentile(seconds, p)) for p in (50, 95)},
            "peak_memory_gib": {"allocated": None, "reserved": None} | memory,
            "state_bytes": state_bytes,
            **self.history,
            "eval_samples": self.eval_samples,
            "versions": versions(),
            "git_commit": git_commit(),
        }
        (args.output_dir / "result.json").write_text(json.dumps(result, indent=2) + "\n")
        hparams = {k: v for k, v in vars(args).items() if isinstance(v, (bool, int, float, str))}
        hparams |= {"technique": SCRIPT, "world_size": WORLD_SIZE}
        hparams.pop("local_rank", None)
        metrics = {"accuracy": accuracy, "images_per_second": speed, "memory": memory["process"]}
        metrics = {f"final/{name}": value for name, value in metrics.items()}
        self.writer.add_hparams(hparams, metrics, run_name=".")
        self.writer.close()
        memory = ", ".join(f"{gib:.2f} GiB {kind}" for kind, gib in memory.items())
        say(
            f"done: accuracy {accuracy:.2%} of {self.eval_samples:,}, median {speed:,.0f} images/s"
            f", peak memory {memory}, files in {args.output_dir}"
        )


def max_over_ranks(values: list[float]) -> list[float]:
    """The largest of each number on any rank; all ranks learn it."""
    if not dist.is_initialized():
        return values
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def leave(code: int) -> NoReturn:
    """End this run before its end. All ranks call it."""
    let_go_of_tensors()
    if dist.is_initialized():
        dist.destroy_process_group()
    raise SystemExit(code)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its shard of a DTensor, or all of a plain one."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def let_go_of_tensors() -> None:
    """Wait for all ranks, so that gloo's threads free what they sent before Python shuts down.

    A thread that still holds a tensor by then aborts the process (pytorch/pytorch#179291). A
    process group waits for its threads when it is freed. But ``torch.distributed.nn``, imported
    after ``init_process_group``, keeps the group as a default argument: hence the import above.
    FSDP's caches and DeepSpeed keep it too: hence this wait. It is not ``barrier()``, which holds
    on to tensors sent just before it.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.monitored_barrier()


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory behind the tensors on this rank: of a sharded tensor those of its shard, and
    a buffer of which several tensors are views once and whole."""
    storages = [local(t).untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def peak_memory_gib(device: torch.device) -> dict[str, float]:
    """Peak memory of this rank, in GiB.

    On a GPU, since the warm-up steps: what tensors took (allocated), what PyTorch's allocator kept
    (reserved), and all that was in use on the GPU, as nvidia-smi shows it (process; it counts other
    programs too). On a CPU: the resident set of the process.
    """
    if device.type == "cpu":
        with contextlib.suppress(OSError):  # Linux; getrusage() would count who started us, too
            lines = Path("/proc/self/status").read_text().splitlines()
            [peak] = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
            return {"process": int(peak) / 2**20}  # from KiB
        unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, else KiB
        return {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    allocated = torch.cuda.max_memory_allocated(device)
    reserved = torch.cuda.max_memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    process = total - free - torch.cuda.memory_reserved(device) + reserved
    figures = {"allocated": allocated, "reserved": reserved, "process": process}
    return {name: value / 2**30 for name, value in figures.items()}


def check_job(args: argparse.Namespace, path: Path, snapshot: dict) -> None:
    """A snapshot belongs to the job that wrote it."""
    for name in JOB:
        theirs, ours = snapshot["job"].get(name), getattr(args, name)
        if theirs != ours:
            flag = f"--{name.replace('_', '-')}"
            fail(
                f"--resume {path} is of a run with {flag} {theirs}, and this one has {ours}; "
                "give the same, or --resume none"
            )


def put_aside_last_run(output_dir: Path, resumed: Path | None) -> None:
    """Move what an earlier run left in this folder to ``previous/``, and drop its curves. Of the
    run that goes on, these are only snapshots that are damaged or newer than the resumed one."""
    previous, snapshots = output_dir / "previous", output_dir / "snapshots"
    aside = [output_dir / "model.pt", output_dir / "result.json", snapshots]
    if resumed and resumed.resolve().parent == snapshots.resolve():
        aside = [
            path for path in fault_tolerance.list_snapshots(snapshots) if path.name > resumed.name
        ]
    else:
        for events in output_dir.glob("events.out.tfevents.*"):
            events.unlink()
        if not fault_tolerance.list_snapshots(snapshots):  # of an attempt that came to nothing
            shutil.rmtree(snapshots, ignore_errors=True)
    for path in aside:
        if path.exists():
            place = previous / path.relative_to(output_dir)
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.is_dir():
                shutil.rmtree(place)
            os.replace(path, place)


def launch_command() -> str:
    """The command that started this run: the launcher's, which is our parent, or our own."""
    words = sys.orig_argv
    if LAUNCHED:
        with contextlib.suppress(OSError):  # there is no /proc outside of Linux
            parent = Path(f"/proc/{os.getppid()}")
            if "deepspeed.launcher.launch" in (parent / "cmdline").read_text():  # itself a child
                parent = parent.parent / (parent / "stat").read_text().rpartition(")")[2].split()[1]
            words = (parent / "cmdline").read_text().strip("\0").split("\0")
    if len(words) > 1 and Path(words[1]).name in ("torchrun", "deepspeed"):  # not their python
        words = words[1:]
    return shlex.join([Path(words[0]).name, *words[1:]])


def hardware() -> dict:
    """Names of the processor and the GPUs, and what decides how fast the processor multiplies."""
    cpu, flags = platform.processor() or platform.machine(), []
    with contextlib.suppress(OSError):  # Linux only
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
        cpu = found.get("model name", cpu)
        wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
        flags = [flag for flag in wanted if flag in found.get("flags", "").split()]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"cpu": cpu, "cpu_flags": flags, "cores": os.cpu_count(), "gpus": gpus}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found |= {"torchvision": importlib.metadata.version("torchvision"), "numpy": np.__version__}
    if torch.cuda.is_available():
        found |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
        found |= {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def git_commit() -> str | None:
    """The commit of this repository, with ``-dirty`` if files differ; ``None`` outside of one."""
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty"]
    try:
        run = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()
