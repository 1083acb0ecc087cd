"""README and docs/: all commands run as shown, all links have a target, and both languages say the
same."""

import difflib
import json
import re
import runpy
import shlex
import sys

import pytest
from checkout import copy_checkout
from conftest import ROOT, cases, succeed

import common
from jobs import choice
from report.pages import list_pages
from report.scripts import PARENTS
from report.theory import RAW

ENGLISH, CHINESE = list_pages(ROOT, chinese=False), list_pages(ROOT, chinese=True)
README = (ROOT / "README.md").read_text()
PAGES = {page.stem: page.read_text() for page in ENGLISH if page.parent.name == "techniques"}
TECHNIQUES = "".join(PAGES[name] for name in ["SingleGPU", *PARENTS])
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
SHORT = "--epochs 1 --train-samples 32 --batch-size 32 --eval-samples 8"
QUICK = "--epochs 1 --train-samples 1024 --batch-size 64 --eval-samples 200 --lr 0.02"
SMALL = "--model squeezenet1_1"  # a sixteenth of ResNet-18's parameters


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.fixture
def checkout(tmp_path):
    return copy_checkout(tmp_path, "config")


# -------------------------------------------------------------------------------------- commands

ELSEWHERE = {  # commands, by what runs them
    ".ci/run": [
        "pip install -r requirements-dev.txt",
        "pip install -r requirements-docs.txt",
        "pip install -r requirements-ecosystem.txt",
    ],
    "test_accelerate.py": ["accelerate launch --config_file config/accelerate_"],
    "test_benchmark.py": ["python benchmark.py"],
    "test_collectives.py": ["torchrun --standalone --nproc_per_node=2 pytorch_collectives.py"],
    "test_data.py": ["python pytorch_SingleGPU.py --dataset folder --data-dir PATH"],
    "test_examples.py": [
        "python examples/",
        "torchrun --standalone --nproc_per_node=2 examples/",
        "deepspeed --num_gpus 2 examples/",
    ],
    "test_estimate.py": ["python estimate.py"],
    "test_first_command": ["pip install -r requirements.txt && torchrun"],
    "test_hangs.py": ["python -m torch.distributed.flight_recorder.fr_trace"],
    "test_inference.py": ["python model_inference.py"],
    "test_lightning.py": ["fabric run ", "torchrun --standalone --nproc_per_node=2 lightning_"],
    "test_remote.py": ["moto_server", "export AWS_", "python -c", "ssh-keygen -q", "/usr/sbin/sshd"]
    + [f"python pytorch_SingleGPU.py --output-dir {scheme}://" for scheme in ("s3", "sftp")],
    "test_resume.py": ["torchrun --standalone --max-restarts=3"],
    "test_reviews.py": ["python pytorch_SingleGPU.py --dataset reviews --data-dir PATH"],
    "test_a_script_is_its_parent_and_a_technique": ["diff pytorch_"],
    "test_silent_examples.py": ["python examples/silent/"],
    "test_slow.py": ["torchrun --standalone --nproc_per_node=2 pytorch_torchrun_DDP.py --trace"],
    "test_text.py": ["python pytorch_SingleGPU.py --model gpt-nano"],
    "test_timeline.py": ["python timeline.py"],
    "test_transformers.py": ["torchrun --standalone --nproc_per_node=2 transformers_Trainer.py"],
}
NEEDS = re.compile(
    r"# (needs (\d+ (GPUs|machines)|Slurm|Kubernetes|SkyPilot|a folder[^\n]*)|runs all tests)$"
)


def shell_blocks(text):
    blocks = re.findall(r"^```bash\n(.*?)\n```", text, re.DOTALL | re.MULTILINE)
    return [block.splitlines() for block in blocks]


def run_elsewhere(line):
    return [start for starts in ELSEWHERE.values() for start in starts if line.startswith(start)]


def commands():
    """Those of docs/techniques/, each of which starts a script."""
    lines = [line for block in shell_blocks(TECHNIQUES) for line in block]
    return [line for line in lines if not run_elsewhere(line)]


def launcher_of(command):
    return re.match(r"python -m \S+|\S+", command)[0]


TYPED = ("torchrun", "python pytorch_")  # by the first command, and in test_scripts.py
LAUNCHED = list({launcher_of(c): c for c in reversed(commands())}.values())  # one of each launcher


