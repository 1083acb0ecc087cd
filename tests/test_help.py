"""The output of --help, and the settings that a run prints."""

import contextlib
import io
import re
import runpy
import sys
import textwrap

import pytest
from conftest import ROOT

import common
from harness import cli, settings

SCRIPTS = [
    path.stem
    for kind in ("pytorch", "accelerate", "lightning", "transformers")
    for path in sorted(ROOT.glob(f"{kind}_*.py"))
    if path.stem != "pytorch_collectives"  # which trains nothing
]
GROUPS = ["this technique", "training", "task", "image options", "language-model options"]
GROUPS += ["mixture of experts", "output", "hardware", "reproducibility and profiling"]


def help_of(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    monkeypatch.setenv("COLUMNS", "80")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(name, marks=[] if name.startswith("pytorch") else pytest.mark.full)
        for name in SCRIPTS
    ],
)
def test_help(script, monkeypatch):
    text = help_of(script, monkeypatch)
    assert text.startswith(f"usage: {script}.py [flags]\n")
    groups = re.findall(r"^([a-z -]+):$", text, re.MULTILINE)
    assert groups == [group for group in GROUPS if group in groups] and len(text.splitlines()) < 150
    for group in groups:
        flags = textwrap.dedent(text.partition(f"\n{group}:\n")[2].partition("\n\n")[0])
        for flag in re.split(r"\n(?=-)", flags):
            words = flag.split()
            assert len(words) > 2 and re.search(r"  +\w", flag), f"{flag} has no help"
            assert not any(word.endswith("-") for word in words), f"a word is broken: {flag}"
            assert all(len(line) <= 80 for line in flag.splitlines())


@pytest.mark.parametrize("script", ["pytorch_PP", "pytorch_EP"])
def test_what_a_script_does_not_train_is_not_shown(script, monkeypatch):
    text = help_of(script, monkeypatch)
    shown = {flag for flag in ("--image-size", "--norm", "--experts") if f"  {flag} " in text}
    assert shown == ({"--experts"} if script == "pytorch_EP" else set())


def test_settings_are_what_was_given(monkeypatch, tmp_path):
    """Also in a file, and without what the launcher adds; result.json has all of them."""
    (tmp_path / "job.args").write_text("--epochs 2  # few\n--lr 0.1\n")
    given = [f"@{tmp_path}/job.args", "--local_rank=1", "--data-dir", "a folder"]
    monkeypatch.setattr(sys, "argv", ["x.py", *given])
    assert cli.given_flags() == "--epochs 2 --lr 0.1 --data-dir 'a folder'"
    monkeypatch.setattr(sys, "argv", ["x.py", "--epochs", "2"])
    args = common.parse_args(common.argument_parser(""))
    words = settings.as_words(args)
    assert words[words.index("--epochs") + 1] == "2" and "--batch-size" in words


@pytest.mark.parametrize("program", ["estimate", "model_inference", "benchmark", "timeline"])
def test_help_of_the_programs(program, monkeypatch):
    text = help_of(program, monkeypatch)
    assert text.startswith(f"usage: {program}.py")
    flags = re.findall(r"^  (-.*(?:\n {4,}.*)*)", text, re.MULTILINE)
    assert len(flags) > 2 and all(re.search(r"(  |\n) *[a-zA-Z]", flag) for flag in flags)
