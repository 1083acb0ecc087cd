"""The code that pages show: what a script or an example adds to its parent, and silent mistakes."""

import ast
import difflib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from techniques import Technique

LONGEST = 40  # lines of an example's diff; a longer one shows training only
LONGEST_SCRIPT = 120  # beyond it, the page shows the definitions that the row names
LONGEST_LESSON = 80  # beyond it, the page leaves out definitions without a tag
USUAL = {"make_model", "layers_of", "make_data", "collate", "order", "forward", "loss_of"}
USUAL |= {"groups_of", "is_done", "export"}  # what a user replaces
USUAL |= {"clip_grad_norm", "find_checkpoint", "newest_checkpoint", "drop_unsaved"}
USUAL |= {"check", "check_packing", "parents_of", "files_of", "end_if"}  # of several examples
USUAL |= {"count_cores", "average_and_clip", "full", "rows_of", "total_of", "check_stages"}
USUAL |= {"parse", "clean", "with_object", "is_learned", "without", "is_same"}  # a line of chat.py
MARK = re.compile(r"# (right|wrong)")
OPTION = re.compile(r"# [\w-]+, (?:option|detail): ")  # the tag of what a page leaves out
RESUMING = re.compile(r"^    (?:if folder|saved = |if files).*?(?=^$|^    model = )", re.M | re.S)


class Pair(NamedTuple):
    """Two texts without their docstrings, and what they are: paths in the repository."""

    old: str
    new: str
    old_lines: list[str]
    new_lines: list[str]
    whole: bool = True  # or only the lines that train

    def diff(self, context: int = 1) -> list[str]:
        """A unified diff with this many lines of context."""
        lines = difflib.unified_diff(self.old_lines, self.new_lines, n=context, lineterm="")
        return list(lines)[2:]


def pair_of(root: Path, row: Technique) -> Pair:
    """A script and its parent."""
    names = f"pytorch_{row.parent}.py", f"{row.script}.py"
    return Pair(*names, *(without_docstring((root / name).read_text()) for name in names))


def example_of(root: Path, name: str) -> Pair:
    """An example and the one that its docstring names, whole if their diff is short."""
    text = (root / "examples" / f"{name}.py").read_text()
    parent = re.search(r'^"""The loop of (\w+)\.py', text)[1]
    names = f"examples/{parent}.py", f"examples/{name}.py"
    texts = [(root / path).read_text() for path in names]
    whole = Pair(*names, *map(without_imports, texts))
    if len(whole.diff()) <= LONGEST:
        return whole
    return Pair(*names, *map(training, texts), whole=False)


def without_docstring(text: str) -> list[str]:
    return text.split('"""', 2)[2].strip("\n").splitlines()


def without_imports(text: str) -> list[str]:
    imports = [n for n in ast.parse(text).body if isinstance(n, (ast.Import, ast.ImportFrom))]
    lines = text.splitlines()[imports[-1].end_lineno :]
    return [line for line in lines if not line.startswith("OUT = ")]  # each has its own folder


def training(text: str) -> list[str]:
    """The lines of an example until the optimizer's step, without its model, its data, and what
    saves and resumes."""
    lines = text.splitlines()
    kept = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            left_out = {
                n for one in node.body if checks(one) for n in range(one.lineno, one.end_lineno + 1)
            }
            numbers = range(node.lineno, node.end_lineno + 1)
            source = "\n".join(lines[n - 1] for n in numbers if n not in left_out)
            kept += RESUMING.sub("", source.partition("        if step % EVERY")[0]).splitlines()
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in USUAL:
            if not any(ast.unparse(base) == "nn.Module" for base in getattr(node, "bases", [])):
                kept += [*lines[node.lineno - 1 : node.end_lineno], ""]
    return kept


def checks(statement: ast.stmt) -> bool:
    """Whether it belongs to an example's comparison with the untouched model."""
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    comparing = names & {"sample", "expected", "why", "check", "firsts", "keep_first"}
    return bool(comparing) and "step" not in names


def tagged_hunks(root: Path, row: Technique) -> list[str]:
    """The hunks of a script's diff that have a line with the script's tag."""
    doc = (root / f"{row.script}.py").read_text().split('"""', 2)[1]
    tag = re.search(r'tagged\s+"(# [\w -]+:)"', doc)
    pair = pair_of(root, row)
    lesson = Pair(pair.old, pair.new, *map(without_options, (pair.old_lines, pair.new_lines)))
    hunks = re.split(r"^(?=@@)", "\n".join(lesson.diff()), flags=re.MULTILINE)
    found = [hunk for hunk in hunks if tag and re.search(rf"^\+.*{tag[1]}", hunk, re.MULTILINE)]
    lines = "\n".join(hunk.strip("\n") for hunk in found).splitlines()
    if len(lines) <= LONGEST_LESSON:
        return lines
    fewer = "\n".join(tagged_definitions(hunk, tag[1]) for hunk in found).splitlines()
    return fewer if len(fewer) <= LONGEST_LESSON else lines


