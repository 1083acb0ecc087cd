"""House rules: which rooms may import which, how large and how dense they may be."""

import ast
import functools
import io
import re
import tokenize
from graphlib import TopologicalSorter

import pytest
from conftest import ROOT, name_of, succeed

from report.pages import BLOCK, list_pages
from techniques import LESSONS

ROOMS = ["harness", "hangs", "parallel", "libraries", "jobs", "report", "inference"]
ROOMS += ["estimator", "website", "measure", "exercises"]
FILES = sorted([*ROOT.glob("*.py"), *(p for room in ROOMS for p in (ROOT / room).rglob("*.py"))])
OURS = {path.stem for path in ROOT.glob("*.py")} | set(ROOMS)
TASK = {"common", "jobs", "libraries", "parallel", "harness", "hangs"}  # below a lesson
PROGRAM = {"report", "techniques", "theory"}
LESSON = {"common", "jobs", "libraries", "parallel"}
MAY_KNOW = {  # of ours, besides the own room; for a lesson: LESSON
    **dict.fromkeys(("theory", "hangs"), set()),
    "techniques": {"theory"},
    "harness": {"hangs"},
    "parallel": {"harness"},
    "libraries": {"parallel", "harness", "hangs"},
    "jobs": {"libraries", "parallel", "harness"},
    **dict.fromkeys(("common", "inference"), TASK),
    "report": {"techniques", "theory"},
    "estimator": TASK | {"techniques", "theory"},
    "website": TASK | PROGRAM | {"estimate", "estimator", "measure"},
    "estimate": TASK | PROGRAM | {"estimator"},
    "model_inference": TASK | {"inference", "report"},
    "benchmark": PROGRAM | {"harness", "measure", "website"},
    "timeline": {"harness", "report"},
    "measure": OURS,  # what it measures
    "exercises": {"hangs", "harness", "techniques", "estimate", "estimator"},
}
PARTS = {"TP", "PP", "CP", "EP", "activation_checkpointing", "chunked_loss"}
PARTS = {f"pytorch_{name}" for name in PARTS}
MAY_KNOW |= {"pytorch_ND_parallel": {*LESSON, *PARTS}}  # which is made of lessons
# Lines of code, without docstrings, comments and blank lines. A room may grow by PLAY before its
# number here has to be discussed in an issue; a room that becomes lighter lowers it.
PLAY = 1.05
BUDGETS = {
    "harness": 2250,
    "hangs": 395,
    "parallel": 590,
    "libraries": 740,
    "jobs": 2100,
    "report": 1320,
    "estimator": 2435,
    "inference": 370,
    "exercises": 1440,
    "website": 592,
    "measure": 1900,
    "tests": 11090,
    "common.py": 236,
    "techniques.py": 222,
    "theory.py": 192,
}
# Statements that say more than one thing, per 100 lines: they may only become fewer.
DENSE = dict.fromkeys((*ROOMS, "examples", "lessons", "tests"), 0.6)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


def lines_of(path):
    return len(path.read_text().splitlines())


@functools.cache
def lines_of_code(path):
    """Without docstrings, comments and blank lines: explaining a line costs nothing."""
    docstrings = set()
    for node in ast.walk(tree_of(path)):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if documented and ast.get_docstring(node):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.string.strip() and token.type != tokenize.COMMENT:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def has_inside(node, kinds):
    return any(isinstance(inner, kinds) for inner in ast.walk(node) if inner is not node)


def says_more_than_one_thing(node):
    """A tuple of unrelated values assigned to a tuple; a comprehension in a comprehension; a
    conditional in a conditional or as an index; a text times a Boolean; ``:=`` in a call."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
        if not isinstance(node.value, ast.Tuple):
            return False
        names = {ast.unparse(target) for target in node.targets[0].elts}
        return not names & {ast.unparse(value) for value in node.value.elts}  # a swap is one thing
    if isinstance(node, COMPREHENSIONS):
        return has_inside(node, COMPREHENSIONS)
    if isinstance(node, ast.IfExp):
        return has_inside(node, ast.IfExp)
    if isinstance(node, ast.Call):
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        return any(isinstance(argument, ast.NamedExpr) for argument in arguments)
    if isinstance(node, ast.Subscript):  # a choice written as an index
        return isinstance(node.slice, ast.IfExp) or isinstance(node.value, (ast.Tuple, ast.List))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        sides = node.left, node.right
        return any(map(is_text, sides)) and any(map(is_condition, sides))
    return False


def is_text(node):
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def is_condition(node):
    named_bool = isinstance(node, ast.Call) and ast.unparse(node.func) == "bool"
    return named_bool or isinstance(node, (ast.Compare, ast.BoolOp, ast.UnaryOp))


def imported(path):
    """Rooms and files of ours that a file imports, anywhere in it; without circles of its room."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.partition(".")[0])
    return found & OURS


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_arrows_go_down(path):
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert imported(path) - {room} <= MAY_KNOW.get(room, LESSON)


