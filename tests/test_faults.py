"""Faults in a long run: what is lost, and what the run reports."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from conftest import (
    HOOKED,
    ROOT,
    cases,
    launch,
    launcher,
    snapshots,
    started,
    state,
    succeed,
    wait_for,
)

from harness import snapshots as disk

JOB = "--dataset synthetic --train-samples 96 --eval-samples 12 --batch-size 24 --epochs 4"
SMALL = f"{JOB} --model small_resnet_dropout --deterministic"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of its own")


def weights(folder):
    return torch.load(folder / "model.pt", weights_only=True)


def same(folder, other):
    ours, theirs = weights(folder), weights(other)
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def ranks_of(folder):
    """Process numbers of the ranks that write to a folder, by rank."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_text().split("\0")
            env = (path / "environ").read_text().split("\0")
            rank = [word.removeprefix("RANK=") for word in env if word.startswith("RANK=")]
            if str(folder) in words and rank:
                found[int(rank[0])] = int(path.name)
    return [found[rank] for rank in sorted(found)]


def start(script, n=1):
    """What launches a script, through the file that has the small models."""
    return launcher(script, n, HOOKED)


def run(command):
    return succeed(command, forked=True)


# ----------------------------------------------------------------------------------- damages


@pytest.mark.parametrize("script", ["pytorch_torchrun_DDP", "pytorch_FSDP", "pytorch_DeepSpeed"])
def test_a_damaged_snapshot_is_named_and_the_one_before_is_used(script, tmp_path):
    """Of each form; and the stock tool sees the damage as well."""
    command = f"{start(script, 2)} {SMALL} --epochs 2 --output-dir {tmp_path}"
    run(f"{command} --max-steps 8")
    expected = weights(tmp_path)
    newer, older = snapshots(tmp_path)
    check = ["sha256sum", "--check", "--quiet", disk.SUMS]
    assert subprocess.run(check, cwd=newer).returncode == 0
    largest = max(
        (path for path in newer.rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
    )
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    assert subprocess.run(check, cwd=newer, capture_output=True).returncode == 1
    (tmp_path / "result.json").unlink()
    finished = run(f"{command} --max-steps 8 --resume auto")
    name = largest.relative_to(newer)
    assert f"snapshot {newer} is damaged and ignored: {name}" in finished.stdout
    assert f"resumed from {older} at epoch 2, step 5" in finished.stdout
    found = weights(tmp_path)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (tmp_path / "previous" / "snapshots" / newer.name).is_dir(), "kept, out of the way"


# ------------------------------------------------------------------------------ exact resume


DEEPSPEED = "pytorch_DeepSpeed --deepspeed_config config/zero_stage{}_config.json".format


STOPPED = [  # what is no line of the contract, and what a signal reaches in another way
    ("pytorch_SingleGPU", 1, True),
    ("pytorch_auto_mixed_precision --dtype bfloat16", 1, True),
    ("pytorch_torchrun_DDP", 2, False),
    ("pytorch_FSDP", 2, True),
    ("pytorch_DDP_AMP --dtype bfloat16", 2, True),
    (DEEPSPEED(2), 2, False),
    (DEEPSPEED(3), 2, True),
]
USUAL = ("pytorch_SingleGPU", "pytorch_torchrun_DDP", DEEPSPEED(3))


@pytest.mark.parametrize("script, n, forked", cases(STOPPED, lambda script, *_: script in USUAL))
def test_stopped_within_an_epoch_it_ends_with_the_same_bits(script, n, forked, tmp_path):
    """SIGTERM to the launcher saves a snapshot at once, wherever in the epoch that is."""
    command = f"{start(script, n)} {SMALL} --snapshot-every 1000"
    command += " --batch-size 8 --train-samples 800 --epochs 2 --max-steps 110 --print-freq 5"
    run(f"{command} --output-dir {tmp_path}/whole")
    stopped = tmp_path / "stopped"
    with started(f"{command} --output-dir {stopped}", forked=forked) as process:
        wait_for(lambda: list(stopped.glob("events.*")))
        time.sleep(0.1)  # from then on it listens
        process.send(signal.SIGTERM)
        process.end()
        wait_for(lambda: not ranks_of(stopped))  # which `deepspeed` does not wait for
        said = process.output[0]
    [snapshot] = snapshots(stopped)
    step = state(stopped)["step"]
    assert 0 < step < 100, said
    assert f"stopped by SIGTERM after step {step} of 110: snapshot {snapshot}" in said
    assert not (stopped / "model.pt").exists()
    resumed = run(f"{command} --output-dir {stopped} --resume auto")
    assert f"at epoch 1, step {step + 1}" in resumed.stdout
    assert same(stopped, tmp_path / "whole")
    mine, whole = (
        json.loads((folder / "result.json").read_text()) for folder in (stopped, tmp_path / "whole")
    )
    for name in ["train_loss", "eval_loss", "eval_accuracy", "steps"]:
        assert mine[name] == whole[name]


@pytest.mark.parametrize(
    "script", ["pytorch_torchrun_DDP", pytest.param("pytorch_FSDP", marks=pytest.mark.full)]
)
def test_three_ranks_round_their_sums_as_before(script, tmp_path):
    """DDP sorts its buckets after the first step, which matters for the sums of three."""
    command = f"{start(script, 3)} {SMALL} --epochs 2 --snapshot-every 3"
    run(f"{command} --output-dir {tmp_path}/whole")
    [third] = (tmp_path / "whole" / "snapshots").glob("step-00000006")
    run(f"{command} --output-dir {tmp_path}/parts --resume {third}")
    assert same(tmp_path / "parts", tmp_path / "whole")


def test_at_another_world_size_every_sample_is_still_seen_once(tmp_path):
    """In float64, three ranks within an epoch, then two: the same as one process from the start."""
    job = f"{JOB} --model small_resnet --norm group --double --epochs 1"
    alone, three, two = (
        f"{start(script, n)} {job}"
        for script, n in [("pytorch_SingleGPU", 1), *[("pytorch_torchrun_DDP", n) for n in (3, 2)]]
    )
    run(f"{alone} --output-dir {tmp_path}/whole")
    parts = tmp_path / "parts"
    run(f"{three} --snapshot-every 1 --output-dir {parts}")
    evaluated, third = snapshots(parts)
    assert third.name == "step-00000003"
    finished = run(f"{two} --output-dir {tmp_path}/two --resume {third}")
    assert "at epoch 1, step 4" in finished.stdout
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "two")
    assert max((found[n] - expected[n]).abs().max().item() for n in expected) < 1e-10
    losses = [
        json.loads((tmp_path / name / "result.json").read_text())["train_loss"]
        for name in ("whole", "two")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def test_two_snapshots_are_kept(tmp_path):
    run(f"{start('pytorch_SingleGPU')} {SMALL} --snapshot-every 1 --output-dir {tmp_path}")
    names = [path.name for path in snapshots(tmp_path)]
    assert names == ["step-00000016-evaluated", "step-00000015"]
    assert not list((tmp_path / "snapshots").glob(".*"))


# ---------------------------------------------------------------------------- stop and orphans


@pytest.mark.parametrize(
    "script, signum, code",
    [
        ("pytorch_SingleGPU", signal.SIGTERM, 143),
        pytest.param("pytorch_torchrun_DDP", signal.SIGINT, 130, marks=pytest.mark.full),
    ],
    ids=["SIGTERM", "Ctrl-C"],
)
def test_one_process_is_stopped_with_a_documented_code(script, signum, code, tmp_path):
    """A single process, which listens to nobody else."""
    command = f"python {HOOKED} {script}.py {SMALL} --epochs 500 --workers 1"
    with started(f"{command} --output-dir {tmp_path}") as process:
        wait_for(lambda: snapshots(tmp_path))
        assert all(a == "127.0.0.1" for a in listening(process.process.pid))
        process.send(signum, group=True)  # as a terminal does, to its children as well
        finished = process.end()
    assert finished.code == code
    output = finished.stdout + finished.stderr
    assert f"stopped by {signum.name} after step" in output and "Traceback" not in output


def test_ctrl_c_for_torchrun(tmp_path):
    command = f"{start('pytorch_torchrun_DDP', 2)} {SMALL} --epochs 500 --output-dir {tmp_path}"
    with started(command) as process:
        wait_for(lambda: snapshots(tmp_path))
        process.send(signal.SIGINT, group=True)
        finished = process.end()
    assert finished.code != 0
    assert finished.stdout.count("stopped by SIGINT after step") == 1
    name = re.search(r"snapshots/(step-\S+);", finished.stdout).group(1)
    assert snapshots(tmp_path)[0].name == name


@pytest.mark.parametrize(
    "script", ["pytorch_torchrun_DDP", pytest.param("pytorch_DeepSpeed", marks=pytest.mark.full)]
)
def test_ranks_listen_on_loopback_and_end_with_their_launcher(script, tmp_path):
    command = f"{start(script, 2)} {SMALL} --epochs 500 --output-dir {tmp_path}"
    with started(command) as process:
        wait_for(lambda: snapshots(tmp_path))
        ranks = ranks_of(tmp_path)
        assert len(ranks) == 2
        addresses = [address for rank in ranks for address in listening(rank)]
        if script == "pytorch_torchrun_DDP":  # DeepSpeed has rank 0 hold the store, for everybody
            assert addresses and all(a == "127.0.0.1" or a.endswith("0100007F") for a in addresses)
        process.send(signal.SIGKILL)
        wait_for(lambda: not ranks_of(tmp_path), 15)


def listening(process):
    """Addresses on which a process accepts TCP connections."""
    sockets = set()
    for file in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(file))
    found = []
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{kind}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                address = words[1].split(":")[0]
                if kind == "tcp":
                    address = ".".join(str(b) for b in reversed(bytes.fromhex(address)))
                found.append(address)
    return found


