"""Put tables into the README and docs/, in both languages: between <!-- NAME --> and <!-- end -->.

Every page has two files, NAME.md and NAME.zh-CN.md; every table is on one page.
"""

import ast
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from report import draw, measured, predictions, suites
from report.blocks import TITLES, Column
from report.blocks import draw as table
from report.results import NOT_YET, ROOT, WORDS, Unusable, load, read_result
from techniques import BEYOND, COURSE, HOOD, LESSONS, TECHNIQUES, Technique

SUITES = ("gpt", "shakespeare", "by_hand", "cpu", "peers", "gpu", "reviews", "parallel")
SUITES += ("local_sgd", "ecosystem")  # with tables of their own
RESULTS = (*SUITES, *measured.BLOCKS, "scaling", "estimate", "published", "proof", "losses")
OUTCOMES = ("faults", "faults_checkpoint", "faults_copies", "corrupt")
BLOCK = re.compile(r"<!-- (?!end )([\w-]+) -->\n(.*?)<!-- end -->", re.DOTALL)


def find_changes(root: Path = ROOT) -> tuple[dict[Path, str], dict[Path, dict]]:
    """What rendering would change: pages with their new text, and pictures with what they show.

    Raises:
        Unusable: a result or a page is invalid, and nothing can be rendered.
    """
    results = {name: read_result(root, name) for name in RESULTS}
    plots = draw.plots(results) | predictions.plots(results)
    drawn = {root / "results" / f"{name}.svg": data for name, data in plots.items()}
    pictures = draw.memory_pictures(results["gpt"]) | draw.timelines(root)
    drawn |= {root / "docs" / f"{name}.svg": data for name, data in pictures.items()}
    drawn = {p: data for p, data in drawn.items() if draw.digest_of(p) != draw.digest(data)}
    blocks = make_blocks(root, results)
    changed = {root / "mkdocs.yml": fill_navigation((root / "mkdocs.yml").read_text())}
    for chinese in (False, True):
        texts = blocks | list_blocks(root, chinese)
        missing = dict.fromkeys(texts)
        for path in list_pages(root, chinese):
            changed[path] = fill(root, path, texts, missing, chinese)
        if missing:
            pages = "README.zh-CN.md and docs/*.zh-CN.md" if chinese else "README.md and docs/*.md"
            raise Unusable(f"{pages} have no place <!-- {next(iter(missing))} --> ... <!-- end -->")
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


# ----------------------------------------------------------------------------------------- blocks


def make_blocks(root: Path, results: dict[str, dict]) -> dict[str, str]:
    """All tables, by the name of their block."""
    blocks = measured.proof_blocks(root, results["proof"])
    blocks |= measured.losses_blocks(root, results["losses"])
    blocks |= {name: block(root, results[name]) for name, block in measured.BLOCKS.items()}
    for name in OUTCOMES:
        blocks[name.replace("_", "-")] = measured.outcomes_block(root / "results" / f"{name}.txt")
    for name in SUITES:
        blocks |= suite_blocks(root, name, results)
    blocks |= predictions.blocks(root, results)
    rows = [row for row in TECHNIQUES if row.parent]
    return blocks | {row.name: technique_block(root, row, results) for row in rows}


def suite_blocks(root: Path, name: str, results: dict[str, dict]) -> dict[str, str]:
    """A suite's tables, each with what has changed since its rows were measured."""
    suite, found = load(root / "config" / f"suite_{name}.json"), results[name]
    blocks = dict.fromkeys(suite["tables"], "")
    for block in {row["table"] for row in found["rows"]}:
        blocks[block] = suites.suite_table(root, found, block)
    if "front" in suite:
        blocks[f"front-{name}"] = found["rows"] and suites.front_table(
            root, found, results["proof"], suite["front"], results["estimate"]["suites"][name]
        )
    if not found["rows"]:
        blocks[suite["tables"][0]] = NOT_YET.format(name)
    return blocks


def technique_block(root: Path, row: Technique, results: dict[str, dict]) -> str:
    """A technique's rows, the command that shows its diff, and its tagged lines."""
    names = ("parallel",) if row.course == BEYOND else ("gpt", "shakespeare", "cpu", "gpu")
    parts = []
    for suite in ("by_hand", "parallel") if row.shows else names:
        found = results[suite]
        rows = [r for r in found["rows"] if r["runs"] and r["runs"][0]["technique"] == row.script]
        rows = [r for r in rows if r["table"] == rows[0]["table"]]  # the first that has some
        if rows:
            run = rows[0]["runs"][0]
            side = run.get("image_size")
            size = f"context {run['context']}" if "context" in run else f"{side}×{side}"
            parts.append(f"{run['model']}, {size}, {run['device']}:")
            parts.append(suites.techniques_table(rows, found.get("times", True)))
    parts.append(f"```bash\ndiff pytorch_{row.parent}.py {row.script}.py\n```")
    lines = technique_lines((root / f"{row.script}.py").read_text(), row.shows)
    return "\n\n".join([*parts, "\n".join(["```python", *lines, "```"])])


