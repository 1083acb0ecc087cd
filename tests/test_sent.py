"""What a step sends, counted from the collectives that ran: within 2 % of the table."""

import json

import pytest
import torch
from conftest import launcher, succeed

JOB = (
    "--dataset synthetic --train-samples 512 --eval-samples 8 --batch-size 16 --max-steps 3 "
    "--print-freq 100"
)
# bytes per parameter, per step and rank, in units of (N - 1) / N; by collective
ALL_REDUCE = {"allreduce": 8}
RUNS = [
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
    ("pytorch_comm_hooks --comm-hook fp16", 2, {"allreduce": 4}),
    ("pytorch_comm_hooks --comm-hook bf16", 4, {"allreduce": 4}),
]


def count(script, world_size, flags, output):
    command = launcher(script, world_size, through="tests/count_sent.py")
    finished = succeed(f"{command} {JOB} {flags} --output-dir {output}")
    weights = torch.load(output / "model.pt", weights_only=True)
    parameters = sum(t.numel() for t in weights.values() if t.is_floating_point())
    sent = json.loads((output / "sent.json").read_text())["sent"]
    return finished, {kind: size / parameters for kind, size in sent.items()}


@pytest.mark.parametrize("script, world_size, table", RUNS, ids=[f"{r[0]}-{r[1]}" for r in RUNS])
def test_within_two_percent(script, world_size, table, tmp_path, measured):
    """With GroupNorm: DDP also broadcasts BatchNorm's buffers, which are 0.2 % of ResNet-18."""
    _, sent = count(script, world_size, "--norm group", tmp_path)
    n = world_size
    measured("sent", script=script, ranks=n, sent=sent)
    assert sent == pytest.approx({k: v * (n - 1) / n for k, v in table.items()}, rel=0.02)


def test_powersgd_sends_what_it_says(tmp_path, measured):
    script = "pytorch_comm_hooks --comm-hook powersgd"
    finished, sent = count(script, 2, "--norm group --max-steps 12", tmp_path)
    measured("sent", script=script, ranks=2, sent=sent)
    [line] = [line for line in finished.lines if line.startswith("sent per step and rank")]
    assert float(line.split()[5]) == pytest.approx(sum(sent.values()), abs=0.001)
    assert sum(sent.values()) < 4 / 20, "of the 4 that plain DDP sends at two ranks"
