"""The README's own commands, run as they stand there, in a folder of their own."""

import json
import re
import shutil

import pytest
from conftest import ROOT, succeed

README = (ROOT / "README.md").read_text()


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


def test_launch_as_typed(checkout):
    command = "python -m torch.distributed.launch --nproc_per_node=2 --nnodes=1 pytorch_DDP.py"
    assert command in README
    succeed(f"{command} --epochs 1 --train-samples 128 --eval-samples 10", cwd=checkout)


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
