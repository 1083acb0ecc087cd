"""Pipeline parallelism: parity with one process, memory, the bubble, and what happens on errors."""

import argparse
import json
from fractions import Fraction

import pytest
from conftest import HOOKED, TABLES, cases, relative_difference, succeed

from parallel.pipelining import SCHEDULES, divide
from website.schedules import UNITS, end_times, formula, order_of, plan

JOB = "--model gpt-8x2x16 --context 16 --dataset synthetic --train-samples 150 --eval-samples 20"
JOB += " --batch-size 24 --epochs 9 --print-freq 1 --clip-grad 0.5"
SCRIPT = "pytorch_PP --pipeline-schedule {}".format
FEW = [tuple(row) for row in TABLES["few_and_many_microbatches"]]


@cases("schedule, n, microbatches", FEW, lambda *row: row in FEW[3:6])
def test_few_and_many_microbatches(schedule, n, microbatches, train):
    flags = "--double --max-steps 2"
    expected, _ = train("pytorch_SingleGPU", 1, flags)
    weights, _ = train(f"{SCRIPT(schedule)} --microbatches {microbatches}", n, flags)
    assert relative_difference(weights, expected) < 1e-9


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_are_idle_as_long_as_the_formula_says(schedule, ranks):
    """Exactly, on every rank, where backward takes twice as long as forward, and messages no
    time."""
    rounds = range(2 * ranks, 8 * ranks, ranks)
    for microbatches in rounds:
        order = order_of(schedule, ranks, microbatches)
        seconds = lambda part: Fraction(UNITS[part[0]])  # noqa: E731
        last = max(end_times(order, seconds).values())
        for parts in order:
            idle = 1 - sum(map(seconds, parts)) / last
            assert idle == formula(schedule, ranks, microbatches)
    least = [formula(name, ranks, 2 * ranks) for name in ("gpipe", "interleaved", "zbv")]
    assert least == sorted(least, reverse=True) and len(set(least)) == 3


@cases("schedule", SCHEDULES, lambda schedule: schedule in ("1f1b", "zbv"))
def test_ranks_compute_in_the_order_that_is_counted(schedule, run_once):
    _, output = run_once(SCRIPT(schedule), 3, f"{JOB} --max-steps 2", "parts")
    order = order_of(schedule, 3, 6)
    ranks = [json.loads(file.read_text()) for file in sorted(output.glob("parts-*.json"))]
    for step in zip(*ranks, strict=True):
        for parts, expected in zip(step, order, strict=True):
            assert [tuple(part) for part in parts] == expected


def test_micro_batches_share_the_matrices_in_bfloat16(tmp_path):
    """All are in flight at once. There are few tokens: a copy is larger than all activations."""
    command = f"python {HOOKED} pytorch_PP.py --pipeline-schedule gpipe --dtype bfloat16"
    flags = f"--microbatches 8 {JOB} --model gpt-1x2x256 --context 2 --batch-size 8"
    flags += f" --max-steps 3 --output-dir {tmp_path}"
    succeed(f"{command} {flags}", forked=True, HOOKS="live:1")
    copy = 2 * 12 * 256**2
    assert json.loads((tmp_path / "rank0.json").read_text())["activations"] < 1.5 * copy


@pytest.mark.parametrize("script", ["pytorch_PP", "pytorch_PP_by_hand"])
def test_weights_are_not_gathered_as_objects(script, run_once):
    """Of which rank 0 would have several copies, as large as the model: here 400 kB a block."""
    flags = "--model gpt-2x2x128 --context 8 --dataset synthetic --max-steps 1 --batch-size 8"
    run_once(script, 2, flags, "objects:50000")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_refused_is_what_pytorch_refuses(schedule):
    """On one rank alone, it may be, and the others would wait for it."""
    for ranks in (1, 2, 3, 4):
        for number in range(1, 25):
            sizes = {"batch_size": number, "microbatches": number}
            args = argparse.Namespace(pipeline_schedule=schedule, model="gpt-8x2x16", **sizes)
            try:
                plan(schedule, ranks, number)
            except ValueError:
                with pytest.raises(SystemExit):
                    divide(args, 8, ranks)
            else:
                divide(args, 8, ranks)


@pytest.mark.parametrize("schedule, batch, ranks, expected", TABLES["microbatches"])
def test_microbatches_by_default(schedule, batch, ranks, expected):
    job = {"batch_size": batch, "microbatches": None, "model": "gpt-12x2x16"}
    args = argparse.Namespace(pipeline_schedule=schedule, **job)
    assert divide(args, 12, ranks)[1] == expected
