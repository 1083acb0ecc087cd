"""A few of the trials of measure/faults: faults at random points of a run. What a thousand of them
showed is in docs/reports/2026-11-endurance.md."""

import re
import shlex
import sys
from types import SimpleNamespace

import pytest
from conftest import cases, environment, server

from measure.faults import inject, replicas


@pytest.fixture
def tried(monkeypatch, capfd):
    """A function that runs a program of measure/faults in this process, which has a server already,
    and returns what it prints and its exit code."""

    def run(program, flags):
        monkeypatch.setattr(sys, "argv", [program.__file__, *shlex.split(flags)])
        with pytest.raises(SystemExit) as end:
            program.main()
        return capfd.readouterr().out, end.value.code

    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    ours = SimpleNamespace(start=server([]).start, close=lambda: None)
    monkeypatch.setattr(inject, "Server", lambda env: ours)
    return run


AT_A_SAVE = "--kinds kill --phases 'before rename' 'after rename' 'during write'"
BROKEN = [
    ("pytorch_torchrun_DDP.py", 2, ""),
    ("pytorch_checkpoint.py --async-save --resume auto", 1, AT_A_SAVE),
    ("pytorch_torchrun_DDP.py", 20, ""),
    ("pytorch_FSDP.py", 1, ""),
]


@cases("script, trials, how", BROKEN, lambda *row: row == BROKEN[1])
def test_broken_anywhere_it_ends_with_the_same_bits(script, trials, how, tried):
    """The seed gives all kinds of faults, but only one that torchrun waits half a minute for."""
    said, code = tried(inject, f"--trials {trials} --seed 14 --script '{script}' {how}")
    assert code == 0, said
    assert f"{trials} trials: {trials} clean, 0 wrong, 0 hung" in said
    if trials == 20:
        assert all(re.search(rf": {kind} ", said) for kind in inject.KINDS)


KILLED = [
    (1, "--seed 23 --kinds kill"),
    (2, "--seed 37"),
    (4, "--seed 1"),
    (2, "--seed 3 --in-state"),
]


@cases("trials, how", KILLED, lambda *row: row == KILLED[0])
def test_without_a_replica_the_others_train_on(trials, how, tried):
    """As one process on the samples of those that are left, in every step. The first is killed
    before its vote, when its sum has arrived, and is let in again."""
    said, code = tried(replicas, f"--trials {trials} {how} --patience 5")
    assert code == 0, said
    assert f"{trials} trials: {trials} clean, 0 wrong, 0 hung" in said
    assert how != KILLED[0][1] or "before vote; restarted: clean" in said and "3 finished" in said
