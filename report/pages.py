"""Put tables into the README and docs/, in both languages: between <!-- NAME --> and <!-- end -->.

Every page has two files, NAME.md and NAME.zh-CN.md; every table is on one page.
"""

import re
from pathlib import Path
from typing import NamedTuple

from report import diffs, draw, front, matrix, measured, predictions, suites
from report.blocks import TABLES, footer
from report.blocks import draw as table
from report.results import NOT_YET, ROOT, WORDS, Unusable, load, read_result
from techniques import COURSE, HOOD, LESSONS, MODEL, ONE, TECHNIQUES, TUNE, Technique
from techniques import DDP as DATA_PARALLEL

SUITES = ("gpt", "models", "shakespeare", "by_hand", "cpu", "peers", "gpu", "reviews", "parallel")
SUITES += ("half", "local_sgd", "ecosystem")  # with tables of their own
RESULTS = (*SUITES, *measured.SINGLE, "scaling", "estimate", "published", "proof", "losses")
RESULTS += ("front", "outputs", "inference")
BLOCK = re.compile(r"<!-- (?!end )([\w-]+) -->\n(.*?)<!-- end -->", re.DOTALL)
IN_SHORT = re.compile(r"^<!-- in short, (\w+): (.*?) -->$", re.MULTILINE)  # of a script
HEADING_OR_PROGRAM = re.compile(r"^##+ (.*)$|^<!-- silent-(\w+) -->$", re.MULTILINE)
NAVIGATION = re.compile(r"(?<=# the course, by benchmark.py --render)\n.*?\n(?= *# end\n)", re.S)
FIRST = {HOOD: ["under_the_hood.md"]}  # pages of a chapter before those of techniques, and after
LAST = {ONE: ["job.md"], DATA_PARALLEL: ["multi_node.md"], MODEL: ["parallelism.md"]}
LAST |= {TUNE: ["inference.md"]}


def find_changes(root: Path = ROOT) -> tuple[dict[Path, str], dict[Path, dict]]:
    """What rendering would change: pages with their new text, and pictures with what they show.

    Raises:
        Unusable: a result or a page is invalid, and nothing can be rendered.
    """
    results = {name: read_result(root, name) for name in RESULTS}
    plots = draw.plots(results) | predictions.plots(results)
    drawn = {root / "results" / f"{name}.svg": data for name, data in plots.items()}
    pictures = front.pictures(results) | draw.timelines(root)
    drawn |= {root / "docs" / "images" / f"{name}.svg": data for name, data in pictures.items()}
    drawn = {p: data for p, data in drawn.items() if draw.digest_of(p) != draw.digest(data)}
    blocks = make_blocks(root, results)
    changed = {root / "mkdocs.yml": fill_navigation(root)}
    for chinese in (False, True):
        texts = blocks | {"course": course_table(root, chinese)}
        texts["silent_examples"] = silent_table(root, results["proof"], chinese)
        missing = dict.fromkeys(texts)
        for path in list_pages(root, chinese):
            changed[path] = fill(root, path, texts, missing, chinese)
        if missing := [name for name in missing if not name.startswith(("diff-", "schematic-"))]:
            pages = "README.zh-CN.md and docs/*.zh-CN.md" if chinese else "README.md and docs/*.md"
            raise Unusable(f"{pages} have no place <!-- {missing[0]} --> ... <!-- end -->")
    return {path: text for path, text in changed.items() if path.read_text() != text}, drawn


def render(changed: dict[Path, str], drawn: dict[Path, dict]) -> None:
    """Write what :func:`find_changes` found."""
    for path, text in changed.items():
        path.write_text(text)
    for path, data in drawn.items():
        draw.draw(path, data)


def list_pages(root: Path, chinese: bool) -> list[Path]:
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    pages = [path for path in pages if not path.name.endswith(".zh-CN.md")]
    return [path.with_suffix(".zh-CN.md") for path in pages] if chinese else pages


def make_blocks(root: Path, results: dict[str, dict]) -> dict[str, str]:
    """All tables, by the name of their block."""
    blocks = measured.blocks(root, results)
    for name in SUITES:
        blocks |= suite_blocks(root, name, results)
    blocks |= predictions.blocks(root, results)
    blocks |= {row.name: technique_block(row, results) for row in TECHNIQUES if row.parent}
    blocks["matrix"] = matrix.matrix_block(root, results["proof"])
    return blocks | schematics(root) | diffs.blocks(root, TECHNIQUES) | front.blocks(root, results)


def suite_blocks(root: Path, name: str, results: dict[str, dict]) -> dict[str, str]:
    """A suite's tables, each with what has changed since its rows were measured."""
    suite, found = load(root / "config" / f"suite_{name}.json"), results[name]
    drawn = {row["table"]: suites.suite_table(root, found, row["table"]) for row in found["rows"]}
    blocks = dict.fromkeys(suite["tables"], "") | drawn
    if not found["rows"]:
        blocks[suite["tables"][0]] = NOT_YET.format(name)
    return blocks


def technique_block(row: Technique, results: dict[str, dict]) -> str:
    """A technique's rows of the first suites that have some."""
    names = ("parallel",) if row.course == MODEL else ("gpt", "shakespeare", "cpu", "gpu")
    parts = []
    for suite in ("by_hand", "parallel") if row.shows else names:
        found = results[suite]
        rows = [r for r in found["rows"] if r["runs"] and r["runs"][0]["technique"] == row.script]
        rows = [r for r in rows if r["table"] == rows[0]["table"]]  # the first that has some
        if rows:
            run = rows[0]["runs"][0]
            size = "context {context}" if "context" in run else "{image_size}×{image_size}"
            parts.append(f"{run['model']}, {size.format_map(run)}, {run['device']}:")
            parts.append(suites.techniques_table(rows, found.get("times", True)))
    return "\n\n".join(parts)


