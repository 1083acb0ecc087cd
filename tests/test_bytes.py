"""What a rank keeps and what a step sends, counted on ResNet-18: within 2 % of the tables."""

import pytest
from conftest import cases, flat, launcher, read_run, succeed
from test_parity import fewest

JOB = (
    "--dataset synthetic --train-samples 96 --eval-samples 8 --batch-size 24 --print-freq 100 "
    "--norm group --lr 0.001"
)
THROUGH = "tests/count_sent.py"
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


SHARDS = ("pytorch_torchrun_DDP", "pytorch_FSDP", "pytorch_DDP_ZeRO", "pytorch_HSDP")
SHARDS += ("pytorch_ZeRO_by_hand", "pytorch_FSDP_by_hand")


def is_usual(script, n, optimizer):
    uneven = script == "pytorch_FSDP" and (n, optimizer) == (3, "adamw")
    telling = "half" in script or script.split()[0] in SHARDS  # others keep what DDP does
    return uneven or telling and (n, optimizer) == (fewest(script, RUNS), "sgd")


def rows_of(chosen):
    """Those of SENT; of each script the usual ones have as many ranks as `chosen` of its rows."""
    ranks = [(script.split()[0], n) for script, n, _ in SENT]
    usual = [n == chosen(name, ranks) and name in SHARDS for name, n in ranks]
    marks = [[] if is_usual else pytest.mark.full for is_usual in usual]
    ids = [f"{script}-{n}" for script, n, _ in SENT]
    return [pytest.param(*r, marks=m, id=i) for r, m, i in zip(SENT, marks, ids, strict=True)]


def most(script, ranks):
    return max(n for name, n in ranks if name == script)


def per_parameter(counted, state):
    return {name: size / len(flat(state)) for name, size in counted.items()}


@pytest.mark.parametrize(
    "script, n, optimizer",
    cases([(*row, optimizer) for row in RUNS for optimizer in FLAGS], is_usual),
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


@pytest.mark.parametrize("script, n, table", rows_of(fewest))
def test_sent(script, n, table, train, measured):
    state, result = train(script, n, FLAGS["sgd"])
    sent = per_parameter(result["sent"], state)
    measured("sent", script=script, ranks=n, sent=sent)
    assert sent == pytest.approx({k: v * (n - 1) / n for k, v in table.items()}, rel=0.02)


TRAIN_A_GPT = ("pytorch_torchrun_DDP", "pytorch_DDP_ZeRO", "pytorch_FSDP", "pytorch_HSDP")
TRAIN_A_GPT += ("pytorch_DDP_by_hand", "pytorch_ZeRO_by_hand", "pytorch_FSDP_by_hand")


@pytest.mark.full
@pytest.mark.parametrize(
    "script, n, table",
    [row for row in rows_of(most) if row.values[0].split()[0] in TRAIN_A_GPT and row.values[1] > 1],
)
def test_sent_by_a_gpt(script, n, table, tmp_path):
    command = f"{launcher(script, n, through=THROUGH)} --model gpt-4x4x128 --context 16 "
    command += "--dataset synthetic --train-samples 64 --eval-samples 8 --batch-size 8 "
    succeed(f"{command} {FLAGS['sgd']} --output-dir {tmp_path}", forked=True)
    state, result = read_run(tmp_path)
    sent = per_parameter(result["sent"], state)
    assert sent == pytest.approx({k: v * (n - 1) / n for k, v in table.items()}, rel=0.03)


@pytest.mark.parametrize(
    "script",
    ["pytorch_DDP", "pytorch_DDP_ZeRO", "pytorch_DDP_AMP --dtype bfloat16",
     "pytorch_gradient_accumulation --accumulate 4", "pytorch_comm_hooks --comm-hook bf16"],
)  # fmt: skip
def test_statistics_are_not_sent_at_every_step(script, tmp_path):
    """DDP would broadcast BatchNorm's at each forward, and they are only needed to evaluate."""
    command = f"{launcher(script, 2, through=THROUGH)} {JOB} --norm batch --max-steps 3"
    finished = succeed(f"{command} --model small_resnet --output-dir {tmp_path}", forked=True)
    _, result = read_run(tmp_path)
    assert set(result["sent"]) == {"allreduce"} and not finished.our_warnings


@pytest.mark.full
def test_powersgd_sends_what_it_says(tmp_path, measured):
    script = "pytorch_comm_hooks --comm-hook powersgd"
    command = f"{launcher(script, 2, through=THROUGH)} {JOB} --max-steps 12"
    finished = succeed(f"{command} --output-dir {tmp_path}", forked=True)
    state, result = read_run(tmp_path)
    sent = per_parameter(result["sent"], state)
    measured("sent", script=script, ranks=2, sent=sent)
    [line] = [line for line in finished.lines if line.startswith("sent per step and rank")]
    assert float(line.split()[5]) == pytest.approx(sum(sent.values()), abs=0.001)
    assert sum(sent.values()) < 4 / 20, "of the 4 that plain DDP sends at two ranks"
