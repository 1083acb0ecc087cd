"""Data, output, snapshots and weights in remote storage: on real S3 and sftp servers."""

import argparse
import hashlib
import shlex
import shutil
import sys
import time
from socket import socket

import file_servers
import pytest
import test_mistakes
from conftest import ROOT, environment, free_port, launch, launcher, started, succeed, wait_for

import common
from harness import cli
from harness.snapshots import SUMS, SnapshotStore, find_damage
from remote import mirror
from remote import storage as remote
from remote.storage import Remote, RemoteError

JOB = "--model gpt-1x2x16 --context 16 --dataset synthetic --train-samples 96 --eval-samples 12"
JOB += " --batch-size 24 --epochs 3 --deterministic"  # of 4 steps each
LARGE = JOB.replace("1x2x16", "1x2x512")  # whose snapshots take a while to copy

refuse = test_mistakes.refuse  # a fixture
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


def command(flags, script="pytorch_SingleGPU", ranks=1, job=JOB):
    words = launcher(script, ranks).replace(f"{script}.py", f"{ROOT}/{script}.py")
    return f"{words} {job} {flags}"


def machine(folder):
    """A folder to start a run in, in which there is nothing yet."""
    folder.mkdir(exist_ok=True)
    return folder


def steps(files):
    """Which snapshots are there, and whether they were copied to their end."""
    found = mirror.by_snapshot(files)
    return {int(name.split("-")[1]): name in mirror.complete(found) for name in found}


def test_shards_of_two_ranks(s3, tmp_path):
    """They go on in another folder, and at the URL, and the best weights come from there. A process
    that is killed while it copies: test_faults.py."""
    flags = "--output-dir s3://bucket/shards --eval-every 2 --lr 100 --warmup-steps 99"  # diverges
    own = command(flags, "pytorch_FSDP", 2)
    succeed(f"{own} --max-steps 4", cwd=machine(tmp_path / "here"), forked=True, **s3.env)
    options = {"cwd": machine(tmp_path / "there"), "forked": True, **s3.env}
    other = own.replace("--output-dir", f"--output-dir {tmp_path}/out --resume")
    finished = succeed(other, **options)
    snapshot = "data/remote/s3/bucket/shards/snapshots/step-00000004-evaluated"
    assert f"resumed from {snapshot} at epoch 2, step 5" in finished.stdout
    finished = succeed(f"{own} --resume auto", **options)
    assert "at epoch 2, step 5" in finished.stdout
    assert finished.lines[-1] == "files copied to s3://bucket/shards"
    assert "evaluation: step 2," in finished.stdout and "model.pt has its" in finished.stdout
    assert steps(Remote("s3://bucket/shards").list_files()) == {12: True, 10: True, 2: True}


class NoServer:
    """Remote storage that is a dict: sizes of files by their names."""

    url = "s3://bucket/run"

    def __init__(self, url):
        self.files = {}

    def upload(self, folder, names):
        assert not self.files.keys() & set(names), "once"
        self.files |= {name: (folder / name).stat().st_size for name in names}

    def list_files(self, place=""):
        return {name: size for name, size in self.files.items() if name.startswith(place)}

    def remove(self, place):
        self.files = {n: size for n, size in self.files.items() if not n.startswith(place)}


def test_the_checksums_of_a_snapshot_are_uploaded_last(tmp_path, monkeypatch):
    """They say that all other files have arrived."""
    monkeypatch.setattr(mirror, "Remote", NoServer)
    snapshot = tmp_path / "snapshots" / "step-00000004"
    snapshot.mkdir(parents=True)
    for name in ("state.pt", SUMS, "tensors.safetensors"):
        (snapshot / name).write_text(name)
    ours = mirror.Mirror("s3://bucket/run", tmp_path, find_damage)
    ours.behind = [snapshot.name]
    ours.push("")
    uploaded = [name.rpartition("/")[2] for name in ours.remote.files]
    assert len(uploaded) == 3 and uploaded[-1] == SUMS


@pytest.mark.full
def test_a_copy_that_fails_ends_the_run_if_it_is_to(s3, tmp_path):
    """All ranks, without a traceback."""
    (s3.folder / "refuse").write_text("step-00000004")
    flags = "--output-dir s3://bucket/stops --on-save-error stop"
    words = command(flags, "pytorch_torchrun_DDP", 2)
    finished = launch(words, cwd=tmp_path, forked=True, **s3.env)
    (s3.folder / "refuse").unlink()
    assert finished.code == 3 and "Traceback" not in finished.stderr, str(finished)
    [line] = finished.errors
    assert "step 4: s3://bucket/stops cannot be written" in line
    assert "check the server" in line and line.endswith("--resume auto")
    [kept] = (tmp_path / "runs/remote/s3/bucket/stops/snapshots").iterdir()
    assert not find_damage(kept) and str(kept.relative_to(tmp_path)) in line


