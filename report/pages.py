"""Put tables into the README and docs/, in both languages: between <!-- NAME --> and <!-- end -->.

Every page has two files, NAME.md and NAME.zh-CN.md; every table is on one English page. A Chinese
page may follow later (report/translations.py).
"""

import json
import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

from report import (
    diffs,
    draw,
    ecosystem,
    front,
    lessons,
    matrix,
    predictions,
    recorded,
    steps,
    suites,
)
from report.blocks import TABLES
from report.blocks import draw as table
from report.results import NOT_YET, ROOT, WORDS, Unusable, load, read_result
from techniques import (
    LESSONS,
    LIBRARIES,
    MODEL,
    PARTS,
    SHELF,
    TECHNIQUES,
    USE,
    technique,
)

OURS = [row for row in LESSONS if row not in LIBRARIES]
SUITES = ("gpt", "shakespeare", "peers", "gpu")  # with tables of their own
RESULTS = (*SUITES, "front", "outputs", "collectives", "published", "one_gpu", "course")
BLOCK = re.compile(r"<!-- (?!end )([\w-]+) -->\n(.*?)<!-- end -->", re.DOTALL)
IN_SHORT = re.compile(r"^<!-- in short, (\w+): (.*?) -->$", re.MULTILINE)  # of a script
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
TITLE = re.compile(r"^# (.*)", re.MULTILINE)
CELL = re.compile(r"(?<=\| ).*?(?= \|)")
PAGE_OR_PICTURE = re.compile(r"\[([^]]*)\]\(([\w./-]+\.(?:md|svg))")
TO_FILES = re.compile(r"\]\((?=(?:results|docs|examples|website|estimator)/|\w+\.py\))")
NAVIGATION = re.compile(r"(?<=# the course, by benchmark.py --render)\n.*?\n(?= *# end\n)", re.S)
LAST = {MODEL: ["parallelism.md"], USE: ["multi_node.md", "inference.md"]}
LAST |= {SHELF: ["techniques/fsdp1_to_fsdp2.md"]}  # pages of a part after those of its scripts
# The question that each part answers; and the script whose page asks to write an exercise.
COURSE = json.loads(Path(__file__).with_name("course.json").read_text())
HOURS = 0.5  # to read a page, to predict and to run
# Phrases of chinese.json, as patterns: {gpus} stands for one word, the same in both languages.
PHRASES = []
for english, chinese in (WORDS["sentences"] | WORDS["phrases"]).items():
    pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\S+?)", re.escape(english))
    PHRASES.append((re.compile(pattern), re.sub(r"\{(\w+)\}", r"\\g<\1>", chinese)))
# Blocks that may be on no English page: code of scripts, and what Chinese pages have until they
# follow the English ones.
OPTIONAL = ("diff-", "script-", "tested-", "next-")
SOURCES = "a schematic is in website/schematics.yaml, an answer in report/answers/, other places"
SOURCES += " of a lesson in report/lessons.json"


def find_changes(root: Path = ROOT) -> tuple[dict[Path, str], dict[Path, dict]]:
    """What rendering would change: pages with their new text, and pictures with what they show.

    Raises:
        Unusable: a result or a page is invalid, and nothing can be rendered.
    """
    results = {name: read_result(root, name) for name in RESULTS}
    plots = draw.plots(results)
    drawn = {root / "results" / f"{name}.svg": data for name, data in plots.items()}
    pictures = front.pictures(root, results) | draw.timelines(root)
    pictures |= steps.pictures(root, partial(translate, root))
    drawn |= {root / "docs" / "images" / f"{name}.svg": data for name, data in pictures.items()}
    drawn = {p: data for p, data in drawn.items() if draw.digest_of(p) != draw.digest(data)}
    blocks = make_blocks(root, results)
    changed = {root / "mkdocs.yml": fill_navigation(root)}
    for chinese in (False, True):
        texts = blocks | {"course": course_table(root, chinese)}
        texts |= lessons.answers(root, results, chinese)
        add_exercises(root, texts)
        texts["silent_examples"] = recorded.silent_table(root, results["outputs"], chinese)
        found = set()
        for path in list_pages(root, chinese):
            changed[path] = fill(root, path, texts, found, chinese)
        missing = [name for name in texts.keys() - found if not name.startswith(OPTIONAL)]
        if missing and not chinese:
            place = f"<!-- {missing[0]} --> ... <!-- end -->"
            raise Unusable(f"README.md and docs/*.md have no place {place}")
    return {path: text for path, text in changed.items() if path.read_text() != text}, drawn


