"""Write a file of examples/ with the functions of another file: python estimate.py init."""

import ast
import dataclasses
import re
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

from harness.cli import fail

FUNCTIONS = ("make_model", "layers_of", "make_data", "collate", "order", "forward", "loss_of")
FUNCTIONS += ("groups_of", "is_done", "export")  # above main(), which a user replaces
LAYERS = """


def layers_of(model):  # the blocks: of the list with the most parameters
    lists = [part for part in model.modules() if isinstance(part, (nn.ModuleList, nn.Sequential))]
    sizes = [sum(p.numel() for p in part.parameters()) for part in lists]
    return list(lists[sizes.index(max(sizes))]) if lists else []
"""
# Functions of the user's model, and what is written if the user has none
OF_THE_MODEL = {"layers_of": "for the largest list", "head_of": "for the example's model"}
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


@dataclasses.dataclass
class Part:
    """A statement at the top level of a file."""

    node: ast.stmt
    text: str  # with the comments above it
    names: set[str]  # that it defines
    uses: set[str]

    @property
    def is_import(self) -> bool:
        return isinstance(self.node, (ast.Import, ast.ImportFrom))

    @property
    def module(self) -> str:
        """Of an import: the package."""
        name = getattr(self.node, "module", None) or self.node.names[0].name
        return name.partition(".")[0]

    @property
    def is_root(self) -> bool:
        """Whether it runs, or is the docstring."""
        return not self.names


def read(path: Path) -> str:
    """The text of the user's file; the process ends with one line if it is not Python."""
    try:
        with tokenize.open(path) as file:
            text = file.read()
        ast.parse(text)
    except SyntaxError as error:
        fail(f"{path}:{error.lineno or 1}: {error.msg}")
    except ValueError as error:
        fail(f"{path} cannot be read ({error}); save it as UTF-8")
    return text


def parts_of(text: str) -> list[Part]:
    lines = text.splitlines()
    found = []
    begin = 0
    for node in ast.parse(text).body:
        written = "\n".join(lines[begin : node.end_lineno]).strip("\n")
        used = [one for one in ast.walk(node) if isinstance(one, ast.Name)]
        names = set()
        if isinstance(node, DEFINITIONS):
            names = {node.name}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {(one.asname or one.name).partition(".")[0] for one in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            names = {one.id for one in used if isinstance(one.ctx, ast.Store)}
        found.append(Part(node, written, names, {one.id for one in used} - names))
        begin = node.end_lineno
    return found


def reached(parts: list[Part], roots: Iterable[str], without: Iterable[str] = ()) -> set[str]:
    """The names that these names need, and they themselves; not through those of ``without``."""
    found = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        if name not in without:
            waiting += [use for part in parts if name in part.names for use in part.uses]
    return found


def compose(example: str, own: str, name: str, example_name: str) -> str:
    """The text of an example with the functions of ``own``, a file of the same functions, in place
    of its own, and with what they need: imports, classes, functions and constants.

    Args:
        name: of the new file, without .py; ``example_name`` likewise.
    """
    if lacks("layers_of", example, own):
        own += LAYERS
    theirs = parts_of(example)
    ours = parts_of(own)
    is_whole = any("main" in part.names for part in ours)
    defined = [part for part in ours if isinstance(part.node, ast.FunctionDef)]
    functions = {one for part in defined for one in part.names}
    known = {one for part in theirs for one in part.names}
    functions &= set(FUNCTIONS) if is_whole else known | set(FUNCTIONS)
    kept = reached(theirs, ["main"], without=functions) & known
    needed = reached(ours, functions)
    bound = {one for part in theirs if part.is_import for one in part.names}
    taken = []  # of ours, in place of one of theirs or besides
    for part in ours:
        if isinstance(part.node, ast.Expr) and isinstance(part.node.value, ast.Call):
            needed |= reached(ours, part.uses)  # such as a registration
            taken.append(part)
        clash = (part.names & kept & needed) - functions
        if isinstance(part.node, DEFINITIONS) and clash and part.text not in example:
            fail(f"both files have {min(clash)}, which are not the same: rename one")
        is_constant = isinstance(part.node, ast.Assign)
        if part.is_import and not part.names & (needed - bound):
            continue
        if part.names & (needed - kept | functions) or (is_constant and part.names & kept):
            taken.append(part)
    replaced = {one: part for part in taken if not part.is_import for one in part.names}
    replaced.pop("OUT", None)
    merged = []
    for part in theirs:
        mine = [replaced.get(one) for one in part.names]
        part = next((one for one in mine if one), part)
        if part not in merged:
            merged.append(part)
    new = [part for part in taken if part not in merged and "OUT" not in part.names]
    roots = [part for part in merged if part.is_root]
    first = [use for part in [*roots, *taken] if part.is_root for use in part.uses]
    used = reached([*merged, *new], [*first, *functions])
    merged = [part for part in merged if part.is_root or part.names & used]
    return write(merged, new, name, example_name)


def lacks(name: str, example: str, own: str) -> bool:
    """Whether the example needs a function of the model that the user's file does not have."""
    return bool(own) and f"def {name}(" in example and f"def {name}(" not in own


def write(parts: list[Part], new: list[Part], name: str, example_name: str) -> str:
    imports = [part for part in parts if part.is_import]
    written = [part.text.strip() for part in imports]
    imports += [part for part in new if part.is_import and part.text.strip() not in written]
    standard = [part for part in imports if part.module in sys.stdlib_module_names]
    others = [part for part in imports if part not in standard]
    defined = [part for part in new if isinstance(part.node, DEFINITIONS)]
    constants = [part for part in new if not part.is_import and part not in defined]
    rest = [part for part in parts if not part.is_import]
    docstring, *rest = rest
    first = next(i for i, part in enumerate(rest) if isinstance(part.node, DEFINITIONS))
    blocks = [docstring.text.replace(f"{example_name}.py", f"{name}.py")]
    for some in (standard, others, [*rest[:first], *constants]):
        blocks.append("\n" + "\n".join(part.text for part in some))
    blocks += [f"\n\n{part.text}" for part in [*defined, *rest[first:]]]
    text = "\n".join(blocks) + "\n"
    if name == example_name:
        return text
    return re.sub(r'^OUT = "[^"]*"', f'OUT = "runs/{name}"', text, flags=re.M)


def init(path: Path, example: Path, own: Path | None) -> list[str]:
    """Write the file ``path``, which must not exist. Returns what the user has to look at."""
    if path.exists():
        fail(f"{path} exists; give a new name")
    if path.suffix != ".py":
        fail(f"{path} does not end with .py")
    if own and not own.is_file():
        fail(f"--own {own}: no such file")
    text = example.read_text(encoding="utf-8")
    other = read(own) if own else ""
    path.write_text(compose(text, other, path.stem, example.stem), encoding="utf-8")
    missing = [name for name in OF_THE_MODEL if lacks(name, text, other)]
    check = "check the one that was written"
    return [f"{own} has no {name}: {check}, {OF_THE_MODEL[name]}" for name in missing]