# --------------------------------------------------------------------------------------- hangs


def test_a_rank_with_loaders_ends_after_an_exception(tmp_path):
    """It does not wait for them, nor the launcher for it."""
    fault = {"kind": "exception", "rank": 1, "step": 3, "phase": "forward"}
    command = f"{launcher('pytorch_torchrun_DDP', 2, 'measure/faults/victim.py')} {SMALL}"
    finished = launch(
        f"{command} --workers 1 --output-dir {tmp_path}/run",
        timeout=60,
        FAULT=json.dumps(fault | {"events": str(tmp_path / "events")}),
    )
    assert finished.code == 1 and "InjectedFault" in finished.stderr


# ------------------------------------------------------------------------------------- the disk


@contextlib.contextmanager
def file_system(folder, size):
    """One of its own, in memory."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@needs_root
@pytest.mark.parametrize(
    "on_save_error, script, n",
    cases(
        [
            (on_save_error, *script)
            for script in [("pytorch_SingleGPU", 1), ("pytorch_FSDP", 2)]
            for on_save_error in ["continue", "stop"]
        ],
        lambda on_save_error, script, n: (on_save_error == "stop") == (n == 2),
    ),
)
def test_no_space(script, n, on_save_error, tmp_path):
    """There is room for one snapshot of 10 MB and the model of 5 MB, not for a second snapshot."""
    small = tmp_path / "small"
    with file_system(small, "18m"):
        command = f"{launcher(script, n)} {JOB} --model shufflenet_v2_x1_0 --epochs 2"
        finished = launch(
            f"{command} --on-save-error {on_save_error} --output-dir {small}/run", forked=True
        )
        words = finished.stdout + finished.stderr
        assert "step 8: " in words and "step 4: " not in words, str(finished)
        assert "No space left on device" in words and "bytes free" in words
        assert str(small / "run" / "snapshots" / "step-00000008-evaluated") in words
        if on_save_error == "stop":
            assert finished.code == 3, str(finished)
            assert "free some disk space" in words
        else:
            assert finished.code == 0, str(finished)
            assert "training continues" in words and (small / "run" / "model.pt").is_file()
        [good] = snapshots(small / "run")
        assert good.name == "step-00000004-evaluated" and not disk.find_damage(good)
        assert not list((small / "run" / "snapshots").glob(".*")), "nothing half is left"


UNWRITABLE = """
import runpy, sys, torch
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import small_resnet
script = next(word for word in sys.argv[1:] if word.endswith(".py"))
sys.argv = [script, *(word for word in sys.argv[1:] if word != script)]
from harness.world import world
save = torch.save
def save_or_fail(state, path, *args, **kwargs):
    if world().rank == {rank} and "{name}" in str(path) and "step-00000002" in str(path):
        raise OSError(122, "Disk quota exceeded")
    return save(state, path, *args, **kwargs)
