"""Techniques that round on purpose stay close to fp32."""

import pytest
from conftest import cases, distance

JOB = (
    "--dataset synthetic --train-samples 240 --eval-samples 20 --batch-size 8 --norm group "
    "--lr 0.0003 --epochs 1 --print-freq 100 --model small_resnet"
)
# on most CPUs convolutions in half take twenty times as long
RUNS = [
    ("pytorch_half_precision --dtype bfloat16", 1),
    ("pytorch_half_precision --dtype bfloat16 --master-weights", 1),
    ("pytorch_half_precision --dtype float16", 1),
    ("pytorch_half_precision --dtype float16 --master-weights", 1),
    ("pytorch_auto_mixed_precision --dtype bfloat16", 1),
    ("pytorch_auto_mixed_precision --dtype float16", 1),
    ("pytorch_DP --dtype bfloat16", 1),
    ("pytorch_FSDP --dtype bfloat16", 2),
    ("pytorch_FSDP --dtype bfloat16 --norm batch", 1),
    ("pytorch_DDP_AMP --dtype bfloat16", 2),
    ("pytorch_DDP_AMP --dtype float16", 2),
    ("pytorch_comm_hooks --comm-hook fp16", 2),
    ("pytorch_comm_hooks --comm-hook bf16", 2),
    ("pytorch_comm_hooks --comm-hook powersgd", 2),
]


MORE = (  # that another row shows as well
    "pytorch_auto_mixed_precision --dtype float16",
    "pytorch_DP --dtype bfloat16",
    "pytorch_comm_hooks --comm-hook bf16",
    "pytorch_half_precision --dtype float16",
    "pytorch_auto_mixed_precision --dtype bfloat16",
    "pytorch_FSDP --dtype bfloat16 --norm batch",
    "pytorch_DDP_AMP --dtype bfloat16",
    "pytorch_comm_hooks --comm-hook fp16",
)


def in_fp32(train, script):
    """The same job by the single process."""
    norm = "--norm batch" if "--norm batch" in script else ""
    return train(f"pytorch_SingleGPU {norm}")


@pytest.mark.parametrize(
    "script, world_size", cases(RUNS, lambda script, world_size: script not in MORE)
)
def test_thirty_steps_stay_close_to_fp32(script, world_size, train, measured):
    weights, result = train(script, world_size)
    expected_weights, expected = in_fp32(train, script)
    assert result["steps"] == expected["steps"] == 30
    [loss], [expected_loss] = result["train_loss"], expected["train_loss"]
    measured("loss", script=script, ranks=world_size, value=loss, fp32=expected_loss)
    assert loss == pytest.approx(expected_loss, rel=0.02)
    assert distance(weights, expected_weights) > 0, "it did not round"
    dtype = next((d for d in ("bfloat16", "float16") if f"--dtype {d}" in script), "float32")
    assert result["precision"] == dtype


def test_pure_half_loses_more_than_master_weights_do(train):
    """At a low rate most updates are less than half a digit of the weight, and are rounded away."""
    low = "--lr 0.0001"
    exact, result = train(f"pytorch_SingleGPU {low}")
    pure, pure_result = train(f"pytorch_half_precision --dtype bfloat16 {low}")
    master, master_result = train(f"pytorch_half_precision --dtype bfloat16 --master-weights {low}")
    assert distance(pure, exact) > 1.5 * distance(master, exact)
    [loss], [pure_loss], [master_loss] = (
        r["train_loss"] for r in (result, pure_result, master_result)
    )
    assert abs(pure_loss - loss) > 2 * abs(master_loss - loss)


@pytest.mark.parametrize("script", ["pytorch_auto_mixed_precision", "pytorch_DDP_AMP"])
def test_clipping_is_of_the_true_gradients(script, train):
    """If they were clipped before unscale_, at scales of thousands, weights would hardly move."""
    start, _ = train("pytorch_SingleGPU --lr 1e-30 --max-steps 1")
    free, _ = train(f"{script} --dtype float16")
    clipped, _ = train(f"{script} --dtype float16 --clip-grad 0.1")
    without_scaler, _ = train(f"{script} --dtype bfloat16 --clip-grad 0.1")
    assert 0 < distance(clipped, start) < 0.5 * distance(free, start)
    assert distance(clipped, start) > 0.5 * distance(without_scaler, start)
