"""The contract of ``--module FILE:FUNCTION``: what the user's function returns, and how much of a
batch its module takes. The training scripts and estimate.py share it."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from harness.cli import fail
from harness.world import print0
from jobs.classifiers import LISTS

IGNORED = -100  # a label that does not count, as in F.cross_entropy


class Parts(NamedTuple):
    """What the function returns: the module; or a tuple that begins as this one; or a dict."""

    module: nn.Module
    batch: Any = None  # an example; default: the first two samples of ``train``
    loss: Callable | None = None  # of output and batch; default: the output's, or cross-entropy
    train: Any = None  # a map-style data set, or a function that returns one; default: ``batch``
    eval: Any = None  # default: the first samples of ``train``
    count: Callable | None = None  # of a batch: how many labels the loss is the mean of
    collate: Callable | None = None  # of a list of samples; default: default_collate
    blocks: str | None = None  # name of an nn.ModuleList or nn.Sequential; default: all of them


def load_function(given: str) -> Callable:
    """Load the function of ``--module``. Errors of its file propagate."""
    path, _, name = given.rpartition(":")
    if not Path(path).is_file() or not path.endswith(".py"):
        fail(f"--module {given}: no such file; give FILE:FUNCTION, such as my_model.py:make_model")
    spec = importlib.util.spec_from_file_location("own_module", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(Path(path).parent.absolute()))
    spec.loader.exec_module(module)
    make = getattr(module, name, None)
    if not callable(make):
        fail(f"--module {given}: {path} has no function {name}; give the one that makes the model")
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        fail(f"--module {given}: {name} needs arguments ({error}); give a function without any")
    return make


def batched(batch) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if torch.is_tensor(leaf) and leaf.ndim]


def to_floating(tree: Any, dtype: torch.dtype | None = None, device=None) -> Any:
    """The tree with floating-point tensors in ``dtype``, or the default one, and on ``device``."""
    dtype = dtype or torch.get_default_dtype()

    def move(t: Tensor) -> Tensor:
        return t.to(device, dtype if t.is_floating_point() else None, non_blocking=True)

    return pytree.tree_map_only(Tensor, move, tree)


def describe(value) -> str:
    if torch.is_tensor(value):
        return f"a tensor of {list(value.shape)} {str(value.dtype)[6:]}"
    return repr(value) if value is None else f"{type(value).__name__} {str(value)[:40]}"


class Contract:
    """What the function has returned, checked. Error messages contain ``given``, the flag's value.

    Attributes:
        parts: as returned; ``batch`` is an example, or ``None`` if the module takes images.
        rest: the key of the labels in a batch, a name or the last index; ``None``: it has none.
        counts: whether the loss is a mean over labels, which :meth:`count` counts, not samples.
    """

    def __init__(self, made: Any, given: str):
        self.given, self.rest, self.counts = given, None, False
        try:
            named = type(made) is dict
            self.parts = Parts(**made) if named else Parts(*made if type(made) is tuple else [made])
        except TypeError:  # other names, or too many
            self.refuse(f"returned {describe(made)}")
        self.collate = self.parts.collate or default_collate
        module, self.kind = self.parts.module, type(self.parts.module)
        if not isinstance(module, nn.Module):
            self.refuse(f"returned {describe(made)}")
        if next(module.parameters(), None) is None:
            self.refuse(f"returned {self.kind.__name__}, which has no parameters")
        for name in ("loss", "count", "collate"):
            if not callable(found := getattr(self.parts, name)) and found is not None:
                self.refuse(f"returned {describe(found)} as the {name}")
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = False  # recomputed layers would append their keys again
        if self.parts.batch is not None:
            self.bind(self.parts.batch)

    def refuse(self, why: str) -> None:
        use = "return a module, a batch and a loss function, or a dict with data sets (docs/job.md)"
        fail(f"--module {self.given} {why}; {use}")

    def data(self, split: str) -> Any:
        """The data set of a split; ``None`` if there is none."""
        found = getattr(self.parts, split)
        found = found() if callable(found) and not hasattr(found, "__getitem__") else found
        indexed = hasattr(found, "__getitem__") and hasattr(found, "__len__")
        if found is not None and not (indexed and len(found)):
            kind = type(found).__name__
            self.refuse(f"returned {kind} as {split}, no map-style data set with samples")
        return found

    def prepare(self) -> nn.Module:
        """The module with its weights in the default dtype, unless all that is trained has it, and
        with the name of its list of blocks as ``blocks_at``."""
        module, default = self.parts.module, torch.get_default_dtype()
        if dtypes := {p.dtype for p in module.parameters() if p.requires_grad} - {default}:
            print0(f"weights: {dtypes.pop()} becomes {default}".replace("torch.", ""))
            module.to(default)
        names = [at for at, part in module.named_modules() if isinstance(part, LISTS) and at]
        module.blocks_at = self.parts.blocks or ""
        if module.blocks_at and module.blocks_at not in names:
            has = ", ".join(names) or "no nn.ModuleList or nn.Sequential"
            self.refuse(f"returned blocks {module.blocks_at!r}, and its module has {has}")
        return module

    def bind(self, batch: Any) -> None:
        """Take ``batch`` as the example. Of a tuple, the module takes all, or all but the labels at
        its end; of a dict, the names of its arguments."""
        self.parts = self.parts._replace(batch=batch)
        if not batched(batch):
            self.refuse(f"returned a batch without a tensor, {describe(batch)}")
        self.signature = inspect.signature(self.kind.forward)
        kinds = {p.kind for p in self.signature.parameters.values()}
        self.takes_any = inspect.Parameter.VAR_KEYWORD in kinds
        if isinstance(batch, dict):
            left = [name for name in batch if not self.takes(name)]
            self.rest = "labels" if "labels" in batch else left[-1] if left else None
        if (why := self.why_not(batch)) and isinstance(batch, (tuple, list)) and len(batch) > 1:
            self.rest = len(batch) - 1
            why = self.why_not(batch) and why
        if why:
            self.refuse(f"returned a batch that {self.kind.__name__} does not take ({why})")
        labels, theirs = self.labels_of(batch), getattr(self.parts.module, "loss_type", None)
        countable = torch.is_tensor(labels) and not labels.is_floating_point()
        self.counts = bool(self.parts.count) or (countable and not self.parts.loss)
        # Hugging Face's: label i is that of logits i - 1, and the loss can be divided by a number
        self.shifts = theirs == "ForCausalLM"
        self.divides = self.takes_any and theirs and self.counts and not self.parts.loss

    def takes(self, name: str) -> bool:
        return self.takes_any or name in self.signature.parameters

    def why_not(self, batch: Any) -> TypeError | None:
        """Why the module does not take a batch."""
        args, kwargs = self.arguments(batch)
        try:
            self.signature.bind(self.parts.module, *args, **kwargs)
        except TypeError as error:
            return error

    def arguments(self, batch: Any) -> tuple[list, dict]:
        """The module's arguments from a batch."""
        if isinstance(batch, dict):
            return [], {name: value for name, value in batch.items() if self.takes(name)}
        return list(batch)[: self.rest] if isinstance(batch, (tuple, list)) else [batch], {}

    def labels_of(self, batch: Any) -> Tensor | None:
        return None if self.rest is None else batch[self.rest]

    def count(self, batch: Any, n: int) -> Tensor:
        """How many labels or samples the loss of n samples is the mean of, an integer scalar."""
        device = batched(batch)[0].device
        if self.parts.count:
            return torch.as_tensor(self.parts.count(batch), device=device)
        if self.counts:
            labels = self.labels_of(batch)
            return ((labels[:, 1:] if self.shifts else labels) != IGNORED).sum()
        return torch.full((), n, device=device)

    def own_loss(self, out: Any, batch: Any) -> Tensor | None:
        """The loss by the user's function, or else the output's own; ``None`` if there is neither.
        A scalar, the mean; or, of the function, the sum of each sample, ``[n]``."""
        if not self.parts.loss:
            loss = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
            return to_floating(loss) if torch.is_tensor(loss) else None
        loss = self.parts.loss(to_floating(out), batch)
        if not torch.is_tensor(loss) or loss.ndim > 1:
            self.refuse(f"returned a loss function that returns {describe(loss)}")
        return to_floating(loss)

    def score(self, out: Any, batch: Any, total: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the losses of ``total`` labels; and, unless autograd is on, how many of them
        the logits predict, NaN if that is not known."""
        loss, labels = self.own_loss(out, batch), self.labels_of(batch)
        correct = torch.full_like(total, torch.nan, dtype=torch.float64)
        if loss is not None and (torch.is_grad_enabled() or not self.counts or self.parts.loss):
            return (loss.sum() if loss.ndim else loss * total), correct
        if labels is None:
            self.refuse(f"returned a module that returns {describe(out)}, without labels or loss")
        logits = to_floating(self.logits(out))
        if loss is None and labels.is_floating_point():  # else they would be probabilities
            self.refuse(f"returned floating-point labels, {describe(labels)}, and no loss")
        if self.shifts:
            logits, labels = logits[:, :, :-1], labels[:, 1:]
        classes = labels.shape == logits[:, 0].shape
        if classes and not torch.is_grad_enabled():
            correct = ((logits.argmax(1) == labels) & (labels != IGNORED)).sum()
        if loss is None and not classes and labels.shape != logits.shape:
            self.refuse(f"has logits, {describe(logits)}, that do not fit {describe(labels)}")
        if loss is None:
            return F.cross_entropy(logits, labels, reduction="sum"), correct
        return loss * total, correct

    def describe(self) -> str:
        if isinstance(batch := self.parts.batch, dict):
            taken = ", ".join(filter(self.takes, batch))
        else:
            taken = f"tensors: {len(self.arguments(batch)[0])}"
        over = "all labels but -100" if self.counts else "samples"
        if self.parts.count:
            over = "what count returns"
        elif self.parts.loss:
            over += ", equally many on each rank (is it over labels? return count)"
        return f"{self.kind.__name__}({taken}), loss: the mean over {over}"

    def logits(self, out: Any) -> Tensor:
        """The output's logits, with the classes in dimension 1."""
        if isinstance(out, (tuple, list)) and out:
            out = out[0]
        logits = out.get("logits") if isinstance(out, dict) else getattr(out, "logits", None)
        if torch.is_tensor(logits):  # Hugging Face's have classes last
            return logits.movedim(-1, 1)
        if not torch.is_tensor(out) or out.ndim < 2 or not out.is_floating_point():
            self.refuse(f"returned a module that returns {describe(out)}, and no loss function")
        return out
