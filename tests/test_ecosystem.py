"""The scripts with Accelerate, Lightning and transformers: each trains as its raw counterpart."""

import signal

import pytest
import torch
from conftest import HOOKED, ROOT, cases, distance, free_port, hooked, launch, read_run, succeed
from test_stop import stop

for library in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(library)

COMMON = "--dataset synthetic --train-samples 75 --eval-samples 20 --batch-size 12 --print-freq 1"
IMAGES = f"{COMMON} --model small_resnet_dropout --double --clip-grad 0.5"
GPT = f"{COMMON} --model gpt-2x4x32 --context 16 --double --clip-grad 0.5"
REVIEWS = "--dataset reviews --data-dir {folder} --model encoder-1x2x16 --context 12 -b 16"
HALF = f"{COMMON} --dtype bfloat16 --model shufflenet_v2_x0_5"
DDP = "pytorch_torchrun_DDP"
FSDP = "pytorch_FSDP"
DEEPSPEED = "pytorch_DeepSpeed"
TRAINER = "lightning_Trainer"
FABRIC = "lightning_Fabric"
SHARDED = f"{TRAINER} --strategy fsdp"
STAGE_2 = f"{TRAINER} --strategy deepspeed_stage_2"
MEASURED = "technique options command settings seconds_total seconds_train trained_between"
MEASURED += " images_per_second tokens_per_second samples_per_second reviews_per_second"
MEASURED += " first_step_seconds step_ms seconds peak_memory_gib breakdown model_tflops"
EIGHT = f"{IMAGES} --max-steps 8"
JOBS = {"images": f"{IMAGES} --max-steps 12 --epochs 2", "eight": EIGHT, "gpt": GPT, "half": HALF}
JOBS |= {"reviews": REVIEWS, "fp32": EIGHT.replace("--double ", "")}
PARITY = {  # script and raw script: jobs, each with its number of ranks
    ("accelerate_DDP", DDP): "images-2 gpt-1",
    ("accelerate_FSDP", FSDP): "gpt-2 half-2 reviews-2",
    ("accelerate_DeepSpeed", DEEPSPEED): "fp32-2",
    ("transformers_Trainer", DDP): "images-2 gpt-1 reviews-2",
    **dict.fromkeys([(FABRIC, DDP), (TRAINER, DDP)], "images-2 eight-1 gpt-2"),
    (SHARDED, FSDP): "images-2 gpt-2",
}
PARITY = [(*both, int(j[-1]), j[:-2]) for both, jobs in PARITY.items() for j in jobs.split()]


@cases("script, raw, ranks, job", PARITY, lambda *row: row[1] == DDP and row[3] == "images")
def test_as_the_raw_script(script, raw, ranks, job, train, review_folder):
    """Weights, with BatchNorm and dropout; and all of result.json that is not a time."""
    job = JOBS[job].format(folder=review_folder)
    (ours, result), (theirs, expected) = (train(name, ranks, job) for name in (script, raw))
    assert ours.keys() == theirs.keys()
    if "lightning" in script:
        assert distance(ours, theirs) < 1e-12
    else:
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert result.keys() == expected.keys()
    for name in result.keys() - set(MEASURED.split()):
        close = name in ("train_loss", "eval_loss", "gradient_norm")
        wanted = expected[name]  # no norm, where nothing is clipped
        wanted = pytest.approx(wanted, rel=1e-12) if close and wanted is not None else wanted
        assert result[name] == wanted, name
    ours, theirs = (each["breakdown"]["ranks"] for each in (result, expected))
    assert [rank.keys() for rank in ours] == [rank.keys() for rank in theirs]


# Within epochs and between them, and with dropout; but not for FSDP, whose is drawn from another
# state. In fp32 for DeepSpeed, which has nothing longer, and names of its own.
LONG = f"{IMAGES} --norm group --warmup-steps 20 --deterministic --epochs 2"
FIXED = LONG.replace("_dropout", "")
TURNS = [(DDP, 2), (TRAINER, 4), (FABRIC, 7), ("transformers_Trainer", 8), ("accelerate_DDP", 9)]
SHORT = FIXED.replace("--double ", "")
RESUMED = {  # the script in one go, scripts in turn with the steps up to which they go
    "accelerate_FSDP": (FSDP, [(FSDP, 3), ("accelerate_FSDP", 8), (FSDP, 12)], FIXED),
    "Trainer-FSDP": (FSDP, [(FSDP, 3), (SHARDED, 6), (FSDP, 12)], FIXED),
    "DDP": (DDP, [*TURNS, (TRAINER, 10), (DDP, 12)], LONG),
    "accelerate_DeepSpeed": (DEEPSPEED, [(DEEPSPEED, 2), ("accelerate_DeepSpeed", 4)], SHORT),
    "Trainer-DeepSpeed": (DEEPSPEED, [(STAGE_2, 2), (STAGE_2, 4)], SHORT),
}


