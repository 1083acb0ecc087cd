"""Data, output, snapshots and weights elsewhere: on a real S3 and a real sftp server."""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from socket import create_server

import file_servers
import pytest
import torch
from checkout import copy_checkout
from conftest import (
    ROOT,
    environment,
    free_port,
    launch,
    launcher,
    started,
    succeed,
    wait_for,
)

import common
from harness import mirror, remote
from harness.mirror import Mirror, RemoteStore
from harness.remote import Remote, RemoteError
from harness.snapshots import SUMS, find_damage

JOB = (
    "--model gpt-1x2x16 --context 16 --dataset synthetic --train-samples 96 --eval-samples 12 "
    "--batch-size 24 --epochs 3 --deterministic"  # of 4 steps each
)
LARGE = JOB.replace("1x2x16", "1x2x512")  # whose snapshots take a while to copy

needs_sshd = pytest.mark.skipif(
    not (file_servers.SSHD and shutil.which("ssh-keygen")), reason="OpenSSH's sshd not installed"
)


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    server = file_servers.s3(tmp_path_factory.mktemp("s3"), free_port(), environment())
    with file_servers.running(server), pytest.MonkeyPatch.context() as patch:
        for name, value in server.env.items():
            patch.setenv(name, value)
        server.files = Remote("s3://bucket")
        server.files.list_files()
        server.files.fs.mkdir("bucket")
        server.folder = server.log.parent
        yield server


@pytest.fixture
def sftp(tmp_path):
    (tmp_path / "keys").mkdir()
    server = file_servers.sftp(tmp_path / "keys", free_port(), environment())
    with file_servers.running(server):
        yield server


@pytest.fixture
def reins(s3):
    """A function that tells the S3 server to `hold` or to `refuse` what it is sent for a path."""

    def tell(rein, path):
        (s3.folder / rein).write_text(path)

    def let_go(*_):
        for rein in ("hold", "refuse", "held"):
            (s3.folder / rein).unlink(missing_ok=True)

    tell.let_go, tell.held = let_go, lambda: (s3.folder / "held").exists()
    yield tell
    let_go()


def command(flags, script="pytorch_SingleGPU", ranks=1, job=JOB):
    words = launcher(script, ranks).replace(f"{script}.py", f"{ROOT}/{script}.py")
    return f"{words} {job} {flags}"


