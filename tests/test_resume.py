"""A run that was stopped goes on from its snapshot as if nothing had happened."""

import json
import os
import shlex
import signal
import subprocess
import time

import pytest
import torch
from conftest import ROOT, environment, launch, launcher, succeed

JOB = "--dataset synthetic --train-samples 240 --eval-samples 12 --batch-size 24"


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


def kill_workers(folder):
    """torchrun's workers have a session of their own: kill -9 of the launcher leaves them alive."""
    for status in list(os.scandir("/proc")):
        if status.name.isdigit():
            try:
                with open(f"/proc/{status.name}/cmdline") as file:
                    if str(folder) in file.read():
                        os.kill(int(status.name), signal.SIGKILL)
            except OSError:
                continue


@pytest.mark.parametrize("script, n", [("pytorch_SingleGPU", 1), ("pytorch_torchrun_DDP", 2)])
def test_killed_and_resumed_ends_with_the_same_bits(script, n, tmp_path):
    command = f"{launcher(script, n)} {JOB} --epochs 4 --deterministic"
    succeed(f"{command} --output-dir {tmp_path}/whole")

    killed = tmp_path / "killed"
    snapshot = killed / "snapshot.pt"
    kill_when(f"{command} --output-dir {killed}", snapshot.is_file)
    kill_workers(killed)
    done = torch.load(snapshot, weights_only=True)["epoch"]
    assert 1 <= done < 4 and not (killed / "model.pt").exists()
    resumed = succeed(f"{command} --output-dir {killed} --resume auto")
    assert f"resumed from {snapshot} at epoch {done + 1}, step {done * 10 + 1}" in resumed.stdout

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
        lambda: (parts / "snapshot.pt").is_file(),
    )
    ranks = f"{launcher('pytorch_torchrun_DDP', 2)} {job} --epochs 4 --output-dir {parts}"
    succeed(f"{ranks} --resume {parts}/snapshot.pt")
    expected, found = weights(tmp_path / "whole"), weights(parts)
    assert max((found[n] - expected[n]).abs().max().item() for n in expected) < 1e-10

    before = result(parts)
    again = succeed(f"{ranks} --resume auto")
    assert "nothing left to do" in again.stdout and "epoch 1/" not in again.stdout
    assert result(parts) == before


def test_a_run_cut_short_by_max_steps_goes_on_within_the_epoch(tmp_path):
    """Ten steps make an epoch: 15 and then 5 more, on the schedule of 20, are the whole."""
    job = f"python pytorch_SingleGPU.py {JOB} --norm group --double --epochs 2 --warmup-steps 20"
    succeed(f"{job} --output-dir {tmp_path}/whole")
    succeed(f"{job} --max-steps 15 --output-dir {tmp_path}/parts")
    assert torch.load(tmp_path / "parts" / "snapshot.pt", weights_only=True)["step"] == 15
    finished = succeed(f"{job} --output-dir {tmp_path}/parts --resume auto")
    assert "at epoch 2, step 16" in finished.stdout
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (
        result(tmp_path / "parts")["eval_loss"][-1] == result(tmp_path / "whole")["eval_loss"][-1]
    )


def test_a_new_run_keeps_the_old_snapshot_aside(tmp_path):
    job = f"python pytorch_SingleGPU.py {JOB} --epochs 1 --output-dir {tmp_path}"
    succeed(job)
    first = (tmp_path / "snapshot.pt").read_bytes()
    succeed(f"{job} --seed 1")
    assert (tmp_path / "snapshot.previous.pt").read_bytes() == first
    assert (tmp_path / "snapshot.pt").read_bytes() != first


def test_weights_start_a_new_run_where_another_ended(tmp_path):
    """Scored before any step, they give what the first run reported at its end."""
    job = f"python pytorch_SingleGPU.py {JOB} --eval-samples 300"
    succeed(f"{job} --epochs 3 --output-dir {tmp_path}/first")
    flags = f"--weights {tmp_path}/first/model.pt --max-steps 1 --lr 1e-30 --weight-decay 0"
    succeed(f"{job} {flags} --norm batch --output-dir {tmp_path}/second")
    first, second = weights(tmp_path / "first"), weights(tmp_path / "second")
    learned = [name for name in first if "running" not in name and "num_batches" not in name]
    assert all(torch.equal(first[name], second[name]) for name in learned)


def test_a_damaged_snapshot_is_named(tmp_path):
    job = f"python pytorch_SingleGPU.py {JOB} --epochs 1 --output-dir {tmp_path}"
    (tmp_path / "snapshot.pt").write_bytes(b"PK\3\4 cut off")
    finished = launch(f"{job} --resume auto")
    assert finished.code == 2
    [line] = finished.errors
    assert f"{tmp_path}/snapshot.pt" in line
    assert (tmp_path / "snapshot.pt").read_bytes() == b"PK\3\4 cut off"
