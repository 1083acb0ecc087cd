"""Compare a measurement with the one before: what is as it was, and both side by side."""

import re
import statistics
from typing import Any

SHARE = 0.1  # by which figures may differ and still be the same
OF_MEMORY = 0.02
MEMORY = ("peak_memory_gib", "state_bytes", "peak", "most", "kinds", "lowest", "highest", "GiB")
COMPARED = ("images_per_second", "tokens_per_second", "peak_memory_gib", "state_bytes", "eval_loss")
NUMBER = re.compile(r"(\d+(?:\.\d+)?)")
PARTS = ("rows", "outputs", "operations", "peaks")  # of a result, whose entries have figures


def is_close(new: Any, old: Any, share: float = SHARE) -> bool:
    """Whether two values are equal but for numbers, also in texts, that differ by no more than a
    share: of memory :data:`OF_MEMORY`."""
    if isinstance(new, str) and isinstance(old, str):
        return is_close(pieces(new), pieces(old), share)
    if isinstance(new, list) and isinstance(old, list):
        pairs = zip(new, old, strict=False)
        return len(new) == len(old) and all(is_close(*pair, share) for pair in pairs)
    if isinstance(new, dict) and isinstance(old, dict):
        shares = {key: OF_MEMORY if key in MEMORY else share for key in new}
        return new.keys() == old.keys() and all(is_close(new[k], old[k], shares[k]) for k in new)
    if isinstance(new, (int, float)) and isinstance(old, (int, float)):
        return abs(new - old) <= share * abs(old)
    return new == old


def pieces(text: str) -> list[dict]:
    """The numbers of a text by their unit, and what stands between them."""
    words = NUMBER.split(text)
    found = [{"": tuple(words[::2])}]
    for number, after in zip(words[1::2], words[2::2], strict=True):
        found.append({after.strip().partition(" ")[0]: float(number)})
    return found


def figures_of(entry: dict) -> dict:
    """What is compared of an entry: of a row the medians over its runs, of others all."""
    if "runs" not in entry:
        return {key: value for key, value in entry.items() if key != "from"}
    found = {"failed": bool(entry.get("failed"))}
    for name in COMPARED:
        values = [run[name] for run in entry["runs"] if run.get(name) is not None]
        if values:
            found[name] = median(values)
    return found


def command_of(entry: dict) -> str | None:
    """What was run: of a row, and of a recorded output."""
    run = entry["runs"][0] if entry.get("runs") else entry
    return run.get("command")


def is_same_figure(new: dict, old: dict) -> bool:
    """Whether an entry was measured by the same command, word for word, and is close."""
    return command_of(new) == command_of(old) and is_close(figures_of(new), figures_of(old))


def median(values: list) -> Any:
    """Of numbers, or of each kind in dictionaries of numbers."""
    if not isinstance(values[0], dict):
        return statistics.median(values)
    kinds = [kind for kind, value in values[0].items() if value is not None]
    found = {}
    for kind in kinds:
        found[kind] = median([value[kind] for value in values])
    return found


def by_name(entries: list | dict) -> dict:
    return entries if isinstance(entries, dict) else {entry["name"]: entry for entry in entries}


def keep_old(new: dict, old: dict, line: str) -> dict:
    """A result whose entries are those of ``old`` where the figures are close, with the ``line``
    that says where ``old`` is from; if all are, ``old``."""
    found = dict(new)
    same = True
    for part in PARTS:
        before = by_name(old.get(part, []))
        entries = dict(by_name(new.get(part, [])))
        for name, entry in entries.items():
            if name in before and is_same_figure(entry, before[name]):
                entries[name] = {"from": line} | before[name]
            else:
                same = False
        same = same and entries.keys() == before.keys()
        if entries:
            found[part] = entries if isinstance(new[part], dict) else [*entries.values()]
    return old if same else found


def side_by_side(entry: dict, before: dict) -> list[str]:
    """Lines with each figure of a row, the stored one, and their ratio."""
    lines = []
    stored = flat(figures_of(before))
    for name, now in flat(figures_of(entry)).items():
        if stored.get(name):
            then = stored[name]
            lines.append(f"{name}: {now:.6g}, stored {then:.6g}, ratio {now / then:.3f}")
        else:
            lines.append(f"{name}: {now:.6g}, not stored")
    return lines


def flat(figures: dict) -> dict[str, float]:
    """Figures by name and kind."""
    found = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            found |= {f"{name} {kind}": number for kind, number in value.items()}
        elif name != "failed":
            found[name] = value
    return found
