"""DeepSpeed: every stage computes what one process does, sends what theory says, and resumes."""

import json

import pytest
import torch
from conftest import cases, distance, hooked, launch, relative_difference, same_bits, succeed

from libraries.weights import load
from techniques import technique

JOB = "--dataset synthetic --train-samples 150 --eval-samples 20 --batch-size 24 --epochs 9"
JOB += " --print-freq 100"
SMALL = "--model small_resnet --norm group"
HOOKS = "sent"
JOBS = {"images": SMALL, "gpt": "--model gpt-2x4x32 --context 16 --clip-grad 0.5"}
# AdamW at a lower rate: its first step is as long as the rate, however small the gradient.
RATES = {"sgd": 0.01, "adamw": 0.0001}
RUNS = [
    ("images", f"zero_stage{stage}", n, optimizer)
    for stage in range(4)
    for n in range(1, 5)
    for optimizer in RATES
    if n != 3 or (optimizer, stage) == ("sgd", 3)
]
RUNS += [("images", f"zero_stage{stage}_offload", 2, "adamw") for stage in (2, 3)]
RUNS += [("gpt", f"zero_stage{stage}", *how) for stage in range(4)
         for how in ((2, "adamw"), (2, "sgd"), (4, "sgd"))]  # fmt: skip
USUAL = [("images", "zero_stage2", 2, "sgd"), ("gpt", "zero_stage3", 2, "adamw")]


def script(config):
    return f"pytorch_DeepSpeed --deepspeed_config config/{config}_config.json"


@cases("job, config, n, optimizer", RUNS, lambda *row: row in USUAL)
def test_two_steps_in_fp32(job, config, n, optimizer, train):
    """The weights of one process, and what a rank sends."""
    flags = f"{JOBS[job]} --max-steps 2 --optimizer {optimizer} --lr {RATES[optimizer]}"
    expected, _ = train("pytorch_SingleGPU", 1, flags)
    weights, result = train(script(config), n, flags)
    assert distance(weights, expected) < 1e-6 and result["steps"] == 2
    if job == "gpt":
        assert 0 < relative_difference(weights, expected) < 1e-5
    elif n == 2 and optimizer == "sgd":
        theory = technique("DeepSpeed").sends(n, result["options"] | {"optimizer": optimizer})
        sent = sum(result["sent"].values()) / sum(map(torch.numel, weights.values()))
        assert sent == pytest.approx(sum(theory.values()), rel=0.05)


@pytest.mark.full
def test_padding_is_not_taken_for_nan(train):
    """Three ranks pad their shards. Memory that nobody initializes is NaN with --deterministic."""
    train(script("zero_stage3"), 3, f"{SMALL} --max-steps 2 --deterministic")


@pytest.mark.full
def test_bfloat16(train):
    """Thirty steps stay within 2 % of fp32; model.pt comes from the fp32 copy."""
    flags = f"--lr 0.001 --max-steps 30 {SMALL}"
    _, expected = train("pytorch_SingleGPU", 1, flags)
    weights, result = train(script("zero_stage2_bf16"), 2, flags)
    assert result["precision"] == "bfloat16"
    assert any(not torch.equal(t, t.bfloat16().float()) for t in weights.values())
    loss, expected_loss = (sum(r["train_loss"]) / 5 for r in (result, expected))
    assert loss == pytest.approx(expected_loss, rel=0.02)


@cases("config", [f"zero_stage{n}" for n in (0, 2, 3)], lambda config: config == "zero_stage3")
def test_resume_and_zero_to_fp32(config, train, tmp_path):
    """Six steps and then the others end as all at once, but not in a stage of another form; and
    DeepSpeed's own function reads the weights from the checkpoint."""
    flags = f"{SMALL} --epochs 2 --warmup-steps 20"
    job = hooked(script(config), 2, f"{JOB} {flags} --output-dir {tmp_path}")
    succeed(f"{job} --max-steps 6", forked=True)
    other = job.replace(config, "zero_stage3" if config == "zero_stage2" else "zero_stage1")
    line = launch(f"{other} --resume auto", timeout=60, forked=True).refusal
    assert "--resume" in line and "snapshot" in line
    finished = succeed(f"{job} --resume auto", forked=True)
    assert "at epoch 2, step 7" in finished.stdout
    ours = torch.load(tmp_path / "model.pt", weights_only=True)
    assert distance(ours, train(script(config), 2, flags)[0]) < 1e-6
    assert same_bits(load(max(tmp_path.glob("snapshots/step-*"))), ours)
    if config != "zero_stage0":  # a rank's half of the weights in fp32, and of their momentum
        files = max(tmp_path.glob("snapshots/step-*")).glob("zero/*optim_states.pt")
        size = 8 / 2 * sum(map(torch.numel, ours.values()))
        assert [file.stat().st_size for file in files] == pytest.approx([size, size], rel=0.1)


def test_a_file_with_its_own_optimizer_and_scheduler(tmp_path):
    """Is honoured, also when the run is resumed."""
    config = {
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.0001, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": 2},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    name = f"pytorch_DeepSpeed --deepspeed_config {tmp_path}/config.json"
    command = hooked(name, 1, f"{JOB} {SMALL} --output-dir {tmp_path}/run")
    finished = succeed(f"{command} --max-steps 6", forked=True)
    said = finished.lines[:2]
    assert "config.json has its own optimizer" in said[0] and "--lr" in said[0]
    assert "config.json has its own scheduler" in said[1] and "--schedule" in said[1]
    resumed = succeed(f"{command} --max-steps 8 --resume auto", forked=True)
    assert "at epoch 2, step 7" in resumed.stdout