@pytest.mark.full
@pytest.mark.parametrize("name", RESUMED)
def test_one_resumes_from_the_snapshots_of_another(name, train, tmp_path):
    raw, turns, flags = RESUMED[name]
    for script, steps in turns:
        job = f"{flags} --max-steps {steps} --output-dir {tmp_path} --resume auto"
        finished = succeed(hooked(script, 2, job), forked=True)
        assert ("resumed from" in finished.stdout) == (steps > turns[0][1]), str(finished)
    weights, result = read_run(tmp_path)
    expected, whole = train(raw, 2, f"{flags} --max-steps {turns[-1][1]}")
    assert distance(weights, expected) < (1e-12 if "--double" in flags else 1e-6)
    assert result["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-4)
    assert result["state_bytes"] == whole["state_bytes"]


LAUNCHED = {"accelerate_DDP": DDP, "accelerate_FSDP": FSDP, FABRIC: DDP}
LAUNCHED |= {"accelerate_DeepSpeed": DEEPSPEED}


@pytest.mark.full
@pytest.mark.parametrize("script", LAUNCHED)
def test_by_its_own_launcher(script, train, tmp_path):
    """Ranks share the cores, and the command is noted as it was typed."""
    job = JOBS["fp32" if "DeepSpeed" in script else "eight"].replace("_dropout", "")
    command = hooked(script, 2, f"{job} --output-dir {tmp_path}")
    if script == FABRIC:
        start = f"fabric run --accelerator=cpu --devices=2 --strategy=ddp --main-port={free_port()}"
        command = f"{start} {HOOKED} {script}.py {job} --output-dir {tmp_path}"
    finished = succeed(command)
    assert not finished.our_warnings
    weights, result = read_run(tmp_path)
    assert distance(weights, train(LAUNCHED[script], 2, job)[0]) < 1e-12
    assert result["command"] == command.replace(f" {ROOT}", " ") and result["world_size"] == 2


STOPPED = ["accelerate_DDP", TRAINER, "transformers_Trainer", SHARDED, FABRIC]


@cases("script", STOPPED, STOPPED[1:3].__contains__)
def test_a_signal_ends_in_a_snapshot(script, tmp_path):
    """Each library has a handler of its own; Lightning's would send a broadcast from within."""
    command = hooked(script, 2, f"{IMAGES} --epochs 1000 --output-dir {tmp_path}")
    finished = stop(command, tmp_path, forked=True)
    assert finished.code == 128 + signal.SIGTERM, str(finished)
    [said] = [line for line in finished.lines if line.startswith("stopped by SIGTERM after step")]
    assert f"snapshot {tmp_path}/snapshots/step-" in said and "Traceback" not in finished.stderr


@pytest.mark.parametrize("script, on_nan, code", [(TRAINER, "stop", 3), (FABRIC, "skip", 0)])
def test_a_bad_gradient_is_seen_before_the_step(script, on_nan, code, tmp_path):
    flags = f"{EIGHT} --on-nan {on_nan} --output-dir {tmp_path}"
    finished = launch(hooked(script, 2, flags), forked=True, HOOKS="poison:gradient,5,5,0")
    said = finished.stdout + finished.stderr
    assert finished.code == code, said
    assert "step 5: the gradient of conv1.weight is NaN or Inf" in said
    if code:
        assert "no weight has changed" in finished.errors[0]
    else:
        assert all(t.isfinite().all() for t in read_run(tmp_path)[0].values())


BY_DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
CLI = {"LT_CLI_USED": "1", "LT_DEVICES": "1"}
WRONG = [  # what a launcher was asked for, and the script is not for
    ("accelerate_FSDP", 2, {}, "config/accelerate_FSDP.yml"),
    ("accelerate_DDP", 2, {"ACCELERATE_USE_FSDP": "true"}, "a file with distributed_type FSDP"),
    ("accelerate_DeepSpeed", 2, {}, "config/accelerate_DeepSpeed.yml"),
    ("accelerate_DeepSpeed --deepspeed_config {adam}", 1, BY_DEEPSPEED, "adam"),
    ("accelerate_DDP --batch-size 128", 3, {}, "; use --batch-size 126"),
    (FABRIC, 1, CLI | {"LT_STRATEGY": "fsdp"}, "--strategy=fsdp: this script supports only DDP"),
    (FABRIC, 1, CLI | {"LT_STRATEGY": "ddp", "LT_PRECISION": "bf16-mixed"}, "`--precision=bf16-"),
]  # fmt: skip


@cases("script, ranks, env, words", WRONG, lambda *row: row not in WRONG[1:5])
def test_what_the_launcher_was_asked_for_and_the_script_is_not(script, ranks, env, words, tmp_path):
    adam = tmp_path / "adam.json"
    adam.write_text('{"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2}}')
    name, _, flags = script.format(adam=adam).partition(" ")
    command = f"torchrun --nproc_per_node={ranks} {name}.py {flags} --output-dir {tmp_path}/run"
    assert words in launch(command, forked=True, **env).refusal