class Place(NamedTuple):
    """Where a script is explained, and what it adds, in a few words."""

    page: Path
    about: str


def find_places(root: Path, chinese: bool = False) -> dict[str, Place]:
    """The place of each script whose page says it in short, by its name."""
    texts = {path: path.read_text() for path in list_pages(root, chinese)}
    found = {name: Place(p, s) for p, text in texts.items() for name, s in IN_SHORT.findall(text)}
    if missing := [row.name for row in TECHNIQUES if row.name not in found]:
        raise Unusable(f"no page has a line <!-- in short, {missing[0]}: ... -->, for the course")
    return found


def course_table(root: Path, chinese: bool) -> str:
    """The list of all scripts, in the order of the course."""
    places = find_places(root, chinese)
    rows = []
    for before, row in zip([None, *LESSONS], LESSONS, strict=False):
        found = {"script": row.script, "parent": f"`{row.parent}`" if row.parent else None}
        found["chapter"] = row.course if not before or row.course != before.course else None
        page = places[row.name].page.relative_to(root).as_posix().replace(".zh-CN", "")
        rows.append(found | {"page": page, "about": places[row.name].about})
    return table(rows, TABLES["course"])


def silent_table(root: Path, proof: dict, chinese: bool) -> str:
    """Silent mistakes by section of their page, each with a link to its section."""
    page = root / "docs" / ("silent_mistakes.zh-CN.md" if chinese else "silent_mistakes.md")
    sections = {}
    last = ""
    for heading, program in HEADING_OR_PROGRAM.findall(page.read_text()):
        last = heading or last
        anchor = re.sub(r"[^\w\- ]", "", last.lower()).replace(" ", "-")
        sections[program] = f"[{last}](#{anchor})"
    order = list(sections)
    rows = []
    for row in measured.worst_first(proof["silent_examples"]):
        name = row["script"].rpartition("/")[2]
        if name not in sections:
            raise Unusable(f"{page} has no place <!-- silent-{name} --> ... <!-- end -->")
        rows.append(row | {"section": sections[name], "place": order.index(name)})
    rows.sort(key=lambda row: row["place"])
    about = footer(root, proof["measured"]["silent_examples"], "proof.json")
    return measured.proof_table("silent_examples", rows) + about


def schematics(root: Path) -> dict[str, str]:
    """The picture of each technique that has one."""
    paths = (root / "docs" / "images").glob("schematic-*.svg")
    names = [path.stem.removeprefix("schematic-") for path in paths if ".zh-CN" not in path.name]
    picture = "![Schematic: {0}](../images/schematic-{0}.svg)"
    return {f"schematic-{name}": picture.format(name) for name in names}


def fill_navigation(root: Path) -> str:
    """mkdocs.yml with the chapters of the course, between two comments."""
    places, lines = find_places(root), []
    for number, course in enumerate(COURSE, 1):
        rows = [row for row in TECHNIQUES if row.course == course]
        pages = [places[row.name].page.relative_to(root / "docs").as_posix() for row in rows]
        pages = [*FIRST.get(course, []), *pages, *LAST.get(course, [])]
        lines.append(f"      - {number} {course}:")
        lines += [f"          - {page}" for page in dict.fromkeys(pages)]
    return NAVIGATION.sub("\n".join(["", *lines, ""]), (root / "mkdocs.yml").read_text())


def fill(root: Path, path: Path, blocks: dict, missing: dict, chinese: bool) -> str:
    """The text of a page with all its tables updated. ``missing``: the blocks that are on no page
    so far; those of this page are removed."""
    up = "../" * (len(path.relative_to(root).parts) - 1)

    def block(match: re.Match) -> str:
        name = match[1]
        if name not in missing or "<!-- " in match[2]:
            raise Unusable(f"{path}: <!-- {name} --> is no table, has no end, or stands twice")
        missing.pop(name)
        lines = translate(blocks[name]) if chinese else blocks[name]
        lines = re.sub(r"\]\((results|docs|examples)/", rf"]({up}\1/", lines)
        return f"<!-- {name} -->\n" + (f"\n{lines}\n\n" if lines else "") + "<!-- end -->"

    text, found = BLOCK.subn(block, path.read_text())
    if found != text.count("<!-- end -->"):
        raise Unusable(f"{path}: <!-- end --> without a beginning")
    return text


def translate(lines: str) -> str:
    """Translate a table to Chinese: headers, notes, and cells that are not names."""
    lines, words = lines.splitlines(), WORDS["cells"] | WORDS["titles"]
    for i, line in enumerate(lines):
        if line.startswith("| "):
            cells = [words.get(cell, cell) for cell in line[2:-2].split(" | ")]
            lines[i] = "| " + " | ".join(cells) + " |"
        if re.search(r"\]\((results|docs|examples)/|^not measured yet|/schematic-", line):
            for english, chinese in WORDS["phrases"].items():
                lines[i] = lines[i].replace(english, chinese)
            lines[i] = re.sub(r"(\]\(docs/[\w/]+)\.md", r"\1.zh-CN.md", lines[i])
    return "\n".join(lines)
