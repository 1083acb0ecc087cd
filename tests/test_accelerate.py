"""Accelerate's scripts end with the weights of their raw counterparts, bit for bit; and what
Accelerate does by default, which docs/ecosystem.md lists and the scripts undo."""

import json
import signal

import pytest
import torch
from conftest import (
    HOOKED,
    ROOT,
    cases,
    distance,
    launch,
    launcher,
    read_run,
    snapshots,
    started,
    succeed,
    wait_for,
)

accelerate = pytest.importorskip("accelerate")

IMAGES = (
    "--dataset synthetic --train-samples 150 --eval-samples 20 --batch-size 24 --clip-grad 0.5 "
    "--epochs 9 --print-freq 1 --model small_resnet_dropout --max-steps 12"
)
GPT = (
    "--model gpt-2x2x32 --context 16 --dataset synthetic --train-samples 64 --eval-samples 8 "
    "--batch-size 8 --epochs 1 --dropout 0.1 --clip-grad 0.5"
)
HALF = (
    "--dtype bfloat16 --dataset synthetic --train-samples 64 --eval-samples 8 --batch-size 16 "
    "--epochs 1 --model shufflenet_v2_x0_5"
)
REVIEWS = (
    "--dataset reviews --data-dir {folder} --model encoder-1x2x16 --context 12 --max-steps 4 "
    "--batch-size 16"
)
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


def run(script, ranks, job, output, forked=True):
    """The weights that a run ends with, and its result; forked as its launcher would start it."""
    through = HOOKED if "small_resnet" in job else ""
    command = f"torchrun --standalone --nproc_per_node={ranks} {through} {script}.py"
    command = command if forked else launcher(script, ranks, through)
    env = FILE.get(script, {}) if forked else {}
    finished = succeed(f"{command} {job} --output-dir {output}", forked=forked, **env)
    assert ("resumed from" in finished.stdout) == ("--resume" in job)
    assert not finished.our_warnings
    return read_run(output)


PARITY = [  # in float64, but for DeepSpeed, which has none
    ("accelerate_DDP", 2, f"{IMAGES} --double", True),
    ("accelerate_DDP", 2, f"{IMAGES} --double", False),
    ("accelerate_FSDP", 2, f"{IMAGES} --double", False),
    ("accelerate_DeepSpeed", 2, IMAGES, False),
    ("accelerate_DDP", 1, GPT, True),
    ("accelerate_FSDP", 2, GPT, True),
    ("accelerate_FSDP", 2, HALF, True),
    ("accelerate_FSDP", 2, REVIEWS, True),
]


@pytest.mark.parametrize("script, ranks, job, forked", cases(PARITY, lambda *row: row == PARITY[0]))
def test_as_the_raw_script(script, ranks, job, forked, review_folder, tmp_path):
    """Images with BatchNorm, also in bfloat16, a GPT, texts; dropout. And by its own launcher."""
    job = job.format(folder=review_folder)
    expected, theirs = run(RAW[script], ranks, job, tmp_path / "raw")
    weights, result = run(script, ranks, job, tmp_path / "accelerate", forked)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    for name in ("train_loss", "eval_loss", "eval_accuracy", "state_bytes", "world_size"):
        assert result[name] == theirs[name]
    own = f"accelerate launch --config_file config/{script}.yml"
    assert forked or result["command"].startswith(own)


@pytest.mark.parametrize("script", cases([(s,) for s in RAW], lambda s: s == "accelerate_FSDP"))
def test_snapshots_are_those_of_the_raw_script(script, tmp_path):
    """Raw, then Accelerate, then raw: in the middle of an epoch each time."""
    job = f"{GPT} --epochs 2 --schedule none"
    expected, _ = run(RAW[script], 2, job, tmp_path / "whole")
    for name, steps in ((RAW[script], 3), (script, 11), (RAW[script], 16)):
        flags = f"--max-steps {steps} {'--resume auto' if steps > 3 else ''}"
        weights, _ = run(name, 2, f"{job} {flags}", tmp_path / "parts")
    assert distance(weights, expected) < 1e-6


def test_asked_to_stop(tmp_path):
    """By the signal that launchers pass on: a snapshot, and the code of that signal."""
    command = f"torchrun --nproc_per_node=2 accelerate_DDP.py {GPT} --epochs 1000"
    with started(f"{command} --output-dir {tmp_path}", forked=True) as process:
        wait_for(lambda: "epoch 3/" in process.output[0])
        process.send(signal.SIGTERM)
        finished = process.end()
    assert finished.code == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in finished.stdout and snapshots(tmp_path)


@pytest.mark.parametrize(
    "script, ranks, file, words",
    cases(
        [  # the file that its launcher was started with
            ("accelerate_FSDP", 2, "accelerate_DDP", "config/accelerate_FSDP.yml"),
            ("accelerate_DDP", 2, "accelerate_FSDP", "a file with distributed_type FSDP"),
            ("accelerate_DeepSpeed", 2, "accelerate_DDP", "config/accelerate_DeepSpeed.yml"),
            (
                "accelerate_DeepSpeed --deepspeed_config adam.json",
                1,
                "accelerate_DeepSpeed",
                "adam",
            ),
            ("accelerate_DDP", 3, "accelerate_DDP", "; use --batch-size 126"),  # and not 128
        ],
        lambda script, *_: script == "accelerate_FSDP",
    ),
)
def test_a_file_that_is_not_for_it(script, ranks, file, words, tmp_path):
    adam = tmp_path / "adam.json"
    adam.write_text('{"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2}}')
    name, _, flags = script.replace("adam.json", str(adam)).partition(" ")
    command = f"torchrun --standalone --nproc_per_node={ranks} {name}.py {flags}"
    finished = launch(f"{command} --output-dir {tmp_path}/run", forked=True, **FILE[file])
    assert finished.code == 2 and "Traceback" not in finished.stderr
    assert len(finished.errors) == 1 and words in finished.errors[0]


# ------------------------------------------------------ what it changes without telling you


def test_what_accelerate_does_by_default():
    """The numbers are of two ranks, and batches of 4 or, of five samples, 2."""
    command = "torchrun --standalone --nproc_per_node=2 measure/accelerate_defaults.py"
    defaults = json.loads(succeed(command, forked=True).lines[-1])
    # a step takes two batches, where rank 0 has the first and not, as by DistributedSampler, every
    # other sample; and it is two steps of the schedule
    assert defaults["samples of a step"] == list(range(8))
    assert defaults["own samples of a step"] == list(range(4))
    assert defaults["scheduler is at step"] == 2
    # three of the five come again
    assert len(defaults["evaluated samples"]) == 8
    assert set(defaults["evaluated samples"]) == set(range(5))
    # the environment asks for FSDP, and nothing is sharded
    assert defaults["distributed_type"] == "MULTI_CPU"
    # the upper half of a matrix is of rank 0, the lower half of rank 1, whatever they hold
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
