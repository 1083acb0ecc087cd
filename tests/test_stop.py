"""How a run ends: by a signal, with its launcher, after an exception, or when nobody reads."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT, cases, launch, snapshots, started, wait_for
from test_snapshots import DEEPSPEED, SMALL, result, run, same, start


def ranks_of(folder):
    """Process numbers of the ranks that write to a folder, by rank."""
    found = {}
    for process in psutil.process_iter(["cmdline", "environ"]):
        rank = (process.info["environ"] or {}).get("RANK")
        if rank and str(folder) in (process.info["cmdline"] or []):
            found[int(rank)] = process.pid
    return [found[rank] for rank in sorted(found)]


def listening(process):
    """Addresses on which a process accepts TCP connections."""
    connections = psutil.Process(process).net_connections("tcp")
    return [c.laddr.ip.removeprefix("::ffff:") for c in connections if c.status == "LISTEN"]


def stop(command, folder, **options):
    """A command that is sent SIGTERM when it has written a snapshot: what it leaves behind."""
    with started(command, **options) as process:
        wait_for(lambda: snapshots(folder) or not process.running)
        process.send(signal.SIGTERM)
        return process.end()


@pytest.mark.full
def test_a_worker_that_dies_is_restarted_from_the_snapshot(tmp_path):
    """By torchrun, as the README has it."""
    command = start("pytorch_torchrun_DDP", 2, f"--epochs 12 --output-dir {tmp_path}")
    command = command.replace("--standalone", "--standalone --max-restarts=1")
    with started(command) as process:
        wait_for(lambda: snapshots(tmp_path))
        os.kill(ranks_of(tmp_path)[-1], signal.SIGKILL)
        finished = process.end(120)
    assert finished.code == 0 and finished.stdout.count("resumed from") == 1, str(finished)
    assert len(result(tmp_path)["train_loss"]) == 12


STOPPED = ["pytorch_torchrun_DDP", "pytorch_DDP_AMP --dtype bfloat16", DEEPSPEED(3), DEEPSPEED(2)]
HEARD = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]
HEARD = [(s,) for s in HEARD if signal.getsignal(s) != signal.SIG_IGN]  # unless under nohup


@cases("script", STOPPED, lambda s: s == STOPPED[0])
def test_sigterm_to_the_launcher_saves_a_snapshot_at_once(script, tmp_path):
    """Wherever in the epoch that is."""
    command = start(script, 2, "--snapshot-every 1000 --print-freq 5")
    command += " --batch-size 8 --train-samples 800 --epochs 2 --max-steps 60"
    run(f"{command} --output-dir {tmp_path}/whole")
    stopped = tmp_path / "stopped"
    with started(f"{command} --output-dir {stopped}", forked=script != DEEPSPEED(2)) as process:
        wait_for(lambda: list(stopped.glob("events.*")))
        time.sleep(0.1)  # from then on it listens
        process.send(signal.SIGTERM)
        process.end()
        wait_for(lambda: not ranks_of(stopped))  # which `deepspeed` does not wait for
        said = process.output[0]
    [snapshot] = snapshots(stopped)
    step = int(snapshot.name.removeprefix("step-"))
    assert 0 < step < 60, said
    assert f"stopped by SIGTERM after step {step} of 60: snapshot {snapshot}" in said
    resumed = run(f"{command} --output-dir {stopped} --resume auto")
    assert f"at epoch 1, step {step + 1}" in resumed.stdout and same(stopped, tmp_path / "whole")


@cases("signum", HEARD, lambda signum: signum in (signal.SIGTERM, signal.SIGINT))
def test_one_process_is_stopped_with_a_documented_code(signum, tmp_path):
    """A single process, which listens to nobody else."""
    command = start("pytorch_SingleGPU", 1, f"--epochs 500 --workers 1 --output-dir {tmp_path}")
    with started(command, forked=True) as process:
        wait_for(lambda: snapshots(tmp_path))
        assert all(a == "127.0.0.1" for a in listening(process.process.pid))
        [refused] = launch(command, forked=True).errors
        assert f"--output-dir {tmp_path}: another run is writing to it" in refused
        process.send(signum)
        finished = process.end()
    assert finished.code == 128 + signum
    assert f"stopped by {signum.name} after" in finished.stdout and not finished.errors


UNREAD = [("pytorch_SingleGPU.py", 129), ("estimate.py --only SingleGPU", 1)]


@cases("words, code", UNREAD, lambda words, code: code == 129)
def test_nobody_reads(words, code, tmp_path):
    """As after ``| head``: a program ends without a traceback."""
    pipe = f"set -o pipefail; {sys.executable} {ROOT}/{words} | :"
    ended = subprocess.run(["bash", "-c", pipe], cwd=tmp_path, capture_output=True)
    assert ended.returncode == code and b"Traceback" not in ended.stderr


@cases("signum", [signal.SIGINT, signal.SIGKILL], lambda signum: signum == signal.SIGKILL)
def test_ranks_end_with_their_launcher(signum, tmp_path):
    """By Ctrl-C or killed, after torchrun has restarted them from a snapshot, as one of them died.
    They listen on the loopback interface alone."""
    command = start("pytorch_torchrun_DDP", 2, f"--epochs 500 --output-dir {tmp_path}")
    command = command.replace("--standalone", "--standalone --max-restarts=1")
    with started(command) as process:
        wait_for(lambda: snapshots(tmp_path))
        os.kill(ranks_of(tmp_path)[-1], signal.SIGKILL)
        wait_for(lambda: "resumed from" in process.output[0])
        first, second = ranks_of(tmp_path)
        assert set(listening(first) + listening(second)) == {"127.0.0.1"}
        process.send(signum, group=signum == signal.SIGINT)
        wait_for(lambda: not ranks_of(tmp_path), 15)
        finished = process.end()
    assert finished.code
    if signum == signal.SIGINT:
        assert finished.stdout.count("stopped by SIGINT after step") == 1
        assert f"{snapshots(tmp_path)[0]}; resume" in finished.stdout


def test_a_rank_with_loaders_ends_after_an_exception(tmp_path):
    """It does not wait for them, nor the launcher for it."""
    fault = {"kind": "exception", "rank": 1, "step": 3, "phase": "forward"}
    fault = json.dumps(fault | {"events": str(tmp_path / "events")})
    command = "torchrun --nproc_per_node=2 measure/faults/victim.py pytorch_torchrun_DDP.py"
    command += f" {SMALL} --epochs 4 --workers 1 --output-dir {tmp_path}/run"
    finished = launch(command, timeout=60, forked=True, FAULT=fault)
    assert finished.code == 1 and "InjectedFault" in finished.stderr
