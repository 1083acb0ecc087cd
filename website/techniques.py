"""What the site adds to a technique's page: its diffs side by side, on pages of their own; memory
and communication from the scripts' docstrings; and memory over one step."""

import ast
import json
import re
from html import escape
from pathlib import Path

import yaml

from report import diffs
from report.pages import IN_SHORT
from techniques import Technique, technique
from website import side_by_side

WORDS = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text())  # English, Chinese
WHEN = re.compile(r"^## (?:When|何时|不适合)", re.MULTILINE)


def add_to(root: Path, path: Path, text: str) -> str:
    """Add the sections to a technique's page, whose scripts are those that it says in short. A page
    of the course that teaches has its own sections on memory and communication: it gets links to
    the whole diffs alone."""
    chinese = path.name.endswith(".zh-CN.md")
    rows = [technique(name) for name, _ in IN_SHORT.findall(text)]
    if not rows:
        return text
    at = WHEN.search(text).start()
    if "<!-- worked-" in text:
        return "\n\n".join([text[:at].rstrip(), *whole_diffs(rows, chinese), text[at:]])
    parts = [text[:at].rstrip(), *whole_diffs(rows, chinese), *sections(root, rows, chinese)]
    return "\n\n".join([*parts, text[at:]])


def whole_diffs(rows: list[Technique], chinese: bool) -> list[str]:
    """Links to the pages that :func:`diff_page` writes."""
    links = [
        f"[{row.script}.py − pytorch_{row.parent}.py](../diffs/{row.name}.md)"
        for row in rows
        if row.parent
    ]
    return [WORDS["whole_diffs"][chinese] + " · ".join(links)] if links else []


def diff_page(root: Path, row: Technique) -> str:
    """A page, which search excludes, of a script beside its parent, without their docstrings."""
    pair = diffs.pair_of(root, row)
    links = f"[{pair.old}](../../{pair.old}) → [{pair.new}](../../{pair.new})"
    front = "---\nhide: [toc]\nsearch:\n  exclude: true\n---"
    return "\n\n".join([front, f"# {pair.new} − {pair.old}", links, side_by_side.diff(pair)]) + "\n"


def sections(root: Path, rows: list[Technique], chinese: bool) -> list[str]:
    parts = [heading("fields", chinese)]
    for row in rows:
        if len(rows) > 1:
            parts.append(f"`{row.script}.py`")
        parts.append(header_fields(root / f"{row.script}.py"))
    pictures = [part for row in rows for part in memory(root, row.name, chinese)]
    if pictures:
        parts += [heading("memory", chinese), *pictures]
    return parts


def heading(key: str, chinese: bool) -> str:
    # Search leaves out what every page has: otherwise "out of memory" finds all of them.
    return f"## {WORDS['headings'][key][chinese]} {{ data-search-exclude }}"


def header_fields(script: Path) -> str:
    """The fields Holds and Sends of the script's docstring, as HTML."""
    doc = ast.get_docstring(ast.parse(script.read_text()))
    fields = re.findall(r"^(Holds|Sends)\s+(.*?)(?=^\S|\Z)", doc, re.DOTALL | re.MULTILINE)
    names = {"Holds": "Memory", "Sends": "Communication"}
    lines = [f"<dt>{names[key]}</dt><dd>{escape(' '.join(s.split()))}</dd>" for key, s in fields]
    return '<dl class="fields" lang="en">\n' + "\n".join(lines) + "\n</dl>"


def memory(root: Path, name: str, chinese: bool) -> list[str]:
    """A place for the pictures of a script's variants, for a GPT and for a ResNet."""
    found = json.loads((root / "website" / "data" / "memory.json").read_text())["data"]
    drawn = {(one["job"], one["technique"].split()[0]) for one in found["series"]}
    parts = []
    for job, (flags, batch) in found["jobs"].items():
        if (job, name) in drawn:
            said = WORDS["memory"][chinese].format(gpus=found["gpus"], flags=flags, batch=batch)
            place = f'<div data-widget="memory" data-job="{job}" data-script="{name}"></div>'
            parts += [f"**{job}.** {said}", place]
    return parts
