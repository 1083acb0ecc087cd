"""Every full-precision technique ends with the weights of the single process, at any world size."""

import json

import pytest
import torch
from conftest import launcher, succeed

JOB = (
    "--dataset synthetic --train-samples 150 --eval-samples 20 --batch-size 24 --norm group "
    "--epochs 9 --print-freq 1"
)
TECHNIQUES = [
    (script, n) for script in ("pytorch_DDP", "pytorch_torchrun_DDP") for n in range(1, 5)
]
IDS = [f"{script}-{n}" for script, n in TECHNIQUES]


def train(script, world_size, flags, output):
    succeed(f"{launcher(script, world_size)} {JOB} {flags} --output-dir {output}")
    weights = torch.load(output / "model.pt", weights_only=True)
    return weights, json.loads((output / "result.json").read_text())


def relative_difference(ours, theirs):
    """Largest difference of any tensor, relative to the tensor's largest value."""
    assert ours.keys() == theirs.keys()
    return max(
        ((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item()
        for name in theirs
    )


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Weights and result of the single process for a set of flags; each is run once."""
    runs = {}

    def get(flags):
        if flags not in runs:
            output = tmp_path_factory.mktemp("single")
            runs[flags] = train("pytorch_SingleGPU", 1, flags, output)
        return runs[flags]

    return get


@pytest.mark.parametrize("script, world_size", TECHNIQUES, ids=IDS)
def test_twelve_steps_in_double(script, world_size, single, tmp_path):
    flags = "--double --max-steps 12"
    expected, expected_result = single(flags)
    weights, result = train(script, world_size, flags, tmp_path)
    assert {t.dtype for t in weights.values()} == {torch.float64}
    assert relative_difference(weights, expected) < 1e-12
    assert result["steps"] == expected_result["steps"] == 12
    for name in ["train_loss", "eval_loss", "eval_accuracy"]:
        assert result[name] == pytest.approx(expected_result[name], rel=1e-9)


@pytest.mark.parametrize("script, world_size", TECHNIQUES, ids=IDS)
def test_one_step_in_fp32(script, world_size, single, tmp_path):
    """One step only: training itself amplifies the rounding of fp32 from step to step."""
    expected, _ = single("--max-steps 1")
    weights, _ = train(script, world_size, "--max-steps 1", tmp_path)
    ours, theirs = (torch.cat([t.flatten() for t in w.values()]) for w in (weights, expected))
    assert (ours - theirs).norm() / theirs.norm() < 1e-6


def test_the_comparison_can_fail(single):
    """Another seed, or another batch, is told apart by far."""
    expected, _ = single("--double --max-steps 12")
    other_seed, _ = single("--double --max-steps 12 --seed 1")
    assert relative_difference(other_seed, expected) > 1e-2
    one, two = (single(f"--max-steps 1 {flags}")[0] for flags in ("", "--batch-size 48"))
    ours, theirs = (torch.cat([t.flatten() for t in w.values()]) for w in (one, two))
    assert (ours - theirs).norm() / theirs.norm() > 1e-4
