"""Runs that are broken anywhere, and snapshots that are damaged anyhow: a part of what results/
holds of tests/faults."""

import shlex
import subprocess
import sys

import pytest
from conftest import ROOT, environment


def run_tool(command, **env):
    return subprocess.run(
        [sys.executable, *shlex.split(command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment(**env),
    )


@pytest.mark.parametrize(
    "script, trials",
    [
        ("pytorch_torchrun_DDP.py", 20),
        ("pytorch_FSDP.py", 3),
        ("pytorch_DDP_ZeRO.py --use_zero --optimizer adamw", 3),
    ],
)
def test_broken_anywhere_it_ends_with_the_same_bits(script, trials):
    run = run_tool(f"tests/faults/inject.py --trials {trials} --seed 1 --script '{script}'")
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{trials} trials: {trials} clean, 0 wrong, 0 hung" in run.stdout


def test_the_injector_notices_what_is_wrong(tmp_path):
    """A script that forgets to go on, and one that does not exist."""
    broken = tmp_path / "pytorch_broken.py"
    text = (ROOT / "pytorch_torchrun_DDP.py").read_text()
    broken.write_text(
        text.replace("run.load_snapshot(", "run.start(optimizer, scheduler, None, None) #")
    )
    run = run_tool(f"tests/faults/inject.py --trials 1 --seed 3 --kinds kill --script {broken}")
    assert run.returncode == 1, run.stdout
    assert "1 trials: 0 clean, 1 wrong, 0 hung" in run.stdout
    run = run_tool("tests/faults/inject.py --script pytorch_nothing.py")
    assert run.returncode == 2 and "pytorch_nothing.py" in run.stderr


def test_no_damaged_snapshot_is_loaded():
    run = run_tool("tests/faults/corrupt.py --trials 100 --seed 1")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "100 trials: 100 fallback, 0 silent, 0 failed" in run.stdout
