"""MkDocs calls these: the site is built from the pages as they are in README and docs/, which
website/pages.py copies and adds to."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]  # MkDocs imports a hook as a module without a package

from website import pages  # noqa: E402


def on_config(config):
    """Take the prepared copies instead of docs/ itself."""
    config.docs_dir = str(pages.prepare(ROOT, ROOT / "build" / "pages"))
    return config


def on_serve(server, config, builder):
    """``mkdocs serve`` builds again when a page of the repository changes."""
    for name in ("README.md", "README.zh-CN.md", "docs", "results", "website"):
        server.watch(str(ROOT / name))
