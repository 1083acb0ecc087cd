"""Compare a measurement with the one before: what is as it was, and both side by side."""

import re
import statistics
from typing import Any

from report.blocks import machine_line, origin

SHARE, OF_MEMORY = 0.1, 0.02  # by which figures may differ and be the same
MEMORY = ("peak_memory_gib", "state_bytes", "peak", "most", "kinds", "lowest", "highest")
COMPARED = ("images_per_second", "tokens_per_second", "peak_memory_gib", "state_bytes", "eval_loss")
NUMBER = re.compile(r"(\d+(?:\.\d+)?)")
PARTS = ("rows", "outputs", "operations", "peaks")  # of a result, whose entries have figures


def is_close(new: Any, old: Any, share: float = SHARE) -> bool:
    """Whether numbers differ by no more than a share, of memory than :data:`OF_MEMORY`, in values
    and texts that are equal otherwise."""
    if isinstance(new, dict) and isinstance(old, dict):
        shares = {key: OF_MEMORY if key in MEMORY else share for key in new}
        return new.keys() == old.keys() and all(is_close(new[k], old[k], shares[k]) for k in new)
    if isinstance(new, list) and isinstance(old, list):
        pairs = zip(new, old, strict=False)
        return len(new) == len(old) and all(is_close(*pair, share) for pair in pairs)
    if isinstance(new, str) and isinstance(old, str):
        (words, numbers), (words_before, before) = split(new), split(old)
        return words == words_before and is_close(numbers, before, share)
    if isinstance(new, (int, float)) and isinstance(old, (int, float)):
        return abs(new - old) <= share * abs(old)
    return new == old


def split(text: str) -> tuple[list[str], list]:
    """The words of a text, and its numbers, those in GiB as memory."""
    *parts, last = NUMBER.split(text)
    words = [*parts[::2], last]
    after = [word.split()[:1] for word in words[1:]]
    numbers = [float(part) for part in parts[1::2]]
    found = [
        {"peak": number} if unit == ["GiB"] else number
        for number, unit in zip(numbers, after, strict=True)
    ]
    return words, found


def figures_of(entry: dict) -> dict:
    """What is compared of an entry: of a row the medians over its runs, of others all."""
    if "runs" not in entry:
        return {key: value for key, value in entry.items() if key != "from"}
    found = {"failed": bool(entry.get("failed"))}
    for name in COMPARED:
        values = [run[name] for run in entry["runs"] if run.get(name) is not None]
        if values and isinstance(values[0], dict):
            kinds = [kind for kind, value in values[0].items() if value is not None]
            found[name] = {k: statistics.median(value[k] for value in values) for k in kinds}
        elif values:
            found[name] = statistics.median(values)
    return found


def by_name(entries: list | dict) -> dict:
    return entries if isinstance(entries, dict) else {entry["name"]: entry for entry in entries}


def keep_old(new: dict, old: dict, machine: str = "") -> dict:
    """A result, in which entries that are close to those of ``old`` are these, with the line that
    says where they are from. If that are all, ``old``."""
    if not old:
        return new
    machine = machine or machine_line(old["hardware"], not old["hardware"]["gpus"])
    line, found, changed = origin(old, machine), dict(new), False
    for part in PARTS:
        before = by_name(old.get(part, []))
        entries = dict(by_name(new.get(part, [])))
        changed = changed or entries.keys() != before.keys()
        for name, entry in entries.items():
            if name in before and is_close(figures_of(entry), figures_of(before[name])):
                entries[name] = {"from": line} | before[name]
            else:
                changed = True
        if entries:
            as_dict = isinstance(new[part], dict)
            found[part] = entries if as_dict else list(entries.values())
    return found if changed else old


def side_by_side(entry: dict, before: dict) -> list[str]:
    """Lines with each figure, the one before, and their ratio."""
    lines, stored = [], figures_of(before)
    for name, value in figures_of(entry).items():
        if name == "failed":
            continue
        values = value if isinstance(value, dict) else {"": value}
        others = stored.get(name, {})
        others = others if isinstance(others, dict) else {"": others}
        for kind, now in values.items():
            said = f"{name} {kind}".strip()
            then = others.get(kind)
            if then:
                lines.append(f"{said}: {now:.6g}, stored {then:.6g}, ratio {now / then:.3f}")
            else:
                lines.append(f"{said}: {now:.6g}, not stored")
    return lines