@pytest.mark.full
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


@pytest.fixture
def fails(refuse, tmp_path, monkeypatch):
    """A function: the line with which a run ends that begins with these flags."""
    monkeypatch.chdir(tmp_path)

    def run(flags):
        code, stderr = refuse("pytorch_SingleGPU", f"{JOB} {flags}")
        assert code == 2 and "secret" not in stderr
        return stderr.splitlines()[-1]

    return run


@pytest.mark.parametrize("flags, words", test_mistakes.WITH_SERVERS)
def test_mistakes(flags, words, s3, fails):
    began = time.monotonic()
    line = fails(flags)
    assert time.monotonic() - began < 20
    for word in words.split(" | "):
        assert word in line


@pytest.mark.parametrize("protocol, listens", [("s3", False), ("s3", True), ("sftp", True)])
def test_a_server_that_never_answers(protocol, listens, s3, fails, monkeypatch):
    """There is none, or it accepts connections and falls silent."""
    monkeypatch.setattr(remote, "ANSWER", 1)
    with socket() as held:
        held.bind(("127.0.0.1", 0))
        if listens:
            held.listen()
        place = f"127.0.0.1:{held.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{place}")
        host = "bucket" if protocol == "s3" else place
        line = fails(f"--output-dir {protocol}://{host}/x")
    assert f"--output-dir {protocol}://{host}/x cannot be written" in line
    assert "give another" in line
    assert not listens or "no answer within 1 s" in line  # s3fs may try again until then


@pytest.mark.full
@needs_sshd
def test_a_server_that_falls_silent(sftp, tmp_path, monkeypatch):
    for name, value in sftp.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "SILENCE", 1)
    (tmp_path / "file").write_bytes(bytes(2**24))
    files = Remote(f"{sftp.url}{tmp_path}/x")
    files.list_files()
    for process in sftp.processes():
        process.suspend()
    with pytest.raises(RemoteError, match="cannot be written .Timeout"):
        files.upload(tmp_path, ["file"])


def test_without_fsspec(fails, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    line = fails("--output-dir s3://bucket/x")
    assert "import of fsspec" in line and "requirements-ecosystem.txt" in line


def test_a_run_here_needs_no_fsspec(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setattr(sys, "argv", ["x.py", *shlex.split(JOB), "--output-dir", str(tmp_path)])
    args = common.parse_args(common.argument_parser(""))
    common.make_datasets(args)
    assert SnapshotStore(args, {}).mirror is None


# ------------------------------------------------------- in memory://, which this process has
@pytest.fixture
def on(tmp_path, monkeypatch):
    """A function that works on a machine of that name: returns its store of the same URL."""
    stores = {}

    def go(machine):
        (tmp_path / machine).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / machine)
        if machine not in stores:
            args = argparse.Namespace(output_dir=f"memory://{tmp_path}", resume="auto")
            stores[machine] = SnapshotStore(args, {})
            stores[machine].output_dir.mkdir(parents=True)
        return stores[machine]

    return go


def write(store, step, text="state"):
    """A snapshot, and its copy."""
    folder = store.folder / f"step-{step:08}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.pt").write_text(text)
    (folder / SUMS).write_text(f"{hashlib.sha256(text.encode()).hexdigest()}  state.pt\n")
    return store.copy_snapshot(folder)


def test_the_last_two_stay_and_a_failed_copy_is_made_up_for(on, monkeypatch):
    store = on("here")
    for step in (1, 2, 3):
        assert write(store, step) is None
    assert steps(store.mirror.remote.list_files()) == {3: True, 2: True}
    store.mirror.remote.remove(f"snapshots/step-00000003/{SUMS}")
    with monkeypatch.context() as broken:
        broken.setattr(store.mirror.remote.fs, "put", None)
        assert "cannot be written" in write(store, 4)
        assert store.mirror.behind == ["step-00000004"]
    upload = store.mirror.remote.upload

    def cut_off(folder, names):
        upload(folder, names)
        for name in names:
            store.mirror.remote.fs.pipe_file(name, b"st")

    with monkeypatch.context() as broken:
        broken.setattr(store.mirror.remote, "upload", cut_off)
        assert "state.pt was uploaded incompletely" in write(store, 4)
        assert 2 in steps(store.mirror.remote.list_files()), "a good one is not dropped for it"
    write(store, 5)
    assert steps(store.mirror.remote.list_files()) == {5: True, 4: True}


