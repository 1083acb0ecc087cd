"""Faults at random points of a run, and randomly damaged snapshots: a few of the trials of
tests/faults, whose results are in results/."""

import re
import shlex
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT, environment, launch, server, succeed

sys.path.insert(0, str(ROOT / "measure" / "faults"))
import inject  # noqa: E402


@pytest.fixture
def inject_faults(monkeypatch, capfd):
    """A function that runs inject.py in this process, which has a server already, and returns what
    it prints and its exit code."""

    def run(flags):
        monkeypatch.setattr(sys, "argv", ["inject.py", *shlex.split(flags)])
        with pytest.raises(SystemExit) as end:
            inject.main()
        return capfd.readouterr().out, end.value.code

    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    ours = SimpleNamespace(start=server([]).start, close=lambda: None)
    monkeypatch.setattr(inject, "Server", lambda env: ours)
    return run


@pytest.mark.parametrize(
    "script, trials, how",
    [
        ("pytorch_torchrun_DDP.py", 3, "--forked"),
        (
            "pytorch_checkpoint.py --async-save --resume auto",
            2,
            "--forked --kinds kill --phases 'before rename' 'after rename' 'during write'",
        ),
        pytest.param("pytorch_torchrun_DDP.py", 20, "--forked", marks=pytest.mark.full),
        pytest.param("pytorch_torchrun_DDP.py", 1, "", marks=pytest.mark.full),
        pytest.param("pytorch_FSDP.py", 1, "--forked", marks=pytest.mark.full),
        pytest.param(
            "pytorch_DDP_ZeRO.py --use_zero --optimizer adamw",
            1,
            "--forked",
            marks=pytest.mark.full,
        ),
    ],
)
def test_broken_anywhere_it_ends_with_the_same_bits(script, trials, how, inject_faults):
    """The seed gives all kinds of faults, but only one that torchrun waits half a minute for."""
    said, code = inject_faults(f"--trials {trials} --seed 14 --script '{script}' {how}")
    assert code == 0, said
    assert f"{trials} trials: {trials} clean, 0 wrong, 0 hung" in said
    if trials == 20:
        assert all(re.search(rf": {kind} ", said) for kind in inject.KINDS)


def test_the_injector_notices_what_is_wrong(tmp_path):
    """A script that forgets to go on, and one that does not exist."""
    broken = tmp_path / "pytorch_broken.py"
    text = (ROOT / "pytorch_torchrun_DDP.py").read_text()
    loads = "run.resume(model, optimizer, scheduler)"
    assert loads in text
    begins = "run.start(model.module, optimizer, scheduler, None)"
    broken.write_text(text.replace(loads, begins))
    command = "python measure/faults/inject.py --trials 1 --seed 3 --kinds kill --forked"
    finished = launch([*command.split(), "--script", broken])
    assert finished.code == 1, str(finished)
    assert "1 trials: 0 clean, 1 wrong, 0 hung" in finished.stdout
    finished = launch("python measure/faults/inject.py --script pytorch_nothing.py", forked=True)
    assert finished.code == 2 and "pytorch_nothing.py" in finished.stderr


@pytest.mark.full
def test_an_interrupted_copy_is_not_used():
    finished = succeed("python measure/faults/copies.py --trials 8 --seed 1")
    assert "8 trials: 8 clean, 0 wrong, 0 hung" in finished.stdout


def test_no_damaged_snapshot_is_loaded():
    finished = succeed("python measure/faults/corrupt.py --trials 40 --seed 1", forked=True)
    assert "40 trials: 40 fallback, 0 silent, 0 failed" in finished.stdout
