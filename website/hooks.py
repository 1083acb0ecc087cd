"""Hooks that MkDocs calls: the site is built from README and docs/, which website/pages.py copies
and extends. The i18n plugin builds one language after the other; here each gets its own search."""

import json
import re
import sys
import tempfile
from pathlib import Path

from mkdocs.plugins import event_priority
from mkdocs.utils import get_relative_url, write_file

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]  # MkDocs imports a hook as a module without a package

from website import pages  # noqa: E402

COPIES = tempfile.TemporaryDirectory(prefix="pages-")  # removed when MkDocs ends
FOLDERS = {"en": "", "zh": "zh/"}  # of the languages on the site
MARKUP = r"<!--.*?-->|<(?:\"[^\"]*\"|'[^']*'|[^>\"'])*>"  # a comment, a tag with its attributes
OPTION = re.compile(rf"{MARKUP}|(?<=[\s>])(--[a-z][\w-]*)", re.DOTALL)
WORD = re.compile(r"<code>([^\s<]+)</code>")


def on_config(config):
    """Build the prepared copies instead of docs/ itself."""
    config.docs_dir = str(pages.prepare(ROOT, Path(COPIES.name)))
    return config


def on_serve(server, config, builder):
    """Rebuild under ``mkdocs serve`` when a page of the repository changes."""
    for name in ("README.md", "README.zh-CN.md", "docs", "results", "website"):
        server.watch(str(ROOT / name))


def on_nav(nav, config, files):
    """Let the edit link of each copy lead to its original, if the repository's address is known."""
    originals = {
        pages.site_name(path.relative_to(ROOT).as_posix()): path.relative_to(ROOT).as_posix()
        for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    }
    for file in files.documentation_pages():
        name = originals.get(Path(file.abs_src_path).relative_to(config.docs_dir).as_posix())
        if config.repo_url and name:
            file.page.edit_url = f"{config.repo_url.rstrip('/')}/edit/main/{name}"
        else:
            file.page.edit_url = None


def on_page_content(html, page, config, files):
    """Mark options, which browsers would break at hyphens, and diffs, which search leaves out: a
    hit would be a wall of code. The home page needs no breadcrumbs."""
    if page.file.src_uri.startswith("index."):
        page.meta["hide"] = [*page.meta.get("hide", []), "path"]
    html = WORD.sub(r'<code class="word">\1</code>', html)
    html = OPTION.sub(mark_option, html)
    html = html.replace(
        '<div class="language-diff', '<div data-search-exclude class="language-diff'
    )
    if page.file.src_uri.startswith("troubleshooting."):  # the style sheet hides a column on phones
        html = html.replace("<table>", "<table data-evidence>")
    return html


def mark_option(match: re.Match) -> str:
    """Only in text: a tag in the attribute of another tag would end it."""
    return f'<span class="option">{match[1]}</span>' if match[1] else match[0]


def on_post_template(output_content, template_name, config):
    """Keep the English 404.html, which a later language would overwrite, and put others beside."""
    folder = FOLDERS[config.theme["language"]]
    if template_name != "404.html" or not folder:
        return output_content
    write_file(output_content.encode(), f"{config.site_dir}/{folder}{template_name}")
    return ""


@event_priority(-200)  # after the i18n plugin, which builds all languages in its own event
def on_post_build(config):
    """Write what belongs to a language, once all are built: its search and its redirects."""
    if config.plugins["i18n"].building:
        return
    site = Path(config.site_dir)
    template = config.theme.get_env().get_template("moved.html")
    index = json.loads((site / "search" / "search_index.json").read_text())
    for language, folder in FOLDERS.items():
        write_search(site / folder / "search", index, language)
        for old, new in config.extra["moved"].items():
            if (site / folder / old).exists() or not (site / folder / new).exists():
                raise FileNotFoundError(f"mkdocs.yml: {old} is a page, or {new} is none")
            text = template.render(target=get_relative_url(new, old))
            write_file(text.encode(), str(site / folder / old))


def write_search(target: Path, index: dict, language: str) -> None:
    """The pages of a language: as JSON and, for pages opened as files, as a script."""
    folder = FOLDERS[language]
    others = tuple(filter(None, FOLDERS.values()))
    docs = []
    for entry in index["docs"]:
        place = entry["location"]
        ours = place.startswith(folder) if folder else not place.startswith(others)
        if ours:
            docs.append(entry | {"location": place.removeprefix(folder)})
    data = json.dumps({"config": index["config"] | {"lang": [language]}, "docs": docs})
    write_file(data.encode(), str(target / "search_index.json"))
    write_file(f"var __index = {data}".encode(), str(target / "search_index.js"))
