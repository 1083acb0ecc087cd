"""Settings: a flag is a field of a frozen dataclass, and is declared nowhere else. The classes of
all subjects are the bases of :class:`jobs.choice.Settings`, an object of which a script parses from
its command line. Other programs construct one, of which every field has a default, and let
:func:`jobs.choice.resolve` fill in those that depend on device, model and data."""

import argparse
import dataclasses
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from harness.cli import ArgumentParser, fail, not_negative, number, place, positive
from harness.storage import find_mistake, trim_url
from harness.world import this_script, why_ranks_are_unclear, world

Kind = TypeVar("Kind")


def flag(default: Any, *names: str, help: str, identity: bool = False, **options) -> Any:
    """A field of a dataclass that is also a flag: ``--batch-size`` for ``batch_size``. The default
    may be a function that returns it; ``False`` makes a switch. A run that resumes must have the
    ``identity`` of its snapshot. Names, such as ``-b``, and options are those of argparse."""
    options |= {"help": help} | ({"action": "store_true"} if default is False else {})
    about = {"names": names, "identity": identity, "options": options}
    how = "default_factory" if callable(default) else "default"
    return dataclasses.field(**{how: default}, metadata=about)


def flags_of(kind: Any) -> list[dataclasses.Field]:
    """The fields of a class or an object that are flags."""
    return [field for field in dataclasses.fields(kind) if field.metadata]


def spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add_flags(
    parser: ArgumentParser, subject: type, shown: bool = True, only: Container | None = None,
    **helps: str,
):  # fmt: skip
    """Add the flags of a subject, or ``only`` these, as a group of the parser, and return the
    group. The help shows them, if ``shown``, with ``helps`` instead of the help texts of these
    fields."""
    group = parser.add_argument_group(subject.TITLE)
    defaults = subject()
    for field in flags_of(subject):
        if only is not None and field.name not in only:
            continue
        names = field.metadata["names"]
        options = dict(field.metadata["options"])
        options["help"] = helps.get(field.name, options["help"]) if shown else argparse.SUPPRESS
        options["default"] = getattr(defaults, field.name)
        group.add_argument(*names, spelled(field.name), **options)
    return group


def read_flags(parser: ArgumentParser, kind: type[Kind], words: list[str] | None = None) -> Kind:
    """Parse a command line (``None``: that of this process) into a frozen object of ``kind``, a
    class of settings, which also has the flags that the script added to the parser."""
    values = vars(parser.parse_args(words))
    fields = []  # of the script's own flags
    declared = {field.name for field in flags_of(kind)}
    for name in (name for name in values if name not in declared):
        options = {"action": "store_true"} if parser.get_default(name) is False else {}
        about = {"options": options, "own": True} if name != "local_rank" else {}
        fields.append((name, Any, dataclasses.field(metadata=about)))
    options = {"bases": (kind,), "frozen": True, "kw_only": True}
    return dataclasses.make_dataclass("Arguments", fields, **options)(**values)


def fill(settings: Kind, **defaults: Any) -> Kind:
    """A copy in which the fields that are ``None`` have these values."""
    unset = {name: value for name, value in defaults.items() if getattr(settings, name) is None}
    return replace(settings, **unset)


def values_of(settings: Any, mark: str) -> dict[str, Any]:
    """The values of the flags with a mark: ``identity``, or ``own`` for those of the script."""
    marked = [field.name for field in flags_of(settings) if field.metadata.get(mark)]
    return {name: getattr(settings, name) for name in marked}


def as_words(settings: Any) -> list[str]:
    """The flags that repeat this run from its start, with all defaults."""
    words = []
    for field in flags_of(settings):
        value = getattr(settings, field.name)
        options = field.metadata["options"]
        is_switch = options.get("action") == "store_true"
        is_set = bool(value) if is_switch else value is not None
        was_given = value in options.get("choices", [value])  # or a script's own
        if is_set and was_given and field.name != "resume":
            said = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
            words += [spelled(field.name)] + ([] if is_switch else [str(said)])
    return words


# fmt: off


