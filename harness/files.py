"""Files that are written atomically, and read with checks."""

import os
from pathlib import Path

import torch
from torch import nn

from harness.cli import fail


def sync(path: Path) -> None:
    """Flush a file, or the list of files of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_file(state: dict, path: Path) -> None:
    """Atomic ``torch.save``: leaves either the old file or the complete new one."""
    temporary = path.with_name(f".{path.name}.part")
    torch.save(state, temporary)
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def load_file(path: Path | str, flag: str, mmap: bool = False) -> dict:
    """``torch.load`` of a dict of tensors and plain types, onto the CPU.

    Args:
        flag: that named the file, for the error message.
        mmap: read each tensor only when it is used.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # damaged files raise any of a dozen types
        fail(
            f"{flag} {path} cannot be loaded ({type(error).__name__}: it is damaged, "
            "or contains objects other than tensors); give another file"
        )
    if not isinstance(state, dict):
        fail(f"{flag} {path} contains a {type(state).__name__}, not a dict; give another")
    return state


def check_weights(model: nn.Module, weights: dict, complaint: str) -> None:
    """Check that weights have the names and shapes of a model.

    Args:
        complaint: start of the error message, which also names an entry that differs.
    """
    shapes = {name: t.shape for name, t in model.state_dict().items()}
    theirs = {name: getattr(t, "shape", None) for name, t in weights.items()}
    wrong = sorted(name for name, _ in shapes.items() ^ theirs.items())
    if wrong:
        fail(f"{complaint}: {wrong[0]} differs, and maybe others; use that run's settings")
