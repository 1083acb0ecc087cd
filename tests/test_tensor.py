"""Tensor parallelism: dropout, and what goes wrong."""

import pytest
from conftest import launcher, read_run, succeed
from test_parity import relative_difference

# Twelve heads and positions: two, three and four ranks can share them out.
JOB = (
    "--model gpt-2x12x48 --context 12 --dataset synthetic --train-samples 150 --eval-samples 20 "
    "--batch-size 24 --epochs 9 --print-freq 1 --clip-grad 0.5 --double"
)
TP, GRID = "pytorch_TP", "pytorch_FSDP_TP --tp 2"


def as_doubles(state):
    return {name: tensor.double() for name, tensor in state.items()}


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
