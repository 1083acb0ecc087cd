"""Accelerate's scripts end with the weights of their raw counterparts, bit for bit; and what it
does by default, which docs/ecosystem.md says and they undo."""

import json
import re
import signal

import pytest
import torch
from conftest import ROOT, cases, distance, launch, launcher, snapshots, started, succeed, wait_for

accelerate = pytest.importorskip("accelerate")

JOB = (
    "--dataset synthetic --train-samples 150 --eval-samples 20 --batch-size 24 --clip-grad 0.5 "
    "--epochs 9 --print-freq 1 --model small_resnet_dropout"
)
GPT = (
    "--model gpt-2x2x32 --context 16 --dataset synthetic --train-samples 64 --eval-samples 8 "
    "--batch-size 8 --epochs 1 --dropout 0.1 --clip-grad 0.5"
)
THROUGH = "tests/small_resnet.py"
RAW = {
    "accelerate_DDP": "pytorch_torchrun_DDP",
    "accelerate_FSDP": "pytorch_FSDP",
    "accelerate_DeepSpeed": "pytorch_DeepSpeed",
}
# What `accelerate launch` puts into the environment, for runs without it
FILE = {
    "accelerate_DDP": {},
    "accelerate_FSDP": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    },
    "accelerate_DeepSpeed": {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": "config/zero_stage2_config.json",
    },
}


def forked(script, ranks, job, output):
    """The script, in processes that are forked; the weights that it ends with, and its result."""
    command = f"torchrun --standalone --nproc_per_node={ranks} {script}.py {job}"
    finished = succeed(f"{command} --output-dir {output}", forked=True, **FILE.get(script, {}))
    assert ("resumed from" in finished.stdout) == ("--resume" in job)
    state = torch.load(output / "model.pt", weights_only=True)
    return state, json.loads((output / "result.json").read_text())


def same_bits(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in theirs)


@pytest.mark.parametrize(
    "script", cases([(script,) for script in RAW], lambda script: script == "accelerate_DDP")
)
def test_as_the_raw_script_by_its_own_launcher(script, train, tmp_path):
    """Images, twelve steps, with BatchNorm and dropout; in float64, but for DeepSpeed, which has
    none."""
    flags = "--max-steps 12" + (" --double" if script != "accelerate_DeepSpeed" else "")
    expected, theirs = train(RAW[script], 2, flags)
    command = f"{launcher(script, 2, THROUGH)} {JOB} {flags} --output-dir {tmp_path}"
    finished = succeed(command)
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    result = json.loads((tmp_path / "result.json").read_text())
    assert same_bits(weights, expected)
    wanted = torch.float32 if "DeepSpeed" in script else torch.float64
    assert {t.dtype for t in weights.values() if t.is_floating_point()} == {wanted}
    for name in ("train_loss", "eval_loss", "eval_accuracy", "state_bytes", "world_size"):
        assert result[name] == theirs[name]
    assert result["command"].startswith(f"accelerate launch --config_file config/{script}.yml")
    assert not finished.our_warnings


HALF = (
    "--dtype bfloat16 --dataset synthetic --train-samples 64 --eval-samples 8 --batch-size 16 "
    "--epochs 1 --model shufflenet_v2_x0_5"
)
REVIEWS = "--dataset reviews --data-dir {folder} --model encoder-1x2x16 --context 12 --max-steps 4"


@pytest.mark.full
@pytest.mark.parametrize(
    "script, ranks, job",
    [
        pytest.param("accelerate_DDP", 1, GPT, marks=pytest.mark.full),
        ("accelerate_FSDP", 2, GPT),
        ("accelerate_FSDP", 2, HALF),
        pytest.param("accelerate_FSDP", 2, f"{REVIEWS} --batch-size 16", marks=pytest.mark.full),
    ],
    ids=["gpt-1", "gpt-2", "half", "reviews"],
)
def test_other_jobs(script, ranks, job, review_folder, tmp_path):
    """A GPT with dropout; BatchNorm beside bfloat16; texts."""
    job = job.format(folder=review_folder)
    expected, _ = forked(RAW[script], ranks, job, tmp_path / "raw")
    weights, _ = forked(script, ranks, job, tmp_path / "accelerate")
    assert same_bits(weights, expected)


@pytest.mark.parametrize("script", cases([(s,) for s in RAW], lambda s: s == "accelerate_FSDP"))
def test_snapshots_are_those_of_the_raw_script(script, tmp_path):
    """Raw, then Accelerate, then raw: in the middle of an epoch each time."""
    job = f"{GPT} --epochs 2 --schedule none"
    expected, _ = forked(RAW[script], 2, job, tmp_path / "whole")
    for name, steps in ((RAW[script], 3), (script, 11), (RAW[script], 16)):
        resume = "--resume auto" if steps > 3 else ""
        flags = f"--max-steps {steps} {resume}"
        weights, _ = forked(name, 2, f"{job} {flags}", tmp_path / "parts")
    assert distance(weights, expected) < 1e-6


