"""Exercises: each solution is right, and what people write instead gets its diagnosis."""

import pytest
from conftest import ROOT, launch, processes_of_this_session, wait_for

HERE = ROOT / "exercises"
# Lines of a solution, what somebody writes instead, and what the judge says of it
WRONG = {
    "mean": [
        ("p.grad /= dist.get_world_size()", "pass",
         "right on 1 rank, but the gradient of 0.weight is 2 times the reference on 2 ranks, 3 "
         "times the reference on 3 ranks: summed over the ranks, not averaged"),
        ("dist.all_reduce(p.grad)", "pass",
         "the gradient of 0.weight is this rank's own gradient, divided: nothing was summed"),
        ("dist.all_reduce(p.grad)", "dist.get_rank() or dist.all_reduce(p.grad)",
         "right on 1 rank, but hangs on 2 ranks: rank 0 waits in all_reduce (line 9) while rank 1 "
         "has left"),
        ("if p.grad is not None", "if True",
         "raises an error on 1 rank: rank 0, line 9, `dist.all_reduce(p.grad)`: "),
    ],
    "buckets": [
        ("in reversed(parameters)", "in parameters",
         "the first bucket begins with the first parameter, whose gradient backward computes last"),
        ("flat /= dist.get_world_size()", "pass", "2 ranks, 3 times the reference on 3 ranks: sum"),
        ("p.grad = part.view_as(p)", "pass", "the mean stays in the flat tensor"),
        ("ready.clear()", "ready.add(None)", "when backward of the second step returns is 0, and there are 2"),
        (", async_op=True)", ")", "an all-reduce blocks backward until it is done: async_op=True"),
    ],
    "token_weights": [
        ('reduction="sum"', 'reduction="mean"', "is divided twice: cross_entropy() took the mean"),
        ("    dist.all_reduce(count)\n", "", "is the sum of the ranks' means"),
        ("dist.all_reduce(count)\n", "count *= dist.get_world_size()\n",
         "is the mean of the ranks' means: a label counts less where its rank has more of them"),
    ],
}  # fmt: skip


def check(name, folder, *flags):
    command = ["python", "exercises/check.py", name, "--answers", folder, *flags]
    finished = launch(command, forked=True, timeout=60)
    assert not finished.stderr, str(finished)
    return finished


@pytest.mark.parametrize("name", WRONG)
def test_the_solution_is_right(name):
    finished = check(name, "exercises/solutions")
    assert finished.code == 0 and finished.stdout.startswith(f"{name}: right on 1"), str(finished)


ROWS = [(name, *row) for name, rows in WRONG.items() for row in rows]


@pytest.mark.parametrize("name, right, wrong, said", ROWS)
def test_a_wrong_answer_gets_its_diagnosis(name, right, wrong, said, tmp_path):
    solution = (HERE / "solutions" / f"{name}.py").read_text()
    assert solution.count(right) == 1
    (tmp_path / f"{name}.py").write_text(solution.replace(right, wrong))
    finished = check(name, tmp_path, "--patience", "2")
    assert finished.code == 1 and said in finished.stdout, str(finished)
    assert len(finished.lines) == 1
