"""The server that forks ranks for the other tests behaves like a launcher."""

import time

import pytest
from conftest import launch, processes_of_this_session

RANKS = "torchrun --standalone --nproc_per_node=3"


@pytest.fixture
def run(tmp_path):
    """A function that runs a program, given as text: by `python` or on three ranks."""

    def run(text, launcher=RANKS, flags="", **options):
        (tmp_path / "program.py").write_text(f"import os, signal, sys, time\n{text}")
        return launch(f"{launcher} {tmp_path}/program.py {flags}", forked=True, **options)

    return run


def test_environment(run):
    """Of torchrun, or of nobody. Our files, which the server has imported, know no other; elsewhere
    they are forgotten."""
    text = """
harness = sys.modules["harness.clock"], sys.modules["harness.world"]
assert harness[0].time.perf_counter() - harness[0].STARTED < 1
assert harness[1].world().rank == int(os.environ.get("RANK", 0))
names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "EXTRA"
sys.stdout.write(" ".join([os.environ.get(name, "-") for name in names] + sys.argv[1:]) + "\\n")
"""
    finished = run(text, flags="--flag", EXTRA="more")
    assert sorted(finished.lines) == [f"{rank} {rank} 3 3 more --flag" for rank in range(3)]
    assert run(text, "python").lines == ["- - - - -"]
    text = "print([name for name in ('common', 'harness', 'jobs.gpt') if name in sys.modules])"
    assert run(text, "python", cwd="/tmp").lines == ["[]"]


@pytest.mark.parametrize(
    "end, code, said",
    [
        ("sys.exit(3)", 3, ""),
        ("raise ValueError('a bug')", 1, "ValueError: a bug\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
    ],
)
def test_when_one_fails_all_end(end, code, said, run):
    """With its code, and after what is to be done at exit."""
    finished = run(
        "import atexit; atexit.register(print, 'at exit')\n"
        f"if os.environ['RANK'] == '1':\n    {end}\n"
        "time.sleep(100)\n"
    )
    assert finished.code == code and finished.stderr.endswith(said) and finished.seconds < 50
    assert finished.lines == ([] if code == -9 else ["at exit"])


def test_no_process_is_left_after_a_time_out(run):
    before = processes_of_this_session()
    with pytest.raises(AssertionError, match="no end after 2 s"):
        run("signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(100)", timeout=2)
    time.sleep(0.5)
    assert len(processes_of_this_session()) == len(before)
