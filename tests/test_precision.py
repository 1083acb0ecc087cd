"""Techniques that round on purpose: they stay close to fp32 and keep the bytes that they should."""

import pytest
from conftest import distance, flat

JOB = (
    "--dataset synthetic --train-samples 480 --eval-samples 20 --batch-size 16 --norm group "
    "--lr 0.001 --epochs 1 --print-freq 100"
)
# float16 convolutions take a hundred times as long on most CPUs, so that model is a small one.
IN_FLOAT16 = "--dtype float16 --model shufflenet_v2_x0_5"
RUNS = [
    ("pytorch_half_precision --dtype bfloat16", 1),
    ("pytorch_half_precision --dtype bfloat16 --master-weights", 1),
    (f"pytorch_half_precision {IN_FLOAT16}", 1),
    (f"pytorch_half_precision {IN_FLOAT16} --master-weights", 1),
    ("pytorch_auto_mixed_precision --dtype bfloat16", 1),
    (f"pytorch_auto_mixed_precision {IN_FLOAT16}", 1),
    ("pytorch_DP --dtype bfloat16", 1),
    ("pytorch_FSDP --dtype bfloat16", 2),
    ("pytorch_FSDP --dtype bfloat16 --norm batch", 1),
    ("pytorch_DDP_AMP --dtype bfloat16", 2),
    (f"pytorch_DDP_AMP {IN_FLOAT16}", 2),
    ("pytorch_comm_hooks --comm-hook fp16", 2),
    ("pytorch_comm_hooks --comm-hook bf16", 2),
    ("pytorch_comm_hooks --comm-hook powersgd", 2),
]


def in_fp32(train, script):
    """The same job by the single process."""
    flags = script.split()
    kept = [f"{flag} {flags[flags.index(flag) + 1]}" for flag in ("--model", "--norm")
            if flag in flags]  # fmt: skip
    return train(" ".join(["pytorch_SingleGPU", *kept]))


@pytest.mark.parametrize("script, world_size", RUNS, ids=[script for script, _ in RUNS])
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
    exact, result = train("pytorch_SingleGPU")
    pure, pure_result = train("pytorch_half_precision --dtype bfloat16")
    master, master_result = train("pytorch_half_precision --dtype bfloat16 --master-weights")
    assert distance(pure, exact) > 1.5 * distance(master, exact)
    [loss], [pure_loss], [master_loss] = (
        r["train_loss"] for r in (result, pure_result, master_result)
    )
    assert abs(pure_loss - loss) > 2 * abs(master_loss - loss)


BYTES = {
    "pytorch_half_precision --dtype bfloat16": {"parameters": 2, "gradients": 2, "state": 0.5},
    "pytorch_half_precision --dtype bfloat16 --master-weights": {
        "parameters": 2,
        "gradients": 2,
        "state": 1,
        "master_weights": 4,
    },
    "pytorch_auto_mixed_precision --dtype bfloat16": {"parameters": 4, "gradients": 4, "state": 1},
}


@pytest.mark.parametrize("optimizer, k", [("sgd", 4), ("adamw", 8)])
@pytest.mark.parametrize("script", BYTES)
def test_state_bytes(script, optimizer, k, train, measured):
    weights, result = train(f"{script} --optimizer {optimizer} --max-steps 2")
    kept = {name: size / len(flat(weights)) for name, size in result["state_bytes"].items()}
    measured("bytes", script=script, ranks=1, optimizer=optimizer, kept=kept)
    table = dict(BYTES[script])
    table["optimizer"] = k * table.pop("state")
    assert kept == pytest.approx(table, rel=0.02)


@pytest.mark.parametrize("script", ["pytorch_auto_mixed_precision", "pytorch_DDP_AMP"])
def test_clipping_is_of_the_true_gradients(script, train):
    """If they were clipped before unscale_, at scales of thousands, weights would hardly move."""
    model = "--model shufflenet_v2_x0_5"
    start, _ = train(f"pytorch_SingleGPU {model} --lr 1e-30 --max-steps 1")
    free, _ = train(f"{script} {IN_FLOAT16}")
    clipped, _ = train(f"{script} {IN_FLOAT16} --clip-grad 0.1")
    without_scaler, _ = train(f"{script} --dtype bfloat16 {model} --clip-grad 0.1")
    assert 0 < distance(clipped, start) < 0.5 * distance(free, start)
    assert distance(clipped, start) > 0.5 * distance(without_scaler, start)