def technique_lines(source: str, names: Iterable[str]) -> list[str]:
    """The lines of a script that implement its technique: some definitions, or the lines with the
    tag that its docstring names."""
    if names:
        nodes = [node for node in ast.walk(ast.parse(source)) if getattr(node, "name", "") in names]
        parts = [ast.get_source_segment(source, node, padded=True) for node in nodes]
        return "\n\n\n".join(map(textwrap.dedent, parts)).splitlines()
    _, doc, code = source.split('"""', 2)
    tag = re.search(r'tagged\s+"(# [\w-]+:)"', doc)
    lines = [line for line in code.splitlines() if tag and tag[1] in line]
    return textwrap.dedent("\n".join(lines)).splitlines()


# ------------------------------------------------------------------------------ lists of scripts


def list_blocks(root: Path, chinese: bool) -> dict[str, str]:
    """The lists of README and docs/techniques/, in the order of the course."""
    begins = {row.course: row for row in reversed(LESSONS)}
    chapter = Column("chapter", "章", lambda row: row.course if begins[row.course] is row else "")
    script = Column("script", "脚本", lambda row: link_to(root, row, f"{row.script}.py"))
    parent = Column("parent", "父脚本", lambda row: row.parent and f"`{row.parent}`")
    name = Column("technique", "技术", lambda row: link_to(root, row, row.name))
    about = Column("what it adds", "增加了什么", lambda row: about_of(root, row, chinese))
    pages = [row for row in LESSONS if page_of(root, row).is_file()]
    return {
        "course": table(LESSONS, chapter, script, parent, about),
        "techniques": table(pages, chapter, name, about),
    }


def page_of(root: Path, row: Technique, chinese: bool = False) -> Path:
    return root / "docs" / "techniques" / f"{row.name}{'.zh-CN' if chinese else ''}.md"


def link_to(root: Path, row: Technique, text: str) -> str:
    """To a row's page, if it has one."""
    page = page_of(root, row)
    return f"[`{text}`]({page.relative_to(root)})" if page.is_file() else f"`{text}`"


def about_of(root: Path, row: Technique, chinese: bool) -> str:
    """The line <!-- in short: ... --> of a page; without a page, of the script's docstring."""
    page = page_of(root, row, chinese)
    if not page.is_file():
        first = (root / f"{row.script}.py").read_text().partition("\n")[0].strip('".')
        return first.removeprefix("Train on several devices ")
    if found := re.search("<!-- in short: (.*?) -->", page.read_text()):
        return found[1]
    raise Unusable(f"{page} has no line <!-- in short: ... -->, which the lists of techniques show")


def fill_navigation(text: str) -> str:
    """mkdocs.yml with the pages of the techniques, between two comments."""
    before, begin, rest = text.partition("      # techniques, by benchmark.py --render\n")
    _, end, after = rest.partition("      # end\n")
    lines = []
    for course in COURSE:
        lines.append(f"      - {course}:")
        lines += ["          - under_the_hood.md"] if course == HOOD else []
        rows = [row for row in LESSONS if row.course == course]
        rows = [row for row in rows if "no_training" not in row.traits]  # those have no page
        lines += [f"          - techniques/{row.name}.md" for row in rows]
    return before + begin + "\n".join(lines) + "\n" + end + after


# ----------------------------------------------------------------------------------------- a page


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
        lines = re.sub(r"\]\((results|docs)/", rf"]({up}\1/", lines)
        return f"<!-- {name} -->\n" + (f"\n{lines}\n\n" if lines else "") + "<!-- end -->"

    try:
        text, found = BLOCK.subn(block, path.read_text())
    except FileNotFoundError:
        raise Unusable(f"{path} is missing") from None
    if found != text.count("<!-- end -->"):
        raise Unusable(f"{path}: <!-- end --> without a beginning")
    return text


def translate(lines: str) -> str:
    """Translate a table to Chinese: headers, notes, and cells that are not names."""
    lines, words = lines.splitlines(), WORDS["cells"] | TITLES
    for i, line in enumerate(lines):
        if line.startswith("| "):
            cells = [words.get(cell, cell) for cell in line[2:-2].split(" | ")]
            lines[i] = "| " + " | ".join(cells) + " |"
        if "](results/" in line or "](docs/" in line or line.startswith("not measured yet"):
            for english, chinese in WORDS["phrases"].items():
                lines[i] = lines[i].replace(english, chinese)
            lines[i] = re.sub(r"(\]\(docs/techniques/\w+)\.md", r"\1.zh-CN.md", lines[i])
    return "\n".join(lines)
