"""State bytes per rank and communication per step, counted on ResNet-18: within 2% of the tables.
test_contract.py counts them on a GPT in each test run."""

import pytest
from conftest import HOOKED, cases, flat, launcher, read_run, succeed

JOB = (
    "--dataset synthetic --train-samples 96 --eval-samples 8 --batch-size 24 --print-freq 100 "
    "--norm group --lr 0.001"
)
HOOKS = "sent"
# All that is kept is there after a step; DDP sends as it always will from the third one on.
FLAGS = {"sgd": "--optimizer sgd --max-steps 3", "adamw": "--optimizer adamw --max-steps 1"}
PLAIN = {"parameters": 4, "gradients": 4, "state": 1}
# Bytes per parameter that a rank of n keeps. The optimizer's are in units of what it keeps for an
# fp32 parameter: 4 (SGD with momentum) or 8 (AdamW).
KEPT = {
    "pytorch_DP": lambda n: PLAIN,
    "pytorch_DDP": lambda n: PLAIN,
    "pytorch_torchrun_DDP": lambda n: PLAIN,
    "pytorch_FSDP": lambda n: {"parameters": 4 / n, "gradients": 4 / n, "state": 1 / n},
    "pytorch_DDP_ZeRO --use_zero": lambda n: PLAIN | {"state": 1 / n},
    "pytorch_gradient_accumulation --accumulate 4": lambda n: PLAIN,
    "pytorch_activation_checkpointing": lambda n: PLAIN,
    "pytorch_HSDP --shard 2": lambda n: {"parameters": 2, "gradients": 2, "state": 1 / 2},
    "pytorch_FSDP_offload": lambda n: {"parameters": 4 / n, "gradients": 4 / n, "state": 1 / n},
    "pytorch_checkpoint": lambda n: {"parameters": 4 / n, "gradients": 4 / n, "state": 1 / n},
    "pytorch_DDP_by_hand": lambda n: PLAIN,
    "pytorch_ZeRO_by_hand": lambda n: PLAIN | {"state": 1 / n},
    "pytorch_ZeRO_by_hand --stage 2": lambda n: PLAIN | {"gradients": 4 / n, "state": 1 / n},
    "pytorch_FSDP_by_hand": lambda n: {"parameters": 4 / n, "gradients": 4 / n, "state": 1 / n},
    "pytorch_auto_mixed_precision --dtype bfloat16": lambda n: PLAIN,
    "pytorch_half_precision --dtype bfloat16": lambda n: {
        "parameters": 2,
        "gradients": 2,
        "state": 1 / 2,
    },
    "pytorch_half_precision --dtype bfloat16 --master-weights": lambda n: {
        "parameters": 2,
        "gradients": 2,
        "state": 1,
        "master_weights": 4,
    },
}
WORLD_SIZES = {  # three ranks, where shares are uneven, only where there are shares
    "pytorch_DDP": (1, 2, 4),
    "pytorch_torchrun_DDP": (1, 2, 4),
    "pytorch_FSDP": (1, 2, 3, 4),
    "pytorch_DDP_ZeRO --use_zero": (1, 2, 3, 4),
    "pytorch_gradient_accumulation --accumulate 4": (1, 2, 4),
    "pytorch_activation_checkpointing": (2,),
    "pytorch_HSDP --shard 2": (2, 4),
    "pytorch_FSDP_offload": (2, 4),
    "pytorch_DDP_by_hand": (2, 4),
    "pytorch_ZeRO_by_hand": (2, 4),
    "pytorch_ZeRO_by_hand --stage 2": (2, 3, 4),
    "pytorch_FSDP_by_hand": (1, 2, 3, 4),
}
RUNS = [(script, n) for script in KEPT for n in WORLD_SIZES.get(script, [1])]
# Bytes per parameter that a rank sends in a step, in units of (N - 1) / N; by collective
ALL_REDUCE = {"allreduce": 8}
SENT = [
    ("pytorch_DDP", 2, ALL_REDUCE),
    ("pytorch_torchrun_DDP", 1, ALL_REDUCE),
    ("pytorch_torchrun_DDP", 2, ALL_REDUCE),
    ("pytorch_torchrun_DDP", 4, ALL_REDUCE),
    ("pytorch_DDP_AMP --dtype bfloat16", 2, ALL_REDUCE),
    ("pytorch_gradient_accumulation --accumulate 4", 2, ALL_REDUCE),
    ("pytorch_DDP_ZeRO --use_zero", 2, {"allreduce": 8, "broadcast": 4}),
    ("pytorch_DDP_ZeRO --use_zero", 4, {"allreduce": 8, "broadcast": 4}),
    ("pytorch_FSDP", 2, {"allgather": 8, "reduce_scatter": 4}),
    ("pytorch_FSDP", 4, {"allgather": 8, "reduce_scatter": 4}),
    ("pytorch_FSDP --dtype bfloat16", 2, {"allgather": 4, "reduce_scatter": 4}),
    ("pytorch_FSDP_offload", 2, {"allgather": 8, "reduce_scatter": 4}),
    ("pytorch_checkpoint", 2, {"allgather": 8, "reduce_scatter": 4}),
    # two rows of two ranks: 4 and 2 within a row, and 2 between them
    (
        "pytorch_HSDP --shard 2",
        4,
        {"allgather": 16 / 3, "reduce_scatter": 8 / 3, "allreduce": 8 / 3},
    ),
    ("pytorch_DDP_by_hand", 2, ALL_REDUCE),
    ("pytorch_DDP_by_hand --average each", 2, ALL_REDUCE),
    ("pytorch_ZeRO_by_hand", 2, {"allreduce": 8, "allgather": 4}),
    ("pytorch_ZeRO_by_hand --stage 2", 2, {"reduce_scatter": 4, "allgather": 4}),
    ("pytorch_ZeRO_by_hand --stage 2", 4, {"reduce_scatter": 4, "allgather": 4}),
    ("pytorch_FSDP_by_hand", 2, {"allgather": 8, "reduce_scatter": 4}),
    ("pytorch_FSDP_by_hand", 4, {"allgather": 8, "reduce_scatter": 4}),
    ("pytorch_comm_hooks --comm-hook fp16", 2, {"allreduce": 4}),
    ("pytorch_comm_hooks --comm-hook bf16", 4, {"allreduce": 4}),
]


