"""README, docs/ and what else people read: commands run as shown, flags exist, links have a target,
both languages say the same, and what PyTorch prints is on docs/troubleshooting.md."""

import argparse
import contextlib
import difflib
import functools
import inspect
import io
import json
import re
import runpy
import shlex
import sys
import textwrap

import pytest
from checkout import copy_checkout
from conftest import ROOT, cases, launch, name_of, succeed
from torch.nn.parallel import DistributedDataParallel

import common
import estimate
from harness import cli
from report import translations
from report.pages import BLOCK, chinese_of, list_pages
from techniques import LESSONS as ROWS
from techniques import TECHNIQUES

ENGLISH = list_pages(ROOT, chinese=False)
CHINESE = list_pages(ROOT, chinese=True)
README = (ROOT / "README.md").read_text()
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
SHORT = "--epochs 1 --train-samples 32 --batch-size 32 --eval-samples 8"
QUICK = "--epochs 1 --train-samples 1024 --batch-size 64 --eval-samples 200 --lr 0.02"
SMALL = "--model squeezenet1_1"  # a sixteenth of ResNet-18's parameters
NO_TRAINING = [row.script for row in ROWS if "no_training" in row.traits]
FIRST = "torchrun --standalone --nproc_per_node=2 pytorch_torchrun_DDP.py"


@pytest.fixture
def checkout(tmp_path):
    return copy_checkout(tmp_path, "config")


# --------------------------------------------------------------------------------------- commands
def shell_lines(page):
    blocks = re.findall(r"^```bash\n(.*?)\n```", page.read_text(), re.DOTALL | re.MULTILINE)
    return "\n".join(blocks).replace("\\\n", " ").splitlines()


PROGRAMS = ["estimate", "model_inference", "benchmark", "timeline"]
OURS = re.compile(rf"(pytorch_\w+|{'|'.join(PROGRAMS)})\.py")
TO_BE_FILLED_IN = re.compile(r"^diff |\$\(| (?!FSDP|HSDP)[A-Z]{4,}\b")


def script_in(line):
    """The script that a line of a page starts, and the words after it; unless the line is one to be
    filled in."""
    words = [] if TO_BE_FILLED_IN.search(line) else shlex.split(line, comments=True)
    for at, word in enumerate(words):
        if OURS.fullmatch(word):
            return word, words[at + 1 :]
    return None, []


def trained_by(words):
    """The first script that an estimate runs, and the flags that it hands on."""
    args, flags = estimate.parse_args(words)
    name, *own = (args.only or "SingleGPU").partition(",")[0].split()
    return f"pytorch_{name}.py", [*own, *flags]


# The commands of docs/techniques/
LESSONS = [line for page in ENGLISH if "techniques" in page.parts for line in shell_lines(page)]
SCRIPTS_OF = {line: (script_in(line)[0] or "").removesuffix(".py") for line in LESSONS}
LESSONS = [line for line in LESSONS if SCRIPTS_OF[line].startswith("pytorch_")]
LESSONS = [line for line in LESSONS if SCRIPTS_OF[line] not in NO_TRAINING]
# Others have a short job of their own, in which test_course.py runs them, or need more terminals
LESSONS = [line for line in LESSONS if "--train-samples" not in line and "fault_tol" not in line]
LAUNCHED = {line.split(" pytorch_")[0].split(" --")[0]: line for line in reversed(LESSONS)}
# One of each launcher is typed; the others are in test_first_command and test_scripts.py
TYPED = [command for command in LAUNCHED.values() if command.startswith("deepspeed")]


def test_the_check_runs_the_command_that_the_readme_has():
    """.ci/run reads it there, and could not say what is missing."""
    found = re.search(r"grep -m 1 '(.*?)'", (ROOT / ".ci/run").read_text())[1]
    [command] = re.findall(rf"{found}.*", (ROOT / "README.md").read_text(), re.M)
    assert command.endswith("python -m pytest")


def test_first_command(checkout):
    """Started as the README says, but for one epoch of less, in which it learns already."""
    assert re.search(rf"^pip install torch .*\n{re.escape(FIRST)}$", README, re.M)
    finished = succeed(f"{FIRST} {QUICK}", cwd=checkout)
    result = json.loads((checkout / "runs/pytorch_torchrun_DDP/result.json").read_text())
    assert result["eval_accuracy"][-1] > 0.3
    assert len(finished.lines) == 3 + 1 + 2
    recorded = json.loads((ROOT / "results/outputs.json").read_text())["outputs"]["first"]
    assert recorded["command"] == FIRST
    shown = [line.split(":")[0].split()[0] for line in recorded["output"]]
    ours = [line.split(":")[0].split()[0] for line in finished.lines]
    assert shown == [*ours[:3], *ours[3:4] * 5, *ours[4:]]


