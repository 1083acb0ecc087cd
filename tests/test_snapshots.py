"""Snapshots: what is written, kept and chosen, and what damage, a full disk and hostile files do.
That a resumed run has the same bits: test_contract.py. Random trials of all of it: test_faults.py.
"""

import json
import math
import os
import random
import re
import shutil
import subprocess

import pytest
import torch
from conftest import cases, hooked, launch, same_bits, snapshots, succeed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_house import FILES

from harness import snapshots as disk
from harness.progress import RunState
from libraries.weights import load

JOB = "--dataset synthetic --train-samples 96 --eval-samples 12 --batch-size 24"  # 4 steps an epoch
SMALL = f"{JOB} --model small_resnet_dropout --deterministic"
DEEPSPEED = "pytorch_DeepSpeed --deepspeed_config config/zero_stage{}_config.json".format
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of its own")
full = pytest.mark.full


def weights(folder):
    return torch.load(folder / "model.pt", weights_only=True)


def same(folder, other):
    return same_bits(weights(folder), weights(other))


def result(folder):
    return json.loads((folder / "result.json").read_text())


def start(script, n=1, flags=""):
    """The command of a job, with a small model."""
    return hooked(script, n, f"{SMALL} {flags}")


def run(command, **env):
    return succeed(command, forked=True, **env)


LONGER = f"{SMALL} --epochs 2 --warmup-steps 20"  # a run that several tests begin with


def test_more_epochs_take_up_the_longer_schedule(tmp_path):
    """The rate had come down to 0 at the end; with more epochs it is that of the middle. And what a
    killed run had not delivered, the next one does."""
    job = start("pytorch_SingleGPU", flags=f"--print-freq 1 --output-dir {tmp_path}")
    run(f"{job} --epochs 1")
    expected = weights(tmp_path)
    before = result(tmp_path)
    (tmp_path / "model.pt").unlink()
    (tmp_path / "result.json").unlink()
    run(f"{job} --epochs 1 --resume auto")
    assert same_bits(weights(tmp_path), expected)
    for name in ["train_loss", "eval_accuracy", "eval_samples", "images_per_second", "steps"]:
        assert result(tmp_path)[name] == before[name]
    finished = run(f"{job} --epochs 2 --resume auto")
    assert "at epoch 2, step 5" in finished.stdout
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    rates = {point.step: point.value for point in reader.Scalars("step/learning_rate")}
    assert list(rates) == list(range(1, 9))
    assert rates[5] == pytest.approx(0.01 * 0.5)
    assert len(result(tmp_path)["train_loss"]) == 2


BEST = "--dataset synthetic --train-samples 96 --eval-samples 12 --batch-size 24 --epochs 3"
BEST += " --model gpt-2x2x16 --context 16 --lr 100 --warmup-steps 99 --eval-every 2"  # diverges
KEEP = ["pytorch_SingleGPU", "pytorch_FSDP", "pytorch_PP", "pytorch_LocalSGD"]
KEEP += ["pytorch_FSDP_by_hand", DEEPSPEED(2)]


@cases("script", KEEP, lambda s: s == KEEP[0])
def test_the_best_weights_are_kept(script, tmp_path):
    """Beside the last two snapshots; and a run that resumes at its end delivers them again."""
    command = hooked(script, 2, f"{BEST} --output-dir {tmp_path} --resume auto")
    finished = run(command)
    found = result(tmp_path)
    assert found["eval_step"] == [2, 4, 6, 8, 10, 12]
    assert found["model_step"] == 2 and min(found["eval_loss"]) == found["eval_loss"][0]
    assert f"done: loss {found['eval_loss'][0]:.4f}" in finished.lines[-1]
    assert [int(path.name.split("-")[1]) for path in snapshots(tmp_path)] == [12, 10, 2]
    best = snapshots(tmp_path)[-1]
    expected = weights(tmp_path)
    assert same_bits({n: t.float() for n, t in load(best).items() if n in expected}, expected)
    (tmp_path / "result.json").unlink()
    run(command)
    assert same_bits(weights(tmp_path), expected)
    shutil.rmtree(best)
    (tmp_path / "result.json").unlink()
    assert "its snapshot does not exist; model.pt has the weights of step 12" in run(command).stdout
    assert result(tmp_path)["model_step"] == 12


