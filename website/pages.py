"""Copy README and docs/ to where MkDocs reads them, and add what Markdown cannot express.

Links are rewritten: GitHub shows every file of a repository, the site only those it contains.
"""

import os
import re
import shutil
import textwrap
from pathlib import Path, PurePosixPath

from techniques import TECHNIQUES
from website import techniques

FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
ANSWER = re.compile(r"<details>\n<summary>(.*?)</summary>\n\n(.*?)\n\n</details>", re.DOTALL)
NAVIGATION = re.compile(r"^\[README\]\(.*\n+", re.MULTILINE)  # the site has its own
DATA = {  # what widgets show, by the name that they give it
    "palette": "report/palette.json",
    "collectives": "website/collectives.json",
    "fit": "website/data/fit.json",
    "memory": "website/data/memory.json",
    "schedules": "website/data/schedules.json",
}
# No prose: headings, tables, HTML and quotations; code, links and comments.
OTHER = r"^```.*?^```|<!--.*?-->|^ *(?:#|\||<|>).*?$|`[^`]*`|!?\[[^\]]*\]\([^)]*\)"
BUTTONS = "[Start the course](docs/course.md){ .md-button .md-button--primary } "
BUTTONS += "[Will it fit?](docs/estimate.md){ .md-button }"
WIDGET = re.compile(r'data-widget="(\w+)"')
CODE = {"": "text", ".py": "python", ".yaml": "yaml", ".sbatch": "bash", ".args": "text"}
CODE |= {".cff": "yaml", ".txt": "text"}


def prepare(root: Path, target: Path) -> Path:
    """Write all pages, in both languages, and the files that they link to.

    Returns:
        ``target``: MkDocs's ``docs_dir``.
    """
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(root / "website" / "assets", target / "assets")
    (target / "data").mkdir()
    for name, path in DATA.items():  # as scripts: a page opened as a file may not fetch JSON
        data = (root / path).read_text().strip()
        script = f"window.SITE_DATA = window.SITE_DATA || {{}}; SITE_DATA.{name} = {data};\n"
        (target / "data" / f"{name}.js").write_text(script)
    linked: set[str] = set()
    for path in [*root.glob("*.md"), *(root / "docs").rglob("*")]:
        if path.is_file():
            copy = target / site_name(path.relative_to(root).as_posix())
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".md":
                copy.write_text(page(root, path, linked))
            else:
                shutil.copy(path, copy)
    (target / "diffs").mkdir()
    for row in TECHNIQUES:
        if row.parent:
            text = techniques.diff_page(root, row)
            text = rewrite_links(root, root / "docs" / "diffs" / f"{row.name}.md", text, linked)
            (target / "diffs" / f"{row.name}.md").write_text(text)
    linked = {name for name in linked if not name.startswith("docs/")}
    for name in sorted(linked | {f"{row.script}.py" for row in TECHNIQUES}):
        add_file(root, target, name)
    return target


def site_name(name: str) -> str:
    """The name of a repository file in MkDocs's ``docs_dir``."""
    language = ".zh" if ".zh-CN." in name else ""
    path = PurePosixPath(name.replace(".zh-CN.", "."))
    if path.suffix == ".md" and path.parent.name == "":  # the README, and CONTRIBUTING
        return f"{path.stem.lower().replace('readme', 'index')}{language}.md"
    if path.parts[0] == "docs":
        path = path.relative_to("docs")
        return str(path.with_name(f"{path.stem}{language}{path.suffix}"))
    if path.suffix in CODE:  # without the dot: the i18n plugin would read .py as a language
        return f"source/{path.with_name(path.name.replace('.', '_'))}.md"
    return f"files/{path.with_name(path.stem + language + path.suffix)}"