def test_no_circle_in_a_room():
    """Nor is one hidden in a function."""
    for room in ROOMS:
        knows = TopologicalSorter()
        for path in (ROOT / room).glob("*.py"):
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.ImportFrom) and node.module.startswith(room):
                    _, _, module = node.module.partition(".")
                    names = [module] if module else [alias.name for alias in node.names]
                    knows.add(path.stem, *names)
        knows.prepare()  # raises CycleError


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_has_one_concern(path):
    """Its first line says which. When it outgrows this, ask which second one has moved in."""
    tree = tree_of(path)
    assert ast.get_docstring(tree) and lines_of_code(path) <= 370
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name != "main":
            lines = node.end_lineno - node.lineno + 1
            assert lines < (200 if isinstance(node, ast.ClassDef) else 60), node.name


@pytest.mark.parametrize("room", BUDGETS)
def test_budgets(room):
    paths = [ROOT / room] if "." in room else (ROOT / room).rglob("*.py")
    lines = sum(map(lines_of_code, paths))
    most = int(BUDGETS[room] * PLAY)
    assert lines <= most, (
        f"{room} has {lines} lines of code, {lines - most} more than its play allows: take "
        "something away beside what you add, or raise its number in BUDGETS and say why"
    )


@pytest.mark.parametrize("room", DENSE)
def test_a_line_says_one_thing(room):
    lessons = [ROOT / f"{row.script}.py" for row in LESSONS]
    paths = lessons if room == "lessons" else [*(ROOT / room).rglob("*.py")]
    found = []
    for path in paths:
        for node in ast.walk(tree_of(path)):
            if says_more_than_one_thing(node):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    most = DENSE[room] / 100 * sum(map(lines_of, paths))
    assert len(found) <= most, f"a name or a line of its own for one of {found}"


IMPORTED = """
import atexit, runpy, sys
from pathlib import Path

def show():
    files = [Path(module.__file__ or "") for module in list(sys.modules.values())
             if hasattr(module, "__file__")]
    print(*(file.relative_to(ROOT) for file in files if file.is_relative_to(ROOT)))

atexit.register(show)
ROOT, *sys.argv = sys.argv[1:]
sys.path.insert(0, ROOT)
runpy.run_path(f"{ROOT}/{sys.argv[0]}", run_name="__main__")
"""
DDP = "pytorch_torchrun_DDP.py --dataset synthetic --device cpu --max-steps 1 --batch-size 4"
DDP += " --train-samples 8 --eval-samples 4"
TASKS = {  # how many of our files a run imports besides the script, and which not, by its flags
    "--model resnet18 --image-size 32": (28, "jobs/model_parts.py parallel/ libraries/"),
    "--model gpt-1x1x8 --context 8": (33, "jobs/images.py jobs/classifiers.py libraries/"),
}
OTHERS = "jobs/experts.py jobs/llama.py jobs/reviews.py jobs/token_files.py harness/profile.py "


@pytest.mark.parametrize("flags", TASKS)
def test_a_run_imports_the_files_of_its_task(flags, tmp_path):
    """Whoever reads a run down to the last line reads these files."""
    most, without = TASKS[flags]
    (tmp_path / "show.py").write_text(IMPORTED)
    command = f"python {tmp_path}/show.py {ROOT} {DDP} {flags} --output-dir {tmp_path}/run"
    finished = succeed(command, cwd=tmp_path, forked=True)  # elsewhere it has none of our files
    found = finished.lines[-1].split()
    assert "harness/run.py" in found and len(found) <= most, found
    for name in (OTHERS + without).split():
        assert not any(file.startswith(name) for file in found), name


ROUNDED = re.compile(r"(?:model|module|layer|block|stage|network|make_model\(.*\))")
CASTS = {("pytorch_half_precision.py", "model.to(dtype)")}  # 16 bits for all are its subject


