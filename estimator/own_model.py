"""The user's own model, on fake tensors; and the user's part of a traceback."""

import inspect
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from harness.cli import fail
from jobs import contract, own
from jobs.classifiers import LISTS, blocks_of
from jobs.contract import Contract, batched, to_floating

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(inspect.__file__).parent
ROOMS = ("estimator", "hangs", "harness", "jobs", "libraries", "parallel")
NOT_OWN = [Path(torch.__file__).parent, *(ROOT / room for room in ROOMS)]


def load_function(given: str) -> Callable:
    """Load the function of ``--module``; an error in its file ends with its traceback."""
    try:
        return contract.load_function(given)
    except Exception as error:
        print(own_traceback(error), end="", file=sys.stderr)
        raise SystemExit(1) from None


class AnyLabels(Contract):
    """A contract whose batch needs no labels: as many classes as the logits have."""

    def own_loss(self, out: Any, batch: Any) -> Tensor | None:
        loss = super().own_loss(out, batch)
        if loss is not None or self.labels_of(batch) is not None:
            return loss
        logits = to_floating(self.logits(out))
        labels = torch.zeros(len(logits), *logits.shape[2:], dtype=torch.int64)
        return F.cross_entropy(logits, labels)


class OwnModel:
    """The model of ``--module``, which ``make``, the user's function, creates once for each
    predicted training step. Error messages contain ``given``, the flag's value. It is trained as
    jobs/own.py does it: the module takes a whole batch, and returns its losses."""

    def __init__(self, make: Callable, given: str, recomputes: bool = False):
        self.make = make
        self.given = given
        self.batch = None
        self.recomputes = recomputes

    def build(self, images: Tensor) -> nn.Module:
        """Call the function, and adapt what it returns. Only for an example of a batch it needs the
        data set, which may be a function that is not called otherwise."""
        contract = AnyLabels(self.make(), self.given)
        if contract.parts.batch is None and contract.parts.train is not None:
            train = contract.data("train")
            contract.bind(contract.collate([train[0], train[1]]))
        if contract.parts.batch is None:
            contract.bind(images)
        else:  # the example itself is not on a GPU
            move = partial(pytree.tree_map_only, Tensor, lambda t: t.to("meta"))
            self.batch = move(contract.parts.batch)
        contract.parts = contract.parts._replace(batch=None)
        module = without_data(contract.prepare())
        for block in largest_list(module) if self.recomputes else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        own.accept_batches(contract)
        return module

    def make_batch(self, n: int, images: Callable) -> own.Batch:
        """A batch of n samples like the user's, or of images."""
        inputs = images(n, None) if self.batch is None else of_samples(self.batch, n)
        inputs = to_floating(inputs)
        return own.Batch(inputs=inputs, samples=n, labels=torch.full((n,), n))

    def describe_sample(self) -> str:
        """The shapes of a batch's tensors, without the batch dimension."""
        shapes = dict.fromkeys("x".join(map(str, leaf.shape[1:])) for leaf in batched(self.batch))
        return ", ".join(shape for shape in shapes if shape)


def of_samples(batch: Any, n: int) -> Any:
    """A batch like another one, of ``n`` samples. Detectors take lists of samples, of which one has
    dicts."""

    def is_list(value: Any) -> bool:
        return isinstance(value, list) and value is not batch

    lists = [value for value in pytree.tree_leaves(batch, is_leaf=is_list) if is_list(value)]
    if not any(isinstance(one, dict) for value in lists for one in value):
        lists = []
    samples = len((lists or batched(batch))[0])

    def zeros(t: Tensor) -> Tensor:
        grows = not lists and t.shape[:1] == (samples,)
        return torch.zeros((n, *t.shape[1:]) if grows else t.shape, dtype=t.dtype)

    def repeat(value: Any) -> Any:
        return [value[i % samples] for i in range(n)] if is_list(value) else value

    if lists:
        batch = pytree.tree_map(repeat, batch, is_leaf=is_list)
    return pytree.tree_map_only(Tensor, zeros, batch)


def largest_list(module: nn.Module) -> list[nn.Module]:
    """The blocks of the list that has the most parameters."""
    lists = [part for part in module.modules() if isinstance(part, LISTS)]
    if not lists:
        fail("this module has no nn.ModuleList or nn.Sequential to checkpoint")
    return [*blocks_of(max(lists, key=lambda part: sum(p.numel() for p in part.parameters())))]


def without_data(module: nn.Module) -> nn.Module:
    """Let fake tensors replace what the function read from files. Tied ones stay tied."""
    fakes = {}
    options = {"recurse": False, "remove_duplicate": False}
    for part in module.modules():
        for name, old in [*part.named_parameters(**options), *part.named_buffers(**options)]:
            new = torch.empty(old.shape, dtype=old.dtype)
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, old.requires_grad)
            setattr(part, name, fakes.setdefault(id(old), new))
    return module


# ------------------------------------------------------------------------- mistakes and errors


def own_frames(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """The frames from the user's first to the user's last line."""
    own = [i for i, frame in enumerate(stack) if is_own(frame.filename)]
    return stack[own[0] : own[-1] + 1] if own else []


def is_own(filename: str) -> bool:
    """Whether a file is the user's: not this project's, PyTorch's or Python's."""
    given = sys.modules.get("own_module")
    if given and filename == given.__file__:
        return True
    path = Path(filename)
    if filename.startswith("<") or path.parent == ROOT:
        return False
    is_pythons = path.is_relative_to(PYTHON) and "site-packages" not in path.parts
    return not is_pythons and not any(path.is_relative_to(folder) for folder in NOT_OWN)


def own_traceback(error: BaseException) -> str:
    """The traceback: it ends at the user's line for an error there; for our bugs it is complete."""
    shown = traceback.TracebackException.from_exception(error)
    if frames := own_frames(shown.stack):
        shown.stack = traceback.StackSummary.from_list(frames)
    return "".join(shown.format(chain=not frames))


def place_of(error: BaseException) -> str:
    """File and line of the data-dependent operation."""
    frames = own_frames(traceback.extract_tb(error.__traceback__))
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
