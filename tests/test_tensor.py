"""Tensor parallelism, alone and under FSDP: the single process's weights, and what goes wrong."""

import pytest
import torch
from conftest import cases, launcher, read_run, snapshots, succeed
from test_parity import relative_difference

# Twelve heads and positions: two, three and four ranks can share them out.
JOB = (
    "--model gpt-2x12x48 --context 12 --dataset synthetic --train-samples 150 --eval-samples 20 "
    "--batch-size 24 --epochs 9 --print-freq 1 --clip-grad 0.5 --double"
)
TP, GRID = "pytorch_TP", "pytorch_FSDP_TP --tp 2"
RANKS = [(TP, 2), (f"{TP} --sequence-parallel", 2), (GRID, 4), (f"{GRID} --sequence-parallel", 4)]
RANKS += [(TP, 3), (f"{TP} --sequence-parallel", 3), (TP, 4), (f"{TP} --sequence-parallel", 4)]
RANKS += [(GRID, 2), ("pytorch_FSDP_TP --tp 1", 2), ("pytorch_FSDP_TP --tp 3", 3)]


def as_doubles(state):
    return {name: tensor.double() for name, tensor in state.items()}


@pytest.mark.parametrize(
    "script, n, optimizer",
    cases(
        [(*row, optimizer) for row in RANKS for optimizer in ("sgd", "adamw")],
        lambda script, n, optimizer: (
            ((optimizer == "adamw" and (script, n) in RANKS[:4]) or (script == TP and n > 2))
            and (optimizer == "adamw" or n == 3)
        ),
    ),
)
def test_twelve_steps_in_double(script, n, optimizer, train, measured):
    flags = f"--max-steps 12 --optimizer {optimizer}"
    expected, expected_result = train("pytorch_SingleGPU", 1, flags)
    weights, result = train(script, n, flags)
    difference = relative_difference(as_doubles(weights), as_doubles(expected))
    measured("parity_shared", script=script, ranks=n, optimizer=optimizer, value=difference)
    assert difference < 1e-11
    for name in ("train_loss", "eval_loss", "eval_accuracy"):
        assert result[name] == pytest.approx(expected_result[name], rel=1e-9)
    assert result["steps"] == 12


def test_dropout_is_that_of_the_single_process(train):
    """All ranks draw it alike, for what they have whole."""
    flags = "--max-steps 4 --dropout 0.3"
    expected, _ = train("pytorch_SingleGPU", 1, flags)
    weights, _ = train(TP, 2, flags)
    assert relative_difference(as_doubles(weights), as_doubles(expected)) < 1e-11


def run_with(mistake, command, folder, n=2):
    script, _, flags = command.partition(" ")
    command = launcher(f"{script} {flags}", n, through="tests/mistakes.py")
    folder = folder / mistake.replace(" ", "-")
    succeed(f"{command} {JOB} --output-dir {folder}", forked=True, MISTAKE=mistake)
    return as_doubles(read_run(folder)[0])


@pytest.mark.full
@pytest.mark.parametrize(
    "mistake, script, n, flags, at_least",
    [
        ("untied", f"{TP} --sequence-parallel", 2, "--tie", 0.05),
        ("batch by rank", GRID, 4, "", 0.5),
        ("fused", TP, 2, "", 0.5),
    ],
    ids=["untied", "batch-by-rank", "fused"],
)
def test_what_no_error_tells_of(mistake, script, n, flags, at_least, train, tmp_path, measured):
    """docs/parallelism.md lists them."""
    flags += " --max-steps 12"
    if mistake == "fused":  # whose single process has one matrix, too
        expected = run_with("none: fused", f"pytorch_SingleGPU {flags}", tmp_path, 1)
    else:
        expected = as_doubles(train("pytorch_SingleGPU", 1, flags)[0])
    difference = relative_difference(run_with(mistake, f"{script} {flags}", tmp_path, n), expected)
    measured("silent", mistake=mistake, script=script, ranks=n, value=difference)
    assert difference > at_least


def test_a_snapshot_goes_on_in_other_techniques(train, tmp_path):
    """Within an epoch, at another number of ranks."""
    flags = "--schedule none --lr 0.001"
    expected, _ = train("pytorch_SingleGPU", 1, f"--max-steps 12 {flags}")
    legs = [("pytorch_HSDP --shard 2", 4), (f"{TP} --sequence-parallel", 3), ("pytorch_FSDP", 2)]
    legs += [(GRID, 4), (TP, 2)]
    for (script, n), steps in zip(legs, (3, 5, 8, 10, 12), strict=True):
        command = f"{launcher(script, n)} {JOB} {flags} --max-steps {steps} --output-dir {tmp_path}"
        finished = succeed(f"{command} --resume auto", forked=True)
        assert ("resumed from" in finished.stdout) == (steps > 3) and not finished.our_warnings
    difference = relative_difference(as_doubles(read_run(tmp_path)[0]), as_doubles(expected))
    assert difference < 1e-11


@pytest.mark.parametrize(
    "script, n",
    cases([(f"{TP} --sequence-parallel", 2), (GRID, 4)], lambda script, n: n == 2),
)
def test_a_stop_in_an_epoch_changes_no_bit(script, n, train, tmp_path):
    flags = "--max-steps 9 --dropout 0.2 --schedule none --lr 0.001"
    expected, _ = train(script, n, flags)
    command = f"{launcher(script, n)} {JOB} {flags} --output-dir {tmp_path}"
    succeed(command.replace("--max-steps 9", "--max-steps 4"), forked=True)
    assert snapshots(tmp_path)[0].name.startswith("step-00000004")
    finished = succeed(f"{command} --resume auto", forked=True)
    assert "at epoch 1, step 5" in finished.stdout
    weights, _ = read_run(tmp_path)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
