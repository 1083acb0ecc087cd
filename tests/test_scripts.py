"""What a run prints and writes, with its own launcher at several world sizes."""

import json
import math
import re
import shlex
import shutil
import statistics
import subprocess
from pathlib import Path

import pytest
import torch
import torchvision
from conftest import HOOKED, ROOT, launcher, state, succeed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import EXPERIMENT_TAG, SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

# 53 evaluation images: not divisible by 2 or 3
JOB = "--dataset synthetic --train-samples 125 --eval-samples 53 --batch-size 24 --epochs 2"
JOB += " --print-freq 2 --seed 5 --model squeezenet1_1"
STEPS = 2 * (125 // 24)
LAUNCHED = ("pytorch_DDP", 2)  # by torch.distributed.launch; the others are forked
RUNS = [LAUNCHED, ("pytorch_SingleGPU", 1)]


@pytest.fixture(scope="module", params=RUNS, ids=str)
def run(request, tmp_path_factory):
    """(script, world size, what it printed, output folder)"""
    script, world_size = request.param
    output = tmp_path_factory.mktemp(f"{script}-{world_size}")
    command = f"{launcher(script, world_size)} {JOB} --output-dir {output}"
    finished = succeed(command, forked=request.param != LAUNCHED)
    yield script, world_size, finished, output
    shutil.rmtree(output)


def test_screen(run):
    script, world_size, finished, output = run
    first, settings, data, *epochs, step, last = finished.lines
    batch = f"global batch 24 = {world_size} x {24 // world_size} per rank"
    for word in [script, f"{world_size} x cpu", "squeezenet1_1", "dataset synthetic", batch]:
        assert word in first
    assert shlex.split(settings) == ["settings:", *shlex.split(JOB), "--output-dir", str(output)]
    assert "125 training and 53 evaluation images, 10 classes" in data
    assert [line.split(":")[0] for line in epochs] == ["epoch 1/2", "epoch 2/2"]
    assert re.match(r"step: [\d,]+ ms( \(.*\))?, data \d+%, .*, rest \d+%", step), step
    assert last.startswith("done: loss ") and str(output) in last
    assert not finished.our_warnings
    if (script, world_size) != LAUNCHED:  # whose launcher warns of its own end
        assert not finished.stderr
    assert script not in finished.stderr


def test_result(run):
    script, world_size, finished, output = run
    result = json.loads((output / "result.json").read_text())
    expected = {"technique": script, "world_size": world_size, "device": "cpu", "steps": STEPS}
    expected |= {"model": "squeezenet1_1", "dataset": "synthetic", "precision": "float32"}
    expected |= {"seed": 5, "train_samples": 125, "eval_samples": 53, "image_size": 32, "epochs": 2}
    expected |= {"global_batch_size": 24, "optimizer": "sgd", "options": {}}
    assert {name: result[name] for name in expected} == expected
    if (script, world_size) == LAUNCHED:
        assert shlex.split(result["command"]) == shlex.split(finished.command)
    for name in ["train_loss", "eval_loss", "eval_accuracy"]:
        assert len(result[name]) == 2 and all(math.isfinite(value) for value in result[name])
    assert all(0 <= value <= 1 for value in result["eval_accuracy"])
    assert 0 < result["seconds_train"] < result["seconds_total"] < finished.seconds
    assert 0 < result["step_ms"]["p50"] <= result["step_ms"]["p95"]
    assert result["images_per_second"] == pytest.approx(24 / result["step_ms"]["p50"] * 1000)
    timed = state(output)["clock"]["steps"]  # the second half of a short run
    assert len(timed) == STEPS // 2
    assert result["step_ms"]["p50"] == pytest.approx(1000 * statistics.median(timed), rel=1e-3)
    memory = result["peak_memory_gib"]
    assert memory["allocated"] is None and memory["reserved"] is None
    assert 0.1 < memory["process"] < 8
    model = torchvision.models.squeezenet1_1(num_classes=10)
    parameters = sum(p.numel() for p in model.parameters())
    assert set(result["state_bytes"]) == {"parameters", "gradients", "optimizer"}
    assert set(result["state_bytes"].values()) == {4 * parameters}
    assert result["versions"]["torch"] == torch.__version__
    command = ["git", "-C", ROOT, "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    assert (result["git_commit"] or "").removesuffix("-dirty") == commit


def test_curves(run):
    """Read with TensorBoard's own reader, and what its HPARAMS page shows."""
    script, world_size, _, output = run
    reader = EventAccumulator(str(output))
    reader.Reload()
    result = json.loads((output / "result.json").read_text())
    curves = {}
    for name in ["loss", "images_per_second", "learning_rate"]:
        points = reader.Scalars(f"step/{name}")
        assert [point.step for point in points] == list(range(2, STEPS + 1, 2))
        curves[name] = [point.value for point in points]
    assert all(0 < value < 20 for value in curves["loss"])
    assert all(value > 0 for value in curves["images_per_second"])
    cosine = [0.5 + 0.5 * math.cos(math.pi * (step - 2) / 9) for step in range(2, STEPS + 1, 2)]
    assert curves["learning_rate"] == pytest.approx([0.01 * factor for factor in cosine])
    accuracies = reader.Scalars("epoch/eval_accuracy")
    assert [e.step for e in accuracies] == [STEPS // 2, STEPS]
    assert [e.value for e in accuracies] == pytest.approx(result["eval_accuracy"])
    shown = reader.PluginTagToContent("hparams")
    session = HParamsPluginData.FromString(shown[SESSION_START_INFO_TAG]).session_start_info.hparams
    assert session["technique"].string_value == script and session["batch_size"].number_value == 24
    experiment = HParamsPluginData.FromString(shown[EXPERIMENT_TAG]).experiment
    metrics = {info.name.tag for info in experiment.metric_infos}
    assert {"final/accuracy", "final/images_per_second"} <= metrics
    assert reader.Scalars("final/accuracy")[-1].value == pytest.approx(accuracies[-1].value)


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's list of threads")
@pytest.mark.parametrize("script", ["pytorch_torchrun_DDP", "pytorch_comm_hooks"])
def test_threads_end_with_the_process_group(script, tmp_path):
    """One that outlives it may abort the process as it exits: world.wait_for_gloo."""
    command = f"{launcher(script, through=HOOKED)} --dataset synthetic --train-samples 16"
    command += " --eval-samples 4 --batch-size 8 --epochs 1 --model squeezenet1_1"
    finished = succeed(f"{command} --output-dir {tmp_path}", HOOKS="threads")
    assert "threads of gloo left: 0" in finished.lines
