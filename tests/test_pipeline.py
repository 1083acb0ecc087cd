"""Pipeline parallelism: parity with one process, memory, the bubble, and what happens on errors."""

import argparse
from fractions import Fraction
from functools import partial

import pytest
import torch
from conftest import HOOKED, cases, launch, launcher, relative_difference, succeed

import pytorch_PP
from jobs import decoder, gpt
from libraries.pipelining import IN_A_V, SCHEDULES, divide, ranks_of_stages
from measure.bubble import UNITS, formula, idle_shares, order_of, plan, read_steps

JOB = (
    "--model gpt-8x2x16 --context 16 --dataset synthetic --train-samples 150 --eval-samples 20 "
    "--batch-size 24 --epochs 9 --print-freq 1 --clip-grad 0.5"
)
SCRIPT = "pytorch_PP --pipeline-schedule {}".format
SCHEDULES = list(SCHEDULES)


# ------------------------------------------------------------------------------------------ parity


FEW = [("gpipe", 3, 1), ("1f1b", 3, 3), ("interleaved", 3, 2), ("interleaved", 4, 6), ("zbv", 3, 1)]
FEW += [("zbv", 2, 24), ("dualpipev", 2, 24), ("dualpipev", 3, 6)]


@pytest.mark.parametrize("schedule, n, microbatches", cases(FEW, lambda *row: row in FEW[3:6]))
def test_few_and_many_microbatches(schedule, n, microbatches, train):
    flags = "--double --max-steps 2"
    expected, _ = train("pytorch_SingleGPU", 1, flags)
    weights, _ = train(f"{SCRIPT(schedule)} --microbatches {microbatches}", n, flags)
    assert relative_difference(weights, expected) < 1e-9


# ------------------------------------------------------------------------------- what a rank holds


def own_parts(schedule, n, tie=False):
    """By rank, the state dict of what it keeps of a model, and the bytes of its parameters."""
    found = []
    owners = ranks_of_stages(schedule, n)
    for rank in range(n):
        torch.manual_seed(0)
        model = gpt.GPT(list(range(27)), gpt.Size(8, 2, 16), 16, tie=tie)
        mine = [number for number, owner in enumerate(owners) if owner == rank]
        stages = {number: pytorch_PP.Stage(model, number, len(owners)) for number in mine}
        pytorch_PP.keep_only(stages, model)
        found.append((model, sum(p.numel() for p in model.parameters())))
    return found


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_ranks_have_each_tensor_once_under_its_own_name(schedule, n, tie):
    torch.manual_seed(0)
    whole = gpt.GPT(list(range(27)), gpt.Size(8, 2, 16), 16, tie=tie).state_dict()
    parts = [model.state_dict() for model, _ in own_parts(schedule, n, tie)]
    for name, tensor in whole.items():
        holders = [part[name] for part in parts if name in part]
        assert all(torch.equal(held, tensor) for held in holders)
        everywhere = name == "vocabulary"
        twice = tie and name in ("token.weight", "head.weight") and schedule not in IN_A_V and n > 1
        assert len(holders) == (n if everywhere else 2 if twice else 1), name
    assert set().union(*parts) == whole.keys()


def test_decay_is_as_in_the_whole_model():
    """With --tie the head's matrix is an embedding's on the last rank, too, and does not decay."""
    (first, _), (last, _) = own_parts("1f1b", 2, tie=True)
    for model in (first, last):
        decayed, others = decoder.parameter_groups(model)
        assert not any(p is model.token.weight for p in decayed["params"])
        assert any(p is model.token.weight for p in others["params"])


# ------------------------------------------------------------------------------------------ bubble


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_are_idle_as_long_as_the_formula_says(schedule, ranks):
    """Exactly, on every rank, where backward takes twice as long as forward, and messages no
    time."""
    rounds = range(2 * ranks, 8 * ranks, ranks)
    for microbatches in rounds:
        order = order_of(schedule, ranks, microbatches)
        shares = idle_shares(order, lambda part: Fraction(UNITS[part[0]]))
        assert shares == [formula(schedule, ranks, microbatches)] * ranks
    least = [formula(name, ranks, 2 * ranks) for name in ("gpipe", "interleaved", "zbv")]
    assert least == sorted(least, reverse=True) and len(set(least)) == 3


@pytest.mark.parametrize(
    "schedule", cases([(s,) for s in SCHEDULES], lambda schedule: schedule in ("1f1b", "zbv"))
)
def test_ranks_compute_in_the_order_that_is_counted(schedule, tmp_path):
    command = launcher(SCRIPT(schedule), 3, HOOKED)
    succeed(f"{command} {JOB} --max-steps 2 --output-dir {tmp_path}", forked=True, HOOKS="parts")
    order = order_of(schedule, 3, 6)
    for step in read_steps(tmp_path):
        assert [[tuple(part["what"]) for part in parts] for parts in step] == order


def test_gradients_of_weights_wait_their_turn():
    """What makes zbv more than an order: halves of backward, the second of which nobody needs."""
    kinds = {kind for parts in order_of("zbv", 2, 4) for kind, _, _ in parts}
    assert kinds == {"F", "I", "W"}


# --------------------------------------------------------------------------------- a rank is gone


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_rank_that_hangs_is_named(schedule, tmp_path):
    """By its neighbours, each of which waits for it in the middle of a step."""
    command = f"{launcher(SCRIPT(schedule), 3, HOOKED)} {JOB} --timeout 10"
    finished = launch(f"{command} --output-dir {tmp_path}", timeout=60, HOOKS="send:SIGSTOP,1,3")
    assert finished.code == 1 and finished.stderr.count(": error: ") == 1, str(finished)
    assert "rank 1 (stopped by a signal) is at pytorch_PP.py:" in finished.stderr, str(finished)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_refused_is_what_pytorch_refuses(schedule):
    """On one rank alone, it may be, and the others would wait for it."""
    for ranks in (1, 2, 3, 4):
        for number in range(1, 25):
            args = argparse.Namespace(
                pipeline_schedule=schedule, batch_size=number, microbatches=number,
                model="gpt-8x2x16",
            )  # fmt: skip
            refused = []
            for check in (partial(plan, schedule, ranks, number), partial(divide, args, 8, ranks)):
                try:
                    check()
                    refused.append(False)
                except (ValueError, SystemExit):
                    refused.append(True)
            assert len(set(refused)) == 1, (ranks, number)


def test_microbatches_by_default():
    found = {}
    for schedule, batch, ranks in (
        ("1f1b", 128, 4), ("zbv", 128, 3), ("interleaved", 10, 4), ("interleaved", 11, 4),
        ("gpipe", 6, 4), ("1f1b", 7, 5),
    ):  # fmt: skip
        args = argparse.Namespace(
            pipeline_schedule=schedule, batch_size=batch, microbatches=None, model="gpt-12x2x16"
        )
        _, found[schedule, batch, ranks] = divide(args, 12, ranks)
    assert list(found.values()) == [8, 8, 10, 1, 6, 7]
