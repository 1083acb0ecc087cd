"""Runs that are broken anywhere, and snapshots that are damaged anyhow: a part of what results/
holds of tests/faults."""

import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT, environment

sys.path.insert(0, str(ROOT / "tests" / "faults"))
import inject  # noqa: E402


def run_tool(command, **env):
    return subprocess.run(
        [sys.executable, *shlex.split(command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment(**env),
    )


@pytest.mark.parametrize(
    "script, trials, how",
    [
        ("pytorch_torchrun_DDP.py", 6, "--forked"),
        pytest.param("pytorch_torchrun_DDP.py", 20, "--forked", marks=pytest.mark.full),
        pytest.param("pytorch_torchrun_DDP.py", 1, "", marks=pytest.mark.full),
        ("pytorch_FSDP.py", 1, "--forked"),
        ("pytorch_DDP_ZeRO.py --use_zero --optimizer adamw", 1, "--forked"),
    ],
)
def test_broken_anywhere_it_ends_with_the_same_bits(script, trials, how):
    """The seed gives all kinds of faults, but only one that torchrun waits half a minute for."""
    job = f"--trials {trials} --seed 14 --script '{script}' {how}"
    run = run_tool(f"tests/faults/inject.py {job}")
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{trials} trials: {trials} clean, 0 wrong, 0 hung" in run.stdout
    if trials == 20:
        assert all(re.search(rf": {kind} ", run.stdout) for kind in inject.KINDS)


def test_the_injector_notices_what_is_wrong(tmp_path):
    """A script that forgets to go on, and one that does not exist."""
    broken = tmp_path / "pytorch_broken.py"
    text = (ROOT / "pytorch_torchrun_DDP.py").read_text()
    loads = "run.load_snapshot(model, optimizer, scheduler)"
    assert loads in text
    begins = "run.start(model.module, optimizer, scheduler, None)"
    broken.write_text(text.replace(loads, begins))
    run = run_tool(
        f"tests/faults/inject.py --trials 1 --seed 3 --kinds kill --forked --script {broken}"
    )
    assert run.returncode == 1, run.stdout
    assert "1 trials: 0 clean, 1 wrong, 0 hung" in run.stdout
    run = run_tool("tests/faults/inject.py --script pytorch_nothing.py")
    assert run.returncode == 2 and "pytorch_nothing.py" in run.stderr


def test_no_damaged_snapshot_is_loaded():
    run = run_tool("tests/faults/corrupt.py --trials 40 --seed 1")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "40 trials: 40 fallback, 0 silent, 0 failed" in run.stdout