torch.save = save_or_fail
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.parametrize(
    "script, rank, name",
    [
        ("pytorch_torchrun_DDP", 0, "state.pt"),
        ("pytorch_FSDP", 0, "state.pt"),
        ("pytorch_DeepSpeed", 0, "model_states"),
        ("pytorch_DeepSpeed", 1, "optim_states"),
    ],
)
def test_what_one_rank_cannot_write_stops_no_other(script, rank, name, tmp_path):
    through = tmp_path / "unwritable.py"
    through.write_text(UNWRITABLE.format(root=str(ROOT), rank=rank, name=name))
    command = f"{launcher(script, 2, through)} {SMALL} --epochs 1 --snapshot-every 1"
    finished = run(f"{command} --timeout 30 --output-dir {tmp_path}/run")
    assert "step 2: " in finished.stdout and "Disk quota exceeded" in finished.stdout
    assert "training continues" in finished.stdout
    names = [path.name for path in snapshots(tmp_path / "run")]
    assert names == ["step-00000004-evaluated", "step-00000003"]


@needs_root
def test_full_while_writing_the_one_before_stays_good(tmp_path):
    small = tmp_path / "small"
    with file_system(small, "3m"):
        write = lambda folder: torch.save(torch.zeros(2**18), folder / "state.pt")  # noqa: E731
        folder = small / "snapshots"
        assert disk.write_snapshot(folder / "step-1", write) is None
        large = lambda folder: torch.save(torch.zeros(2**20), folder / "state.pt")  # noqa: E731
        why = disk.write_snapshot(folder / "step-2", large)
        assert "step-2 could not be written" in why
        assert [path.name for path in folder.iterdir()] == ["step-1"]
        assert disk.find_damage(folder / "step-1") is None
        subprocess.run(["mount", "-o", "remount,ro", small], check=True)
        why = disk.write_snapshot(folder / "step-2", write)
        assert "Read-only file system" in why
        assert disk.find_damage(folder / "step-1") is None


