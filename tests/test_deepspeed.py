"""DeepSpeed: every stage computes what one process does, keeps what it should, and resumes."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import cases, distance, flat, launch, launcher, read_run, snapshots, succeed

JOB = (
    "--dataset synthetic --train-samples 150 --eval-samples 20 --batch-size 24 --norm group "
    "--epochs 9 --print-freq 100"
)
SMALL, RUN_SMALL = "--model small_resnet", "tests/small_resnet.py"
THROUGH = "tests/count_sent.py"
STAGES = [f"zero_stage{stage}" for stage in range(4)]
# AdamW at a lower rate: its first step is as long as the rate, however small the gradient.
TWO_STEPS = {
    "sgd": "--max-steps 2 --lr 0.01",
    "adamw": "--max-steps 2 --optimizer adamw --lr 0.0001",
}
RUNS = [
    (config, n, optimizer)
    for config in STAGES
    for n in range(1, 5)
    for optimizer in TWO_STEPS
    if n != 3 or (optimizer, config) == ("sgd", "zero_stage3")
] + [("zero_stage2_offload", 2, "adamw"), ("zero_stage3_offload", 2, "adamw")]
# AdamW of the others is in test_text.py
CASES = cases(RUNS, lambda c, n, optimizer: n in (2, 3) and (optimizer == "sgd" or "offload" in c))


def script(config):
    return f"pytorch_DeepSpeed --deepspeed_config config/{config}_config.json"


@pytest.mark.parametrize("config, world_size, optimizer", CASES)
def test_two_steps_in_fp32(config, world_size, optimizer, train, measured):
    flags = TWO_STEPS[optimizer]
    expected, _ = train("pytorch_SingleGPU", 1, flags)
    weights, result = train(script(config), world_size, flags)
    value = distance(weights, expected)
    measured("parity", script=name(config), ranks=world_size, optimizer=optimizer, value=value)
    assert value < 1e-6
    assert result["steps"] == 2 and result["world_size"] == world_size


def name(config):
    return f"pytorch_DeepSpeed {config}"


@pytest.mark.parametrize("config, world_size, optimizer", CASES)
def test_state_bytes(config, world_size, optimizer, train, measured):
    """The theory, and what DeepSpeed keeps besides: an fp32 copy of this rank's share, which the
    optimizer updates; in stage 3 small parameters whole and a second buffer of gradients. Stage 1
    has, when the step is taken, cut its gradients down to its share, as stage 2 does."""
    weights, result = train(script(config), world_size, TWO_STEPS[optimizer])
    n, state = world_size, {"sgd": 4, "adamw": 8}[optimizer]
    kept = {key: size / len(flat(weights)) for key, size in result["state_bytes"].items()}
    measured("bytes", script=name(config), ranks=n, optimizer=optimizer, kept=kept)
    if config == "zero_stage0":
        table = {"parameters": 4, "gradients": 4, "optimizer": state, "fp32_copy": 0}
    elif config.startswith("zero_stage3"):
        table = {"parameters": 4 / n, "gradients": 4 / n, "optimizer": state / n}
        table |= {"fp32_copy": 4 / n, "gradient_buffer": 4 / n}
        small = 0 if n == 1 else 0.1  # one rank alone has them in its share
        assert kept.pop("small_parameters") == pytest.approx(small, abs=0.03)
    else:
        table = {"parameters": 4, "gradients": 4 / n, "optimizer": state / n, "fp32_copy": 4 / n}
    assert kept == pytest.approx(table, rel=0.02)


@pytest.mark.parametrize("config", STAGES)
def test_sent(config, train, measured):
    """Reported, with what it was on DeepSpeed 0.19; its own paper says 2, 2, 2 and 3 times 4 bytes,
    times (N - 1) / N."""
    weights, result = train(script(config), 2, TWO_STEPS["sgd"])
    sent = {kind: size / len(flat(weights)) for kind, size in result["sent"].items()}
    measured("sent", script=name(config), ranks=2, sent=sent)
    expected = {"zero_stage0": 4, "zero_stage1": 6, "zero_stage2": 6, "zero_stage3": 4}[config]
    assert sum(sent.values()) == pytest.approx(expected, rel=0.05)


def test_it_clips_unless_it_is_told_not_to(tmp_path, train):
    """Why each file in config/ states gradient_clipping; and the comparison above can fail."""
    config = {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = TWO_STEPS["sgd"]
    expected, _ = train("pytorch_SingleGPU", 1, flags)
    weights, _ = train(f"pytorch_DeepSpeed --deepspeed_config {tmp_path}/config.json", 1, flags)
    assert distance(weights, expected) > 1e-4


def test_bfloat16(train, measured):
    """Thirty steps stay within 2 % of fp32; model.pt comes from the fp32 copy."""
    flags = f"--lr 0.001 --max-steps 30 {SMALL}"
    _, expected = train("pytorch_SingleGPU", 1, flags)
    weights, result = train(script("zero_stage2_bf16"), 2, flags)
    assert result["precision"] == "bfloat16"
    assert not torch.equal(flat(weights), flat(weights).bfloat16().double())
    loss, expected_loss = (sum(r["train_loss"]) / 5 for r in (result, expected))
    measured("loss", script=name("zero_stage2_bf16"), ranks=2, value=loss, fp32=expected_loss)
    assert loss == pytest.approx(expected_loss, rel=0.02)
    kept = {key: size / len(flat(weights)) for key, size in result["state_bytes"].items()}
    table = {"parameters": 2, "gradients": 2, "optimizer": 2, "fp32_copy": 2}
    assert kept == pytest.approx(table, rel=0.02)


@pytest.mark.full
@pytest.mark.parametrize(
    "start",
    [
        "torchrun --standalone --nproc_per_node=2 pytorch_DeepSpeed.py",
        pytest.param("python pytorch_DeepSpeed.py", marks=pytest.mark.full),
    ],
)
def test_other_launchers(start, tmp_path):
    """Than its own, whose command in the pages is run as typed."""
    config = "--deepspeed_config config/zero_stage3_config.json"
    job = f"{JOB} --model shufflenet_v2_x0_5 --max-steps 2"
    forked = start.startswith("python")
    finished = succeed(f"{start} {config} {job} --output-dir {tmp_path}", forked=forked)
    assert not finished.our_warnings
    _, result = read_run(tmp_path)
    assert result["command"].startswith(start)


@pytest.mark.parametrize(
    "config",
    cases([(f"zero_stage{n}",) for n in (0, 2, 3)], lambda config: config == "zero_stage3"),
)
def test_resume_and_zero_to_fp32(config, tmp_path):
    """One epoch and then another end as two; and DeepSpeed's own script reads the checkpoint."""
    job = f"{launcher(script(config), 2, RUN_SMALL)} {JOB} {SMALL} --epochs 2 --warmup-steps 20"
    succeed(f"{job} --output-dir {tmp_path}/whole", forked=True)
    parts = tmp_path / "parts"
    succeed(f"{job} --max-steps 6 --output-dir {parts}", forked=True)
    finished = succeed(f"{job} --output-dir {parts} --resume auto", forked=True)
    assert "at epoch 2, step 7" in finished.stdout
    whole, resumed = read_run(tmp_path / "whole")[0], read_run(parts)[0]
    assert distance(resumed, whole) < 1e-6
    if config == "zero_stage0":  # which has nothing to put together
        return
    command = [sys.executable, snapshots(parts)[0] / "zero_to_fp32.py", snapshots(parts)[0]]
    subprocess.run([*command, tmp_path / "fp32"], check=True, capture_output=True, timeout=120)
    theirs = torch.load(tmp_path / "fp32" / "pytorch_model.bin", weights_only=True)
    ours = torch.load(parts / "model.pt", weights_only=True)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_bfloat16_with_batch_norm(tmp_path):
    """Its running statistics are in bfloat16 too, or a CPU could not compute it."""
    job = "--dataset synthetic --train-samples 96 --eval-samples 12 --batch-size 24 --epochs 1"
    command = launcher(script("zero_stage2_bf16"), 2, RUN_SMALL)
    succeed(f"{command} {job} {SMALL} --output-dir {tmp_path}", forked=True)
    _, result = read_run(tmp_path)
    assert result["precision"] == "bfloat16" and result["norm"] == "batch"


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
    command = f"{launcher(name, 1, RUN_SMALL)} {JOB} {SMALL} --output-dir {tmp_path}/run"
    finished = succeed(f"{command} --max-steps 6", forked=True)
    said = finished.lines[:2]
    assert "config.json has its own optimizer" in said[0] and "--lr" in said[0]
    assert "config.json has its own scheduler" in said[1] and "--schedule" in said[1]
    resumed = succeed(f"{command} --max-steps 8 --resume auto", forked=True)
    assert "at epoch 2, step 7" in resumed.stdout