def test_what_is_damaged_there_is_left_out(on, capsys):
    for step in (1, 2):
        write(on("here"), step)
    with on("here").mirror.remote.connection("damaged") as there:
        there.pipe_file("snapshots/step-00000002/state.pt", b"stale")
    other = on("there")
    other.fetch()
    assert [path.name for path in other.folder.iterdir()] == ["step-00000001"]
    assert "step-00000002 is damaged and ignored: state.pt" in capsys.readouterr().out
    assert not find_damage(other.folder / "step-00000001")


def test_a_url_holds_one_run(on, capsys):
    """Another one is refused; and what a run of before has left here is put aside."""
    first = on("here")
    first.archive_previous_run()
    write(first, 1, "first")
    (first.output_dir / "result.json").write_text("first")
    first.copy_results()
    new = on("there")
    with pytest.raises(SystemExit):
        new.archive_previous_run()
    assert "has a run; use --resume auto" in capsys.readouterr().err
    assert first.mirror.remote.read("snapshots/step-00000001/state.pt") == b"first"
    for what in ("snapshots", "result.json"):  # as a user does who wants to begin anew
        first.mirror.remote.remove(what)
    new.archive_previous_run()
    write(new, 1, "second")
    on("here").fetch()  # and on this machine
    assert (first.folder / "step-00000001" / "state.pt").read_text() == "second"
    assert (first.output_dir / "previous" / "result.json").read_text() == "first"
    assert not (first.output_dir / "result.json").exists()


def test_what_went_on_elsewhere_is_newer(on):
    """The results here are those of an earlier end."""
    here = on("here")
    here.archive_previous_run()
    for step in (1, 2):
        write(here, step)
    (here.output_dir / "result.json").write_text("at 2")
    here.copy_results()
    there = on("there")
    there.fetch()
    (there.output_dir / "result.json").write_text("at 3")
    write(there, 3)
    there.copy_results()
    here = on("here")
    here.fetch()
    assert (here.output_dir / "result.json").read_text() == "at 3" and not here.mirror.behind


def test_one_that_goes_on_puts_newer_ones_aside(on):
    store = on("here")
    for step in (1, 2):
        write(store, step)
    (store.output_dir / "result.json").write_text("at 2")
    store.copy_results()
    store.resumed = store.folder / "step-00000001"
    store.archive_previous_run()
    assert steps(store.mirror.remote.list_files()) == {1: True}
    [newer] = (store.output_dir / "previous" / "snapshots").iterdir()
    assert newer.name == "step-00000002"
    assert store.mirror.remote.read("result.json") is None, "it comes back at the end"


def test_data_is_downloaded_once(on, tmp_path):
    """By size; what is only here is refused."""
    folder = machine(tmp_path / "data")
    for name in ("a", "b"):
        (folder / name).write_text(name)
    there = Remote(f"memory://{tmp_path}/data")
    there.upload(folder, ["a", "b"])
    on("here")
    path = cli.fetch_input(there.url, "--data-dir")
    assert sorted(file.name for file in path.iterdir()) == ["a", "b"]
    (path / "a").write_text("A")
    (path / "b").unlink()
    remote.fetch_files(there, path, again=False)
    assert [(path / name).read_text() for name in "ab"] == ["A", "b"]
    (path / "c").touch()
    with pytest.raises(RemoteError, match="c is not in memory://.*; remove it"):
        remote.fetch_files(there, path, again=False)
    for again, expected in ((False, "a"), (False, "A"), (True, "a")):  # weights: every time
        remote.fetch_files(Remote(f"{there.url}/a"), tmp_path / "one", again)
        assert (tmp_path / "one").read_text() == expected
        (tmp_path / "one").write_text("A")


def test_nothing_is_written_outside_or_cut_off(on, tmp_path):
    write(on("here"), 1)
    there = on("here").mirror.remote
    with pytest.raises(RemoteError, match="contains a file named"):
        there.download({"../../outside": 1}, tmp_path / "in")
    with pytest.raises(RemoteError, match="state.pt is truncated"):
        there.download({"snapshots/step-00000001/state.pt": 99}, tmp_path / "in")
