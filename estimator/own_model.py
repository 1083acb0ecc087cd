"""The user's own model, on fake tensors; and the user's part of a traceback."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from estimator.places import own_traceback
from harness.cli import fail
from jobs.model_parts import LISTS, blocks_of

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(inspect.__file__).parent
ROOMS = ("estimator", "hangs", "harness", "jobs", "libraries", "parallel")
NOT_OWN = [Path(torch.__file__).parent, *(ROOT / room for room in ROOMS)]


class Parts(NamedTuple):
    """What the user's function returns: the module alone, or a tuple of the first parts."""

    module: nn.Module
    batch: Any = None  # an example; default: images
    loss: Callable | None = None  # of output and batch; default: the output's, or cross-entropy


def load_function(given: str) -> Callable:
    """Load the function of ``--module``, FILE:FUNCTION; an error in its file ends with its
    traceback."""
    path, _, name = given.rpartition(":")
    if not Path(path).is_file() or not path.endswith(".py"):
        fail(f"--module {given}: no such file; give FILE:FUNCTION, such as my_model.py:make_model")
    spec = importlib.util.spec_from_file_location("own_module", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.append(str(Path(path).parent.absolute()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        print(own_traceback(error), end="", file=sys.stderr)
        raise SystemExit(1) from None
    make = getattr(module, name, None)
    if not callable(make):
        fail(f"--module {given}: {path} has no function {name}; give the one that makes the model")
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        fail(f"--module {given}: {name} needs arguments ({error}); give a function without any")
    return make


class OwnModel:
    """The model of ``--module``, which ``make``, the user's function, creates once for each
    predicted training step. ``given`` is the flag's value, for error messages; ``recomputes``:
    whether the blocks of its largest list are checkpointed."""

    def __init__(self, make: Callable, given: str, recomputes: bool = False):
        self.make = make
        self.given = given
        self.recomputes = recomputes
        self.example = None  # of a batch, on the meta device; None: the module takes images
        self.loss = None  # the user's function
        self.batch = None  # of this rank and step
        self.samples = 0  # in this batch

    def build(self, images: Tensor) -> nn.Module:
        """Call the function, and make its module one that a script can train."""
        made = self.make()
        try:
            parts = Parts(*made) if isinstance(made, tuple) else Parts(made)
        except TypeError:  # too many
            self.refuse(f"returned {describe(made)}")
        module = parts.module
        if not isinstance(module, nn.Module):
            self.refuse(f"returned {describe(made)}")
        if next(module.parameters(), None) is None:
            self.refuse(f"returned {type(module).__name__}, which has no parameters")
        if parts.loss is not None and not callable(parts.loss):
            self.refuse(f"returned {describe(parts.loss)} as the loss")
        self.loss = parts.loss
        if parts.batch is not None:
            self.example = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), parts.batch)
            if not tensors_of(self.example):
                self.refuse(f"returned a batch without a tensor, {describe(parts.batch)}")
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = False  # recomputed layers would append their keys again
        if any(p.requires_grad and p.dtype != torch.float32 for p in module.parameters()):
            module.float()  # as mixed precision needs it
        without_data(module)
        if self.recomputes:
            for block in largest_list(module):
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return Trained(module, self, images if self.example is None else self.example)

    def refuse(self, why: str) -> NoReturn:
        use = "return a module, a batch and a loss function (docs/estimate.md)"
        fail(f"--module {self.given} {why}; {use}")

    def make_batch(self, n: int, images: Callable) -> Tensor:
        """Make a batch of n samples like the user's, or of images, for the module. The script
        gets numbers of samples, int64 ``[n]``, and passes them to the module."""
        batch = images(n, None) if self.example is None else of_samples(self.example, n)
        self.batch = to_floating(batch, torch.get_default_dtype())
        self.samples = n
        return torch.zeros(n, dtype=torch.int64)

    def describe_sample(self) -> str:
        """The shapes of a batch's tensors, without the batch dimension."""
        sizes = ["x".join(map(str, tensor.shape[1:])) for tensor in tensors_of(self.example)]
        return ", ".join(size for size in dict.fromkeys(sizes) if size)


class Trained(nn.Module):
    """The user's module as a script trains it: from numbers of samples, int64 ``[n]``, to the loss
    of as many samples of the batch, a scalar. ``example``: a batch like it."""

    def __init__(self, module: nn.Module, own: OwnModel, example: Any):
        super().__init__()
        self.module = module
        self.own = own
        self.signature = inspect.signature(type(module).forward)
        # Of a tuple, the module takes all, or all but the labels at its end; of a dict, the names
        # of its arguments.
        self.labels_at = None  # the key of the labels in a batch: a name, or the last index
        if isinstance(example, dict):
            left = [name for name in example if not self.takes(name)]
            names = ["labels"] if "labels" in example else left[-1:]
            self.labels_at = names[0] if names else None
        why = self.why_not(example)
        if why and isinstance(example, (tuple, list)) and len(example) > 1:
            self.labels_at = len(example) - 1
            why = why if self.why_not(example) else None
        if why:
            own.refuse(f"returned a batch that {type(module).__name__} does not take ({why})")

    def takes(self, name: str) -> bool:
        parameters = self.signature.parameters
        kinds = {parameter.kind for parameter in parameters.values()}
        return name in parameters or inspect.Parameter.VAR_KEYWORD in kinds

    def arguments(self, batch: Any) -> tuple[list, dict]:
        """The module's arguments from a batch."""
        if isinstance(batch, dict):
            return [], {name: value for name, value in batch.items() if self.takes(name)}
        if isinstance(batch, (tuple, list)):
            return list(batch)[: self.labels_at], {}
        return [batch], {}

    def why_not(self, batch: Any) -> TypeError | None:
        """Why the module does not take a batch."""
        args, kwargs = self.arguments(batch)
        try:
            self.signature.bind(self.module, *args, **kwargs)
        except TypeError as error:
            return error

    def forward(self, numbers: Tensor) -> Tensor:
        batch = first(self.own.batch, len(numbers), self.own.samples)
        dtype = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), None)
        args, kwargs = to_floating(self.arguments(batch), dtype)
        loss = self.loss_of(self.module(*args, **kwargs), batch)
        return to_floating(loss, torch.get_default_dtype()).mean()

    def loss_of(self, out: Any, batch: Any) -> Tensor:
        """The loss by the user's function, or else the output's own, or else the cross-entropy of
        its logits; with as many classes as these have, if the batch has no labels."""
        default = torch.get_default_dtype()
        if self.own.loss:
            loss = self.own.loss(to_floating(out, default), batch)
            if not torch.is_tensor(loss):
                self.own.refuse(f"returned a loss function that returns {describe(loss)}")
            return loss
        loss = entry(out, "loss")
        if torch.is_tensor(loss):
            return loss
        logits = to_floating(self.logits_of(out), default)
        if self.labels_at is not None:
            return F.cross_entropy(logits, batch[self.labels_at])
        labels = torch.zeros(len(logits), *logits.shape[2:], dtype=torch.int64)
        return F.cross_entropy(logits, labels)

    def logits_of(self, out: Any) -> Tensor:
        """The output's logits, with the classes in dimension 1."""
        if isinstance(out, (tuple, list)) and out:
            out = out[0]
        logits = entry(out, "logits")
        if torch.is_tensor(logits):  # Hugging Face's have classes last
            return logits.movedim(-1, 1)
        if not torch.is_tensor(out) or out.ndim < 2 or not out.is_floating_point():
            self.own.refuse(f"returned a module that returns {describe(out)}, and no loss function")
        return out