@cases("command", LESSONS, TYPED.__contains__)
def test_each_command_as_typed(command, checkout):
    """With a short job instead of the default one."""
    forked = command not in LAUNCHED.values()
    script = re.search(r"(\w+)\.py", command)[1]
    only_gpt = "only_gpt=True" in (ROOT / f"{script}.py").read_text()
    model = "" if only_gpt or "--model" in command else SMALL
    finished = succeed(f"{command} {SHORT} {model}", cwd=checkout, forked=forked)
    result = json.loads((checkout / "runs" / script / "result.json").read_text())
    assert result["technique"] == script
    assert forked or result["command"].startswith(command)
    assert result["world_size"] == int((re.findall(r"--nproc_per_node=(\d)", command) or [1])[0])
    assert not finished.our_warnings


class Parsed(Exception):
    """A command line was read, and accepted."""


@pytest.fixture
def parse(monkeypatch):
    """A function that runs a line's script here, if it has one, until it has accepted its flags."""

    def then_stop(function):
        def parse_and_stop(*args):
            raise Parsed(function(*args))

        return parse_and_stop

    def run(line):
        script, words = script_in(line)
        if not script:
            return
        if script == "estimate.py":
            if any(word.endswith(".py") for word in words):
                return  # a file of the reader: test_own_file.py
            script, words = trained_by(words)
        trains = script.startswith("pytorch_") and script.removesuffix(".py") not in NO_TRAINING
        where = common if trains else argparse.ArgumentParser
        if trains and "--weights" in words and "--model" in words:
            place = words.index("--weights")
            words[place : place + 2] = []  # which a line before it writes
        with monkeypatch.context() as patch, pytest.raises(Parsed):
            patch.setattr(where, "parse_args", then_stop(where.parse_args))
            patch.setattr(sys, "argv", [script, *words])
            runpy.run_path(script, run_name="__main__")

    monkeypatch.chdir(ROOT)
    return run