def per_parameter(counted, state):
    return {name: size / len(flat(state)) for name, size in counted.items()}


@pytest.mark.parametrize(
    "script, n, optimizer",
    cases([(*row, o) for row in RUNS for o in FLAGS], lambda script, n, o: "half" in script),
)
def test_kept(script, n, optimizer, train, measured):
    state, result = train(script, n, FLAGS[optimizer])
    kept = per_parameter(result["state_bytes"], state)
    measured("bytes", script=script, ranks=n, optimizer=optimizer, kept=kept)
    table = dict(KEPT[script](n))
    table["optimizer"] = {"sgd": 4, "adamw": 8}[optimizer] * table.pop("state")
    # ZeroRedundancyOptimizer deals out whole tensors, and the largest of ResNet-18 are a fifth of
    # it: at four ranks the fullest has 5.5 % more than a quarter.
    uneven = script.startswith("pytorch_DDP_ZeRO") and n == 4
    assert kept == pytest.approx(table, rel=0.06 if uneven else 0.02)


@pytest.mark.full
@pytest.mark.parametrize("script, n, table", SENT)
def test_sent(script, n, table, train, measured):
    state, result = train(script, n, FLAGS["sgd"])
    sent = per_parameter(result["sent"], state)
    measured("sent", script=script, ranks=n, sent=sent)
    assert sent == pytest.approx({k: v * (n - 1) / n for k, v in table.items()}, rel=0.02)


@pytest.mark.parametrize(
    "script",
    ["pytorch_DDP", "pytorch_DDP_ZeRO", "pytorch_DDP_AMP --dtype bfloat16",
     "pytorch_gradient_accumulation --accumulate 4", "pytorch_comm_hooks --comm-hook bf16"],
)  # fmt: skip
def test_statistics_are_not_sent_at_every_step(script, tmp_path):
    """DDP would broadcast BatchNorm's at each forward, and they are only needed to evaluate."""
    command = f"{launcher(script, 2, HOOKED)} {JOB} --norm batch --max-steps 3"
    finished = succeed(
        f"{command} --model small_resnet --output-dir {tmp_path}", forked=True, HOOKS=HOOKS
    )
    _, result = read_run(tmp_path)
    assert set(result["sent"]) == {"allreduce"} and not finished.our_warnings


@pytest.mark.full
def test_powersgd_sends_what_it_says(tmp_path, measured):
    script = "pytorch_comm_hooks --comm-hook powersgd"
    command = f"{launcher(script, 2, HOOKED)} {JOB} --max-steps 12"
    finished = succeed(f"{command} --output-dir {tmp_path}", forked=True, HOOKS=HOOKS)
    state, result = read_run(tmp_path)
    sent = per_parameter(result["sent"], state)
    measured("sent", script=script, ranks=2, sent=sent)
    [line] = [line for line in finished.lines if line.startswith("sent per step and rank")]
    assert float(line.split()[5]) == pytest.approx(sum(sent.values()), abs=0.001)
    assert sum(sent.values()) < 4 / 20, "of the 4 that plain DDP sends at two ranks"