def render(changed: dict[Path, str], drawn: dict[Path, dict]) -> None:
    """Write what :func:`find_changes` found."""
    for path, text in changed.items():
        path.write_text(text)
    for path, data in drawn.items():
        draw.draw(path, data)


def list_pages(root: Path, chinese: bool) -> list[Path]:
    """The pages of a language, without dated reports, which have no Chinese page and no table that
    a program writes. English ones come first: some may not have a Chinese page yet."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    pages = [path for path in pages if path.parent != root / "docs" / "reports"]
    pages = [path for path in pages if not path.name.endswith(".zh-CN.md")]
    translated = [path for path in map(chinese_of, pages) if path.is_file()]
    return translated if chinese else pages


def chinese_of(page: Path) -> Path:
    """Of a page, or of a picture."""
    return page.with_suffix(f".zh-CN{page.suffix}")


def make_blocks(root: Path, results: dict[str, dict]) -> dict[str, str]:
    """All tables, by the name of their block, without those that are made for each language."""
    blocks = {"collectives": suites.collectives_table(results["collectives"])}
    blocks |= {"matrix": matrix.matrix_block(), "ecosystem": ecosystem.ecosystem_table()}
    for name in SUITES:
        blocks |= suite_blocks(root, name, results[name])
    blocks |= predictions.blocks(root, results)
    blocks |= schematics(root) | diffs.blocks(root, OURS) | front.blocks(root, results)
    blocks |= lessons.blocks(root, results) | next_blocks(root) | {"parts": parts_list(root)}
    return blocks


def suite_blocks(root: Path, name: str, found: dict) -> dict[str, str]:
    """A suite's tables, by the name of their block; empty if they are not measured yet."""
    blocks = dict.fromkeys(load(root / "measure" / "suites" / f"{name}.json")["tables"], "")
    for name_of_table in {row["table"] for row in found["rows"]}:
        blocks[name_of_table] = suites.suite_table(found, name_of_table)
    if not found["rows"]:
        blocks[next(iter(blocks))] = NOT_YET.format(name)
    return blocks


class Place(NamedTuple):
    """Where a script is explained, and what it adds, in a few words."""

    page: Path
    about: str


def find_places(root: Path, chinese: bool = False) -> dict[str, Place]:
    """The place of each script whose page says it in short, by its name; in Chinese where there is
    a Chinese page."""
    found = find_places(root) if chinese else {}
    for path in list_pages(root, chinese):
        for name, about in IN_SHORT.findall(path.read_text()):
            found[name] = Place(path, about)
    if missing := [row.name for row in TECHNIQUES if row.name not in found]:
        raise Unusable(f"no page has a line <!-- in short, {missing[0]}: ... -->, for the course")
    return found


def course_table(root: Path, chinese: bool) -> str:
    """The list of all scripts, in the order of the course."""
    places = find_places(root, chinese)
    rows = []
    for before, row in zip([None, *LESSONS], LESSONS, strict=False):
        found = {"script": row.script, "parent": f"`{row.parent}`" if row.parent else None}
        found["part"] = row.part if not before or row.part != before.part else None
        page = places[row.name].page.relative_to(root).as_posix().replace(".zh-CN", "")
        rows.append(found | {"page": page, "about": places[row.name].about})
    return table(rows, TABLES["course"])


def pages_of_parts(root: Path) -> dict[str, list[str]]:
    """The pages of each part of the course, and of the shelf, in the order in which they are read;
    paths in docs/. A page with scripts of two parts is in the first of them."""
    places = find_places(root)
    found = {}
    seen = set()
    for part in (*PARTS, SHELF):
        rows = [row for row in LESSONS if row.part == part]
        pages = [places[row.name].page.relative_to(root / "docs").as_posix() for row in rows]
        pages = [page for page in [*pages, *LAST.get(part, [])] if page not in seen]
        found[part] = list(dict.fromkeys(pages))
        seen |= {*pages}
    return found


def next_blocks(root: Path) -> dict[str, str]:
    """``next-NAME``: what the page of a script leaves unsolved, and the page after it."""
    places = find_places(root)
    parts = pages_of_parts(root)
    line = [page for part in PARTS for page in parts[part]]
    found = {}
    for row in LESSONS:
        page = places[row.name].page.relative_to(root / "docs").as_posix()
        if row.unsolved:
            after = line[line.index(page) + 1]
            found[f"next-{row.name}"] = f"{row.unsolved} → {link_to(root, after)}"
    return found


