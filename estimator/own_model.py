"""The user's own model, wrapped so that it takes one tensor, as the scripts' models do; and the
user's part of a traceback."""

import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from jobs import contract
from jobs.contract import Contract, batched

ROOT, PYTHON = Path(__file__).resolve().parents[1], Path(inspect.__file__).parent
ROOMS = ("estimator", "hangs", "harness", "jobs", "libraries", "remote")
NOT_OWN = [Path(torch.__file__).parent, *(ROOT / room for room in ROOMS)]


def load_function(given: str) -> Callable:
    """Load the function of ``--module``; an error in its file ends with its traceback."""
    try:
        return contract.load_function(given)
    except Exception as error:
        print(own_traceback(error), end="", file=sys.stderr)
        raise SystemExit(1) from None


class OwnModel:
    """The model of ``--module``, which ``make``, the user's function, creates once for each
    predicted training step. Error messages contain ``given``, the flag's value."""

    def __init__(self, make: Callable, given: str):
        self.make, self.given, self.batch = make, given, None

    def build(self) -> nn.Module:
        """Call the function, and adapt what it returns. Only for an example of a batch it needs the
        data set, which may be a function that is not called otherwise."""
        self.contract = Contract(self.make(), self.given)
        if self.contract.parts.batch is None and self.contract.parts.train is not None:
            train = self.contract.data("train")
            self.contract.bind(self.contract.collate([train[0], train[1]]))
        self.batch = self.contract.parts.batch
        return self.adapt(without_data(self.contract.prepare()))

    def adapt(self, module: nn.Module) -> nn.Module:
        """Let the model take the first tensor of a batch, which is all that the scripts pass."""
        kind, own = type(module), self

        def forward(module, first: Tensor) -> Tensor:
            batch = first if own.batch is None else own.complete(first)
            args, kwargs = own.contract.arguments(batch)
            return own.score(kind.forward(module, *args, **kwargs), batch)

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
        loss = self.contract.own_loss(out, batch)
        return self.contract.logits(out) if loss is None else loss.mean()


def without_data(module: nn.Module) -> nn.Module:
    """Let fake tensors replace what the function read from files. Tied ones stay tied."""
    fakes, options = {}, {"recurse": False, "remove_duplicate": False}
    for part in module.modules():
        for name, old in [*part.named_parameters(**options), *part.named_buffers(**options)]:
            new = torch.empty(old.shape, dtype=old.dtype)
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, old.requires_grad)
            setattr(part, name, fakes.setdefault(id(old), new))
    return module


def let_losses_pass() -> None:
    """If a model computes its loss itself, the scripts use that loss."""
    cross_entropy = F.cross_entropy
    F.cross_entropy = lambda logits, labels, **options: (
        cross_entropy(logits, labels, **options) if logits.ndim else logits
    )


# ------------------------------------------------------------------------- mistakes and errors


def own_frames(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """The frames from the user's first to the user's last line."""
    own = [i for i, frame in enumerate(stack) if is_own(frame.filename)]
    return stack[own[0] : own[-1] + 1] if own else []


def is_own(filename: str) -> bool:
    """Whether a file is the user's: not this project's, PyTorch's or Python's."""
    given, path = sys.modules.get("own_module"), Path(filename)
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