@pytest.mark.parametrize("page", [*ENGLISH, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_flags_of_commands_exist(page, parse):
    """Each script accepts those that a page gives it."""
    for line in shell_lines(page):
        parse(line)


@pytest.mark.parametrize("spelling", ["--local-rank", "--local_rank"])
def test_both_spellings_of_the_local_rank(spelling, parse):
    """torch.distributed.launch has passed one or the other, depending on its version."""
    parse(f"python pytorch_DDP.py {spelling}=0")


NOTEBOOK = ROOT / "docs" / "course.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CELLS = [("".join(cell["source"]), cell["cell_type"]) for cell in CELLS]
CODE = [text for text, kind in CELLS if kind == "code" and "git clone" not in text]


def commands_of(cell):
    return [line[1:] for line in cell.splitlines() if line.startswith("!")]


def test_the_notebook_has_commands_that_work(parse):
    lines = [line for cell in CODE for line in commands_of(cell)]
    assert len(lines) == 12
    for line in lines:
        parse(line)


def test_links_of_the_notebook_lead_somewhere():
    links = [link for text, _ in CELLS for link in re.findall(r"\]\((\S+)\)", text)]
    assert len(links) >= 5 and all((NOTEBOOK.parent / link).is_file() for link in links)


@pytest.mark.full
def test_the_cells_of_the_notebook_run(checkout):
    """But for those that clone and train ResNet-18, which the first command of the README does. The
    exercise is solved in the cell that a reader changes."""
    solution = (ROOT / "exercises" / "solutions" / "mean.py").read_text()
    printed = []
    for cell in CODE:
        if cell.startswith("%%writefile answers/mean.py\n"):
            compile(cell.split("\n", 1)[1], "mean.py", "exec")
            (checkout / "answers" / "mean.py").write_text(solution)
        elif not commands_of(cell):
            compile(cell, "cell", "exec")
        for command in commands_of(cell):
            if command != FIRST and not command.startswith("diff "):  # which finds a difference
                forked = "torchrun" in command
                printed += succeed(command, cwd=checkout, forked=forked).lines
    assert "mean: right on 1, 2 and 3 ranks" in printed


PUBLIC = [*ENGLISH, *map(ROOT.joinpath, ("CONTRIBUTING.md", "CITATION.cff", "mkdocs.yml"))]


@pytest.mark.parametrize("page", [*PUBLIC, NOTEBOOK], ids=name_of)
def test_nothing_is_to_be_filled_in(page):
    """A command of the README runs as it stands."""
    assert not re.search(r"\b(OWNER|YOUR_\w+|ORG|USER)/", page.read_text())


# ------------------------------------------------------------------------------------------- help
SCRIPTS = sorted({path.stem for path in ROOT.glob("*_*.py")}.difference(NO_TRAINING, PROGRAMS))


@cases("script", SCRIPTS + PROGRAMS, lambda n: "pytorch" in n or n in PROGRAMS)
def test_help(script, monkeypatch):
    """Each flag has a help text, in 80 columns, without broken words."""
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    monkeypatch.setenv("COLUMNS", "80")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
    text = printed.getvalue()
    assert text.startswith(f"usage: {script}.py")
    groups = re.findall(r"^[a-z -]+:\n((?:  .*\n?)+)", text, re.MULTILINE)
    flags = [f for group in groups for f in re.split(r"\n(?=-)", textwrap.dedent(group))]
    flags = [flag for flag in flags if flag.startswith("-")]
    assert len(flags) > 2 and len(text.splitlines()) < 160
    for flag in flags:
        words = flag.split()
        assert len(words) > 2 and re.search(r"(  |\n) *\w", flag), f"{flag} has no help"
        assert not any(word.endswith("-") for word in words), f"a word is broken: {flag}"
        assert script in PROGRAMS or all(len(line) <= 80 for line in flag.splitlines())
    shown = {flag for flag in ("--image-size", "--norm", "--experts") if f"  {flag} " in text}
    if script in ("pytorch_PP", "pytorch_Muon"):  # what a script does not train is not shown
        assert shown == ({"--experts"} if script == "pytorch_PP" else set())


def test_settings_are_what_was_given(monkeypatch, tmp_path):
    """Also in a file, and without what the launcher adds."""
    (tmp_path / "job.args").write_text("--epochs 2  # few\n--lr 0.1\n")
    given = [f"@{tmp_path}/job.args", "--local_rank=1", "--data-dir", "a folder"]
    monkeypatch.setattr(sys, "argv", ["x.py", *given])
    assert cli.given_flags() == "--epochs 2 --lr 0.1 --data-dir 'a folder'"


# ------------------------------------------------------------------------------------------ pages
@pytest.mark.release
def test_no_chinese_page_is_behind():
    assert not translations.list_behind(), "python -m report.translations"


@pytest.mark.release
@pytest.mark.parametrize("chinese", CHINESE, ids=name_of)
def test_both_languages_have_the_same_blocks_and_figures(chinese):
    ours = translations.english_of(chinese).read_text()
    theirs = chinese.read_text()
    assert FENCED.findall(ours) == FENCED.findall(theirs)
    ours = FENCED.sub("", ours)
    theirs = FENCED.sub("", theirs)
    for pattern in (r"^\|.*\|$", r"^- ", r"^!\["):
        counts = [len(re.findall(pattern, text, re.MULTILINE)) for text in (ours, theirs)]
        assert counts[0] == counts[1], pattern
    for pattern in (r"^#+ ", r"^<!-- [\w-]+ -->"):  # the same sections, with the same tables
        assert re.findall(pattern, ours, re.M) == re.findall(pattern, theirs, re.M)
    rows = (" ".join(re.findall(r"^\|.*\|$", text, re.MULTILINE)) for text in (ours, theirs))
    found, expected = (re.findall(r"\d+(?:[.,]\d+)*(?: %|e-\d+)?", row) for row in rows)
    assert found == expected


# Code, the runs of other projects, and where links lead.
NO_PROSE = re.compile(r"`[^`]*`|\[[^]]*\]\(https:[^)]*\)|\]\([^)]*\)")
ENGLISH_WORDS = re.compile(r"[A-Za-z'’-]+(?:[,:;.]? [a-z'’-]+){2,}")


@pytest.mark.release
@pytest.mark.parametrize("chinese", CHINESE, ids=name_of)
def test_what_programs_write_on_a_chinese_page_is_chinese(chinese):
    """No three English words follow each other, as in a sentence that was changed or is new."""
    left = []
    for name, block in BLOCK.findall(chinese.read_text()):
        prose = NO_PROSE.sub("|", FENCED.sub("", block))
        left += [f"{name}: {words}" for words in ENGLISH_WORDS.findall(prose)]
    assert not left, f"for report/chinese.json, or report/answers/NAME.zh-CN.md: {left}"


@pytest.mark.parametrize("page", ENGLISH + CHINESE, ids=name_of)
def test_links_lead_somewhere(page):
    """To a file, and to a heading in it; and to pages of the same language."""
    text = FENCED.sub("", page.read_text())
    for label, link in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not heading or heading in anchors(target), link
        if target in ENGLISH + CHINESE and label not in ("中文", "English"):
            translated = target in CHINESE or chinese_of(target).is_file()
            is_other = (target in CHINESE) != (page in CHINESE)
            assert not (is_other and translated), f"{link} is in the other language"


@functools.cache
def anchors(page):
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]


CHILDREN = [(t.name, t.parent) for t in TECHNIQUES if t.parent and t.name != "ND_parallel"]


@pytest.mark.parametrize("child, parent", CHILDREN)
def test_a_script_is_its_parent_and_a_technique(child, parent):
    """Most lines of the parent's code are in the child, letter for letter and in order; DDP,
    DeepSpeed and tensor parallelism, the largest steps, bound both numbers. (ND_parallel is made
    of several.)"""
    old, new = (code_of(name) for name in (parent, child))
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    shared = sum(block.size for block in matcher.get_matching_blocks())
    assert shared > 0.67 * len(old), "lines of the parent are missing"
    assert len(new) - shared < 0.72 * len(new), "more than a technique"


def code_of(name):
    lines = (ROOT / f"pytorch_{name}.py").read_text().split('"""\n', 1)[1].splitlines()
    return [line.partition("  #")[0] for line in lines if line.strip()]


# -------------------------------------------------------------------------------- troubleshooting
TROUBLES = [(ROOT / f"docs/{n}.md").read_text() for n in ("troubleshooting", "silent_mistakes")]
ROWS = re.findall(r"^\| (.+) \| .+ \| (.+) \|$", "".join(TROUBLES), re.MULTILINE)
PROVOKED = {where[1:-1]: seen for seen, where in ROWS if re.fullmatch(r"`\w+`", where)}
SLOW = ["compiled_late", "half_a_library"]  # wait for a compiler
DEFINED = {
    path.stem: {*re.findall(r"^def (\w+)\(remedy\)", path.read_text(), re.M)}.difference(SLOW)
    for path in sorted(ROOT.glob("examples/troubles/*.py"))
}
RUNS = [(file, " ".join(sorted(names))) for file, names in DEFINED.items() if names]
WORDS = re.compile(r"`(.+?)`")
# https://github.com/pytorch/pytorch/pull/175851
FIXED = "preserve_version" in inspect.getsource(DistributedDataParallel._sync_buffers)
HARMLESS = {"two_forwards": FIXED, "safe_path": sys.version_info < (3, 11)}


NEEDED = "ddp", "network"  # usually: a commit changes no message of PyTorch


@cases("file, names", [*RUNS, *(("compiled", n) for n in SLOW)], lambda f, _: f in NEEDED)
def test_troubles_provoked_and_remedied(file, names):
    """One after the other, by the same two ranks."""
    command = f"torchrun --standalone --nproc_per_node=2 examples/troubles/{file}.py {names}"
    finished = launch(command, forked=True, timeout=120)
    assert finished.code == 0, str(finished)
    for name in names.split():
        ends = re.findall(rf"^== {name}, rank \d\n(.*?)^== end$", finished.stderr, re.M | re.S)
        assert len(ends) == 2 and all(end.startswith("remedied\n") for end in ends), str(finished)
        if HARMLESS.get(name):
            continue
        assert "nothing happened" not in "".join(ends), str(finished)
        for words in WORDS.findall(PROVOKED[name]) or ["AssertionError"]:
            assert words in finished.stderr, f"{words}\n{finished}"


def test_all_troubles_are_on_the_page():
    assert {*SLOW}.union(*DEFINED.values()) == PROVOKED.keys()
