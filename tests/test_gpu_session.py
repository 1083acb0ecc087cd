"""measure/gpu_session.sh on a CPU: what becomes of steps that fail, are slow, or are left."""

import json
import signal
import sys

import pytest
import torch
from conftest import ROOT, launch, started, wait_for

from measure import gpu_session
from techniques import TECHNIQUES

# Stands in for python and torchrun, as those of the session take seconds to start.
FAKE = """#!/usr/bin/env bash
case "$*" in
    *sys.executable*) echo "$0" ;;
    *find_spec*) [[ "$*" != *deepspeed* ]] ;;
    *--begin*) echo 0 ;;
    *--report*) ;;
    *"$SLOW"*) echo begun >>"$STARTED" ; sleep 60 ;;
    *"$WRONG"*) echo "ValueError: too wrong" ; echo "and more" ; exit 1 ;;
    *) echo begun >>"$STARTED" ; echo "done: loss 1" ;;
esac
"""


@pytest.fixture
def session(tmp_path, monkeypatch):
    """A function that returns the words of a session, whose scripts do nothing, or what SLOW and
    WRONG say; and the file with a line for each that was started."""
    for name in ("python", "torchrun"):
        (tmp_path / name).write_text(FAKE)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # comes first in PATH
    words = f"bash measure/gpu_session.sh --device cpu --work {tmp_path / 'work'} "
    started_file = tmp_path / "started"

    def command(flags, slow="nothing", wrong="nothing"):
        env = {"SLOW": slow, "WRONG": wrong, "STARTED": str(started_file)}
        return {"command": words + flags, **env}

    return command, started_file


def test_a_step_that_fails_or_is_slow_is_named(session):
    """The others are done, and a second call repeats none."""
    command, begun = session
    faults = {"slow": "pytorch_FSDP_TP.py", "wrong": "pytorch_FSDP_by_hand.py"}
    flags = "--limit 1 --only 'one rank: F'"
    finished = launch(**command(flags, **faults))
    assert finished.code == 1, str(finished)
    lines = {line[:34].strip(): line[34:].strip() for line in finished.lines[:4]}
    assert lines["one rank: FSDP"] == lines["one rank: FSDP_offload"] == "done: loss 1"
    assert lines["one rank: FSDP_TP"].startswith("failed: over its limit of 1 s; see ")
    assert lines["one rank: FSDP_by_hand"].startswith("failed: ValueError: too wrong; see ")
    assert finished.lines[4:] == ["failed: one rank: FSDP_TP; one rank: FSDP_by_hand"]
    before = begun.read_text()
    again = launch(**command(flags))
    assert again.code == 1 and before == begun.read_text()
    assert sum(line.endswith(" (before)") for line in again.lines) == 4


def test_stopped_and_continued(session):
    command, begun = session
    flags = "--only 'one rank: F'"
    with started(**command(flags, slow="pytorch_FSDP_TP.py")) as process:
        wait_for(lambda: begun.exists() and begun.read_text().count("begun") == 2)
        process.send(signal.SIGINT)
        finished = process.end()
    assert finished.code == 130 and "the same command continues" in finished.stderr
    again = launch(**command(flags))
    assert again.code == 0, str(again)
    assert sum("(before)" in line for line in again.lines) == 1
    assert begun.read_text().count("begun") == 2 + 3


def test_what_the_time_does_not_suffice_for_is_left(session):
    command, _ = session
    finished = launch(**command("--minutes 0.1 --only 'one rank: F'", slow="pytorch_FSDP_TP.py"))
    assert finished.code == 3, str(finished)
    [line] = [line for line in finished.lines if line.startswith("left for the next call")]
    assert "one rank: FSDP_TP" in line and "FSDP;" not in line


def test_wrong_flags(session):
    command, _ = session
    for flags in ("--minutes none", "--device tpu", "--only Nothing", "--minute 9", "--only"):
        finished = launch(**command(flags))
        assert finished.code == 2 and "gpu_session.sh: error: -" in finished.stderr, str(finished)


def test_every_script_is_a_step(session):
    command, _ = session
    listed = launch(**command("--list")).stdout
    for row in TECHNIQUES:
        assert f"\none rank: {row.name}: " in listed
    assert "claims" in listed and "resume: ZeRO AdamW" in listed


@pytest.mark.full
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_resume_of_an_optimizer(name, tmp_path):
    """As on a GPU, with the real scripts."""
    words = f"--device cpu --work {tmp_path}/work --out {tmp_path}/out --only".split()
    words = ["bash", "measure/gpu_session.sh", *words, f"resume: {name}"]
    finished = launch(words, timeout=600)
    assert finished.code == 0, str(finished)
    found = json.loads((tmp_path / "out/gpu_session.json").read_text())
    assert {"hardware", "versions", "git_commit", "date"} < found.keys()
    [step] = found["steps"]
    assert step["outcome"].endswith("off by 0.0e+00 of what its steps change")
    assert "--resume" in step["command"] and not (ROOT / "results/gpu_session.json").exists()


def test_a_wrong_resume_is_found(tmp_path):
    """Within what another order of additions does, it is none."""
    for name, value in (("half", 1.0), ("straight", 2.0), ("resumed", 2.01)):
        (tmp_path / name).mkdir()
        torch.save({"weight": torch.tensor([value])}, tmp_path / name / "model.pt")
    gpu_session.compare(tmp_path)
    torch.save({"weight": torch.tensor([1.9])}, tmp_path / "resumed/model.pt")
    with pytest.raises(SystemExit, match="1"):
        gpu_session.compare(tmp_path)


def test_a_suite_that_was_stopped_is_a_result(tmp_path, monkeypatch):
    """With the rows that have been measured, unless all rows were measured before."""
    results = tmp_path / "results"
    work = tmp_path / "work"
    for folder in (results, work):
        folder.mkdir()
    monkeypatch.setattr(gpu_session, "RESULTS", results)
    row = {"failed": None, "runs": [{"command": "python pytorch_SingleGPU.py"}]}
    rows = [row, row | {"runs": []}, row | {"runs": [], "failed": "out of memory"}]
    (results / "gpu.partial.json").write_text(json.dumps({"rows": rows, "complete": False}))
    gpu_session.report("cuda", work, results, tmp_path / "out")
    found = json.loads((tmp_path / "out/gpu.json").read_text())
    assert found["rows"] == [rows[0], rows[2]]
    (results / "gpu.json").write_text('{"complete": true}')
    gpu_session.report("cuda", work, results, None)
    assert json.loads((results / "gpu.json").read_text()) == {"complete": True}


def test_a_text_of_gpt2s_size(tmp_path):
    gpu_session.write_text(tmp_path / "text")
    text = (tmp_path / "text").read_text()
    assert len(set(text)) == 50_257 and len(text) * 9 // 10 > 720 * 1024
