"""Exercises: each solution is right, and what people write instead gets its diagnosis."""

import io
import random
import re
import signal
import sys

import pytest
import yaml
from conftest import (
    ROOT,
    cases,
    launch,
    processes_of_this_session,
    refused,
    started,
    succeed,
    wait_for,
)

from exercises import predict as program
from jobs.sizes import SIZES
from techniques import technique

HERE = ROOT / "exercises"
WRONG = yaml.safe_load((ROOT / "tests/exercises.yaml").read_text())


def check(name, folder, *flags):
    command = ["python", "exercises/check.py", *name.split(), "--answers", folder, *flags]
    finished = launch(command, forked=True, timeout=60)
    assert not finished.stderr, str(finished)
    return finished


USUAL = ("mean", "zero", "pipeline", "lora")  # usually: an edit of one breaks no other


@cases("name", WRONG, USUAL.__contains__)
def test_the_solution_is_right(name):
    finished = check(name, "exercises/solutions")
    right = f"{name}: right on 1"
    assert finished.code == 0 and finished.stdout.startswith(right), str(finished)
    assert finished.lines[1:] == [f"Compare yours with exercises/solutions/{name}.py"]


ROWS = [(name, number) for name, rows in WRONG.items() for number in range(len(rows))]


def is_usual(name, number):
    return name in USUAL and number == 0 or "hangs" in WRONG[name][number]["says"]


@cases("name, number", ROWS, is_usual)
def test_a_wrong_answer_gets_its_diagnosis(name, number, tmp_path):
    row = WRONG[name][number]
    solution = (HERE / "solutions" / f"{name}.py").read_text()
    assert solution.count(row["right"]) == 1
    (tmp_path / f"{name}.py").write_text(solution.replace(row["right"], row["wrong"]))
    finished = check(name, tmp_path, "--patience", "2")
    assert finished.code == 1 and row["says"] in finished.stdout, str(finished)
    assert len(finished.lines) == 1


def test_all_exercises_have_wrong_answers_and_a_row():
    assert set(WRONG) == {path.stem for path in (HERE / "solutions").glob("*.py")}
    assert all(len(rows) >= 3 for rows in WRONG.values())
    page = (ROOT / "docs/exercises.md").read_text()
    assert re.findall(r"^\| \[(\w+)\.py\]\(\.\./exercises/\1\.py\) \|", page, re.M) == list(WRONG)


def test_verdicts_on_the_page_are_real():
    page = (ROOT / "docs/exercises.md").read_text()
    first, *wrong, right = re.findall(r"^mean: (.*)$", page, re.M)
    assert f"mean: {first}\n" == check("mean", "exercises").stdout
    assert wrong == [WRONG["mean"][number]["says"] for number in (0, 2)]
    assert right == "right on 1, 2 and 3 ranks"  # test_the_solution_is_right


def test_files_as_they_are(tmp_path):
    """Nothing is begun, and nothing runs."""
    finished = check("", "exercises")
    assert finished.code == 1 and finished.seconds < 30, str(finished)
    assert [line.split()[:2] for line in finished.lines[:15]] == [["not", "begun"]] * 15
    assert finished.lines[15:] == ["0 of 15 done. Next: write exercises/mean.py"]


@cases("right, count", [("", "2 mistakes"), (" + rank", "1 mistake")], lambda right, _: right)
def test_the_hunt_begins_with_three_mistakes(right, count, tmp_path):
    """Of which two ranks show two: all batches are divisible by 2."""
    lines = (HERE / "three_mistakes.py").read_text().splitlines(keepends=True)
    left = "".join(line for line in lines if "delete this line" not in line)
    (tmp_path / "three_mistakes.py").write_text(left.replace(right, ""))
    said = check("three_mistakes", tmp_path).stdout
    assert f"right on 1 rank, but on 2 ranks the trained model has {count} left" in said, said