MISTAKES = [  # content of the file, what the line must name
    (None, ["no_such.json"]),
    ("{", ["config.json", "not a JSON file"]),
    ("[1]", ["config.json", "list"]),
    ('{"train_batch_size": 64}', ["64", "--batch-size 24", "1 ranks"]),
    ('{"train_micro_batch_size_per_gpu": 7}', ["7", "--batch-size 24", "1 ranks"]),
    ('{"gradient_accumulation_steps": 2}', ["2", "--batch-size 24", "1 ranks"]),
    ('{"zero_optimization": {"stage": 7}}', ["config.json", "7"]),
]


@pytest.mark.parametrize("content, words", MISTAKES, ids=[str(content) for content, _ in MISTAKES])
def test_bad_config(content, words, tmp_path):
    path = tmp_path / ("config.json" if content else "no_such.json")
    if content:
        path.write_text(content)
    command = f"python pytorch_DeepSpeed.py {JOB} --deepspeed_config {path}"
    finished = launch(f"{command} --output-dir {tmp_path}/run", timeout=60, forked=True)
    assert finished.code == 2 and "Traceback" not in finished.stderr, str(finished)
    [line] = finished.errors
    for word in words:
        assert word in line
    assert not list(tmp_path.glob("run/*"))


def test_double_is_refused(tmp_path):
    command = f"python pytorch_DeepSpeed.py {JOB} --double --output-dir {tmp_path}/run"
    finished = launch(command, timeout=60, forked=True)
    assert finished.code == 2 and "Traceback" not in finished.stderr
    [line] = finished.errors
    assert "--double" in line


def test_not_installed(tmp_path):
    """As it is where `import deepspeed` fails."""
    (tmp_path / "deepspeed.py").write_text("raise ImportError(\"No module named 'deepspeed'\")\n")
    command = f"python pytorch_DeepSpeed.py {JOB} --output-dir {tmp_path}/run"
    finished = launch(command, timeout=60, PYTHONPATH=str(tmp_path))
    assert finished.code == 2 and "Traceback" not in finished.stderr
    [line] = finished.errors
    assert "pip install deepspeed" in line


def test_a_checkpoint_that_does_not_fit(tmp_path):
    command = f"python pytorch_DeepSpeed.py {JOB} --max-steps 1 --output-dir {tmp_path}"
    succeed(command, forked=True)
    other = f"{command} --resume auto --deepspeed_config config/zero_stage3_config.json"
    finished = launch(other, timeout=60, forked=True)
    assert finished.code == 2 and "Traceback" not in finished.stderr, str(finished)
    [line] = finished.errors
    assert "--resume" in line and "snapshot" in line
