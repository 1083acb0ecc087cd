"""Which measured code has changed since it was measured, for the line below each table."""

import ast
import functools
import hashlib
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path

BELOW = ("common.py", "jobs", "harness")  # every script
UNMEASURED = ("hangs/watch.py", "hangs/diagnosis.py")  # act once a collective has failed
SHOWN = 6  # files; if there are more, the note says how many
UNKNOWN = "; since then: unknown"  # keep the note that is on the page


def note(
    root: Path, commit: str | None, commands: Iterable[str], below: Iterable[str] = BELOW
) -> str:
    """The note on changed code for the line below a table; empty if nothing has changed.

    The files of the working tree are compared with those of the commit, so that committing a change
    does not alter the note. Files that are not in the commit do not count: they matter only if an
    old file uses them, which has changed then.

    Args:
        commit: of the result, as in ``git describe --dirty``.
        commands: that were measured. They name the scripts and files in config/ that count, in
            addition to the code that all scripts use.
        below: files and folders that all scripts use; those of :data:`UNMEASURED` count only if
            they are named themselves.

    Returns:
        :data:`UNKNOWN` without a clone, or with one that lacks the commit, such as a shallow one.
    """
    if not commit:
        return ""
    commit, _, dirty = commit.partition("-")
    listed = git(root, "ls-tree", "-r", commit)
    if listed is None:
        return UNKNOWN
    measured = {*below, *(word for command in commands for word in shlex.split(command))}
    if "model_inference.py" in measured:
        measured.add("inference")
    changed = []
    for line in listed.decode().splitlines():
        about, path = line.split("\t")
        folder = path.split("/")[0]
        counts = path.endswith((".py", ".json", ".yml")) and {path, folder} & measured
        ignored = folder == "results" or (path in UNMEASURED and path not in measured)
        if counts and not ignored and is_changed(root, path, blob=about.split()[2]):
            changed.append(path)
    said = "; measured on uncommitted changes" if dirty else ""
    if len(changed) > SHOWN:
        said += f"; since then changed ({len(changed)} files): {', '.join(changed[:SHOWN])}, …"
    elif changed:
        said += f"; since then changed: {', '.join(changed)}"
    return said


def note_of_rows(root: Path, found: dict, rows: Iterable[dict]) -> str:
    """:func:`note` for some rows of a suite's results."""
    return note(root, found["git_commit"], [run["command"] for row in rows for run in row["runs"]])


def is_changed(root: Path, path: str, blob: str) -> bool:
    """Whether a file is deleted or changed; in Python only code counts."""
    try:
        now = (root / path).read_bytes()
    except OSError:
        return True
    if blob == hashlib.sha1(b"blob %d\0" % len(now) + now).hexdigest():
        return False
    before = git(root, "cat-file", "blob", blob) or b""
    if path.endswith(".py"):
        return code_of(before) != code_of(now)
    return before.splitlines() != now.splitlines()


@functools.cache
def code_of(source: bytes) -> str:
    """A file's code alone: without comments, docstrings and line breaks."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return repr(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:]
    return ast.dump(tree)


@functools.cache
def git(root: Path, *words: str) -> bytes | None:
    """The output of git; ``None`` if it fails. Cached, for immutable objects only."""
    try:
        run = subprocess.run(["git", "-C", root, *words], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout
