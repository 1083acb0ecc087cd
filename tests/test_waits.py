"""Between two prints no step reads a value from a tensor, as this would wait for the GPU."""

import json

import pytest
from conftest import HOOKED, cases, launcher, succeed

JOB = (
    "--dataset synthetic --train-samples 192 --eval-samples 8 --batch-size 16 --epochs 1 "
    "--model small_resnet --print-freq 5"
)
SCRIPTS = [
    ("pytorch_SingleGPU", 1),
    ("pytorch_half_precision --dtype bfloat16 --master-weights", 1),
    ("pytorch_auto_mixed_precision --dtype float16 --clip-grad 1", 1),
    ("pytorch_DP", 1),
    ("pytorch_DDP", 2),
    ("pytorch_torchrun_DDP", 2),
    ("pytorch_FSDP", 2),
    ("pytorch_DDP_ZeRO --use_zero", 2),
    ("pytorch_DDP_AMP --dtype float16 --clip-grad 1", 2),
    ("pytorch_gradient_accumulation", 2),
    ("pytorch_comm_hooks --comm-hook bf16", 2),
    ("pytorch_activation_checkpointing --selective", 2),
    ("pytorch_HSDP --shard 2 --clip-grad 1", 2),
    ("pytorch_FSDP_offload", 2),
    ("pytorch_DDP_by_hand", 2),
    ("pytorch_ZeRO_by_hand --stage 2 --clip-grad 1", 2),
    ("pytorch_FSDP_by_hand --clip-grad 1", 2),
]
# One process, DDP, a GradScaler, FSDP, and clipping by hand: all that is in a step of the others.
USUAL = [SCRIPTS[i] for i in (0, 2, 5, 6, 15)]


def count(script, ranks, flags, output):
    command = launcher(script, ranks, HOOKED)
    succeed(f"{command} {JOB} {flags} --output-dir {output}", forked=True, HOOKS="waits")
    files = [output / f"waits-{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("script, ranks", cases(SCRIPTS, lambda *row: row in USUAL))
def test_no_step_waits_between_prints(script, ranks, tmp_path):
    for waits in count(script, ranks, "", tmp_path):
        assert list(waits) == [str(step) for step in range(1, 13)]
        prints = {step: kinds for step, kinds in waits.items() if int(step) in (5, 10, 12)}
        assert all(prints.values()), "they do fetch, and it is seen"
        assert {step: kinds for step, kinds in waits.items() if step not in prints and kinds} == {}


def test_looking_before_every_step_does_wait(tmp_path):
    """So the count can fail; and why --on-nan stop is not the default."""
    [waits] = count("pytorch_SingleGPU", 1, "--on-nan stop", tmp_path)
    assert all(waits.values())