def machine(folder):
    """A folder to start a run in, in which there is nothing yet."""
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run ends with that nothing interrupts, of either job."""
    weights = {}
    for job in (JOB, LARGE):
        folder = tmp_path_factory.mktemp("whole")
        succeed(command(f"--output-dir {folder}", job=job), forked=True)
        weights[job] = torch.load(folder / "model.pt", weights_only=True)
    return weights


def same_bits(path, expected):
    found = torch.load(path, weights_only=True)
    return all(torch.equal(found[name], expected[name]) for name in expected)


def steps(files):
    """Which snapshots are there, and whether they were copied to their end."""
    found = mirror.by_snapshot({k.removeprefix("snapshots/"): v for k, v in files.items()})
    return {int(name.split("-")[1]): SUMS in theirs for name, theirs in found.items()}


# ------------------------------------------------------------------------------------ a run


def test_killed_in_the_middle_of_a_copy(s3, reins, whole, tmp_path):
    """The half of a snapshot is named and left out by another machine; on the same one, the newest
    is still there."""
    files, here = Remote("s3://bucket/killed"), machine(tmp_path / "here")
    own = command("--output-dir s3://bucket/killed")
    reins("hold", f"step-00000008-evaluated/{SUMS}")
    with started(own, cwd=here, forked=True, **s3.env) as process:
        wait_for(lambda: reins.held() or not process.running)
        assert process.running, str(process.end())
    reins.let_go()
    assert steps(files.list_files()) == {8: False, 4: True}

    other = command(f"--resume s3://bucket/killed --output-dir {tmp_path}/out")
    finished = succeed(other, cwd=machine(tmp_path / "there"), forked=True, **s3.env)
    assert "step-00000008-evaluated is damaged and left out: SHA256SUMS is missing" in str(finished)
    snapshot = "data/remote/s3/bucket/killed/snapshots/step-00000004-evaluated"
    assert f"resumed from {snapshot} at epoch 2, step 5" in finished.stdout
    assert same_bits(tmp_path / "out" / "model.pt", whole[JOB])

    finished = succeed(f"{own} --resume auto", cwd=here, forked=True, **s3.env)
    snapshot = "runs/remote/s3/bucket/killed/snapshots/step-00000008-evaluated"
    assert f"resumed from {snapshot} at epoch 3, step 9" in finished.stdout
    assert finished.lines[-1] == "files copied to s3://bucket/killed"
    assert steps(files.list_files()) == {12: True, 8: True}
    files.download(files.list_files(), tmp_path / "back")
    assert same_bits(tmp_path / "back" / "model.pt", whole[JOB])
    for snapshot in (tmp_path / "back" / "snapshots").iterdir():
        assert not find_damage(snapshot)
    result = json.loads((tmp_path / "back" / "result.json").read_text())
    assert "--output-dir s3://bucket/killed" in result["settings"]
    assert f"settings: {result['settings']}" in finished.lines


@needs_sshd
def test_killed_in_the_middle_of_a_file(sftp, whole, tmp_path):
    """As it is in a file system: half of a file may be there. Another machine goes on."""
    out = tmp_path / "server"
    own = command(f"--output-dir {sftp.url}{out}", job=LARGE)
    second = out / "snapshots" / "step-00000008-evaluated"
    with started(own, cwd=machine(tmp_path / "here"), forked=True, **sftp.env) as process:
        wait_for(lambda: (second / "state.pt").exists() or not process.running)
        assert process.running, str(process.end())
    assert not (second / SUMS).exists()
    finished = succeed(
        f"{own} --resume auto", cwd=machine(tmp_path / "there"), forked=True, **sftp.env
    )
    assert "step-00000008-evaluated is damaged and left out" in finished.stdout
    assert "at epoch 2, step 5" in finished.stdout
    assert same_bits(out / "model.pt", whole[LARGE])
    assert sorted(path.name for path in (out / "snapshots").iterdir()) == [
        "step-00000008-evaluated",
        "step-00000012-evaluated",
    ]


def test_shards_of_two_ranks_and_weights(s3, tmp_path):
    """They go on elsewhere; and the weights that they end with begin another run."""
    own = command("--output-dir s3://bucket/shards", "pytorch_FSDP", 2)
    succeed(f"{own} --max-steps 4", cwd=machine(tmp_path / "here"), forked=True, **s3.env)
    there = machine(tmp_path / "there")
    finished = succeed(f"{own} --resume auto", cwd=there, forked=True, **s3.env)
    assert "at epoch 2, step 5" in finished.stdout
    assert steps(Remote("s3://bucket/shards").list_files()) == {12: True, 8: True}

    flags = f"--weights s3://bucket/shards/model.pt --max-steps 1 --output-dir {tmp_path}/second"
    succeed(command(flags, "pytorch_torchrun_DDP", 2), cwd=there, forked=True, **s3.env)
    result = json.loads((tmp_path / "second" / "result.json").read_text())
    assert "--weights s3://bucket/shards/model.pt" in result["settings"]


def test_data(s3, image_folder, tmp_path):
    """Downloaded by one rank, once, and then what is here already is not fetched again."""
    names = [str(p.relative_to(image_folder)) for p in image_folder.rglob("*") if p.is_file()]
    Remote("s3://bucket/images").upload(image_folder, names)
    job = "--batch-size 24 --epochs 1 --max-steps 1 --model squeezenet1_1"
    flags = f"--dataset folder --data-dir s3://bucket/images --output-dir {tmp_path}/run"
    images = command(flags, "pytorch_torchrun_DDP", 2, job=job)
    finished = succeed(images, cwd=tmp_path, forked=True, **s3.env)
    assert (
        f": {len(names)} of {len(names)} files" in finished.lines[2]
        and "60 training" in finished.lines[3]
    )
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert "--data-dir s3://bucket/images" in result["settings"]
    (tmp_path / "data/remote/s3/bucket/images" / names[0]).unlink()
    again = succeed(images, cwd=tmp_path, forked=True, **s3.env)
    assert f": 1 of {len(names)} files" in again.lines[2], "the others are here already"
    added = tmp_path / "data/remote/s3/bucket/images/train/red/added.jpg"
    shutil.copy(image_folder / names[0], added)
    refused = launch(images, cwd=tmp_path, forked=True, **s3.env)
    assert refused.code == 2 and "added.jpg is not in s3://bucket/images; remove it" in str(refused)

    (tmp_path / "text").write_text("to be or not to be " * 50)
    Remote("s3://bucket").upload(tmp_path, ["text"])
    job = "--batch-size 24 --epochs 1 --model gpt-1x2x16 --context 16 --dataset text"
    text = command(f"--data-dir s3://bucket/text --output-dir {tmp_path}/run", job=job)
    finished = succeed(text, cwd=tmp_path, forked=True, **s3.env)
    assert "data: text, 855 training" in finished.stdout


@pytest.mark.parametrize("server", ["moto_server", pytest.param("sshd", marks=needs_sshd)])
def test_the_commands_of_the_page(server, tmp_path):
    """As typed, but for the ports and a shorter job."""
    page = (ROOT / "docs/reliability.md").read_text()
    [block] = [b for b in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if server in b]
    (tmp_path / ".ssh").mkdir()
    make_key = f"ssh-keygen -q -t ed25519 -N '' -f {tmp_path}/.ssh/id_ed25519"
    port = free_port()
    block = re.sub(r"\b(5000|2222)\b", str(port), block)
    block = block.replace("/usr/sbin/sshd", str(file_servers.SSHD))
    listens = f"until (echo > /dev/tcp/127.0.0.1/{port}) 2> /dev/null; do sleep 0.1; done"
    script = ["trap 'kill $(jobs -p)' EXIT"] + [make_key] * (server == "sshd")
    for line in block.splitlines():
        script.append(f"{line} {JOB}" if line.startswith("python pytorch_") else line)
        if line.endswith("&"):
            script.append(listens)
    if os.getuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)
    checkout = copy_checkout(machine(tmp_path / "checkout"))
    env = {"HOME": str(tmp_path), "no_proxy": "127.0.0.1"}
    finished = succeed(["bash", "-ec", "\n".join(script)], cwd=checkout, **env)
    assert finished.lines[-1].startswith("files copied to s"), str(finished)


# --------------------------------------------------------------------------------- what goes wrong


def test_a_copy_that_fails_is_made_up_for(s3, reins, tmp_path):
    reins("refuse", "step-00000004")
    with started(
        command("--output-dir s3://bucket/late --snapshot-every 2", job=JOB),
        cwd=tmp_path,
        forked=True,
        **s3.env,
    ) as process:
        wait_for(lambda: "training goes on" in process.output[0] or not process.running)
        reins.let_go()
        finished = process.end()
    assert finished.code == 0, str(finished)
    [line, *_] = [line for line in finished.lines if "cannot be written" in line]
    assert line.startswith("step 4: s3://bucket/late/snapshots cannot be written (")
    assert "step-00000004-evaluated; training goes on (--on-save-error continue)" in line
    assert steps(Remote("s3://bucket/late").list_files()) == {12: True, 10: True}


def test_a_copy_that_fails_ends_the_run_if_it_is_to(s3, reins, tmp_path):
    """All ranks, without a traceback."""
    reins("refuse", "step-00000004")
    flags = "--output-dir s3://bucket/stops --on-save-error stop"
    finished = launch(
        command(flags, "pytorch_torchrun_DDP", 2), cwd=tmp_path, forked=True, **s3.env
    )
    assert finished.code == 3 and "Traceback" not in finished.stderr, str(finished)
    [line] = finished.errors
    assert "step 4: s3://bucket/stops/snapshots cannot be written" in line
    assert line.endswith("see to the server, then go on with --resume auto")
    [kept] = (tmp_path / "runs/remote/s3/bucket/stops/snapshots").iterdir()
    assert not find_damage(kept) and str(kept.relative_to(tmp_path)) in line


@needs_sshd
def test_a_server_that_is_gone_in_the_middle_of_a_save(sftp, tmp_path):
    """The run goes on, its end says what is missing, and the same command delivers it."""
    out = tmp_path / "server"
    own = command(f"--output-dir {sftp.url}{out}", job=LARGE)
    options = {"cwd": machine(tmp_path / "here"), "forked": True, **sftp.env}
    second = out / "snapshots" / "step-00000008-evaluated"
    with started(own, **options) as process:
        wait_for(lambda: second.exists() or not process.running)
        sftp.kill()
        finished = process.end()
    assert finished.code == 3 and "Traceback" not in finished.stderr, str(finished)
    assert "step 8: " in finished.stdout and "step 12: " in finished.stdout
    [line] = finished.errors
    assert "not copied: step-00000008-evaluated, step-00000012-evaluated, " in line
    assert "model.pt" in line and "--resume auto" in line
    assert not (out / "model.pt").exists()

    sftp.start()
    again = succeed(f"{own} --resume auto", **options)
    assert "nothing left to do" in again.stdout and "files copied to sftp://" in again.stdout
    kept = tmp_path / "here" / "runs/remote/sftp" / f"{sftp.url[7:]}{out}"
    assert (out / "model.pt").read_bytes() == (kept / "model.pt").read_bytes()
    for snapshot in (out / "snapshots").iterdir():
        assert not find_damage(snapshot)


REFUSES = "http://127.0.0.1:9"  # the discard service, which nobody runs
MISTAKES = [
    ("--output-dir nosuch://x/y", ["--output-dir nosuch://x/y", "no nosuch://", "s3://"]),
    ("--data-dir nosuch://x/y", ["--data-dir nosuch://x/y", "give a folder"]),
    ("--weights nosuch://x/y", ["--weights nosuch://x/y", "give a folder"]),
    ("--resume nosuch://x/y", ["--resume nosuch://x/y", "give a folder"]),
    ("--output-dir sftp://me:secret@host/x", ["password", "FSSPEC_SFTP_PASSWORD"]),
    ("--output-dir s3://bucket/*", ["--output-dir s3://bucket/*", "one place"]),
    ("--output-dir gs://bucket/x", ["--output-dir gs://bucket/x", "gcsfs", "pip install"]),
    ("--output-dir s3://nowhere/x", ["--output-dir s3://nowhere/x", "bucket does not exist"]),
    ("--output-dir sftp://127.0.0.1:9/x", ["sftp://127.0.0.1:9/x", "cannot be written"]),
    ("--dataset text --data-dir s3://bucket/no", ["--data-dir s3://bucket/no", "nothing"]),
    ("--dataset text --data-dir s3://nowhere/x", ["--data-dir s3://nowhere/x", "give another"]),
    ("--weights s3://bucket/nothing", ["--weights s3://bucket/nothing", "nothing"]),
    ("--resume s3://bucket/nothing", ["--resume s3://bucket/nothing", "give another, or none"]),
]


def fails(flags, monkeypatch, capsys):
    """The line with which a run ends that begins with these flags, before its first step."""
    monkeypatch.setattr(sys, "argv", ["x.py", *shlex.split(JOB), *shlex.split(flags)])
    with pytest.raises(SystemExit) as end:
        args = common.parse_args(common.argument_parser(""))
        remote.check_writable(args)
        train_set, _ = common.make_datasets(args)
        common.make_model(args, train_set.classes)
        loader = common.make_loader(args, train_set, args.batch_size)
        common.Run(args, torch.device("cpu"), loader).load_snapshot(None, None, None)
    assert end.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    return lines[-1]


@pytest.mark.parametrize("flags, words", MISTAKES, ids=[flags for flags, _ in MISTAKES])
def test_mistakes(flags, words, s3, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    line = fails(flags, monkeypatch, capsys)
    assert time.monotonic() - began < remote.ANSWER + 5
    for word in words:
        assert word in line
    assert "secret" not in line


def test_no_server_at_all(s3, tmp_path):
    """On two ranks, as a user sees it."""
    own = command("--output-dir s3://bucket/x", "pytorch_torchrun_DDP", 2)
    options = s3.env | {"AWS_ENDPOINT_URL": REFUSES}
    finished = launch(own, cwd=tmp_path, forked=True, timeout=60, **options)
    assert finished.code == 2 and "Traceback" not in finished.stderr, str(finished)
    [line] = finished.errors
    assert "--output-dir s3://bucket/x cannot be written" in line and "give another" in line


def test_a_server_that_never_answers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(remote, "ANSWER", 1)
    with create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        line = fails(f"--output-dir sftp://127.0.0.1:{port}/x", monkeypatch, capsys)
    assert "no answer within 1 s" in line


@needs_sshd
def test_a_server_that_falls_silent(sftp, tmp_path, monkeypatch):
    for name, value in sftp.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "SILENCE", 1)
    (tmp_path / "file").write_bytes(bytes(2**24))
    files = Remote(f"{sftp.url}{tmp_path}/x")
    files.list_files()
    for process in file_servers.children(sftp.process.pid):
        os.kill(process, signal.SIGSTOP)
    with pytest.raises(RemoteError, match="cannot be written .Timeout"):
        files.upload(tmp_path, ["file"])


@needs_sshd
def test_another_key(sftp, tmp_path, monkeypatch, capsys):
    home = machine(tmp_path / "home")
    (home / ".ssh").mkdir()
    shutil.copy(tmp_path / "keys" / "host", home / ".ssh" / "id_ed25519")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.chdir(tmp_path)
    line = fails(f"--output-dir {sftp.url}{tmp_path}/x", monkeypatch, capsys)
    assert "cannot be written (AuthenticationException" in line


def test_without_fsspec(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    line = fails("--output-dir s3://bucket/x", monkeypatch, capsys)
    assert "fsspec cannot be imported" in line and "requirements-ecosystem.txt" in line


def test_a_run_here_needs_no_fsspec(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setattr(sys, "argv", ["x.py", *shlex.split(JOB), "--output-dir", str(tmp_path)])
    args = common.parse_args(common.argument_parser(""))
    common.make_datasets(args)
    assert not isinstance(mirror.open_snapshots(args), RemoteStore)


# -------------------------------------------------------------- in memory://, which a process has


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A mirror of a folder of this test, and a function that writes a snapshot to it."""
    monkeypatch.chdir(tmp_path)
    found = Mirror(f"memory://{tmp_path}", tmp_path / "run")
    (tmp_path / "run").mkdir()
    return found


