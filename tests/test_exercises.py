"""Exercises: each solution is right, and what people write instead gets its diagnosis."""

import pytest
import yaml
from conftest import ROOT, launch

HERE = ROOT / "exercises"
WRONG = yaml.safe_load((ROOT / "tests/exercises.yaml").read_text())


def check(name, folder, *flags):
    command = ["python", "exercises/check.py", *name.split(), "--answers", folder, *flags]
    finished = launch(command, forked=True, timeout=60)
    assert not finished.stderr, str(finished)
    return finished


@pytest.mark.parametrize("name", WRONG)
def test_the_solution_is_right(name):
    finished = check(name, "exercises/solutions")
    assert finished.code == 0 and finished.stdout.startswith(f"{name}: right on 1"), str(finished)


ROWS = [(name, number) for name, rows in WRONG.items() for number in range(len(rows))]


@pytest.mark.parametrize("name, number", ROWS)
def test_a_wrong_answer_gets_its_diagnosis(name, number, tmp_path):
    row = WRONG[name][number]
    solution = (HERE / "solutions" / f"{name}.py").read_text()
    assert solution.count(row["right"]) == 1
    (tmp_path / f"{name}.py").write_text(solution.replace(row["right"], row["wrong"]))
    finished = check(name, tmp_path, "--patience", "2")
    assert finished.code == 1 and row["says"] in finished.stdout, str(finished)
    assert len(finished.lines) == 1


TITLES = {path.stem for path in (HERE / "solutions").glob("*.py")}


def test_all_exercises_have_wrong_answers():
    assert set(WRONG) == TITLES
    assert all(len(rows) >= 3 for rows in WRONG.values())


def test_files_as_they_are(tmp_path):
    """Nothing is begun, and nothing runs."""
    finished = check("", "exercises")
    assert finished.code == 1 and finished.seconds < 30, str(finished)
    assert [line.split()[:2] for line in finished.lines[:14]] == [["not", "begun"]] * 14
    assert finished.lines[14:] == [
        "0 of 14 done. Next: exercises/mean.py, then",
        "python exercises/check.py mean",
    ]


@pytest.mark.parametrize("text, said", [
    ("", "zero: not begun: zero.py does not define flatten(), make_shard(), step()"),
    (None, "zero: not begun: there is no file "),
    ("def step(:", "zero: cannot be read: line 1: invalid syntax"),
    ("as it is", "zero: not begun: write flatten(), step() in exercises/zero.py"),
    ("half", "zero: raises an error on 1 rank: rank 0, line 43 is not written yet: step() reduce-"),
    ("loop", "zero: does not end on 1 rank: rank 0 is in line "),
    ("exit", "zero: raises an error on 1 rank: rank 0, line 1, `raise SystemExit(3)`: SystemExit"),
])  # fmt: skip
def test_what_cannot_be_judged(text, said, tmp_path):
    """In a sentence, not in a traceback."""
    file = tmp_path / "zero.py"
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
    }
    if text is not None:
        file.write_text(texts.get(text, text))
    finished = check("zero", "exercises" if text == "as it is" else tmp_path, "--patience", "0.5")
    assert finished.code == 1 and finished.stdout.startswith(said), str(finished)
    assert len(finished.lines) == 1


def test_a_name_that_is_none():
    finished = launch("python exercises/check.py fdsp", forked=True)
    assert finished.refusal.startswith("check: error: fdsp is no exercise; use one of mean, buck")
