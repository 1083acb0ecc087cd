"""The settings of a training task, and which task they select: a GPT or a Llama learns from text or
chat, an encoder from reviews, any other model from images.

All tasks have the same functions, so their callers need not know which one it is. A run imports the
files of its own task, and no others.
"""

import argparse
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, NoReturn

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from harness.cli import ArgumentParser, fail, number, place, positive
from harness.settings import Hardware, Output, Reproducibility, Training, add_flags, flag, flags_of
from harness.storage import trim_url
from harness.world import this_script, world
from jobs.sizes import is_decoder

GPTS = "gpt-nano, gpt-mini, gpt2, qwen3-0.6b, ... (docs/job.md), gpt-4x4x128 or llama-4x4x128"
ONLY_GPT = {  # help texts of a script that trains nothing else
    "model": f"{GPTS} (default: gpt-mini on a GPU, gpt-nano on a CPU)",
    "dataset": "auto (default): Shakespeare, if present or downloadable, else synthetic; "
    "or shakespeare, text, chat, synthetic",
    "data_dir": "folder or text file; chat: .jsonl file (default: data)",
    "weights": "initial weights: a model.pt, the folder of a run or a snapshot; for a Llama, "
    "Mistral or Qwen also a folder or a name of huggingface.co (default: none)",
}


def loss_or_bias(text: str) -> float | str:
    """The value of ``--balance``."""
    return text if text == "bias" else number(float, 0)(text)


# fmt: off
@dataclass(frozen=True, kw_only=True)
class Choice:
    """Data and model."""

    TITLE = "task"
    model: str | None = flag(None, metavar="NAME", identity=True,
        help="any torchvision classifier (default: resnet50 on a GPU, resnet18 on a CPU); or "
        f"{GPTS}; for reviews: distilbert, or encoder-LxHxD")
    dataset: str = flag("auto", metavar="NAME",
        choices="auto cifar10 folder shakespeare text chat reviews synthetic".split(),
        help="auto (default): CIFAR-10, or Shakespeare for a GPT, if present or downloadable, else "
        "synthetic; or cifar10, folder; shakespeare, text, chat; reviews; synthetic")
    data_dir: Path | str = flag(Path("data"), type=place, metavar="DIR",
        help="folder of the data set; text: files, or one file; chat: a .jsonl file; folder: "
        "train/ and test/ or val/; reviews: train.tsv and test.tsv (default: %(default)s)")
    train_samples: int | None = flag(None, type=positive, metavar="N", identity=True,
        help="use the first N training samples (default: all; 2048 on a CPU)")
    eval_samples: int | None = flag(None, type=positive, metavar="N",
        help="use the first N evaluation samples (default: all; 1000 on a CPU)")
    weights: str = flag("none", metavar="PATH", type=trim_url,
        help="initial weights: a model.pt, the folder of a run or a snapshot; for images also "
        "imagenet; for a Llama, Mistral or Qwen, and for reviews, also a folder with config.json "
        "and *.safetensors, or a name on huggingface.co (default: %(default)s)")


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The flags for images."""

    TITLE = "image options"
    norm: str | None = flag(None, choices=["batch", "group", "sync"], identity=True,
        help="normalization layers: the model's BatchNorm (default), GroupNorm or SyncBatchNorm")
    image_size: int | None = flag(None, type=positive, metavar="PIXELS", identity=True,
        help="side of the model's input (default: 224 on a GPU, 32 on a CPU)")
    no_flip: bool | None = flag(None, action="store_true", identity=True,
        help="do not mirror half of the training images (a mirrored b is a d)")


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The flags for models of text: decoders, and in part encoders."""

    TITLE = "language-model options"
    context: int | None = flag(None, type=positive, metavar="N", identity=True,
        help="tokens per sequence (default: the model's maximum; at most 2048 "
        "with a folder as --weights)")
    tokenizer: str | None = flag(None, choices=["chars", "bytes", "hub"], identity=True,
        help="characters, bytes, or hub: tokens of the tokenizer in the folder --weights "
        "(default: hub if it has one, else chars)")
    packed: bool | None = flag(None, action="store_true", identity=True,
        help="pack several documents into each sequence")
    kv_heads: int | None = flag(None, type=positive, metavar="N", identity=True,
        help="llama-LxHxD: heads of keys and values (default: H)")
    mlp_width: int | None = flag(None, type=positive, metavar="N", identity=True,
        help="llama-LxHxD: width within the MLP (default: 8/3 D)")
    dropout: float | None = flag(None, type=number(float, 0, 1), metavar="P",
        help="dropout probability (default: gpt-mini 0.2, gpt2 0.1, others 0)")
    tie: bool | None = flag(None, action="store_true", identity=True,
        help="tie the embedding's and the head's weights")


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The flags for a mixture of experts."""

    TITLE = "mixture of experts"
    experts: int | None = flag(None, type=positive, metavar="E", identity=True,
        help="experts in each block, instead of one MLP (default: the model's)")
    top_k: int | None = flag(None, type=positive, metavar="K", identity=True,
        help="experts per token (default: the model's, or 1)")
    balance: float | str | None = flag(None, type=loss_or_bias, metavar="X", identity=True,
        help="weight of the load-balancing loss; or bias: no loss, but a bias of the router that "
        "follows the load (default: 0.01, or 0 with a folder as --weights)")


# fmt: on
class Task(NamedTuple):
    """What the settings select."""

    name: str
    datasets: list[str]  # choices of --dataset
    flags: set[str]  # that it has and other tasks may not have

    @property
    def has_decoder(self) -> bool:
        """Whether it trains a GPT or a Llama."""
        return self.name in ("text", "chat")

    @property
    def data(self) -> ModuleType:
        """Has ``resolve``, ``describe`` and ``make_datasets``."""
        if self.name == "images":
            from jobs import images

            return images
        if self.name == "reviews":
            from jobs import reviews

            return reviews
        if self.name == "chat":
            from jobs import chat

            return chat
        from jobs import text

        return text

    @property
    def models(self) -> ModuleType:
        """Has ``make_model``, ``parameter_groups`` and the checks of a model."""
        if self.name == "images":
            from jobs import classifiers

            return classifiers
        if self.name == "reviews":
            from jobs import encoder

            return encoder
        from jobs import language_models

        return language_models


def names_of(*subjects: type) -> set[str]:
    return {field.name for subject in subjects for field in flags_of(subject)}


OF_IMAGES = names_of(ImageOptions)
OF_TEXT = names_of(TextOptions, Experts)
IMAGES = Task("images", ["auto", "cifar10", "folder", "synthetic"], OF_IMAGES)
TEXT = Task("text", ["auto", "shakespeare", "text", "synthetic"], OF_TEXT)
CHAT = Task("chat", ["chat"], OF_TEXT)
REVIEWS = Task("reviews", ["auto", "reviews"], {"context", "dropout"})


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
        texts = CHAT if self.dataset == "chat" else TEXT
        return texts if is_decoder(model) else IMAGES

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of a row of tokens: packed ones have positions beside them."""
        return (2, self.context) if self.packed else (self.context,)

    @property
    def source(self) -> str | None:
        """For snapshots: the folder with a Llama's configuration and tokenizer, if it has one."""
        if self.weights == "none" or not self.task.has_decoder:
            return None
        from libraries import hub

        if not hub.is_folder(self.weights):
            return None
        return str(hub.folder_of(self.weights).absolute())

    @property
    def checksum(self) -> int:
        """Of the files of ``--weights`` on this machine, from which each rank of a decoder reads
        its shards; 0 for others, which rank 0 reads for all."""
        if self.weights == "none" or not self.task.has_decoder:
            return 0
        from libraries import hub, weights

        if hub.is_folder(self.weights) and not weights.is_snapshot(self.weights):
            return weights.checksum(hub.folder_of(self.weights))
        return weights.checksum(weights.locate(self.weights))