def write(mirror, step, text="state"):
    folder = mirror.folder / "snapshots" / f"step-{step:08}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.pt").write_text(text)
    digest = common.command_line.hashlib.sha256(text.encode()).hexdigest()
    (folder / SUMS).write_text(f"{digest}  state.pt\n")
    mirror.behind.append(folder.name)
    return folder


def test_the_last_two_stay(place):
    for step in (1, 2, 3):
        write(place, step)
        place.copy_snapshots()
    assert steps(place.remote.list_files()) == {3: True, 2: True}
    place.snapshots.remove(f"step-00000003/{SUMS}")
    write(place, 4)
    place.copy_snapshots()
    assert steps(place.remote.list_files()) == {4: True, 3: False, 2: True}, "two good ones"


def test_what_is_damaged_there_is_left_out(place, tmp_path, capsys):
    for step in (1, 2):
        write(place, step)
        place.copy_snapshots()
    with place.remote.connection("damaged") as fs:
        fs.pipe_file(place.remote.path("snapshots/step-00000002/state.pt"), b"stale")
    other = Mirror(place.remote.url, tmp_path / "other")
    other.fetch()
    assert [path.name for path in (other.folder / "snapshots").iterdir()] == ["step-00000001"]
    assert "step-00000002 is damaged and left out: state.pt" in capsys.readouterr().out


