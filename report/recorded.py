"""What programs print, as pages show it: results/outputs.json."""

import json
import re
from pathlib import Path

from report.blocks import TABLES, draw, footer
from report.diffs import fenced
from report.results import Unusable, load

SILENT = "silent-"  # the outputs of examples/silent/, which are rows of a table
# The mistake of each of these programs in words, and what it does.
WORDS = json.loads(Path(__file__).with_name("silent.json").read_text())
LINE = re.compile(r"^(right|wrong) ?(.*): (.+) off by (\S+)$")
HEADING_OR_PROGRAM = re.compile(r"^##+ (.*)$|^<!-- silent-(\w+) -->$", re.MULTILINE)


def outputs(root: Path, found: dict) -> dict[str, str]:
    """What commands have printed, maybe from some line on, by the name of their block."""
    shown = load(root / "measure" / "suites" / "outputs.json")["shown"]
    blocks = {}
    for name, one in found["outputs"].items():
        if not name.startswith(SILENT):
            lines = one["output"]
            begin = shown.get(name, "")
            first = next(i for i, line in enumerate(lines) if line.startswith(begin))
            blocks[f"output-{name}"] = fenced("text", lines[first:])
    return blocks


def silent_table(root: Path, found: dict, chinese: bool) -> str:
    """Silent mistakes in the order of their page, each with a link to its section."""
    page = root / "docs" / ("silent_mistakes.zh-CN.md" if chinese else "silent_mistakes.md")
    words = dict(WORDS)
    rows = []
    section = ""
    for heading, name in HEADING_OR_PROGRAM.findall(page.read_text()):
        section = heading or section
        if name:
            mistake, effect = words.pop(name)
            anchor = re.sub(r"[^\w\- ]", "", section.lower()).replace(" ", "-")
            row = {"program": name, "mistake": mistake, "effect": effect}
            row |= printed(found["outputs"][SILENT + name])
            rows.append(row | {"section": f"[{section}](#{anchor})"})
    if words:
        name = next(iter(words))
        raise Unusable(f"{page} has no place <!-- silent-{name} --> ... <!-- end -->")
    return draw(rows, TABLES["silent_examples"]) + footer(
        found, "outputs", found["hardware"]["cpu"], rows
    )


def printed(one: dict) -> dict:
    """By how much a quantity is off, and which; a range if a program shows several mistakes."""
    found = [LINE.match(line).groups() for line in one["output"]]
    values = sorted(float(value) for kind, _, _, value in found if kind == "wrong")
    said = "–".join(f"{value:.2g}" for value in dict.fromkeys([values[0], values[-1]]))
    return one | {"off": said, "of": found[0][2]}