def entry(out: Any, name: str) -> Any:
    """What an output has by this name, in a dict or as an attribute."""
    return out.get(name) if isinstance(out, dict) else getattr(out, name, None)


def describe(value: Any) -> str:
    if torch.is_tensor(value):
        return f"a tensor of {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "None" if value is None else f"{type(value).__name__} {str(value)[:40]}"


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch that can have a batch dimension."""
    leaves = pytree.tree_leaves(batch)
    return [leaf for leaf in leaves if torch.is_tensor(leaf) and leaf.ndim]


def to_floating(tree: Any, dtype: torch.dtype | None) -> Any:
    """The tree with its floating-point tensors in ``dtype``."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return pytree.tree_map_only(Tensor, cast, tree)


def first(batch: Any, n: int, samples: int) -> Any:
    """The first n of the samples of a batch, without a copy: a micro-batch."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:n] if tensor.shape[:1] == (samples,) else tensor

    return batch if n == samples else pytree.tree_map_only(Tensor, cut, batch)


def of_samples(batch: Any, n: int) -> Any:
    """A batch like another one, of ``n`` samples. Detectors take lists of samples, of which one has
    dicts."""

    def is_list(value: Any) -> bool:
        return isinstance(value, list) and value is not batch

    leaves = pytree.tree_leaves(batch, is_leaf=is_list)
    lists = [value for value in leaves if is_list(value)]
    if not any(isinstance(value[0], dict) for value in lists if value):
        lists = []
    samples = len(lists[0] if lists else tensors_of(batch)[0])

    def zeros(tensor: Tensor) -> Tensor:
        grows = not lists and tensor.shape[:1] == (samples,)
        shape = (n, *tensor.shape[1:]) if grows else tensor.shape
        return torch.zeros(shape, dtype=tensor.dtype)

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


def without_data(module: nn.Module) -> None:
    """Let fake tensors replace what the function read from files. Tied ones stay tied."""
    fakes = {}
    options = {"recurse": False, "remove_duplicate": False}
    for part in module.modules():
        for name, old in [*part.named_parameters(**options), *part.named_buffers(**options)]:
            new = torch.empty(old.shape, dtype=old.dtype)
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, old.requires_grad)
            setattr(part, name, fakes.setdefault(id(old), new))