UNJUDGED = [
    ("", "zero: not begun: zero.py does not define flatten()"),
    (None, "zero: not begun: there is no file "),
    ("def step(:", "zero: raises an error on 1 rank: rank 0, line 1: invalid syntax"),
    ("as it is", "zero: not begun: zero.py, line 19: flatten() puts tensors into one flat tensor"),
    ("half", "zero: right so far: zero.py, line 43: step() reduce-scatters gradients, updates, an"),
    ("loop", "zero: does not end on 1 rank: rank 0 is in line "),
    ("exit", "zero: raises an error on 1 rank: rank 0, line 1, `raise SystemExit(3)`: SystemExit"),
    ("kill", "zero: aborts on 1 rank: rank 0, its process has ended, or is stuck"),
]  # fmt: skip


@cases("text, said", UNJUDGED, lambda text, _: text not in ("as it is", "exit"))
def test_what_cannot_be_judged(text, said, tmp_path):
    """In a sentence, not in a traceback."""
    shipped = (HERE / "zero.py").read_text()
    solution = (HERE / "solutions/zero.py").read_text()
    begin, _, rest = shipped.partition("    raise NotImplementedError")
    body = "    flat = torch.cat([t.flatten() for t in tensors])\n"
    body += "    return F.pad(flat, (0, -len(flat) % dist.get_world_size()))\n"
    texts = {
        "as it is": shipped,
        "half": begin + body + rest.partition("\n")[2],
        "loop": solution.replace("def flatten(tensors):", "while True:\n    pass\ndef flatten(t):"),
        "exit": "raise SystemExit(3)\n" + solution,
        "kill": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    }
    if text is not None:
        (tmp_path / "zero.py").write_text(texts.get(text, text))
    patience = ["--patience", "0.5"] if text == "loop" else []
    finished = check("zero", tmp_path, *patience)
    assert finished.code == 1 and finished.stdout.startswith(said), str(finished)
    assert len(finished.lines) == 1


UNEQUAL = """
import torch
import torch.distributed as dist

def average_gradients(parameters):
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    mine = torch.ones(3 + rank)
    more = torch.ones(ranks * len(mine))
"""
ENDS = {  # of ranks that disagree, by their line
    "    if ranks > 1: dist.all_gather_into_tensor(more, mine)":
        "aborts on 2 ranks: rank 0, it got a tensor of another size than it expected (line 10)",
    "    if ranks > 1: dist.recv(torch.ones(3), (rank + 1) % ranks)":
        "hangs on 2 ranks: rank 0 waits in recv of float64 [3] from rank 1 (line 10), rank 1 waits",
    "    dist.broadcast(torch.ones(3), 0) if rank else dist.all_reduce(torch.ones(3))":
        "hangs on 2 ranks: rank 0 waits in all_reduce (line 10), rank 1 waits in broadcast (line "
        "10); collective 1 differs: all_reduce of float64 [3] on rank 0, broadcast of",
    "    if rank: raise ValueError('no')\n    dist.barrier()":
        "raises an error on 2 ranks: rank 1, line 10, `if rank: raise ValueError('no')`: ValueErr",
}  # fmt: skip


@cases("line", ENDS, lambda line: "recv" not in line)
def test_ranks_that_disagree(line, tmp_path):
    (tmp_path / "mean.py").write_text(UNEQUAL + line)
    finished = check("mean", tmp_path, "--patience", "2")
    assert ENDS[line] in finished.stdout, str(finished)
    assert not any("check.py" in " ".join(info["cmdline"]) for info in processes_of_this_session())


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_no_rank_survives_the_judge(signum, tmp_path):
    """Each waits for it, and would otherwise wait forever."""
    waits = "    print('waits', flush=True)\n    dist.recv(mine)"
    (tmp_path / "mean.py").write_text(UNEQUAL + waits)
    command = ["python", "exercises/check.py", "mean", "--answers", tmp_path, "--patience", "60"]
    with started(command, forked=True) as process:
        wait_for(lambda: "waits" in process.output[0])
        before = len(processes_of_this_session())
        process.send(signum, group=signum == signal.SIGINT)
        wait_for(lambda: len(processes_of_this_session()) <= before - 2, 20)


def test_a_name_that_is_none():
    finished = launch("python exercises/check.py fdsp", forked=True)
    assert finished.refusal.startswith("check: error: fdsp is no exercise; use one of mean, buck")


# --------------------------------------------------------------------------------- predict.py
WITH_TYPED = """
import runpy, sys
sys.stdin = open(sys.path[0] + "/typed")
runpy.run_path("exercises/predict.py", run_name="__main__")
"""