def link_to(root: Path, page: str) -> str:
    """A link to a page of docs/ with its title."""
    return f"[{TITLE.search((root / 'docs' / page).read_text())[1]}](docs/{page})"


def parts_list(root: Path) -> str:
    """The parts of the course: what each answers, how long it takes, its pages and exercises."""
    parts = pages_of_parts(root)
    lines = []
    for number, (part, question) in enumerate(COURSE["questions"].items()):
        hours = HOURS * len(parts[part])
        lines.append(f"- **{number} {part}** (about {hours:g} h). {question}")
        lines += [f"    - {link_to(root, page)}" for page in parts[part]]
        rows = COURSE["exercises"].items()
        if names := [f"`{name}`" for name, row in rows if technique(row).part == part]:
            lines.append(f"    - [Exercises](docs/exercises.md): {', '.join(names)}")
    return "\n".join(lines)


def add_exercises(root: Path, blocks: dict[str, str]) -> None:
    """Put the commands that judge the exercises of a page below its last answer."""
    places = find_places(root)
    below = {}
    for name, row in COURSE["exercises"].items():
        command = f"`python exercises/check.py {name}`"
        below.setdefault(places[row].page.stem, []).append(command)
    for page, commands in below.items():
        if answers := [name for name in blocks if name.startswith(f"answer-{page}-")]:
            line = f"[Write it yourself](docs/exercises.md): {', '.join(commands)}"
            blocks[max(answers)] += f"\n\n{line}"


def schematics(root: Path) -> dict[str, str]:
    """The picture of each technique that is described, also if it is not drawn yet."""
    described = (root / "website" / "schematics.yaml").read_text()
    names = [row.name for row in OURS if f"\n  {row.name}: |\n" in described]
    picture = "![Schematic: {0}](../images/schematic-{0}.svg)"
    return {f"schematic-{name}": picture.format(name) for name in names}


def fill_navigation(root: Path) -> str:
    """mkdocs.yml with the parts of the course, between two comments."""
    lines = []
    for number, (part, pages) in enumerate(pages_of_parts(root).items()):
        lines.append(f"      - {part}:" if part == SHELF else f"      - {number} {part}:")
        lines += [f"          - {page}" for page in pages]
    return NAVIGATION.sub("\n".join(["", *lines, ""]), (root / "mkdocs.yml").read_text())


def fill(root: Path, path: Path, blocks: dict, found: set[str], chinese: bool) -> str:
    """The text of a page with all its tables updated. ``found``: the blocks of the pages before, to
    which those of this page are added."""
    up = "../" * (len(path.relative_to(root).parts) - 1)

    def block(match: re.Match) -> str:
        name = match[1]
        if name not in blocks:
            raise Unusable(f"{path}: nothing is to be written at <!-- {name} -->; {SOURCES}")
        if name in found or "<!-- " in match[2]:
            raise Unusable(f"{path}: <!-- {name} --> has no end, or stands twice")
        found.add(name)
        lines = TO_FILES.sub(f"]({up}", blocks[name])
        lines = translate(path.parent, lines) if chinese else lines
        inside = f"\n{lines}\n\n" if lines else ""
        return f"<!-- {name} -->\n{inside}<!-- end -->"

    text, blocks_of_page = BLOCK.subn(block, path.read_text())
    if blocks_of_page != text.count("<!-- end -->"):
        raise Unusable(f"{path}: <!-- end --> without a beginning")
    return text


def translate(folder: Path, text: str) -> str:
    """Translate a block of a page in ``folder`` to Chinese, but for its code: cells, and phrases in
    everything else. Links lead to the Chinese page or picture where there is one, and if they have
    the title of the English page, they get that of the Chinese one."""

    def link(match: re.Match) -> str:
        label = match[1]
        page = folder / match[2]
        chinese = chinese_of(page)
        if not chinese.is_file():
            return match[0]
        if page.suffix == ".md" and label == TITLE.search(page.read_text())[1]:
            label = TITLE.search(chinese.read_text())[1]
        return f"[{label}]({chinese_of(Path(match[2]))}"

    words = WORDS["cells"] | WORDS["titles"]
    parts = FENCED.split(text)
    for i in range(0, len(parts), 2):
        part = CELL.sub(lambda cell: words.get(cell[0], cell[0]), parts[i])
        for english, chinese in PHRASES:
            part = english.sub(chinese, part)
        parts[i] = PAGE_OR_PICTURE.sub(link, part)
    return "".join(parts)