def test_a_folder_that_vanishes_while_writing(tmp_path):
    def write(folder):
        torch.save(torch.zeros(10), folder / "state.pt")
        shutil.rmtree(folder)

    why = disk.write_snapshot(tmp_path / "a" / "step-1", write)
    assert "step-1 could not be written" in why and "bytes free" in why
    assert not disk.list_snapshots(tmp_path / "a")


def test_a_folder_that_vanishes_is_made_again(tmp_path):
    command = f"{start('pytorch_SingleGPU')} {SMALL} --epochs 100 --output-dir {tmp_path}/run"
    with started(command, forked=True) as process:
        wait_for(lambda: snapshots(tmp_path / "run"))
        shutil.rmtree(tmp_path / "run" / "snapshots")
        wait_for(lambda: snapshots(tmp_path / "run"))
        process.send(signal.SIGTERM)
        process.end()
    assert disk.find_damage(snapshots(tmp_path / "run")[0]) is None


# ------------------------------------------------------------------------------------- security


class Attack:
    def __reduce__(self):
        return os.system, ("touch {}",)


def attack(marker):
    instance = Attack()
    instance.__class__ = type(
        "Attack", (), {"__reduce__": lambda self: (os.system, (f"touch {marker}",))}
    )
    return instance


def sign(folder):
    """Make a forged snapshot verify: checksums are against damage, not against malice."""
    names = disk.list_files(folder)
    lines = [f"{disk.sha256(folder / name)}  {name}\n" for name in names]
    (folder / disk.SUMS).write_text("".join(lines))


@pytest.mark.parametrize(
    "script, file",
    [
        ("pytorch_SingleGPU", "state.pt"),
        ("pytorch_FSDP", "state.pt"),
        ("pytorch_DeepSpeed", "zero/mp_rank_00_model_states.pt"),
        ("pytorch_DeepSpeed", "evil/mp_rank_00_model_states.pt"),  # where `latest` points
    ],
)
def test_a_snapshot_that_would_run_code_is_refused(script, file, tmp_path):
    command = f"python {HOOKED} {script}.py {SMALL} --output-dir {tmp_path}/run"
    run(f"{command} --max-steps 1")
    [snapshot] = snapshots(tmp_path / "run")
    marker = tmp_path / "attacked"
    if file.startswith("evil"):
        (snapshot / "zero").rename(snapshot / "evil")
        (snapshot / "latest").write_text("evil")
    torch.save({"step": attack(marker)}, snapshot / file)
    sign(snapshot)
    finished = launch(f"{command} --resume {snapshot}", forked=True)
    assert finished.code == 2 and "Traceback" not in finished.stderr, str(finished)
    [line] = finished.errors
    assert str(snapshot) in line
    assert not marker.exists()


def test_all_loads_are_of_weights_only():
    for path in [*ROOT.glob("*.py"), *ROOT.glob("[hij]*/*.py")]:  # harness, inference, jobs
        for call in re.findall(r"torch\.load\(([^)]*)\)", path.read_text()):
            assert "weights_only=True" in call, path
