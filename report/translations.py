"""List the Chinese pages that are behind: each says which English text it translates.

    python -m report.translations
    python -m report.translations --mark docs/course.md

The first prints the pages whose English text has changed since, and exits with code 1 if there are
any. The second, after translating, notes that a page follows. What --render writes does not count:
report/chinese.json translates its cells and phrases, report/answers/NAME.zh-CN.md has the answers.
"""

import argparse
import hashlib
import re
import sys
from pathlib import Path

from report.pages import BLOCK, chinese_of, list_pages
from report.results import ROOT

MARK = re.compile(r"^<!-- translates (\S+) (\w+) -->\n", re.MULTILINE)


def hash_of(text: str) -> str:
    """Of the text that people write: without what is in blocks."""
    return hashlib.sha256(BLOCK.sub(r"<!-- \1 -->", text).encode()).hexdigest()[:10]


def english_of(page: Path) -> Path:
    return page.with_name(page.name.replace(".zh-CN", ""))


def list_behind(root: Path = ROOT) -> list[str]:
    """The Chinese pages that are missing, have no mark, or that of another English text."""
    behind = []
    for english in list_pages(root, chinese=False):
        page = chinese_of(english)
        expected = english.relative_to(root).as_posix(), hash_of(english.read_text())
        if not page.is_file() or MARK.findall(page.read_text()) != [expected]:
            behind.append(page.relative_to(root).as_posix())
    return behind


def mark(page: Path, root: Path = ROOT) -> None:
    """Note at the end of a Chinese page that it translates the English one as that is now."""
    english = english_of(page)
    name = english.relative_to(root).as_posix()
    line = f"<!-- translates {name} {hash_of(english.read_text())} -->"
    page.write_text(f"{MARK.sub('', page.read_text()).rstrip()}\n\n{line}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mark", nargs="+", metavar="PAGE", help="English pages: docs/course.md")
    args = parser.parse_args()
    pages = {english_of(page): page for page in list_pages(ROOT, chinese=True)}
    for name in args.mark or []:
        if ROOT / name not in pages:
            print(f"--mark {name}: no English page; give one as docs/course.md", file=sys.stderr)
            sys.exit(2)
        mark(pages[ROOT / name])
    behind = [] if args.mark else list_behind()
    for name in behind:
        print(f"{name} is behind its English page")
    sys.exit(bool(behind))


if __name__ == "__main__":
    main()
