"""A copy of the repository for tests that write into it or damage it."""

import shutil

from conftest import ROOT


def copy_checkout(target, *more):
    """Copy all programs: those at the top, and every folder with Python files but tests/; and the
    navigation of the site.

    Args:
        more: files and folders to copy besides, as patterns below the repository's root.
    """
    folders = {path.parent for path in ROOT.glob("*/*.py")} - {ROOT / "tests"}
    named = (path for what in ("*.py", "mkdocs.yml", *more) for path in ROOT.glob(what))
    chosen = [*named, *folders]
    for path in chosen:
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, target / path.name, ignore=ignored)
        else:
            shutil.copy(path, target / path.name)
    return target
