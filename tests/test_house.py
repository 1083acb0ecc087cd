"""House rules: which modules may import which, and how large a file or function may be."""

import ast
from pathlib import Path

import pytest
from conftest import ROOT

LESSONS = sorted(ROOT.glob("pytorch_*.py"))
ROOMS = [
    "harness",
    "hangs",
    "remote",
    "libraries",
    "jobs",
    "report",
    "inference",
    "estimator",
    "website",
]
FILES = [*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).glob("*.py"))]
OURS = {path.stem for path in ROOT.glob("*.py")} | set(ROOMS)
MAY_KNOW = {  # of ours; besides its own room
    "hangs": set(),
    "remote": {"harness"},
    "harness": {"hangs", "remote"},
    "libraries": {"harness"},
    "jobs": {"libraries", "harness", "remote"},
    "common": {"libraries", "jobs", "harness", "hangs", "remote"},
    "inference": {"common", "libraries", "jobs", "harness"},
    "report": {"techniques"},
    "estimator": {"common", "libraries", "jobs", "harness"},
    "website": {"report", "estimate", "estimator", "harness", "measure", "techniques"},
    "estimate": {"estimator", "harness", "report", "jobs"},
    "model_inference": {"common", "inference", "report", "jobs"},
    "benchmark": {"harness", "report"},
    "timeline": {"harness", "report"},
    "lightning_Trainer": {"common", "libraries"},  # for DeepSpeed,
    "pytorch_DeepSpeed": {"common", "libraries"},  # which keeps things in places of its own
    "pytorch_LocalSGD": {"common", "libraries"},  # as do its snapshots
    "pytorch_ND_parallel": {  # which is made of lessons
        "common",
        "libraries",
        "pytorch_TP",
        "pytorch_PP",
        "pytorch_CP",
        "pytorch_activation_checkpointing",
    },  # fmt: skip
    "pytorch_CP": {"common", "libraries"},  # PyTorch's kernels,
    "pytorch_PP": {"common", "libraries"},  # and its schedules
    "accelerate_DeepSpeed": {"common", "libraries"},
}


def imported(path):
    """Names of our files and folders that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(node.module.partition(".")[0])
    return found & OURS


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_go_down(path):
    room = path.parent.name if path.parent != ROOT else path.stem
    assert imported(path) - {room} <= MAY_KNOW.get(room, {"common"})


def test_no_circle_in_a_room():
    """Nor is one hidden in a function."""
    for room in ROOMS:
        files = {path.stem: path for path in (ROOT / room).glob("*.py")}
        knows = {name: set() for name in files}
        for name, path in files.items():
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module.startswith(room):
                    _, _, module = node.module.partition(".")
                    names = [module] if module else [alias.name for alias in node.names]
                    knows[name] |= set(names) & files.keys()
        while free := [name for name, others in knows.items() if not others]:
            knows = {n: o - set(free) for n, o in knows.items() if n not in free}
        assert not knows, f"{room}: {', '.join(knows)} know each other"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_rooms_stay_small(path):
    """When one outgrows this, ask which second concern has moved in."""
    text = path.read_text()
    assert len(text.splitlines()) <= 450
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name != "main":
            lines = node.end_lineno - node.lineno + 1
            assert lines <= (220 if isinstance(node, ast.ClassDef) else 65), node.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_first_line_says_what_a_file_is_for(path):
    assert ast.get_docstring(ast.parse(Path(path).read_text()))