def tagged_definitions(hunk: str, tag: str) -> str:
    """A hunk without those of its new classes and functions that have no line with the tag."""
    head, _, rest = hunk.strip("\n").partition("\n")
    parts = re.split(r"\n\+\n\+\n(?=\+(?:class|def|@))", rest)
    return "\n".join([head, "\n+\n+\n".join(part for part in parts if tag in part)])


def without_options(lines: list[str]) -> list[str]:
    """The lines of a script without the statements that are tagged as an option or a detail in
    their first line, and without the blank lines below a function of them."""
    left_out = set()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.stmt) and OPTION.search(lines[node.lineno - 1]):
            end = node.end_lineno
            while isinstance(node, ast.FunctionDef) and end < len(lines) and not lines[end]:
                end += 1
            left_out |= {*range(node.lineno, end + 1)}
    return [line for number, line in enumerate(lines, 1) if number not in left_out]


def shown_definitions(root: Path, row: Technique) -> str:
    """The classes and functions of a script that its page shows instead of a diff."""
    source = (root / f"{row.script}.py").read_text()
    lines = source.splitlines()
    nodes = [node for node in ast.walk(ast.parse(source)) if getattr(node, "name", "") in row.shows]
    parts = ["\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes]
    return fenced("python", "\n\n\n".join(map(textwrap.dedent, parts)).splitlines())


def blocks(root: Path, rows: list[Technique]) -> dict[str, str]:
    """``example-NAME`` of each example; of each script with a parent ``script-NAME``, its tagged
    lines; and ``diff-NAME`` of a script whose row names the definitions to show."""
    found = {}
    for path in sorted((root / "examples").glob("*.py")):
        if path.stem != "plain":
            pair = example_of(root, path.stem)
            note = "" if pair.whole else " Its model, its data, saving and resuming are left out."
            text = f"[{pair.new}]({pair.new}), compared with [{pair.old}]({pair.old}).{note}"
            found[f"example-{path.stem}"] = f"{text}\n\n{fenced('diff', pair.diff())}"
    for row in rows:
        if row.parent:
            found[f"script-{row.name}"] = script_block(root, row)
        if row.shows:
            found[f"diff-{row.name}"] = shown_definitions(root, row)
    return found | whole_blocks(root)


def whole_blocks(root: Path) -> dict[str, str]:
    """``own-NAME`` of each file with functions for an example, whole, and ``silent-NAME`` of each
    silent mistake: the statements whose comments say what is right and wrong."""
    found = {}
    for path in sorted((root / "examples" / "own").glob("*.py")):
        name = path.relative_to(root).as_posix()
        code = fenced("python", without_docstring(path.read_text()))
        found[f"own-{path.stem}"] = f"[{name}]({name}):\n\n{code}"
    for path in sorted((root / "examples" / "silent").glob("*.py")):
        source = path.read_text()
        if MARK.search(source):
            code = marked(ast.parse(source).body, source.splitlines())
            found[f"silent-{path.stem}"] = fenced("python", [f"# {path.relative_to(root)}", *code])
    return found


def marked(body: list[ast.stmt], lines: list[str]) -> Iterator[str]:
    """Marked statements; of an ``if`` all branches, of other blocks what is marked in them."""
    for node in body:
        text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        if MARK.search(text):
            whole = isinstance(node, ast.If) or not hasattr(node, "body")
            yield from [textwrap.dedent(text)] if whole else marked(node.body, lines)


def script_block(root: Path, row: Technique) -> str:
    """The tagged hunks below the names of both scripts; of a long diff the definitions that the row
    names."""
    pair = pair_of(root, row)
    line = f"[{pair.new}]({pair.new}), compared with [{pair.old}]({pair.old}): "
    left_out = " Options and details are left out."
    options = left_out if any(map(OPTION.search, pair.new_lines)) else ""
    hunks = tagged_hunks(root, row)
    if row.shows and not 0 < len(hunks) <= LONGEST_SCRIPT:
        return f"{line}the tagged lines.\n\n{shown_definitions(root, row)}"
    return f"{line}what the technique changes.{options}\n\n{fenced('diff', hunks)}"


def fenced(language: str, lines: list[str]) -> str:
    return "\n".join([f"```{language}", *lines, "```"])