def page(root: Path, path: Path, linked: set[str]) -> str:
    """The text of a page with the site's additions, and with links to pages of the site."""
    text = NAVIGATION.sub("", path.read_text(), count=1)
    if path.parent == root and path.name == "README.md":
        text = hero(text)
    if path.parent.name == "techniques":
        text = techniques.add_to(root, path, link_terms(root, path, text))
    text += scripts(site_name(path.relative_to(root).as_posix()), WIDGET.findall(text))
    parts = FENCED.split(text)
    parts[::2] = [rewrite_links(root, path, part, linked) for part in parts[::2]]
    return ANSWER.sub(folded, "".join(parts))


def hero(text: str) -> str:
    """The home page: after its first paragraph two buttons, and the picture."""
    picture = re.search(r"^!\[.*\n+", text, re.MULTILINE)[0]
    title, first, rest = text.replace(picture, "").split("\n\n", 2)
    first = re.sub(r" \[中文\]\(.*?\)", "", first)  # the site has a switch
    return "\n\n".join([title, first, BUTTONS, picture.strip(), rest])


def link_terms(root: Path, path: Path, text: str) -> str:
    """An English page of the course whose first use of each term leads to the glossary, unless the
    page links to it already."""
    glossary = (root / "docs" / "start.md").read_text().partition("\n## Glossary\n")[2]
    titles = sorted(re.findall(r"^### (.*)$", glossary, re.MULTILINE), key=len, reverse=True)
    names = {title.lower().removesuffix("s"): title.lower().replace(" ", "-") for title in titles}
    if path.name.endswith(".zh-CN.md"):
        return text
    seen = {name for name, anchor in names.items() if f"start.md#{anchor})" in text}
    terms = "|".join(re.escape(name).replace(r"\ ", r"\s") for name in names)

    def link(match: re.Match) -> str:
        name = " ".join((match["term"] or "").lower().split())
        if not name or name in seen:
            return match[0]
        seen.add(name)
        return f"[{match[0]}](../start.md#{names[name]}){{.term}}"

    prose = rf"{OTHER}|(?<![\w-])(?P<term>{terms})s?(?![\w-])"
    return re.sub(prose, link, text, flags=re.DOTALL | re.IGNORECASE | re.MULTILINE)


def folded(match: re.Match) -> str:
    """A folded answer, which GitHub shows as HTML, as a block of pymdownx.details."""
    title, text = match.groups()
    return f'??? answer "{title}"\n\n{textwrap.indent(text, "    ")}'


def scripts(name: str, widgets: list[str]) -> str:
    """What the widgets of a page need; a Chinese page is one folder further down."""
    if not widgets:
        return "\n"
    depth = name.count("/") + (1 if name.endswith(".zh.md") else 0)
    needed = ["data/palette", *(f"data/{widget}" for widget in dict.fromkeys(widgets))]
    needed.append("assets/widgets")
    lines = [f'\n<script src="{"../" * depth}{script}.js"></script>' for script in needed]
    return "".join(lines) + "\n"


def rewrite_links(root: Path, path: Path, text: str, linked: set[str]) -> str:
    here = PurePosixPath(site_name(path.relative_to(root).as_posix())).parent

    def rewritten(match: re.Match) -> str:
        target = os.path.normpath(path.parent.relative_to(root) / match[1]).replace(os.sep, "/")
        name = site_name(target)
        if not name.endswith(".md") or name.startswith("source/"):
            linked.add(target)
        name = re.sub(r"\.zh\.(\w+)$", r".\1", name)  # MkDocs finds the page in the same language
        return f"]({os.path.relpath(name, here)}{match[2] or ''})"

    return LINK.sub(rewritten, text)


def add_file(root: Path, target: Path, name: str) -> None:
    """Add a file that pages link to: code as a page that search excludes, a folder as a page with
    its scripts, other files unchanged."""
    path = root / name
    copy = target / site_name(name)
    copy.parent.mkdir(parents=True, exist_ok=True)
    if copy.suffix != ".md":
        shutil.copy(path, copy)
        return
    parts = [f"---\nsearch:\n  exclude: true\n---\n\n# {name}"]
    for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
        if path.is_dir():
            parts.append(f"## {file.name}")
        parts.append(f"````{CODE[file.suffix]}\n{file.read_text()}````\n")
    copy.write_text("\n\n".join(parts))