def test_first_command(checkout):
    """Started as the README says, but for one epoch of less, in which it learns already."""
    command = "torchrun --standalone --nproc_per_node=2 pytorch_torchrun_DDP.py"
    assert f"pip install -r requirements.txt && {command}" in README
    finished = succeed(f"{command} {QUICK}", cwd=checkout)
    result = json.loads((checkout / "runs/pytorch_torchrun_DDP/result.json").read_text())
    assert result["eval_accuracy"][-1] > 0.3
    assert len(finished.lines) == 3 + 1 + 2
    example = re.search(r"```text\n(.*?)```", README, re.DOTALL)[1].splitlines()
    shown = [line.split(":")[0].split()[0] for line in example]
    ours = [line.split(":")[0].split()[0] for line in finished.lines]
    assert shown == [*ours[:3], *ours[3:4] * 5, *ours[4:]], "the README's example output"


@pytest.mark.full
def test_the_first_command_learns(checkout):
    """All of it, in the time of a coffee; after a step at a rate of nearly 0 it is chance. (Without
    BatchNorm, whose running statistics are useless after one step on any data.)"""
    command = "torchrun --standalone --nproc_per_node=2 pytorch_torchrun_DDP.py"
    path = checkout / "runs/pytorch_torchrun_DDP/result.json"
    succeed(command, cwd=checkout)
    assert json.loads(path.read_text())["eval_accuracy"][-1] > 0.93
    succeed(f"{command} --norm group --max-steps 1 --lr 1e-9", cwd=checkout, forked=True)
    assert json.loads(path.read_text())["eval_accuracy"][-1] < 0.3


@pytest.mark.parametrize(
    "command",
    cases([(c,) for c in commands()], lambda c: c in LAUNCHED and not c.startswith(TYPED)),
)
def test_each_command_as_typed(command, checkout):
    """With a short job instead of the default one."""
    forked = command not in LAUNCHED
    script = re.search(r"(\w+)\.py", command)[1]
    only_gpt = "only_gpt=True" in (ROOT / f"{script}.py").read_text()
    model = "" if only_gpt or "--model" in command else SMALL
    finished = succeed(f"{command} {SHORT} {model}", cwd=checkout, forked=forked)
    result = json.loads((checkout / "runs" / script / "result.json").read_text())
    assert result["technique"] == script
    assert forked or result["command"].startswith(command)
    assert result["world_size"] == int((re.findall(r"--nproc_per_node=(\d)", command) or [1])[0])
    assert not finished.our_warnings


@pytest.mark.parametrize("page", ENGLISH, ids=name_of)
def test_every_shell_block_is_run_or_says_what_it_needs(page):
    for first, *rest in shell_blocks(page.read_text()):
        if first.startswith("#"):
            assert NEEDS.match(first)
            continue
        for line in [first, *rest]:
            assert line in commands() or len(run_elsewhere(line)) == 1, line


class Parsed(Exception):
    """A command line was read, and accepted."""


@pytest.mark.parametrize("command", commands())
def test_the_flags_of_each_command(command, monkeypatch):
    """Each script accepts those of its page."""

    def parse_and_stop(parser):
        raise Parsed(parse(parser))

    parse = common.parse_args
    monkeypatch.setattr(common, "parse_args", parse_and_stop)
    words = shlex.split(command)
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    monkeypatch.setattr(sys, "argv", words[at:])
    monkeypatch.setattr(choice, "this_script", lambda: words[at].removesuffix(".py"))
    monkeypatch.chdir(ROOT)
    with pytest.raises(Parsed):
        runpy.run_path(words[at], run_name="__main__")


def test_plain_python_is_a_world_of_one(checkout):
    command = f"python pytorch_torchrun_DDP.py {SHORT} {SMALL}"
    finished = succeed(command, cwd=checkout, forked=True)
    assert "pytorch_torchrun_DDP: 1 x cpu (gloo)" in finished.lines[0] and not finished.stderr
    result = json.loads((checkout / "runs/pytorch_torchrun_DDP/result.json").read_text())
    assert result["command"] == command


