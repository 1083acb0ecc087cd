"""Every full-precision technique ends with the weights of the single process, at any world size."""

import pytest
import torch
from conftest import cases, distance, relative_difference

JOB = (
    "--dataset synthetic --train-samples 150 --eval-samples 20 --batch-size 24 --norm group "
    "--epochs 9 --print-freq 1 --model small_resnet"
)
SCRIPTS = [
    "pytorch_DDP",
    "pytorch_torchrun_DDP",
    "pytorch_FSDP",
    "pytorch_DDP_ZeRO --use_zero",
    "pytorch_gradient_accumulation --accumulate 4",
    "pytorch_activation_checkpointing",
    "pytorch_FSDP_offload",
    "pytorch_DDP_by_hand",
    "pytorch_ZeRO_by_hand",
    "pytorch_ZeRO_by_hand --stage 2",
    "pytorch_FSDP_by_hand",
]
TECHNIQUES = [("pytorch_DP", 1)] + [(script, n) for script in SCRIPTS for n in range(1, 5)]
TECHNIQUES += [("pytorch_activation_checkpointing --selective", 2)]
TECHNIQUES += [("pytorch_HSDP --shard 2", 2), ("pytorch_HSDP --shard 2", 4)]
IN_DOUBLE = {  # optimizer: flags, and how closely the weights agree
    # SGD: to rounding. AdamW divides by the root of a small number, which enlarges it.
    "sgd": ("--double --max-steps 12", 1e-12),
    "adamw": ("--double --max-steps 12 --optimizer adamw", 1e-9),
}
SHARDED = ("pytorch_FSDP", "pytorch_HSDP --shard 2", "pytorch_DDP_ZeRO --use_zero")
SHARDED += ("pytorch_ZeRO_by_hand --stage 2", "pytorch_FSDP_by_hand")
LIBRARY = {  # what is written by hand, and who else does it
    "pytorch_DDP_by_hand --average each": "pytorch_torchrun_DDP",
    "pytorch_DDP_by_hand --average buckets": "pytorch_torchrun_DDP",
    "pytorch_DDP_by_hand": "pytorch_torchrun_DDP",
    "pytorch_ZeRO_by_hand": "pytorch_DDP_ZeRO --use_zero",
    "pytorch_FSDP_by_hand": "pytorch_FSDP",
}


def fewest(script, techniques):
    """The number of ranks that shows what a script does: two, if it runs on two."""
    return min((n for name, n in techniques if name == script), key=lambda n: (n == 1, n))


def is_usual(script, n, optimizer):
    """With SGD, as GPTs show AdamW; those that shard also where shares are uneven."""
    if "HSDP" in script:
        return optimizer == "sgd" and n == 4  # two rows of two
    uneven = script in SHARDED and n == 3
    return optimizer == "sgd" and (n == fewest(script, TECHNIQUES) or uneven)


@pytest.mark.parametrize(
    "script, world_size, optimizer",
    cases([(*row, optimizer) for row in TECHNIQUES for optimizer in IN_DOUBLE], is_usual),
)
def test_twelve_steps_in_double(script, world_size, optimizer, train, measured):
    flags, tolerance = IN_DOUBLE[optimizer]
    expected, expected_result = train("pytorch_SingleGPU", 1, flags)
    weights, result = train(script, world_size, flags)
    assert {t.dtype for t in weights.values()} == {torch.float64}
    difference = relative_difference(weights, expected)
    measured("parity", script=script, ranks=world_size, optimizer=optimizer, value=difference)
    assert difference < tolerance
    assert result["steps"] == expected_result["steps"] == 12
    for name in ["train_loss", "eval_loss", "eval_accuracy"]:
        assert result[name] == pytest.approx(expected_result[name], rel=1e-9)


@pytest.mark.parametrize(
    "script",
    cases([("pytorch_DP",), *zip(SCRIPTS, strict=True)], lambda script: "torchrun" in script),
)
def test_three_steps_of_the_real_resnet(script, train):
    flags, tolerance = "--double --max-steps 3 --model resnet18 --batch-size 8", 1e-12
    expected, _ = train("pytorch_SingleGPU", 1, flags)
    weights, _ = train(script, 1 if script == "pytorch_DP" else 2, flags)
    assert relative_difference(weights, expected) < tolerance


@pytest.mark.parametrize(
    "script, library", cases(LIBRARY.items(), lambda script, _: "buckets" not in script)
)
def test_by_hand_as_by_the_library(script, library, train):
    flags, _ = IN_DOUBLE["sgd"]
    (by_hand, ours), (expected, theirs) = train(script, 2, flags), train(library, 2, flags)
    assert relative_difference(by_hand, expected) < 1e-12
    assert ours["state_bytes"] == pytest.approx(theirs["state_bytes"], rel=0.02)


@pytest.mark.parametrize(
    "script",
    [pytest.param("pytorch_DDP", marks=pytest.mark.full), "pytorch_torchrun_DDP", "pytorch_FSDP"],
)
def test_one_step_in_fp32(script, train):
    """One step only: training itself amplifies the rounding of fp32 from step to step."""
    expected, _ = train("pytorch_SingleGPU", 1, "--max-steps 1")
    weights, _ = train(script, 3, "--max-steps 1")
    assert distance(weights, expected) < 1e-6


def test_the_comparison_can_fail(train):
    """Another seed, or another batch, is told apart by far."""
    expected, _ = train("pytorch_SingleGPU", 1, "--double --max-steps 12")
    other_seed, _ = train("pytorch_SingleGPU", 1, "--double --max-steps 12 --seed 1")
    assert relative_difference(other_seed, expected) > 1e-2
    one, two = (
        train("pytorch_SingleGPU", 1, f"--max-steps 1 {flags}")[0]
        for flags in ("", "--batch-size 48")
    )
    assert distance(one, two) > 1e-4


@pytest.mark.parametrize("flags", ["", "--selective"])
def test_checkpointing_changes_no_bit(flags, train):
    """Nor BatchNorm's statistics, though a block is computed twice."""
    job = "--norm batch --max-steps 3"
    expected, _ = train("pytorch_torchrun_DDP", 2, job)
    weights, _ = train(f"pytorch_activation_checkpointing {flags}".strip(), 2, job)
    assert any("num_batches_tracked" in name for name in expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
