"""The README's own commands, run as they stand there, in a folder of their own."""

import difflib
import json
import re
import shutil

import pytest
from conftest import ROOT, succeed

from benchmark import PARENTS

README = (ROOT / "README.md").read_text()
CHINESE = (ROOT / "README.zh-CN.md").read_text()
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def checkout(tmp_path):
    for path in [*ROOT.glob("*.py"), ROOT / "config"]:
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    return tmp_path


def test_first_command(checkout):
    """Started as the README says, it learns in the time of a coffee."""
    command = "torchrun --standalone --nproc_per_node=2 pytorch_torchrun_DDP.py"
    assert f"pip install -r requirements.txt && {command}" in README
    finished = succeed(command, cwd=checkout)
    result = json.loads((checkout / "runs/pytorch_torchrun_DDP/result.json").read_text())
    assert result["eval_accuracy"][-1] > 0.93
    assert len(finished.lines) == 3 + 5 + 1
    example = re.search(r"```text\n(.*?)```", README, re.DOTALL)[1]
    shown = [line.split(":")[0] for line in example.splitlines()]
    assert shown == [line.split(":")[0] for line in finished.lines], "the README's example output"


def test_four_ranks_as_typed(checkout):
    finished = succeed("torchrun --nproc_per_node=4 pytorch_torchrun_DDP.py", cwd=checkout)
    result = json.loads((checkout / "runs/pytorch_torchrun_DDP/result.json").read_text())
    assert result["world_size"] == 4 and result["eval_accuracy"][-1] > 0.93
    assert result["command"] == "torchrun --nproc_per_node=4 pytorch_torchrun_DDP.py"
    assert not finished.our_warnings


def commands():
    """Those below "How each is started" that start a script, without the restart, tested apart."""
    section = README.partition("## How each is started")[2].partition("## The job")[0]
    blocks = re.findall(r"```bash\n(.*?)\n```", section, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if "--max-restarts" not in line]


@pytest.mark.parametrize("command", commands())
def test_each_command_as_typed(command, checkout):
    """With a short job instead of the default one."""
    finished = succeed(f"{command} --epochs 1 --train-samples 128 --eval-samples 10", cwd=checkout)
    script = re.search(r"(\w+)\.py", command)[1]
    result = json.loads((checkout / "runs" / script / "result.json").read_text())
    assert result["technique"] == script and result["command"].startswith(command)
    assert result["world_size"] == int((re.findall(r"--nproc_per_node=(\d)", command) or [1])[0])
    assert not finished.our_warnings


TESTED = [  # the other commands, and where they are run
    ("pip install -r requirements.txt && torchrun", "test_first_command"),
    ("pip install -r requirements-dev.txt && python -m pytest", ".ci/run"),
    ("torchrun --standalone --max-restarts=3", "test_resume.py"),
    ("diff pytorch_SingleGPU.py pytorch_DDP.py", "test_a_script_is_its_parent_and_a_technique"),
    ("python pytorch_SingleGPU.py --dataset folder --data-dir PATH", "test_data.py"),
    ("python model_inference.py", "test_inference.py"),
    ("python benchmark.py", "test_benchmark.py"),
]


def test_every_shell_block_is_run_or_says_what_it_needs():
    for block in re.findall(r"```bash\n(.*?)\n```", README, re.DOTALL):
        first, *rest = block.splitlines()
        if first.startswith("#"):
            assert re.match(r"# (needs \d+ (GPUs|machines)|an hour on two cores)$", first)
            continue
        for line in [first, *rest]:
            tested = [where for command, where in TESTED if line.startswith(command)]
            assert line in commands() or len(tested) == 1, line
    for command, where in TESTED:
        assert command in README
        if where.endswith(".py"):
            script = re.search(r"\w+\.py", command)
            assert (
                not script or script[0].removesuffix(".py") in (ROOT / "tests" / where).read_text()
            )


def test_both_readmes_have_the_same_blocks_and_figures():
    assert FENCED.findall(README) == FENCED.findall(CHINESE)
    for pattern in (r"<!-- .*? -->", r"^\|.*\|$"):
        ours, theirs = (re.findall(pattern, text, re.MULTILINE) for text in (README, CHINESE))
        assert len(ours) == len(theirs)
    figures = r"\d+(?:[.,]\d+)*(?: %|e-\d+)?"
    ours, theirs = (
        re.findall(figures, " ".join(re.findall(r"^\|.*\|$", text, re.MULTILINE)))
        for text in (README, CHINESE)
    )
    assert ours == theirs


def test_each_script_has_its_command():
    scripts = {re.search(r"(\w+)\.py", command)[1] for command in commands()}
    assert scripts == {path.stem for path in ROOT.glob("pytorch_*.py")}


@pytest.mark.parametrize("child, parent", PARENTS.items())
def test_a_script_is_its_parent_and_a_technique(child, parent):
    """Most lines of the parent's code are in the child, letter for letter and in order; DDP and
    DeepSpeed, the largest steps, bound both numbers."""
    old, new = (code_of(name) for name in (parent, child))
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    shared = sum(block.size for block in matcher.get_matching_blocks())
    assert shared > 0.7 * len(old), "lines of the parent are missing"
    assert len(new) - shared < 0.7 * len(new), "more than a technique"


def code_of(name):
    lines = (ROOT / f"pytorch_{name}.py").read_text().split('"""\n', 1)[1].splitlines()
    return [line.partition("  #")[0] for line in lines if line.strip()]


def test_plain_python_is_a_world_of_one(checkout):
    flags = "--epochs 1 --train-samples 128 --eval-samples 10"
    finished = succeed(f"python pytorch_torchrun_DDP.py {flags}", cwd=checkout)
    assert "pytorch_torchrun_DDP: 1 x cpu (gloo)" in finished.lines[0]
    assert finished.stderr == ""
    result = json.loads((checkout / "runs/pytorch_torchrun_DDP/result.json").read_text())
    assert result["command"] == f"python pytorch_torchrun_DDP.py {flags}"


@pytest.mark.parametrize("flags", ["--use-env", "--use_env"])
def test_launch_through_the_environment(flags, checkout):
    command = f"python -m torch.distributed.launch {flags} --nproc_per_node=2 pytorch_DDP.py"
    succeed(f"{command} --epochs 1 --train-samples 128 --eval-samples 10", cwd=checkout)


@pytest.mark.parametrize("spelling", ["--local-rank", "--local_rank"])
def test_both_spellings_of_the_local_rank(spelling, checkout):
    """torch.distributed.launch has passed one or the other, depending on its version."""
    flags = f"{spelling}=0 --epochs 1 --train-samples 128 --eval-samples 10"
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    succeed(f"python pytorch_DDP.py {flags}", cwd=checkout, **alone)


def test_untrained_models_know_nothing(checkout):
    """What the first command reaches is learned: after a step at a rate of nearly 0 it is chance.
    (Without BatchNorm, whose running statistics are useless after one step on any data.)"""
    succeed("python pytorch_SingleGPU.py --norm group --max-steps 1 --lr 1e-9", cwd=checkout)
    result = json.loads((checkout / "runs/pytorch_SingleGPU/result.json").read_text())
    assert result["eval_accuracy"][-1] < 0.3


def test_every_script_is_listed_and_those_to_come_are_marked():
    listed = re.findall(r"^\| \[?`(\w+\.py)`\]?\S* \| (.*?) \|", README, re.MULTILINE)
    assert len(listed) == 13
    for name, what in listed:
        assert (ROOT / name).is_file() != ("not written yet" in what), name