def test_a_new_run_keeps_the_files_of_the_last(place, tmp_path):
    place.archive(None)
    write(place, 1, "first")
    (place.folder / "model.pt").write_text("first")
    (place.folder / "events.out.tfevents.1").write_text("curve")
    place.copy_results()
    assert steps(place.remote.list_files()) == {1: True}

    new = Mirror(place.remote.url, tmp_path / "new")
    new.folder.mkdir()
    assert new.is_of_another_run() and not place.is_of_another_run()
    new.archive(None)
    names = ["model.pt", "snapshots/step-00000001/SHA256SUMS", "snapshots/step-00000001/state.pt"]
    assert sorted(place.remote.list_files()) == [*(f"previous/{n}" for n in names), "run_id"]
    assert place.remote.read("previous/model.pt") == b"first"
    assert place.is_of_another_run(), "what is here was left by the first one"


def test_a_run_goes_on_under_its_own_id(place, tmp_path):
    """Where another run's files are here: its results, and no snapshot."""
    place.archive(None)
    write(place, 1)
    place.copy_results()
    folder = remote.local_folder(place.remote.url)
    folder.mkdir(parents=True)
    for name in ("run_id", "model.pt", "result.json"):
        (folder / name).write_text("of another run")
    args = argparse.Namespace(output_dir=place.remote.url, resume="auto")
    store = RemoteStore(args)
    store.fetch_own()
    store.mirror.archive("step-00000001")
    assert place.remote.read("run_id") == place.own_id() == (folder / "run_id").read_bytes()
    assert not (folder / "model.pt").exists() and (folder / "previous/model.pt").exists()


