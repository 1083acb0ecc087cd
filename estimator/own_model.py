"""The user's own model, wrapped so that it takes one tensor, as the scripts' models do.

The user's function returns a module that takes images; or a module and a batch for it, of any
nesting; or these and a loss function of output and batch.
"""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from harness.cli import fail

ROOT, PYTHON = Path(__file__).resolve().parents[1], Path(inspect.__file__).parent
ROOMS = ("estimator", "hangs", "harness", "jobs", "libraries", "remote")
NOT_OWN = [Path(torch.__file__).parent, *(ROOT / room for room in ROOMS)]


class OwnModel:
    """The model of ``--module``, which ``make``, the user's function, creates once for each
    predicted training step. Error messages contain ``given``, the flag's value."""

    def __init__(self, make: Callable, given: str):
        self.make, self.given, self.batch, self.loss = make, given, None, None

    def build(self) -> nn.Module:
        """Call the function, and adapt what it returns."""
        made = self.make()
        parts = list(made) if isinstance(made, tuple) else [made]
        module = parts[0] if parts else None
        if not isinstance(module, nn.Module) or len(parts) > 3:
            self.refuse(f"returned {describe(made)}")
        if next(module.parameters(), None) is None:
            self.refuse(f"returned {type(module).__name__}, which has no parameters")
        if len(parts) > 1:
            self.batch = parts[1]
            if not batched(self.batch):
                self.refuse(f"returned a batch without a tensor, {describe(self.batch)}")
        if len(parts) > 2:
            self.loss = parts[2]
            if not callable(self.loss):
                self.refuse(f"returned {describe(self.loss)} as the loss")
        return self.adapt(module)

    def refuse(self, why: str) -> None:
        fail(
            f"--module {self.given} {why}; return a module, or a module and a batch for it, or "
            "these and a function of output and batch that computes the loss"
        )

    def adapt(self, module: nn.Module) -> nn.Module:
        """Let the model take the first tensor of a batch, which is all that the scripts pass."""
        kind, own = type(module), self

        def forward(module, first: Tensor) -> Tensor:
            batch = first if own.batch is None else own.complete(first)
            args, kwargs = arguments_of(batch)
            return own.score(kind.forward(module, *args, **kwargs), batch)

        if self.batch is not None:
            args, kwargs = arguments_of(self.batch)
            try:
                inspect.signature(kind.forward).bind(module, *args, **kwargs)
            except TypeError as error:
                self.refuse(f"returned a batch that {kind.__name__} does not take ({error})")
        module.__class__ = type(kind.__name__, (kind,), {"forward": forward})
        return module

    def make_batch(self, n: int, dtype: torch.dtype | None) -> Tensor:
        """Make a batch of n samples like the user's; return its first tensor."""
        samples = len(batched(self.batch)[0])

        def like(value):
            if not torch.is_tensor(value):
                return value
            kind = dtype if dtype and value.is_floating_point() else value.dtype
            grows = value.ndim and len(value) == samples
            shape = (n, *value.shape[1:]) if grows else value.shape
            return torch.zeros(shape, dtype=kind)

        self.whole = pytree.tree_map(like, self.batch)
        return batched(self.whole)[0]

    def describe_sample(self) -> str:
        """The shapes of a batch's tensors, without the batch dimension."""
        shapes = dict.fromkeys("x".join(map(str, leaf.shape[1:])) for leaf in batched(self.batch))
        return ", ".join(shape for shape in shapes if shape)

    def complete(self, first: Tensor):
        """The complete batch for a first tensor, or for some of its samples."""
        leaves, spec = pytree.tree_flatten(self.whole)
        at = next(i for i, leaf in enumerate(leaves) if torch.is_tensor(leaf) and leaf.ndim)
        samples = len(leaves[at])
        for i, leaf in enumerate(leaves):
            if torch.is_tensor(leaf) and leaf.ndim and len(leaf) == samples:
                leaves[i] = first if i == at else leaf[: len(first)]
        return pytree.tree_unflatten(leaves, spec)

    def score(self, out, batch) -> Tensor:
        """Logits with the classes in dimension 1, or a scalar loss."""
        if self.loss:
            loss = self.loss(out, batch)
            if not torch.is_tensor(loss) or loss.ndim:
                self.refuse(f"returned a loss function that returns {describe(loss)}")
            return loss
        loss = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
        if torch.is_tensor(loss):
            return loss
        if isinstance(out, (tuple, list)) and out:
            out = out[0]
        logits = out.get("logits") if isinstance(out, dict) else getattr(out, "logits", None)
        if torch.is_tensor(logits):  # Hugging Face's have classes last
            return logits.movedim(-1, 1)
        if not torch.is_tensor(out) or out.ndim < 2 or not out.is_floating_point():
            self.refuse(f"returned a module that returns {describe(out)}, and no loss function")
        return out


def arguments_of(batch) -> tuple[list, dict]:
    """Arguments of a module: those of a dict by name, of a tuple in order."""
    if isinstance(batch, dict):
        return [], batch
    return list(batch) if isinstance(batch, (tuple, list)) else [batch], {}


def batched(batch) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if torch.is_tensor(leaf) and leaf.ndim]


def describe(value) -> str:
    if torch.is_tensor(value):
        return f"a tensor of {list(value.shape)} {str(value.dtype)[6:]}"
    return repr(value) if value is None else f"{type(value).__name__} {str(value)[:40]}"


def let_losses_pass() -> None:
    """If a model computes its loss itself, the scripts use that loss."""
    cross_entropy = F.cross_entropy
    F.cross_entropy = lambda logits, labels, **options: (
        cross_entropy(logits, labels, **options) if logits.ndim else logits
    )


# ------------------------------------------------------------------------- mistakes and errors


def load_function(given: str) -> Callable:
    """Load the function of ``--module``."""
    path, _, name = given.rpartition(":")
    if not Path(path).is_file() or not name:
        fail(f"--module {given}: no such file; give FILE:FUNCTION, such as my_model.py:make_model")
    spec = importlib.util.spec_from_file_location("module_to_estimate", path)
    if spec is None:
        fail(f"--module {given}: {path} is not a Python file; give one that ends in .py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(Path(path).parent.absolute()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        print(own_traceback(error), end="", file=sys.stderr)
        raise SystemExit(1) from None
    make = getattr(module, name, None)
    if not callable(make):
        fail(f"--module {given}: {path} has no function {name}; give the one that makes the model")
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(make).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in starred]
    if needed:
        fail(f"--module {given} needs {', '.join(needed)}; give a function without arguments")
    return make


def own_frames(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """The frames from the user's first to the user's last line."""
    own = [i for i, frame in enumerate(stack) if is_own(frame.filename)]
    return stack[own[0] : own[-1] + 1] if own else []


def is_own(filename: str) -> bool:
    """Whether a file is the user's: not this project's, PyTorch's or Python's."""
    given, path = sys.modules.get("module_to_estimate"), Path(filename)
    if given and filename == given.__file__:
        return True
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
