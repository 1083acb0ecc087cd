"""A stopped run resumes from its snapshot as if it had not been interrupted."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from conftest import HOOKED, launcher, snapshots, started, state, succeed, wait_for
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness import state as snapshot_state

JOB = "--dataset synthetic --train-samples 96 --eval-samples 12 --batch-size 24"


def start(script, n=1, flags=""):
    """The command of a job, through the small model."""
    return f"{launcher(script, n, HOOKED)} {JOB} --model small_resnet {flags}"


def kill_when(command, condition):
    """Start a command and kill all its processes, without a warning, once a condition holds."""
    with started(command, forked=True) as process:
        wait_for(lambda: condition() or not process.running)
        assert process.running, str(process.end())


def run(command):
    return succeed(command, forked=True)


def weights(folder):
    return torch.load(folder / "model.pt", weights_only=True)


def result(folder):
    return json.loads((folder / "result.json").read_text())


def workers(folder):
    """Process numbers of the ranks that write to a folder, in the order in which they started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\0")
        except OSError:  # ended meanwhile
            continue
        if str(folder) in words and "torchrun" not in words[1]:
            found.append(int(path.parent.name))
    return sorted(found)


def test_resume_at_another_world_size_and_a_finished_run(tmp_path):
    """Some epochs alone, the rest on two ranks: the same as all alone. Then nothing is left."""
    job = "--norm group --double --epochs 8"
    single = start("pytorch_SingleGPU", 1, job)
    run(f"{single} --output-dir {tmp_path}/whole")
    parts = tmp_path / "parts"
    kill_when(f"{single} --output-dir {parts}", lambda: snapshots(parts))
    ranks = start("pytorch_torchrun_DDP", 2, f"{job} --output-dir {parts}")
    run(f"{ranks} --resume {parts}/snapshots")
    expected, found = weights(tmp_path / "whole"), weights(parts)
    assert max((found[n] - expected[n]).abs().max().item() for n in expected) < 1e-10

    before = result(parts)
    again = run(f"{ranks} --resume auto")
    assert "nothing left to do" in again.stdout and "epoch 1/" not in again.stdout
    assert result(parts) == before


def test_a_run_cut_short_by_max_steps_goes_on_within_the_epoch(tmp_path):
    """Four steps make an epoch: 6 and then 2 more are the 8 of two epochs. (The warm-up is longer
    than both, which makes the rate independent of their number.)"""
    flags = "--norm group --double --epochs 2 --warmup-steps 20"
    job = start("pytorch_SingleGPU", flags=flags)
    run(f"{job} --output-dir {tmp_path}/whole")
    run(f"{job} --max-steps 6 --output-dir {tmp_path}/parts")
    assert state(tmp_path / "parts")["step"] == 6
    finished = run(f"{job} --output-dir {tmp_path}/parts --resume auto")
    assert "at epoch 2, step 7" in finished.stdout
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (
        result(tmp_path / "parts")["eval_loss"][-1] == result(tmp_path / "whole")["eval_loss"][-1]
    )


def test_more_epochs_take_up_the_longer_schedule(tmp_path):
    """The rate had come down to 0 at the end; with more epochs it is that of the middle."""
    job = start("pytorch_SingleGPU", flags=f"--print-freq 1 --output-dir {tmp_path}")
    run(f"{job} --epochs 1")
    finished = run(f"{job} --epochs 2 --resume auto")
    assert "at epoch 2, step 5" in finished.stdout
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    rates = {point.step: point.value for point in reader.Scalars("step/learning_rate")}
    assert list(rates) == list(range(1, 9))
    assert rates[5] == pytest.approx(0.05 * 0.5)
    assert len(result(tmp_path)["train_loss"]) == 2


def test_killed_after_the_last_snapshot_it_still_delivers(tmp_path):
    job = start("pytorch_SingleGPU", flags=f"--epochs 2 --output-dir {tmp_path}")
    run(job)
    expected, before = weights(tmp_path), result(tmp_path)
    (tmp_path / "model.pt").unlink()
    (tmp_path / "result.json").unlink()
    run(f"{job} --resume auto")
    assert all(torch.equal(weights(tmp_path)[name], expected[name]) for name in expected)
    for name in ["train_loss", "eval_accuracy", "eval_samples", "images_per_second", "steps"]:
        assert result(tmp_path)[name] == before[name]


def test_a_worker_that_dies_is_restarted_from_the_snapshot(tmp_path):
    """By torchrun, as the README has it."""
    command = start("pytorch_torchrun_DDP", 2, f"--epochs 20 --output-dir {tmp_path}")
    command = command.replace("--standalone", "--standalone --max-restarts=1")
    with started(command) as process:
        wait_for(lambda: snapshots(tmp_path))
        os.kill(workers(tmp_path)[-1], signal.SIGKILL)
        finished = process.end(120)
    assert finished.code == 0 and finished.stdout.count("resumed from") == 1, str(finished)
    assert len(result(tmp_path)["train_loss"]) == 20