def add_all_flags(
    parser: ArgumentParser, only_gpt: bool = False, experts: bool = False,
    only: Container | None = None,
) -> None:  # fmt: skip
    """Add the flags of all settings, or ``only`` these. The help shows those of other models unless
    ``only_gpt``, and those of a mixture of experts with ``experts``."""
    add_flags(parser, Training, only=only)
    add_flags(parser, Choice, only=only, **(ONLY_GPT if only_gpt else {}))
    parser.set_defaults(model="gpt" if only_gpt else None)
    add_flags(parser, ImageOptions, not only_gpt, only)
    add_flags(parser, TextOptions, only=only)
    add_flags(parser, Experts, experts, only)
    for subject in (Output, Hardware, Reproducibility):
        group = add_flags(parser, subject, only=only)
    hidden = {"dest": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    parser.add_argument("--module", type=refuse_module, **hidden)
    group.add_argument("-h", "--help", action="help", help="print this help and exit")


def refuse_module(given: str) -> NoReturn:
    """The type of ``--module``, which no script has."""
    use = "write a file with your model: python estimate.py init (docs/your_own_model.md)"
    fail(f"--module {given}: the scripts train the models of this repository; {use}")


def init_weights(
    args, model: nn.Module, classes: list[str], targets: dict[str, Tensor] | None = None
) -> None:
    """Initialize a model that was made on the meta device, sharded and allocated, with the weights
    of ``make_model()``; each rank gets its shards. For a decoder, ranks draw or read one parameter
    at a time. For other models, rank 0 has the whole model on its CPU. All ranks call it.

    Args:
        targets: of a decoder, by name: fill these tensors instead of the model's parameters.
    """
    models = args.task.models
    if args.task.has_decoder:
        return models.init_weights(args, model, classes, targets)
    weights = models.make_model(args, classes).state_dict() if world().rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)


