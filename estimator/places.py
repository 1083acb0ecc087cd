"""The user's part of a traceback, and the user's line that creates a tensor."""

import dataclasses
import functools
import inspect
import linecache
import sys
import traceback
from pathlib import Path
from types import FrameType

import torch

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(inspect.__file__).parent
TORCH = Path(torch.__file__).parent
ROOMS = ("estimator", "examples", "hangs", "harness", "jobs", "libraries", "parallel")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tensor was created: the innermost line of the user's, and below it the innermost one
    of a library, as files and numbers of lines."""

    line: tuple[str, int]
    library: tuple[str, int] | None = None
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    def __str__(self) -> str:
        file, number = self.line
        return f"{Path(file).name}:{number}"

    @property
    def text(self) -> str:
        """The statement that begins there."""
        return linecache.getline(*self.line).strip()


def find(frame: FrameType | None, tensor: torch.Tensor | None) -> Place:
    """The place of the code that runs in a frame."""
    library = None
    while frame:
        file = frame.f_code.co_filename
        whose = owner_of(file)
        if whose == "user":
            break
        if whose == "library" and not library:
            library = file, frame.f_lineno
        frame = frame.f_back
    line = (frame.f_code.co_filename, frame.f_lineno) if frame else ("", 0)
    if tensor is None:
        return Place(line, library)
    return Place(line, library, tuple(tensor.shape), tensor.dtype)


@functools.cache
def owner_of(filename: str) -> str:
    """Who wrote a file: the user, or a library; "" for this project, PyTorch and Python."""
    given = sys.modules.get("own_module")
    if given and filename == given.__file__:
        return "user"
    path = Path(filename)
    if filename.startswith("<") or path.parent == ROOT or path.is_relative_to(TORCH):
        return ""
    if any(path.is_relative_to(ROOT / room) for room in ROOMS):
        return ""
    if "site-packages" in path.parts or "dist-packages" in path.parts:
        return "library"
    return "" if path.is_relative_to(PYTHON) else "user"


# ------------------------------------------------------------------------- mistakes and errors


def own_frames(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """The frames from the user's first to the last of the user or a library."""
    own = [i for i, frame in enumerate(stack) if owner_of(frame.filename)]
    return stack[own[0] : own[-1] + 1] if own else []


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
