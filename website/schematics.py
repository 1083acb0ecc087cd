"""The schematic on each technique's page, as SVG: website/schematics.yaml says what it shows."""

import re
from pathlib import Path
from typing import NamedTuple

import jinja2

from report.palette import COLLECTIVES, INKS, MEMORY, PANELS, PHASES, text_on
from report.results import WORDS, Unusable

WIDTH, LETTER, WIDE = 440, 7, "\u2e7f"  # of a figure, of a letter; letters after this are two wide
GAP, PAD, BETWEEN = 4, 8, 16  # between boxes; of a panel; between panels
FILLS = MEMORY | PHASES | {name.replace("_", "-"): tone for name, tone in COLLECTIVES.items()}
FILLS |= {"batch": MEMORY["input"], "compute": PHASES["forward and backward"]}
KINDS = "|".join([*sorted(FILLS, key=len, reverse=True), "none", "[#→←↔↓↑↕]"])
BOX = re.compile(rf"(?P<kind>{KINDS})?(?P<own>: )?(?P<label>.*?) *(\*(?P<width>[\d.]+))?")
NUMBER = re.compile(r"\b\d+\b")


class Box(NamedTuple):
    """``long``: the room that the label needs. What is not in place yet begins at 0."""

    kind: str
    label: str
    long: float
    width: float
    x: float = 0
    y: float = 0
    height: float = 0


def pictures(root: Path) -> dict[Path, str]:
    """All schematics, by the path of their file: for light and dark pages, in both languages."""
    import yaml

    found = yaml.safe_load((root / "website" / "schematics.yaml").read_text())
    template = (root / "website" / "schematic.svg.jinja").read_text()
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(template)
    drawn = {}
    for language, words in (("", {}), (".zh-CN", WORDS["pictures"] | found["chinese"])):
        for name, text in found["schematics"].items():
            panels, boxes = lay_out(text, words)
            said = {"width": WIDTH, "height": boxes[-1].y + 36, "panels": panels, "boxes": boxes}
            said |= {"key": legend(text, words), "fills": FILLS, "text_on": text_on}
            for theme, ink in INKS.items():
                path = root / "docs" / f"schematic-{name}-{theme}{language}.svg"
                drawn[path] = template.render(said, ink=ink, panel=PANELS[theme]) + "\n"
    return drawn


def lay_out(text: str, words: dict[str, str]) -> tuple[list, list[Box]]:
    """The panels of ranks (x, y, width, height), and all boxes in their places."""
    panels, boxes, y = [], [], 0.0
    for section in text.split("---\n"):
        rows, top = section.splitlines(), y
        ranks = rows[0].count("|") + 1 if rows[0].startswith("#") else 0
        for row in rows:
            each = [row[6:].replace("{}", str(rank)) for rank in range(ranks)]
            cells = each if row.startswith("each: ") else row.split("|")
            placed = []
            for cell, (x, width) in zip(cells, columns(len(cells)), strict=True):
                placed += place(cell, x + PAD * bool(ranks), width - 2 * PAD * bool(ranks), words)
            filled = any(box.kind in FILLS or box.kind in ("none", "↕") for box in placed)
            height = 30 if filled else 20
            boxes += [box._replace(y=y + GAP, height=height) for box in placed]
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
    unit, placed = (width + GAP) / sum(box.width for box in boxes), []
    for box in boxes:
        placed.append(box._replace(x=x, width=box.width * unit - GAP))
        if box.long > placed[-1].width:
            raise Unusable(f"website/schematics.yaml: {box.label!r} is too long for its box")
        x += box.width * unit
    return placed


def read(part: str, words: dict[str, str]) -> Box:
    found = BOX.fullmatch(part.strip())
    kind, label = found["kind"] or "", found["label"]
    label = translate(label if found["own"] or kind not in FILLS else kind + label, words)
    long = sum(LETTER * (1 + (letter > WIDE)) for letter in label)
    return Box(kind, label, long, float(found["width"] or 1))


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
