"""The schematic on each technique's page, as SVG: website/schematics.yaml says what it shows."""

import re
from pathlib import Path
from typing import NamedTuple

import jinja2
from markupsafe import Markup

from report.palette import COLLECTIVES, MEMORY, PHASES, text_on, theme_style
from report.results import WORDS, Unusable

WIDTH = 440  # of a figure
LETTER = 7  # the width of a Latin letter; those after WIDE, as Chinese ones, are twice as wide
WIDE = "\u2e7f"
GAP = 4  # between boxes
PAD = 8  # of a panel
BETWEEN = 16  # between panels
FILLS = MEMORY | PHASES | {name.replace("_", "-"): tone for name, tone in COLLECTIVES.items()}
FILLS |= {"batch": MEMORY["input"], "compute": PHASES["forward and backward"]}
KINDS = "|".join([*sorted(FILLS, key=len, reverse=True), "none", "idle", "[#→←↔↓↑↕]"])
SIZE = r"(\*(?P<width>[\d.]+))? *(\^(?P<share>[\d.]+))?"
BOX = re.compile(rf"(?P<kind>{KINDS})?(?P<own>: )?(?P<label>.*?) *{SIZE}")
NUMBER = re.compile(r"\b\d+\b")


class Box(NamedTuple):
    """``long``: the room that the label needs; ``share``: the height, as a share of its row's. What
    is not in place yet begins at 0."""

    kind: str
    label: str
    long: float
    width: float
    share: float = 1
    x: float = 0
    y: float = 0
    height: float = 0


def pictures(root: Path) -> dict[Path, str]:
    """All schematics in both languages, by the path of their file."""
    import yaml

    found = yaml.safe_load((root / "website" / "schematics.yaml").read_text())
    chinese = WORDS["pictures"] | found["chinese"]
    template = (root / "website" / "schematic.svg.jinja").read_text()
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(template)
    drawn = {}
    for name, text in found["schematics"].items():
        for language, words in (("", {}), (".zh-CN", chinese)):
            panels, boxes = lay_out(text, words)
            lowest = max(box.y for box in boxes if box.share == 1)
            path = root / "docs" / "images" / f"schematic-{name}{language}.svg"
            drawn[path] = template.render(
                style=Markup(theme_style()), width=WIDTH, height=lowest + 36,
                panels=panels, boxes=boxes, key=legend(text, words),
                fills=FILLS, text_on=text_on,
            ) + "\n"  # fmt: skip
    return drawn


def lay_out(text: str, words: dict[str, str]) -> tuple[list, list[Box]]:
    """The panels of ranks (x, y, width, height), and all boxes in their places."""
    panels = []
    boxes = []
    y = 0.0
    for section in text.split("---\n"):
        top = y
        rows = section.splitlines()
        ranks = rows[0].count("|") + 1 if rows[0].startswith("#") else 0
        pad = PAD if ranks else 0
        for row in rows:
            cells = row.split("|")
            if row.startswith("each: "):
                same = row.removeprefix("each: ")
                cells = [same.replace("{}", str(rank)) for rank in range(ranks)]
            placed = []
            for cell, (x, width) in zip(cells, columns(len(cells)), strict=True):
                placed += place(cell, x + pad, width - 2 * pad, words)
            filled = any(box.kind in FILLS or box.kind in ("none", "idle", "↕") for box in placed)
            height = 30 if filled else 20
            for box in placed:
                top_of_box = y + GAP + height * (1 - box.share)
                boxes.append(box._replace(y=top_of_box, height=height * box.share))
            y += height + 1.5 * GAP
        panels += [(x, top, width, y - top + GAP / 2) for x, width in columns(ranks)]
        y += 2 * GAP
    return panels, boxes


def columns(n: int) -> list[tuple[float, float]]:
    """Where each of ``n`` columns begins, and its width."""
    width = (WIDTH + BETWEEN) / max(n, 1) - BETWEEN
    return [(i * (width + BETWEEN), width) for i in range(n)]


def place(cell: str, x: float, width: float, words: dict[str, str]) -> list[Box]:
    """The boxes of a column beside each other."""
    boxes = [read(part, words) for part in cell.split(",")]
    unit = (width + GAP) / sum(box.width for box in boxes)
    placed = []
    for box in boxes:
        placed.append(box._replace(x=x, width=box.width * unit - GAP))
        if box.long > placed[-1].width:
            raise Unusable(f"website/schematics.yaml: {box.label!r} is too long for its box")
        x += box.width * unit
    return placed


def read(part: str, words: dict[str, str]) -> Box:
    found = BOX.fullmatch(part.strip())
    kind = found["kind"] or ""
    label = found["label"]
    if kind in FILLS and not found["own"]:
        label = kind + label
    label = translate(label, words)
    long = sum(2 * LETTER if letter > WIDE else LETTER for letter in label)
    share = float(found["share"]) if found["share"] else 1
    return Box(kind, label, long, float(found["width"] or 1), share)


def translate(label: str, words: dict[str, str]) -> str:
    """A label in the language of ``words``, which have ``{}`` for its numbers."""
    pattern = NUMBER.sub("{}", label.strip())
    return words.get(pattern, pattern).format(*NUMBER.findall(label))


def legend(text: str, words: dict[str, str]) -> dict[str, str]:
    """The colours that no box names, by the name of their kind."""
    _, boxes = lay_out(text, {})
    named = {box.kind for box in boxes if box.kind in box.label}
    kinds = dict.fromkeys(box.kind for box in boxes if box.kind in FILLS)
    return {translate(kind, words): FILLS[kind] for kind in kinds if kind not in named}
