"""Which measured code has changed since it was measured, for the line below each table.

A result has the hash of every file that counts (:func:`files_of`). In Python only code counts:
comments, docstrings and line breaks may change.
"""

import ast
import functools
import hashlib
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BELOW = ("common.py", "jobs", "libraries", "parallel", "harness")  # every script uses them
PROFILER = ("harness/profile.py", "harness/trace_rows.py")  # which runs with a flag only
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SHOWN = 6  # files; if there are more, the note says how many


def files_of(root: Path, commands: Iterable[str], below: Iterable[str] = BELOW) -> dict[str, str]:
    """The hash of each file that counts, by its path: every script and every file of config/ that
    the measured commands name, and the files and folders in ``below``."""
    named = {word for command in commands for word in shlex.split(command)}
    paths = {root / name for name in {*below, *named}}
    paths |= {path for name in below for path in (root / name).rglob("*.py")}
    paths = sorted(p for p in paths if p.is_file() and p.suffix in (".py", ".json", ".yml"))
    return {p.relative_to(root).as_posix(): hash_of(p.read_bytes(), p.suffix) for p in paths}


def note(root: Path, found: dict, commands: Iterable[str] | None = None) -> str:
    """The note on changed code for the line below a table; empty if nothing has changed. New files
    do not count: an old one that uses them has changed. Nor does an unused library, or profiler.

    Args:
        found: a result, with its ``files`` and the ``git_commit`` that it was measured at.
        commands: of the table. Only files that they name and :data:`BELOW` count. Default: all.
    """
    named = {*BELOW, *(word for line in commands or () for word in shlex.split(line))}
    files = {path: before for path, before in found.get("files", {}).items()
             if commands is None or {path, path.split("/")[0]} & named}  # fmt: skip
    code = {path: (root / path).read_bytes() for path in files if (root / path).is_file()}
    imports = re.findall(rb"from libraries[^(\n]*(?:\([^)]*)?", b"\n".join(code.values()))
    used = re.findall(r"\w+", b"\n".join(imports).decode())
    changed = [
        path
        for path, before in files.items()
        if not path.startswith("libraries/") or Path(path).stem in used
        if path not in PROFILER or re.search("--(trace|profile-memory)", str(found))
        if path not in code or hash_of(code[path], Path(path).suffix) != before
    ]
    said = "; measured on uncommitted changes" if "-" in (found.get("git_commit") or "") else ""
    if len(changed) > SHOWN:
        return f"{said}; since then changed ({len(changed)} files): {', '.join(changed[:SHOWN])}, …"
    return f"{said}; since then changed: {', '.join(changed)}" if changed else said


@functools.cache
def hash_of(source: bytes, suffix: str) -> str:
    """The hash of a file's code; of its lines, if it is not Python."""
    if suffix != ".py":
        return short_hash(source.splitlines())
    code = ast.parse(source)
    for node in ast.walk(code):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
        if isinstance(node, ast.JoinedStr):  # Python 3.12 ends some with an empty text
            node.values = [part for part in node.values if getattr(part, "value", None) != ""]
    return short_hash(outline(code))


def short_hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def outline(node: Any) -> Any:
    """A syntax tree without what differs between versions of Python: fields that are empty."""
    if isinstance(node, list):
        return [outline(one) for one in node]
    if not isinstance(node, ast.AST):
        return node
    fields = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, [])]
    return [type(node).__name__, *((name, outline(value)) for name, value in fields)]
