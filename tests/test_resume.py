"""A run that was stopped goes on from its snapshot as if nothing had happened."""

import json
import os
import shlex
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import torchvision
from conftest import ROOT, environment, launch, launcher, snapshots, state, succeed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

JOB = "--dataset synthetic --train-samples 96 --eval-samples 12 --batch-size 24"


def kill_when(command, condition):
    """Start a command and kill all its processes, without a warning, once a condition holds."""
    process = subprocess.Popen(
        shlex.split(command),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, command
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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


@pytest.mark.parametrize("script, n", [("pytorch_SingleGPU", 1), ("pytorch_torchrun_DDP", 2)])
def test_killed_and_resumed_ends_with_the_same_bits(script, n, tmp_path):
    command = f"{launcher(script, n)} {JOB} --epochs 4 --deterministic"
    succeed(f"{command} --output-dir {tmp_path}/whole")

    killed = tmp_path / "killed"
    kill_when(f"{command} --output-dir {killed}", lambda: snapshots(killed))
    snapshot, done = snapshots(killed)[0], state(killed)["step"] // 4
    assert 1 <= done < 4 and not (killed / "model.pt").exists()
    resumed = succeed(f"{command} --output-dir {killed} --resume auto")
    assert f"resumed from {snapshot} at epoch {done + 1}, step {done * 4 + 1}" in resumed.stdout

    expected, found = weights(tmp_path / "whole"), weights(killed)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for name in ["train_loss", "eval_loss", "eval_accuracy", "steps", "epochs"]:
        assert result(killed)[name] == result(tmp_path / "whole")[name]


def test_resume_at_another_world_size_and_a_finished_run(tmp_path):
    """Some epochs alone, the rest on two ranks: the same as all alone. Then nothing is left."""
    job = f"{JOB} --norm group --double"
    single = launcher("pytorch_SingleGPU", 1)
    succeed(f"{single} {job} --epochs 4 --output-dir {tmp_path}/whole")
    parts = tmp_path / "parts"
    kill_when(
        f"{single} {job} --epochs 4 --output-dir {parts}",
        lambda: snapshots(parts),
    )
    ranks = f"{launcher('pytorch_torchrun_DDP', 2)} {job} --epochs 4 --output-dir {parts}"
    succeed(f"{ranks} --resume {parts}/snapshots")
    expected, found = weights(tmp_path / "whole"), weights(parts)
    assert max((found[n] - expected[n]).abs().max().item() for n in expected) < 1e-10

    before = result(parts)
    again = succeed(f"{ranks} --resume auto")
    assert "nothing left to do" in again.stdout and "epoch 1/" not in again.stdout
    assert result(parts) == before


def test_a_run_cut_short_by_max_steps_goes_on_within_the_epoch(tmp_path):
    """Four steps make an epoch: 6 and then 2 more are the 8 of two epochs. (The warm-up is longer
    than both, which makes the rate independent of their number.)"""
    job = f"python pytorch_SingleGPU.py {JOB} --norm group --double --epochs 2 --warmup-steps 20"
    succeed(f"{job} --output-dir {tmp_path}/whole")
    succeed(f"{job} --max-steps 6 --output-dir {tmp_path}/parts")
    assert state(tmp_path / "parts")["step"] == 6
    finished = succeed(f"{job} --output-dir {tmp_path}/parts --resume auto")
    assert "at epoch 2, step 7" in finished.stdout
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (
        result(tmp_path / "parts")["eval_loss"][-1] == result(tmp_path / "whole")["eval_loss"][-1]
    )


def test_more_epochs_take_up_the_longer_schedule(tmp_path):
    """The rate had come down to 0 at the end; with more epochs it is that of the middle."""
    job = f"python pytorch_SingleGPU.py {JOB} --print-freq 1 --output-dir {tmp_path}"
    succeed(f"{job} --epochs 1")
    finished = succeed(f"{job} --epochs 2 --resume auto")
    assert "at epoch 2, step 5" in finished.stdout
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    rates = {point.step: point.value for point in reader.Scalars("step/learning_rate")}
    assert list(rates) == list(range(1, 9))
    assert rates[5] == pytest.approx(0.05 * 0.5)
    assert len(result(tmp_path)["train_loss"]) == 2


def test_killed_after_the_last_snapshot_it_still_delivers(tmp_path):
    job = f"python pytorch_SingleGPU.py {JOB} --epochs 2 --output-dir {tmp_path}"
    succeed(job)
    expected, before = weights(tmp_path), result(tmp_path)
    (tmp_path / "model.pt").unlink()
    (tmp_path / "result.json").unlink()
    succeed(f"{job} --resume auto")
    assert all(torch.equal(weights(tmp_path)[name], expected[name]) for name in expected)
    for name in ["train_loss", "eval_accuracy", "eval_samples", "images_per_second", "steps"]:
        assert result(tmp_path)[name] == before[name]


def test_a_worker_that_dies_is_restarted_from_the_snapshot(tmp_path):
    """By torchrun, as the README has it."""
    command = f"{launcher('pytorch_torchrun_DDP', 2)} {JOB} --epochs 4 --output-dir {tmp_path}"
    command = command.replace("--standalone", "--standalone --max-restarts=1")

    def kill_one():
        while not snapshots(tmp_path):
            time.sleep(0.02)
        os.kill(workers(tmp_path)[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    finished = succeed(command)
    assert finished.stdout.count("resumed from") == 1
    assert len(result(tmp_path)["train_loss"]) == 4


def test_a_new_run_keeps_the_files_of_the_last(tmp_path):
    job = f"python pytorch_SingleGPU.py {JOB} --epochs 1 --output-dir {tmp_path}"
    succeed(job)
    names = ["model.pt", "result.json", "snapshots/step-00000004-evaluated/state.pt"]
    first = {name: (tmp_path / name).read_bytes() for name in names}
    succeed(f"{job} --seed 1")
    for name in names:
        assert (tmp_path / "previous" / name).read_bytes() == first[name]
        assert (tmp_path / name).read_bytes() != first[name]


def test_weights_start_a_new_run_where_another_ended(tmp_path):
    """Scored after a step of nearly no length, they give what the first run reported."""
    job = f"python pytorch_SingleGPU.py {JOB} --eval-samples 300 --norm group"
    succeed(f"{job} --epochs 3 --output-dir {tmp_path}/first")
    flags = f"--weights {tmp_path}/first/model.pt --max-steps 1 --lr 1e-30 --weight-decay 0"
    succeed(f"{job} {flags} --output-dir {tmp_path}/second")
    first, second = result(tmp_path / "first"), result(tmp_path / "second")
    assert first["eval_loss"][-1] != pytest.approx(first["eval_loss"][0], rel=1e-3)
    assert second["eval_accuracy"] == first["eval_accuracy"][-1:]
    assert second["eval_loss"] == pytest.approx(first["eval_loss"][-1:])


def test_a_damaged_snapshot_is_named(tmp_path):
    job = f"python pytorch_SingleGPU.py {JOB} --epochs 1 --output-dir {tmp_path}"
    succeed(job)
    [snapshot] = snapshots(tmp_path)
    (snapshot / "state.pt").write_bytes(b"PK\3\4 cut off")
    finished = launch(f"{job} --resume {snapshot}")
    assert finished.code == 2
    [line] = finished.errors
    assert f"--resume {snapshot} is damaged: state.pt" in line
    assert (snapshot / "state.pt").read_bytes() == b"PK\3\4 cut off"


@pytest.mark.parametrize(
    "script, before, after",
    [
        ("pytorch_FSDP", 2, 3),  # sharded in two, read in three
        ("pytorch_DDP_ZeRO --use_zero", 2, 2),
        ("pytorch_gradient_accumulation", 2, 1),
    ],
)
def test_sharded_state_goes_on(script, before, after, tmp_path):
    """One epoch on some ranks and one on others end as two of the single process."""
    job = f"{JOB} --norm group --double --epochs 2 --warmup-steps 20 --optimizer adamw"
    succeed(f"{launcher('pytorch_SingleGPU')} {job} --output-dir {tmp_path}/whole")
    parts = tmp_path / "parts"
    succeed(f"{launcher(script, before)} {job} --max-steps 4 --output-dir {parts}")
    finished = succeed(f"{launcher(script, after)} {job} --output-dir {parts} --resume auto")
    assert "at epoch 2, step 5" in finished.stdout and not finished.our_warnings
    expected, found = weights(tmp_path / "whole"), weights(parts)
    assert max((found[n] - expected[n]).abs().max().item() for n in expected) < 1e-9
    assert result(parts)["steps"] == 8


@pytest.mark.parametrize(
    "script",
    [
        "pytorch_half_precision --dtype bfloat16 --master-weights",
        "pytorch_auto_mixed_precision --dtype float16 --model shufflenet_v2_x0_5",
    ],
)
def test_half_precision_goes_on_with_the_same_bits(script, tmp_path):
    """So the fp32 weights are in the snapshot, and the scale is."""
    job = f"{launcher(script)} {JOB} --epochs 2 --warmup-steps 20 --deterministic"
    succeed(f"{job} --output-dir {tmp_path}/whole")
    succeed(f"{job} --max-steps 4 --output-dir {tmp_path}/parts")
    finished = succeed(f"{job} --output-dir {tmp_path}/parts --resume auto")
    assert "at epoch 2, step 5" in finished.stdout
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_consolidated_state_loads_into_the_plain_optimizer(optimizer, tmp_path):
    """What ZeroRedundancyOptimizer gathered is what the same script without it has."""
    job = f"{JOB} --norm group --double --epochs 1 --optimizer {optimizer}"
    states = []
    for flags in ("", "--use_zero"):
        succeed(f"{launcher('pytorch_DDP_ZeRO', 2)} {flags} {job} --output-dir {tmp_path}")
        states.append(state(tmp_path))
    model = torchvision.models.resnet18(num_classes=10, norm_layer=lambda n: nn.GroupNorm(32, n))
    model.double().load_state_dict(states[1]["model"])
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    plain = kind(model.parameters(), 0.1)
    plain.load_state_dict(states[1]["optimizer"])
    expected = states[0]["optimizer"]["state"]
    loaded = plain.state_dict()["state"]
    assert loaded.keys() == expected.keys() and len(expected) == len(list(model.parameters()))
    for number, values in expected.items():
        for name, value in values.items():
            torch.testing.assert_close(loaded[number][name], value, rtol=1e-9, atol=1e-12)
