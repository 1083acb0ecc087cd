"""Hooks that MkDocs calls: the site is built from README and docs/, which website/pages.py copies
and extends."""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]  # MkDocs imports a hook as a module without a package

from website import pages  # noqa: E402

COPIES = tempfile.TemporaryDirectory(prefix="pages-")  # removed when MkDocs ends


def on_config(config):
    """Build the prepared copies instead of docs/ itself."""
    config.docs_dir = str(pages.prepare(ROOT, Path(COPIES.name)))
    return config


def on_serve(server, config, builder):
    """Rebuild under ``mkdocs serve`` when a page of the repository changes."""
    for name in ("README.md", "README.zh-CN.md", "docs", "results", "website"):
        server.watch(str(ROOT / name))