def check_is_gpt(args) -> None:
    if not args.task.has_decoder:
        why = f"{this_script()}.py supports only decoders"
        fail(f"--model {args.model}: {why}; use gpt-nano, gpt-mini, gpt2, gpt-LxHxD or llama-LxHxD")


def resolve(args):
    """Fill in the defaults of the task, and reject flags of other tasks."""
    if args.weights != "none":
        args = resolve_weights(args)
    ours = args.task
    model = f"--model {args.model}" if args.model else "the default model"
    for name in sorted((OF_IMAGES | OF_TEXT) - ours.flags):
        if getattr(args, name) is not None:
            owners = ["images" if name in OF_IMAGES else "a GPT, such as --model gpt-nano"]
            owners += ["--dataset reviews"] if name in REVIEWS.flags else []
            flag = f"--{name.replace('_', '-')}"
            fail(f"{flag} is for {' or '.join(owners)}, not for {model}; leave it out")
    if args.dataset not in ours.datasets:
        use = f"use {', '.join(ours.datasets)}, or another --model"
        fail(f"--dataset {args.dataset} is not for {model}; {use}")
    if args.weights == "imagenet" and ours is not IMAGES:
        fail(f"--weights imagenet is for images; give a model.pt, or none, for {model}")
    args = ours.data.resolve(args)
    check_not_replaced(args)
    return args


def resolve_weights(args):
    """Take the model from ``--weights`` if that is a folder of a Llama; check that it exists."""
    from libraries import hub, weights

    if args.dataset != "reviews" and args.model in (None, "gpt", "llama"):
        path = Path(args.weights)
        if path.name == "model.pt" and path.with_name("config.json").is_file():  # of a Llama's run
            args = replace(args, weights=str(path.parent))
        if hub.is_folder(args.weights):
            args = replace(args, model="llama")
    if args.weights == "imagenet" or "://" in args.weights or has_pretrained(args):
        return args
    if why := weights.why_unusable(args.weights):
        also = ", or imagenet" if args.task is IMAGES else ""
        if args.task.has_decoder or args.task is IMAGES and not args.model:
            also += ", or a folder or name on the hub of a Llama, Mistral or Qwen"
        use = f"give a model.pt, the folder of a run or a snapshot{also}"
        fail(f"--weights {args.weights}: {why}; {use}")
    return args


def check_not_replaced(args) -> None:
    """Reject weights that this run would replace, or move to previous/ before a restart."""
    own = Path(args.output_dir).resolve()
    path = Path(args.weights).resolve()
    replaced = {"model.pt", "model.safetensors", "config.json", "snapshots", "previous"}
    if path == own or own in path.parents and path.relative_to(own).parts[0] in replaced:
        fail(f"--weights {args.weights} would be overwritten; give another --output-dir")
    if "/" in args.weights and args.task.has_decoder and path.parent in [own, *own.parents]:
        from libraries import hub

        if not hub.is_name(args.weights):
            return
        why = f"is in a folder with which {args.weights} would be a path, and no name on the hub"
        fail(f"--output-dir {args.output_dir} {why}; give another")


def has_pretrained(args) -> bool:
    """Whether ``--weights`` names pretrained weights of a decoder or an encoder, in a folder."""
    if args.weights == "none" or args.task is IMAGES:
        return False
    return args.task.data.has_pretrained(args)


def kind_of(args) -> str:
    """The model, to print: ``--model``, or the kind of the one in the folder ``--weights``."""
    return args.task.models.size_of(args).kind if args.model == "llama" else args.model


def warmup_steps(args, total: int) -> int:
    """``--warmup-steps``; by default a tenth of all steps, or 3% if a decoder is fine-tuned."""
    if args.warmup_steps is not None:
        return args.warmup_steps
    return total * (3 if is_decoder(args.model) and has_pretrained(args) else 10) // 100


def describe_defaults(args) -> str:
    """Optimizer and schedule, if fine-tuning has set their defaults; else nothing."""
    if not has_pretrained(args):
        return ""
    filled = args.schedule == "cosine" and args.warmup_steps is None
    warmup = f", warm-up {warmup_steps(args, 100)}% of the steps" if filled else ""
    rates = f"lr {args.lr:g}, weight decay {args.weight_decay:g}"
    return f"; fine-tuning with {args.optimizer}, {rates}{warmup}"
