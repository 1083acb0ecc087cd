"""Which files of examples/ fit, with the functions of the user's file: the file that ``python
estimate.py init`` would write is predicted."""

import contextlib
import dataclasses
import io
import itertools
import operator
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from estimator import compose, own_file
from estimator.network import MACHINE
from estimator.own_file import Found, fullest

# The order in which to use them, if they fit: first what divides the batch alone and waits for
# nothing, then what computes twice, then what splits the model, then copies to CPU memory
TRIED = ("plain", "ddp", "accumulation", "fsdp", "fsdp_accumulation", "hsdp")
TRIED += ("optimizer_in_backward", "chunked_loss", "zero", "checkpointing", "fsdp_checkpointing")
TRIED += ("tp", "fsdp_tp", "pp", "cp", "ep", "activation_offload", "offload")
ALONE = ("plain", "checkpointing", "activation_offload", "offload")  # of use on one GPU


def names_for(gpus: int) -> Iterator[str]:
    for name in TRIED:
        several = name != "plain" and (name != "hsdp" or gpus > MACHINE)
        if name in ALONE if gpus == 1 else several:
            yield name


def tasks_of(own: Path, examples: Path, gpus: int, has_half: bool) -> list[Callable]:
    """A prediction of each file: :class:`Found`, whose name is that of the example."""
    text = compose.read(own)
    paths = [examples / f"{name}.py" for name in names_for(gpus)]
    task = partial(predict, text=text, own=own, gpus=gpus, has_half=has_half)
    last = [partial(task, path, rank=gpus - 1) for path in paths if path.stem == "pp"]
    return [partial(task, path) for path in paths] + last


def predict(example: Path, text: str, own: Path, gpus: int, has_half: bool, rank=0) -> Found:
    """In this process, which cannot be used for anything else afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"my_{example.stem}.py")
        other = example.read_text(encoding="utf-8")
        complaint = io.StringIO()
        try:
            with contextlib.redirect_stderr(complaint):
                mixed = compose.compose(other, text, path.stem, example.stem)
                path.write_text(mixed, encoding="utf-8")
                module = own_file.load(path, own.absolute().parent)
        except SystemExit:
            found = Found(example.stem, gpus, 0, mistake=complaint.getvalue().strip())
        else:
            ranks = gpus if own_file.is_launched(module) else 0
            found = own_file.predict(module, ranks, has_half, rank=rank)
        mistake = found.mistake.removeprefix("estimate: error: ").replace(f"{folder}/", "")
        if mistake and compose.lacks("head_of", other, text):
            mistake = f"needs head_of(model) in {own.name}: the layer that computes the logits"
        return dataclasses.replace(found, name=example.stem, mistake=mistake)


name_of = operator.attrgetter("name")


def rank(found: list[Found], room: int) -> tuple[list[Found], list[Found]]:
    """Those that fit ``room`` bytes, in the order of ``TRIED``; and all others, by their peak, and
    last those without a prediction."""
    found = [fullest(some) for _, some in itertools.groupby(sorted(found, key=name_of), name_of)]
    good = [one for one in found if one.kinds and one.peak <= room]
    others = [one for one in found if one not in good]
    others.sort(key=lambda one: (bool(one.mistake), one.peak))
    good.sort(key=lambda one: TRIED.index(one.name))
    return good, others