def test_predict_reads_answers_line_by_line(tmp_path):
    """Right ones are counted, wrong ones explained, and a line that is no number asked again."""
    first = program.ask_state(random.Random(7)).answer
    (tmp_path / "typed").write_text(f"{first:.3g}\nten\n1e9\n1.5\n")
    (tmp_path / "with_typed.py").write_text(WITH_TYPED)
    finished = succeed(f"python {tmp_path}/with_typed.py --seed 7", forked=True)
    assert re.fullmatch("(training steps to predict: .*\n)*", finished.stderr), finished.stderr
    said = finished.stdout
    assert f"\n> {first:.3g}\nright: it is {first:.3g} GB; bytes per parameter: par" in said, said
    assert "\n> ten\n'ten' is not a number of GB; a point separates" in said
    assert "\n> 1e9\nno: it is" in said and "MiB at the peak: parameters" in said
    assert said.endswith("\n2 of 3 right. The same questions: --seed 7\n"), said


def test_predict_without_an_answer(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["predict.py", "--seed", "1"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with refused("no answer on the standard input"):
        program.main()


def test_a_wrong_number_is_explained():
    draw = random.Random(3)
    question = program.ask_state(draw)
    other = question.others["DDP, where no rank shards anything"]
    assert program.reply(question, other)[1].startswith("this is DDP, where no rank shards")
    assert "a matter of the unit" in program.reply(question, 1000 * question.answer)[1]
    question = program.ask_traffic(draw)
    assert program.reply(question, question.answer / 2)[1].startswith("this is forward alone; it")
    assert program.reply(question, 1.05 * question.answer)[0]


# ------------------------------------------------------------- figures in the exercises' problems
def test_figures_of_the_exercises():
    """Of published sizes, and of techniques.py."""
    llama = SIZES["llama3-8b"]
    large = SIZES["llama3-70b"]
    mixtral = SIZES["mixtral-8x7b"]
    parameters = llama.count_parameters(llama.vocabulary)
    everything = sum(technique("SingleGPU").keeps(1, {"optimizer": "adamw"}).values())
    shard = sum(technique("FSDP").keeps(8, {"optimizer": "adamw"}).values())
    optimizer = technique("ZeRO_by_hand").keeps(8, {"optimizer": "adamw", "stage": 1})["optimizer"]
    experts = mixtral.layers * 8 * 3 * mixtral.width * mixtral.mlp_width
    figures = {
        "buckets": [f"GPT-2 has {12 * SIZES['gpt2'].layers + 4} parameters."],  # 12 in a block
        "mean": [f"{4 * parameters / 1e9:.1f} GB that no"],
        "recompute": [
            f"Llama-3-8B is {2 * 8192 * llama.width / 1e6:.0f} MB",
            f"its MLP {2 * 8192 * llama.mlp_width / 1e6:.0f} MB",
        ],
        "zero": [
            f"{8 * parameters / 1e9:.0f} GB for Llama-3-8B",
            f"a rank of 8 keeps {optimizer * parameters / 1e9:.0f} GB",
        ],
        "fsdp": [
            f"are {everything * parameters / 1e9:.0f} GB",
            f"each keeps {shard * parameters / 1e9:.0f} GB",
        ],
        "tensor_parallel": [f"are {2 * 3 * large.width * large.mlp_width / 1e9:.1f} GB"],
        "sequence_parallel": [f"{2 * 8192 * large.width / 1e6:.0f} MB each for a sequence of"],
        "ring": [f"a matrix of {2 * 131_072**2 / 1e9:.0f} GB"],
        "experts": [
            f"block, {2 * experts / 1e9:.0f} GB in bfloat16 of its "
            f"{2 * mixtral.count_parameters(mixtral.vocabulary) / 1e9:.0f}"
        ],
        "lora": [
            f"are {everything * parameters / 1e9:.0f} GB",
            f"the weights are {2 * parameters / 1e9:.0f} GB",
        ],
    }
    for name, said in figures.items():
        text = " ".join((HERE / f"{name}.py").read_text().split())
        assert [words for words in said if words not in text] == [], name