def test_what_went_on_elsewhere_is_newer(place, tmp_path):
    """The results here are those of an earlier end; and what is behind is only what is newer."""
    place.archive(None)
    for step in (1, 2):
        write(place, step)
    (place.folder / "result.json").write_text("at 2")
    place.copy_results()
    other = Mirror(place.remote.url, tmp_path / "other")
    other.fetch()
    write(other, 3)
    (other.folder / "result.json").write_text("at 3")
    other.copy_results()

    assert not place.is_of_another_run()
    place.fetch()
    assert (place.folder / "result.json").read_text() == "at 3" and not place.behind
    write(place, 4)
    again = Mirror(place.remote.url, place.folder)
    again.fetch()
    assert again.behind == ["step-00000004"]


def test_one_that_goes_on_puts_newer_ones_aside(place):
    for step in (1, 2):
        write(place, step)
        place.copy_snapshots()
    (place.folder / "result.json").write_text("at 2")
    place.copy_results()
    place.archive("step-00000001")
    assert steps(place.remote.list_files()) == {1: True}
    assert place.remote.read("previous/snapshots/step-00000002/state.pt") == b"state"
    assert place.remote.read("result.json") is None, "it comes back at the end"


def test_each_machine_fetches_what_rank_0_has_chosen(place, tmp_path):
    write(place, 1)
    place.copy_snapshots()
    store = RemoteStore(argparse.Namespace(output_dir=place.remote.url, resume="auto"))
    chosen = remote.local_folder(place.remote.url) / "snapshots" / "step-00000001"
    assert store.name_of(chosen) == f"{place.remote.url}/snapshots/step-00000001"
    store.bring(chosen)
    assert not find_damage(chosen)


def test_nothing_is_written_outside(place, tmp_path):
    with place.remote.connection("written"), pytest.raises(RemoteError, match="holds a file named"):
        place.remote.download({"../../outside": 1}, tmp_path / "in")


def test_a_download_that_is_cut_off(place, tmp_path):
    write(place, 1)
    place.copy_snapshots()
    with pytest.raises(RemoteError, match="state.pt is cut off"):
        place.snapshots.download({"step-00000001/state.pt": 99}, tmp_path / "in")
    assert [path.name for path in (tmp_path / "in").rglob("*.pt")] == []