@pytest.mark.parametrize("spelling", ["--local-rank", "--local_rank"])
def test_both_spellings_of_the_local_rank(spelling, checkout):
    """torch.distributed.launch has passed one or the other, depending on its version."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = f"python pytorch_DDP.py {spelling}=0 {SHORT} {SMALL}"
    succeed(command, cwd=checkout, forked=True, **alone)


# ----------------------------------------------------------------------------------------- pages


@pytest.mark.parametrize("english, chinese", list(zip(ENGLISH, CHINESE, strict=True)), ids=name_of)
def test_both_languages_have_the_same_blocks_and_figures(english, chinese):
    ours, theirs = english.read_text(), chinese.read_text()
    assert FENCED.findall(ours) == FENCED.findall(theirs)
    ours, theirs = FENCED.sub("", ours), FENCED.sub("", theirs)
    for pattern in (r"^\|.*\|$", r"^- ", r"^!\["):
        counts = [len(re.findall(pattern, text, re.MULTILINE)) for text in (ours, theirs)]
        assert counts[0] == counts[1], pattern
    for pattern in (r"^#+ ", r"^<!-- .*? -->"):  # the same sections, with the same tables
        assert re.findall(pattern, ours, re.M) == re.findall(pattern, theirs, re.M)
    rows = (" ".join(re.findall(r"^\|.*\|$", text, re.MULTILINE)) for text in (ours, theirs))
    found, expected = (re.findall(r"\d+(?:[.,]\d+)*(?: %|e-\d+)?", row) for row in rows)
    assert found == expected


@pytest.mark.parametrize("page", ENGLISH + CHINESE, ids=name_of)
def test_links_lead_somewhere(page):
    """To a file, and to a heading in it; and to pages of the same language."""
    text = FENCED.sub("", page.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if heading:
            assert heading in anchors(target.read_text()), link
        if target in ENGLISH + CHINESE and not re.search(
            rf"\[(中文|English)\]\({re.escape(link)}", text
        ):
            assert (target in CHINESE) == (page in CHINESE), f"{link} is in the other language"


def anchors(text):
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]


def test_the_pages_of_docs_are_linked():
    """From the README, and those of the techniques from their table of contents."""
    contents = PAGES["README"]
    for page in ENGLISH[1:]:
        linked = f"]({name_of(page)})" in README or f"]({page.name})" in contents
        assert linked, f"{name_of(page)} is not linked"


@pytest.mark.parametrize("page", [ENGLISH[0], CHINESE[0]], ids=name_of)
def test_the_front_door_is_small(page):
    """Readable on a phone: what is there first, how much of it, and how wide."""
    text = page.read_text()
    assert len(text.splitlines()) <= 250
    choice, costs, *_ = re.finditer(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    header, _, *rows = costs[0].splitlines()
    assert len(rows) <= 12 and header.count("|") - 1 <= 7
    chosen = set(re.findall(r"docs/techniques/(\w+)", choice[0]))
    assert {*PARENTS, "SingleGPU"} - chosen == {"SingleGPU", "DDP"}, "each technique can be chosen"


# ------------------------------------------------------------------------------------- the scripts


def test_every_script_is_listed():
    """In a chapter of the course, after its parent."""
    section = README.partition("## The scripts")[2].partition("## Into your own")[0]
    rows = re.findall(r"^\| (`.+?) \| (.*?) ?\| .+ \|$", section, re.M)
    parents = {name: parent for names, parent in rows for name in re.findall(r"`(\w+)\.py`", names)}
    scripts = [path.stem for path in ROOT.glob("pytorch_*.py")] + [*RAW]
    assert sorted(parents) == sorted([*scripts, "model_inference"])
    with_command = {re.search(r"(\w+)\.py", command)[1] for command in commands()}
    assert with_command | {"pytorch_collectives", *RAW} == set(scripts)
    expected = {f"pytorch_{child}": parent for child, parent in PARENTS.items()}
    expected |= {name: parent.removeprefix("pytorch_") for name, parent in RAW.items()}
    for name, parent in parents.items():
        assert parent.strip("`") == expected.get(name, ""), name


def test_what_libraries_change_is_shown_by_tests():
    """Each row of the table in docs/ecosystem.md names one that is there for it."""
    text = (ROOT / "docs/ecosystem.md").read_text()
    named = re.findall(r"^\| .* \| `(test_\w+)` \|$", text, re.M)
    below = ""
    for library in ("accelerate", "lightning", "transformers"):
        tests = (ROOT / f"tests/test_{library}.py").read_text()
        below += re.split(r"^# -+ what .*$", tests, maxsplit=1, flags=re.M)[1]
    shown = re.findall(r"^def (test_\w+)", below, re.M)
    assert len(named) > 20 and set(named) <= set(shown)


def test_the_map_is_complete():
    """Every file of ours has its line, or its folder has; and what has a line exists."""
    section = README.partition("## What is where")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w./*]+)`", " ".join(re.findall(r"^\| (.*?) \|", section, re.M)))
    found = {path for name in named for path in ROOT.glob(name.rstrip("/"))}
    for name in named:
        assert list(ROOT.glob(name.rstrip("/"))), f"{name} does not exist"
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]:
        if path.name != "__init__.py":
            assert {path, path.parent} & found, f"{path.relative_to(ROOT)} is not on the map"


CHILDREN = {child: parent for child, parent in PARENTS.items() if child != "ND_parallel"}


@pytest.mark.parametrize("child, parent", CHILDREN.items())
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