def test_the_best_evaluation():
    """The lowest loss, wherever it was, and the first of two; NaN is the worst."""
    run = RunState(torch.zeros(()))
    assert run.best == (0, math.inf)
    best = []
    for run.step, loss in enumerate([math.nan, 3.0, 1.0, math.nan, 2.0, 1.0, 0.5, 4.0], start=1):
        run.add_evaluation(0.0, {"loss": loss, "accuracy": 0.0, "samples": 1}, 0.0)
        best.append(run.best)
    assert best[1:] == [(2, 3.0), *4 * [(3, 1.0)], *2 * [(7, 0.5)]]
    assert run.name_best() == "step-00000007-evaluated"


def test_a_new_run_keeps_the_files_of_the_last(tmp_path):
    """And may start from its weights. Scored after a step of nearly no length, they give what the
    first run reported."""
    job = start("pytorch_SingleGPU", flags=f"--norm group --output-dir {tmp_path}")
    run(f"{job} --epochs 1")
    names = ["model.pt", "result.json", "snapshots/step-00000004-evaluated/state.pt"]
    first = {name: (tmp_path / name).read_bytes() for name in names}
    scored = result(tmp_path)
    shutil.copy(tmp_path / "model.pt", tmp_path / "copy.pt")
    flags = f"--weights {tmp_path}/copy.pt --max-steps 4 --lr 1e-30 --weight-decay 0 --seed 0"
    run(f"{job} {flags}")
    assert result(tmp_path)["eval_accuracy"] == scored["eval_accuracy"]
    assert result(tmp_path)["eval_loss"] == pytest.approx(scored["eval_loss"])
    for name in names:
        assert (tmp_path / "previous" / name).read_bytes() == first[name]
    assert (tmp_path / "result.json").read_bytes() != first["result.json"]


DAMAGED = ["pytorch_SingleGPU", "pytorch_torchrun_DDP", DEEPSPEED(2)]