def test_asked_to_stop(tmp_path):
    """By the signal that launchers pass on: a snapshot, and the code of that signal."""
    command = f"torchrun --nproc_per_node=2 accelerate_DDP.py {GPT} --epochs 1000"
    with started(f"{command} --output-dir {tmp_path}", forked=True) as process:
        wait_for(lambda: "epoch 3/" in process.output[0])
        process.send(signal.SIGTERM)
        finished = process.end()
    assert finished.code == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in finished.stdout
    assert snapshots(tmp_path)


@pytest.mark.parametrize(
    "script, file, words",
    cases(
        [
            ("accelerate_FSDP", "accelerate_DDP", "config/accelerate_FSDP.yml"),
            ("accelerate_DDP", "accelerate_FSDP", "a file with distributed_type FSDP"),
            ("accelerate_DeepSpeed", "accelerate_DDP", "config/accelerate_DeepSpeed.yml"),
        ],
        lambda script, *_: script == "accelerate_FSDP",
    ),
)
def test_a_file_for_another_script(script, file, words, tmp_path):
    command = f"torchrun --standalone --nproc_per_node=2 {script}.py --output-dir {tmp_path}"
    finished = launch(command, forked=True, **FILE[file])
    assert finished.code == 2
    assert len(finished.errors) == 1 and words in finished.errors[0]
    assert "Traceback" not in finished.stderr


@pytest.mark.full
def test_a_file_of_deepspeeds_with_an_optimizer(tmp_path):
    path = tmp_path / "adam.json"
    path.write_text('{"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2}}')
    command = "torchrun --standalone --nproc_per_node=1 accelerate_DeepSpeed.py --deepspeed_config"
    command += f" {path} --output-dir {tmp_path}"
    finished = launch(command, forked=True, **FILE["accelerate_DeepSpeed"])
    assert finished.code == 2
    assert [str(path) in line for line in finished.errors] == [True]


def test_a_file_for_another_number_of_processes(tmp_path):
    """128 images are not divisible by 3 ranks."""
    command = f"torchrun --nproc_per_node=3 accelerate_DDP.py --output-dir {tmp_path}"
    finished = launch(command, forked=True, **FILE["accelerate_DDP"])
    assert [re.sub(r"^.*; ", "", line) for line in finished.errors] == ["use --batch-size 126"]


@pytest.mark.parametrize(
    "script, library",
    cases(
        [*((script, "accelerate") for script in RAW), ("transformers_Trainer", "transformers")],
        lambda script, library: script == "accelerate_FSDP",
    ),
)
def test_a_missing_library(script, library, tmp_path):
    (tmp_path / f"{library}.py").write_text("raise ImportError('not here')")
    finished = launch(f"python {script}.py", PYTHONPATH=str(tmp_path))
    assert finished.code == 2
    expected = f"{library} cannot be imported (not here); pip install -r requirements-ecosystem.txt"
    assert finished.stderr == f"{script}: error: {expected}\n"


# ------------------------------------------------------ what it changes without telling you


@pytest.fixture(scope="module")
def defaults():
    command = "torchrun --standalone --nproc_per_node=2 tests/accelerate_defaults.py"
    return json.loads(succeed(command, forked=True).lines[-1])


def test_the_batch_is_multiplied_and_dealt_out_in_blocks(defaults):
    """A loader of batches of 4 makes steps of 8 on two ranks, and rank 0 has the first 4 of them,
    where DistributedSampler gives it every other one."""
    assert defaults["samples of a step"] == list(range(8))
    assert defaults["own samples of a step"] == list(range(4))


def test_the_schedule_runs_ahead(defaults):
    """One step of the training is two of the schedule on two ranks."""
    assert defaults["scheduler is at step"] == 2


def test_evaluation_sees_samples_twice(defaults):
    """Five samples in batches of two, on two ranks, are eight: three come again."""
    assert len(defaults["evaluated samples"]) == 8
    assert set(defaults["evaluated samples"]) == set(range(5))


def test_fsdp_on_a_cpu_is_ddp(defaults):
    """The environment asks for FSDP, and nothing is sharded."""
    assert defaults["distributed_type"] == "MULTI_CPU"


def test_fsdp_mixes_the_weights_of_ranks(defaults):
    """The upper half of a matrix is of rank 0, the lower half of rank 1, whatever they hold."""
    assert defaults["weights of FSDP"] == [0.0, 0.0, 1.0, 1.0]


def test_bf16_of_fsdp_adds_gradients_in_bf16():
    """pytorch_FSDP.py --dtype bfloat16 adds them in fp32."""
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.reduce_dtype == torch.bfloat16


@pytest.mark.full
def test_one_process_gets_one_thread(tmp_path):
    """torchrun sets OMP_NUM_THREADS for several ranks alone."""
    show = "import os; print('threads', os.environ['OMP_NUM_THREADS'])"
    (tmp_path / "threads.py").write_text(show)
    file = ROOT / "config/accelerate_DDP.yml"
    command = f"accelerate launch --config_file {file} --num_processes 1 {tmp_path}/threads.py"
    assert "threads 1" in succeed(f"env -u OMP_NUM_THREADS {command}").lines
