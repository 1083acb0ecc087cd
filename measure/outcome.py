"""What a run left behind: the curve of its loss, its weights, or the reason why it failed."""

import re
from pathlib import Path

import torch


def read_curve(folder: Path) -> list[list[float]]:
    """Steps and losses from TensorBoard's file; empty if there is none."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    found = reader.Scalars("step/loss") if "step/loss" in reader.Tags()["scalars"] else []
    return [[point.step, round(point.value, 4)] for point in found]


def is_parameter(name: str) -> bool:
    """Whether a tensor is a parameter: not a statistic, a vocabulary or an encoder's extras."""
    buffers = ("running_mean", "running_var", "num_batches_tracked", "vocabulary")
    return not name.endswith((*buffers, "tokenizer", "config", "position_ids"))


def distance(ours: dict, theirs: dict) -> float | None:
    """The norm of the difference of two models' parameters, relative to the second's norm."""
    names = [name for name in theirs if is_parameter(name)]
    if names != [name for name in ours if is_parameter(name)]:
        return None
    flat, other = (torch.cat([s[n].flatten().double() for n in names]) for s in (ours, theirs))
    return ((flat - other).norm() / other.norm()).item()


def reason(text: str, code: int | None) -> str:
    """Why a run failed, in a few words, from its output."""
    text = text.replace("|", "/")  # which would end a table cell
    if re.search(r"out of memory|can't allocate memory|DefaultCPUAllocator", text, re.IGNORECASE):
        return "out of memory"
    if missing := re.search(r"No module named '([\w.]+)'", text):
        return f"{missing[1]} is not installed"
    if ours := re.findall(r"^\w+: error: (.*)$", text, re.MULTILINE):
        return ours[-1]
    raised = r"^(?:\[rank\d+\]: )?(\w*(?:Error|Exception): .*)$"
    if errors := re.findall(raised, text, re.MULTILINE):
        return errors[0][:200]
    lines = text.strip().splitlines() or ["no output"]
    return f"exit code {code}: {lines[-1][:200]}"