@cases("script", DAMAGED, lambda s: s == DAMAGED[0])
def test_a_damaged_snapshot_is_named_and_the_one_before_is_used(script, tmp_path):
    """And the stock tool sees the damage as well."""
    command = f"{start(script, 2)} --epochs 2 --output-dir {tmp_path}"
    run(command)
    expected = weights(tmp_path)
    newer, older = snapshots(tmp_path)
    check = ["sha256sum", "--check", "--quiet", disk.SUMS]
    assert subprocess.run(check, cwd=newer).returncode == 0
    files = [path for path in newer.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    assert subprocess.run(check, cwd=newer, capture_output=True).returncode == 1
    (tmp_path / "result.json").unlink()
    finished = run(f"{command} --resume auto")
    name = largest.relative_to(newer)
    assert f"snapshot {newer} is damaged and ignored: {name}" in finished.stdout
    assert f"resumed from {older} at epoch 2, step 5" in finished.stdout
    assert same_bits(weights(tmp_path), expected)
    assert (tmp_path / "previous" / "snapshots" / newer.name).is_dir(), "kept, out of the way"


def damage(way, folder, older, rng):
    """Damage a snapshot, at a place drawn at random."""
    file = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    content = bytearray(file.read_bytes())
    if way == "one bit":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
    elif way == "cut off":
        file.write_bytes(content[: rng.randrange(len(content))])
    elif way == "one file missing":
        file.unlink()
    elif way == "all files missing":
        shutil.rmtree(folder)
        folder.mkdir()
    elif way == "state of an older one":
        shutil.copy(older / "state.pt", folder)
    else:
        shutil.copytree(older, folder, dirs_exist_ok=True)


DAMAGE = ("one bit", "cut off", "one file missing", "all files missing")
DAMAGE += ("state of an older one", "all of an older one")


@pytest.mark.parametrize("way", DAMAGE)
def test_no_damage_is_overlooked(way, run_once, tmp_path, capsys):
    """2,000 trials: docs/reports/2026-11-endurance.md."""
    newer, older = snapshots(run_once("pytorch_SingleGPU", 1, LONGER)[1])
    assert disk.read_snapshot(newer, None, named=False)
    rng = random.Random(way)
    for trial in range(5):
        folder = tmp_path / str(trial) / newer.name
        shutil.copytree(newer, folder)
        damage(way, folder, older, rng)
        assert disk.read_snapshot(folder, None, named=False) is None
        assert f"snapshot {folder} is damaged and ignored: " in capsys.readouterr().out


def test_a_snapshot_that_a_machine_lacks_ends_all_ranks(monkeypatch, tmp_path):
    monkeypatch.setattr(disk, "gather_objects", lambda value: [value, False])
    with pytest.raises(SystemExit):
        disk.read_snapshot(tmp_path, None, named=False)


def test_another_scripts_snapshot_has_no_scaler(run_once, tmp_path):
    _, snapshot = snapshots(run_once("pytorch_SingleGPU", 1, LONGER)[1])
    job = hooked("pytorch_auto_mixed_precision --dtype float16", 1, LONGER)
    finished = run(f"{job} --output-dir {tmp_path} --resume {snapshot}")
    assert f"{snapshot} contains no scaler state; scaler is reset" in finished.stdout


def test_a_snapshot_of_another_job_is_refused(tmp_path):
    """In one line, of data as well as of flags; nothing of it is loaded, so no shape can differ."""
    for name, text in {"a": "abc ", "b": "abx ", "c": "abcd", "d": "abc abc "}.items():
        (tmp_path / name).write_text(text * 40)
    job = "python pytorch_SingleGPU.py --model gpt-1x1x4 --context 8 --batch-size 4 --epochs 1"
    job += f" --output-dir {tmp_path}/run --dataset text --data-dir {tmp_path}/"
    run(f"{job}a")
    [snapshot] = snapshots(tmp_path / "run")
    content = torch.load(snapshot / "state.pt", weights_only=True)
    for data, words in {
        "b": "data with classes ['c'], and this run has ['x']; use the same",
        "c": "data with classes [' '], and this run has ['d']; use the same",
        "d": "--train-samples 18, and this run has 36; use the same",
        "a --schedule plateau": "--schedule cosine, and this run has plateau; use the same",
        "a": "was written by an older version; resume with that",
    }.items():
        torch.save(content | {"format": content["format"] - (data == "a")}, snapshot / "state.pt")
        sign(snapshot)
        assert words in launch(f"{job}{data} --resume auto", forked=True).refusal


def test_a_restart_does_not_need_the_snapshot_that_resume_names(tmp_path):
    """It has its own, and has deleted that one by then: the last two are kept."""
    job = start("pytorch_SingleGPU", flags=f"--output-dir {tmp_path}")
    run(f"{job} --epochs 1 --max-steps 2")
    [named] = snapshots(tmp_path)
    job += f" --epochs 3 --resume {named}"
    longer = run(job, TORCHELASTIC_RUN_ID="a").stdout
    assert "schedule now ends at step 12; that of the snapshot's run ended at step 2" in longer
    assert not named.exists()
    before = result(tmp_path)
    again = run(job, TORCHELASTIC_RUN_ID="a", TORCHELASTIC_RESTART_COUNT="1")
    assert "nothing left to do" in again.stdout and "epoch 1/" not in again.stdout
    assert "schedule now ends" not in again.stdout
    assert result(tmp_path) == before


@pytest.fixture
def small(tmp_path):
    """A file system of its own, in memory."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=18m", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


NO_SPACE = [("pytorch_SingleGPU", 1, "stop"), ("pytorch_SingleGPU", 1, "continue")]
NO_SPACE += [("pytorch_FSDP", 2, "stop"), ("pytorch_FSDP", 2, "continue")]


@needs_root
@cases("script, n, on_save_error", NO_SPACE, lambda *r: r == NO_SPACE[0])
def test_no_space(script, n, on_save_error, small):
    """There is room for one snapshot of 10 MB and the model of 5 MB, not for a second snapshot."""
    command = hooked(script, n, f"{JOB} --model shufflenet_v2_x1_0 --epochs 2")
    command += f" --on-save-error {on_save_error} --output-dir {small}/run"
    finished = launch(command, forked=True)
    words = finished.stdout + finished.stderr
    assert "step 8: " in words and "step 4: " not in words, str(finished)
    assert "No space left on device" in words and "bytes" in words
    assert str(small / "run" / "snapshots" / "step-00000008-evaluated") in words
    assert finished.code == (3 if on_save_error == "stop" else 0), str(finished)
    if on_save_error == "stop":
        assert "free some disk space" in words
    else:
        assert "training continues" in words and (small / "run" / "model.pt").is_file()
    [good] = snapshots(small / "run")
    assert good.name == "step-00000004-evaluated" and not disk.find_damage(good)
    assert not list((small / "run" / "snapshots").glob(".*")), "nothing half is left"


UNWRITABLE = [("pytorch_FSDP", 1, "safetensors")]
UNWRITABLE += [("pytorch_checkpoint --async-save", 1, "distcp")]
UNWRITABLE += [("pytorch_DeepSpeed", 1, "optim_states")]
UNWRITABLE += [("pytorch_checkpoint", 0, "run.pt"), ("pytorch_DeepSpeed", 0, "model_states")]
UNWRITABLE += [("pytorch_torchrun_DDP", 0, "state.pt")]
UNWRITABLE += [("pytorch_LocalSGD --sync-every 1", 1, "rank-00001")]


@cases("script, rank, name", UNWRITABLE, lambda *row: row in UNWRITABLE[:2])
def test_what_one_rank_cannot_write_stops_no_other(script, rank, name, tmp_path):
    command = f"{start(script, 2)} --epochs 1 --snapshot-every 1 --timeout 30"
    hooks = f"unwritable:{rank},{name},step-00000002"
    finished = run(f"{command} --output-dir {tmp_path}", HOOKS=hooks)
    assert f"step {3 if 'async' in script else 2}: " in finished.stdout
    assert "Disk quota exceeded" in finished.stdout
    names = [path.name for path in snapshots(tmp_path)]
    older = ["step-00000001"] if "checkpoint" in script else []  # it keeps two beside the new one
    assert names == ["step-00000004-evaluated", "step-00000003", *older]


def test_results_that_cannot_be_written_are_not_lost(tmp_path):
    """The error names the snapshot from which the next run writes them."""
    command = start("pytorch_SingleGPU", 1, f"--epochs 1 --output-dir {tmp_path}")
    failed = launch(command, forked=True, HOOKS="unwritable:0,model.pt")
    assert failed.code == 3 and f"(snapshot: {snapshots(tmp_path)[0]})" in failed.errors[0]
    run(f"{command} --resume auto")
    assert (tmp_path / "model.pt").is_file()


def test_a_folder_that_vanishes(tmp_path):
    """While a snapshot is written; or between two, when it is made again."""

    def write(folder):
        torch.save(torch.zeros(10), folder / "state.pt")

    def vanish(folder):
        write(folder)
        shutil.rmtree(folder)

    folder = tmp_path / "a"
    assert "step-1 could not be written" in disk.write_snapshot(folder / "step-1", vanish)
    assert not disk.list_snapshots(folder)
    shutil.rmtree(folder)
    for number in (1, 2, 3):
        assert disk.write_snapshot(folder / f"step-{number}", write) is None
    assert [path.name for path in disk.list_snapshots(folder)] == ["step-3", "step-2"]


def attack(marker):
    """Whose pickle runs a command."""
    kind = type("Attack", (), {"__reduce__": lambda self: (os.system, (f"touch {marker}",))})
    return kind()


def sign(folder):
    """Make a forged snapshot verify: checksums are against damage, not against malice."""
    names = disk.list_files(folder)
    lines = [f"{disk.sha256(folder / name)}  {name}\n" for name in names]
    (folder / disk.SUMS).write_text("".join(lines))


@pytest.mark.parametrize("script, file", [
    ("pytorch_SingleGPU", "state.pt"),
    pytest.param("pytorch_DeepSpeed", "zero/mp_rank_00_model_states.pt", marks=full),
    ("pytorch_DeepSpeed", "evil/mp_rank_00_model_states.pt"),  # where `latest` points
])  # fmt: skip
def test_a_snapshot_that_would_run_code_is_refused(script, file, run_once, tmp_path):
    snapshot = tmp_path / "step-00000008-evaluated"
    marker = tmp_path / "attacked"
    shutil.copytree(snapshots(run_once(script, 1, LONGER)[1])[0], snapshot)
    if file.startswith("evil"):
        (snapshot / "zero").rename(snapshot / "evil")
        (snapshot / "latest").write_text("evil")
    torch.save({"step": attack(marker)}, snapshot / file)
    sign(snapshot)
    flags = f"{LONGER} --output-dir {tmp_path}/run --resume {snapshot}"
    assert str(snapshot) in launch(hooked(script, 1, flags), forked=True).refusal
    assert not marker.exists()


def test_all_loads_are_of_weights_only():
    for path in FILES:
        for call in re.findall(r"torch\.load\(([^)]*)\)", path.read_text()):
            assert "weights_only=True" in call, path