@dataclass(frozen=True, kw_only=True)
class Training:
    """The optimization, for any model. A script may have flags for ``dtype`` and ``accumulate``."""

    TITLE = "training"
    dtype: str | None = "float32"  # of compute; None: the fast half precision of the device
    accumulate: int = 1  # number of parts in which a rank's batch is computed
    batch_size: int = flag(128, "-b", type=positive, metavar="N", identity=True,
        help="GLOBAL batch size, divided among the ranks (default: %(default)s)")
    epochs: int = flag(5, type=positive, metavar="N",
        help="number of epochs (default: %(default)s)")
    max_steps: int | None = flag(None, type=positive, metavar="N",
        help="stop after N optimizer steps (default: no limit)")
    optimizer: str | None = flag(None, choices=["sgd", "adamw"], identity=True,
        help="optimizer (default: sgd for images, else adamw)")
    lr: float | None = flag(None, type=number(float, 0, above=0), metavar="X", identity=True,
        help="peak learning rate (default: sgd 0.01 for images, 0.1 for a GPT; adamw 0.001; "
        "fine-tuning a decoder 2e-5)")
    schedule: str = flag("cosine", choices=["cosine", "plateau", "none"], identity=True,
        help="learning-rate schedule: cosine decay after a linear warm-up (default); plateau: "
        "divide by ten after two evaluations without improvement; none: constant")
    warmup_steps: int | None = flag(None, type=not_negative, metavar="N",
        help="warm-up steps of the cosine schedule (default: a tenth of all; fine-tuning: 3%%)")
    momentum: float = flag(0.9, type=number(float, 0, 1), metavar="X", identity=True,
        help="momentum of sgd (default: %(default)s)")
    weight_decay: float | None = flag(None, type=number(float, 0), metavar="X", identity=True,
        help="weight decay (default: sgd 0.0005, adamw 0.01; GPT 0.1 except norms and embeddings, "
        "fine-tuning 0)")
    clip_grad: float | None = flag(None, type=number(float, 0, above=0), metavar="NORM",
        help="clip the global gradient norm (default: off)")
    on_nan: str = flag("watch", choices=["watch", "stop", "skip", "ignore"],
        help="NaN or Inf: watch (default) checks the loss at every --print-freq-th step and the "
        "weights before a snapshot, and stops the run; stop and skip check before every step, "
        "and stop the run or skip the step; ignore does not check")


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a run writes, and what it resumes from."""

    TITLE = "output"
    output_dir: Path | str = flag(lambda: Path("runs", this_script()), type=place, metavar="DIR",
        help="folder for everything that the run writes. This and --resume, --data-dir and "
        "--weights may be URLs, such as s3://bucket/run (default: %(default)s)")
    resume: str = flag("none", metavar="auto|none|PATH", type=trim_url,
        help="resume from this snapshot; auto: from the newest valid one in --output-dir, if any "
        "(default: none, but a run that its launcher restarts resumes)")
    eval_every: int | None = flag(None, type=positive, metavar="N",
        help="evaluate every N steps, too; save the best weights")
    snapshot_every: int = flag(1000, type=positive, metavar="N",
        help="write a snapshot every N steps, and after every evaluation (default: %(default)s)")
    on_save_error: str = flag("continue", choices=["continue", "stop"],
        help="what to do when a snapshot cannot be written (default: %(default)s)")
    print_freq: int = flag(10, type=positive, metavar="N",
        help="update the progress bar and TensorBoard every N steps (default: %(default)s)")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The devices of a run, and its processes."""

    TITLE = "hardware"
    device: str = flag("auto", choices=["auto", "cpu", "cuda"],
        help="device to train on (default: auto, a GPU if there is one)")
    workers: int | None = flag(None, "-j", type=not_negative, metavar="N",
        help="loader processes per rank (default: 0; 4 for an image folder larger than memory)")
    timeout: float = flag(1800, type=number(float, 0, above=0), metavar="SECONDS",
        help="timeout of a collective and of a download (default: %(default)s)")


@dataclass(frozen=True, kw_only=True)
class Reproducibility:
    """Random numbers, precision and profiling."""

    TITLE = "reproducibility and profiling"
    seed: int = flag(0, type=number(int, 0, 2**32), metavar="N", identity=True,
        help="seed of weights, data order and dropout; seeds of independent runs differ by more "
        "than the epochs and the ranks (default: %(default)s)")
    deterministic: bool = flag(False, help="bitwise reproducible results; slower")
    double: bool = flag(False, identity=True, help="compute in float64")
    profile_memory: bool = flag(False,
        help="on a CPU, measure the peak memory of tensors in the last step; slower (on a GPU it "
        "is always measured)")
    trace: int | None = flag(None, type=positive, metavar="N",
        help="write a Chrome trace per rank of the N steps before the last one, to the folder "
        "trace in --output-dir; timeline.py draws them (default: no trace)")


# fmt: on


def check_flags(settings: Kind) -> Kind:
    """Choose device and dtype, and check the flags that all training tasks have."""
    if why := why_ranks_are_unclear():
        fail(why)
    for name in ("output_dir", "resume", "data_dir", "weights"):
        if mistake := find_mistake(str(getattr(settings, name))):
            fail(f"{spelled(name)} {mistake}")
    if settings.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: PyTorch finds no GPU here; use --device cpu")
    if settings.trace and settings.profile_memory:
        fail("--trace and --profile-memory both profile the last step; leave out one of them")
    first = world().restarts == 0  # after a restart, the run resumes from its own snapshots
    here = settings.resume not in ("auto", "none") and "://" not in settings.resume
    if first and here and not Path(settings.resume).exists():
        fail(f"--resume {settings.resume}: no such folder; give auto, none or a snapshot's folder")
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = auto if settings.device == "auto" else settings.device
    half = {"cuda": "float16", "cpu": "bfloat16"}  # that is fast on most GPUs, and on CPUs
    settings = fill(replace(settings, device=device), dtype=half[device])
    if settings.double and settings.dtype != "float32":
        fail(f"--double is float64, and --dtype is {settings.dtype}; leave out one of them")
    return settings