def casts_of_modules(path):
    """Casts of a whole module, buffers included. To fp32 nothing is rounded."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            module = ROUNDED.fullmatch(ast.unparse(node.func.value).rpartition(".")[2])
            to = ast.unparse(node).rpartition(".to(")[2]
            dtype = re.search("dtype|float16|half|double|FROZEN", to)
            casts = node.func.attr in ("half", "bfloat16") or node.func.attr == "to" and dtype
            if module and casts:
                yield path.name, ast.unparse(node)


def test_buffers_are_not_rounded():
    """Rotary frequencies in bfloat16 are other frequencies: cast parameters."""
    lessons = ROOT.glob("*.py")
    paths = [*lessons, *(ROOT / "examples").glob("*.py"), *(ROOT / "examples/own").glob("*.py")]
    assert {cast for path in paths for cast in casts_of_modules(path)} <= CASTS


@pytest.mark.parametrize("course, most", [(True, 128), (False, 145)], ids=["course", "reference"])
def test_pages_are_short(course, most):
    """On average, in lines that no program writes, in English: a new page brings its own room. The
    course and the reference, with the README and CONTRIBUTING, do not take each other's."""
    lessons = {"start.md", "course.md", "exercises.md"}
    lines = []
    for page in [ROOT / "CONTRIBUTING.md", *list_pages(ROOT, chinese=False)]:
        teaches = page.parent.name == "techniques" or page.name in lessons
        if teaches == course:
            text = re.sub(rf"{BLOCK.pattern}\n", "", page.read_text(), flags=re.S)
            lines.append(text.count("\n"))
    mean = sum(lines) / len(lines)
    assert mean <= most * PLAY, f"{mean:.0f} lines a page, and {most} are enough: shorten some"


def sets_a_name_with_dots(loop):
    """``setattr(model, "blocks.0.bias", ...)`` makes an attribute of this name, and leaves what the
    block has as it was: a loop that sets what it has found asks with ``recurse=False``."""
    if not isinstance(loop, ast.For):
        return False
    asked = ast.unparse(loop.iter)
    asks = re.search(r"\.named_(buffers|parameters)\(", asked)
    if not asks or "recurse" in asked or "**" in asked:
        return False
    names = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
    return any(ast.unparse(c.func) == "setattr" and ast.unparse(c.args[1]) in names for c in calls)


def makes_a_gloo_group_of_some(node):
    """If init_process_group has got a device_id, all ranks that such a group leaves out wait in
    nccl's split of the communicator of all ranks, for those that it has: they never come."""
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func).rpartition(".")[2]
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if not name.startswith(("new_group", "new_subgroups")) or "gloo" not in str(options):
        return False
    return name != "new_group" or bool(node.args) or "ranks" in options


def splits_without_a_gpu(node):
    """PyTorch 2.14 gives each direction of a pipeline a communicator by splitting that of all
    ranks, which raises an error if init_process_group has got no device_id."""
    called = ast.unparse(node) if isinstance(node, ast.FunctionDef) else ""
    splits = "pipeline_per_direction_p2p" in called and "init_process_group" in called
    return splits and "device_id" not in called


WRONG = {  # the lines of a mistake, what finds it
    "dist.new_group([0, 1], backend='gloo')": makes_a_gloo_group_of_some,
    "dist.new_group(ranks=some, backend='gloo')": makes_a_gloo_group_of_some,
    "for n, b in model.named_buffers(): setattr(model, n, b.cuda())": sets_a_name_with_dots,
    "def main(): config.pipeline_per_direction_p2p = init_process_group()": splits_without_a_gpu,
}


@pytest.mark.parametrize("lines", WRONG)
def test_mistakes_that_are_made_once(lines):
    finds = WRONG[lines]
    found = []
    assert any(map(finds, ast.walk(ast.parse(lines))))
    for path in [*FILES, *(ROOT / "examples").rglob("*.py")]:
        for node in ast.walk(tree_of(path)):
            if finds(node):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


@pytest.mark.full
def test_claims_of_gpus_have_their_tests():
    """With these parameters: ``-m claim`` would not miss one whose name has changed."""
    claims = (ROOT / "tests" / "gpu_claims.txt").read_text().splitlines()[1:]
    tests = {claim.partition(" => ")[2] for claim in claims}
    found = succeed("python -m pytest --collect-only -q -n 0 -m claim").stdout
    assert tests == set(re.findall(r"^tests/.*::.*$", found, re.MULTILINE))