def test_a_new_run_keeps_the_files_of_the_last(tmp_path):
    job = start("pytorch_SingleGPU", flags=f"--epochs 1 --output-dir {tmp_path}")
    run(job)
    names = ["model.pt", "result.json", "snapshots/step-00000004-evaluated/state.pt"]
    first = {name: (tmp_path / name).read_bytes() for name in names}
    run(f"{job} --seed 1")
    for name in names:
        assert (tmp_path / "previous" / name).read_bytes() == first[name]
        assert (tmp_path / name).read_bytes() != first[name]


def test_weights_start_a_new_run_where_another_ended(tmp_path):
    """Scored after a step of nearly no length, they give what the first run reported."""
    job = start("pytorch_SingleGPU", flags="--eval-samples 300 --norm group")
    run(f"{job} --epochs 3 --output-dir {tmp_path}/first")
    flags = f"--weights {tmp_path}/first/model.pt --max-steps 1 --lr 1e-30 --weight-decay 0"
    run(f"{job} {flags} --output-dir {tmp_path}/second")
    first, second = result(tmp_path / "first"), result(tmp_path / "second")
    assert first["eval_loss"][-1] != pytest.approx(first["eval_loss"][0], rel=1e-3)
    assert second["eval_accuracy"] == first["eval_accuracy"][-1:]
    assert second["eval_loss"] == pytest.approx(first["eval_loss"][-1:])


@pytest.mark.parametrize(
    "script",
    [
        "pytorch_half_precision --dtype bfloat16 --master-weights",
        "pytorch_auto_mixed_precision --dtype float16",
    ],
)
def test_half_precision_goes_on_with_the_same_bits(script, tmp_path):
    """So the fp32 weights are in the snapshot, and the scale is."""
    job = start(script, flags="--epochs 2 --warmup-steps 20 --deterministic")
    run(f"{job} --output-dir {tmp_path}/whole")
    run(f"{job} --max-steps 4 --output-dir {tmp_path}/parts")
    finished = run(f"{job} --output-dir {tmp_path}/parts --resume auto")
    assert "at epoch 2, step 5" in finished.stdout
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_scaler_without_a_state_is_none_that_is_missing(tmp_path):
    """In bfloat16 it is disabled; what it saves is empty, and is all of it."""
    job = start("pytorch_auto_mixed_precision --dtype bfloat16", flags="--epochs 2")
    run(f"{job} --max-steps 4 --output-dir {tmp_path}")
    finished = run(f"{job} --output-dir {tmp_path} --resume auto")
    assert "resumed from" in finished.stdout and "starts from scratch" not in finished.stdout


def test_float16_goes_on_from_a_snapshot_without_a_scaler(tmp_path):
    flags = "--epochs 2 --warmup-steps 20"
    run(f"{start('pytorch_SingleGPU', flags=flags)} --max-steps 4 --output-dir {tmp_path}/one")
    [snapshot] = snapshots(tmp_path / "one")
    script = "pytorch_auto_mixed_precision --dtype float16"
    finished = run(f"{start(script, flags=flags)} --output-dir {tmp_path}/two --resume {snapshot}")
    assert f"{snapshot} contains no scaler state; scaler is reset" in finished.stdout


def test_how_a_step_is_computed_is_the_scripts_to_say(tmp_path):
    """A snapshot of before the steps were fused is gone on from with fused ones."""
    model = torch.nn.Linear(2, 2)
    plain, fused = (torch.optim.SGD(model.parameters(), 0.1, fused=f) for f in (False, True))
    tensors, groups = snapshot_state.gather(model, plain)
    snapshot_state.save(tensors, tmp_path)
    snapshot_state.load(tmp_path, {"param_groups": groups}, model, fused)
    assert fused.param_groups[0]["fused"] is True


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_state_of_a_zero_optimizer_is_that_of_a_plain_one(optimizer, tmp_path):
    """Each rank writes the state of its parameters; together it is what the script has without."""
    job = f"--norm group --double --epochs 1 --optimizer {optimizer} --output-dir {tmp_path}"
    found = []
    for flags in ("", "--use_zero"):
        run(start("pytorch_DDP_ZeRO", 2, f"{flags} {job}"))
        files = sorted(snapshots(tmp_path)[0].glob("tensors/*.safetensors"))
        assert len(files) == (2 if flags else 1)
        found.append({name: t for file in files for name, t in load_file(file).items()})
    expected, found = found
    assert found.keys() == expected.keys()
    assert any(name.startswith("optimizer.") for name in found)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)
