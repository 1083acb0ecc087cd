"""Output, snapshots and inputs at URLs: in the files of this machine, and in memory."""

import argparse
import contextlib
import functools
import shutil
import sys
import time

import pytest
from conftest import ROOT, launcher, refused, succeed
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

import harness.world
from harness import snapshots, storage
from harness.cli import fetch_input
from harness.snapshots import FORMAT, SnapshotStore, write_to_url
from harness.world import World

JOB = "--model gpt-1x2x16 --context 16 --dataset synthetic --train-samples 96 --eval-samples 12"
JOB += " --batch-size 24 --epochs 3 --eval-every 2 --lr 100 --warmup-steps 99"  # diverges


def test_a_run_goes_on_elsewhere(tmp_path):
    """On one rank instead of two, when nothing is left of the first machine: also its best weights
    come from the URL."""
    for script, ranks, flags in (("FSDP", 2, "--max-steps 6"), ("SingleGPU", 1, "--resume auto")):
        machine = tmp_path / script
        machine.mkdir()
        command = launcher(f"{ROOT}/pytorch_{script}", ranks).replace(".py.py", ".py")
        command += f" {JOB} --output-dir file://{tmp_path}/store {flags}"
        said = succeed(command, cwd=machine, forked=True).stdout
        shutil.rmtree(machine)
    assert "step-00000006-evaluated at epoch 2, step 7" in said
    assert "evaluation: step 2," in said and "model.pt has its weights" in said
    assert {"model.pt", "result.json"} < {path.name for path in (tmp_path / "store").iterdir()}


def save(store, step, note=""):
    state = {"run": {"step": step}, "format": FORMAT, "identity": {}, "note": note}
    return store.save(f"step-{step:08}", state, [lambda part: (part / "own").write_text(note)])


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return SnapshotStore(argparse.Namespace(output_dir=f"memory://{tmp_path}", resume="auto"), {})


@pytest.mark.parametrize("done", range(3))
def test_a_half_written_snapshot_is_not_taken(done, store, monkeypatch):
    """An upload ends after some files. What only this machine has, is not taken either."""
    for step in (1, 2, 3):
        assert save(store, step) == (f"{store.url}/snapshots/step-{step:08}", None)
    put = MemoryFileSystem.put_file
    left = iter(range(done))
    with monkeypatch.context() as broken:
        broken.setattr(MemoryFileSystem, "put_file", lambda *a, **k: [next(left), put(*a, **k)])
        saved, failure = save(store, 4)
    assert saved is None and "check the server" in failure
    assert storage.list_complete(store.url) == ["step-00000003", "step-00000002"]
    args = argparse.Namespace(output_dir=store.output_dir, resume="auto")
    with monkeypatch.context() as local:
        local.setitem(sys.modules, "fsspec", None)  # which only a URL needs
        assert save(SnapshotStore(args, {}), 9) == (f"{store.folder}/step-00000009", None)
    assert store.find()["run"]["step"] == 3
    save(store, 3, "again")
    assert store.find()["note"] == "again"


def test_a_run_resumes_from_the_url_that_it_printed(store):
    """Of the copies only the resumed one stays. A newer snapshot is not lost: it must go first."""
    first, _ = save(store, 1)
    second, _ = save(store, 2)
    for asked, step in (("auto", 2), (store.url, 2), (second, 2), (first, 1)):
        store.args.resume = asked
        assert store.find()["run"]["step"] == step
        assert [path.name for path in store.folder.glob("step-*")] == [f"step-{step:08}"]
        with refused("newer snapshot step-00000002") if step == 1 else contextlib.nullcontext():
            store.archive_previous_run()
    storage.remove(second)
    store.archive_previous_run()
    assert storage.list_snapshots(store.url) == {"step-00000001": True}


def test_a_damaged_snapshot_gives_way(store):
    """``auto`` takes the one before. The damaged one would count as one of the last two."""
    for step in (1, 2):
        place, _ = save(store, step)
    MemoryFileSystem().pipe(f"{place}/own", b"other")
    assert store.find()["run"]["step"] == 1
    store.archive_previous_run()
    assert storage.list_snapshots(store.url) == {"step-00000001": True}


def test_an_older_incomplete_snapshot_is_removed(store):
    for step in (1, 7):
        MemoryFileSystem().pipe(f"{store.url}/snapshots/step-{step:08}/own", b"")
    for step in (2, 3, 4):
        save(store, step)
    found = {"step-00000007": False, "step-00000004": True, "step-00000003": True}
    assert storage.list_snapshots(store.url) == found


def test_folders_exist_before_ranks_write(store, monkeypatch):
    def put_file(fs, _, place, **options):
        assert fs.isdir(place.rpartition("/")[0])

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)

    def write(part):
        (part / "sub").mkdir()
        (part / "sub" / "own").touch()

    assert write_to_url(f"{store.url}/new", write) is None


def test_a_full_disk_is_no_fault_of_the_server(store):
    failure = write_to_url(f"{store.url}/new", lambda part: (part / "no" / "own").touch())
    assert failure.endswith("(No such file or directory); free some disk space")


@pytest.mark.parametrize("file", ["own", "state.pt"])
def test_each_machine_verifies_its_own_copy(file, store, monkeypatch):
    save(store, 1)
    store.find()
    (store.resumed / file).write_bytes(b"damaged")
    found = []
    for rank in (2, 3):  # of the second machine of two
        here = World, rank, rank % 2, 4, 2, True, 0
        monkeypatch.setattr(snapshots, "world", functools.partial(*here))
        with contextlib.suppress(SystemExit):  # state.pt
            found.append(snapshots.read_snapshot(store.resumed, None, named=False))
    assert None in found


def test_all_ranks_fail_together(store, monkeypatch, capsys):
    """Here the other one of two fails."""
    save(store, 1)
    with monkeypatch.context() as elsewhere:
        fails = "sftp://host/x cannot be read (why)"
        elsewhere.setattr(harness.world, "gather_objects", lambda value: [value, (fails, None)])
        for ask in (store.find, lambda: fetch_input.__wrapped__(store.url, "--output-dir")):
            with pytest.raises(SystemExit):
                ask()
            assert f"--output-dir {fails}; give another" in capsys.readouterr().err
        store.kept = lambda: "step-00000001"
        assert store.find_kept() == store.folder / store.kept()
    monkeypatch.setattr(snapshots, "gather_objects", lambda value: [value, False])
    assert store.find_kept() is None


def test_an_input_is_copied_until_it_changes(tmp_path, monkeypatch, capsys):
    """Also from a file to a folder, and back; not when a server tells that it has been read. An
    object store lists a folder in itself."""
    monkeypatch.chdir(tmp_path)
    files = MemoryFileSystem()
    place = f"{tmp_path}/data"
    describe = MemoryFileSystem.ls

    def ls(fs, path, **options):
        found = [about | {"time": time.time()} for about in describe(fs, path, **options)]
        return [*found, {"name": f"{path}/", "size": 0, "type": "file"}]

    monkeypatch.setattr(MemoryFileSystem, "ls", ls)
    for found in ({"": b"x"}, {"/a": b"a", "/sub/b": b"b"}, {"/a": b"a"}, {"": b"x"}):
        with contextlib.suppress(FileNotFoundError):
            files.rm(place, recursive=True)
        files.pipe({place + name: content for name, content in found.items()})
        for _ in range(2):
            copy = fetch_input.__wrapped__(f"memory://{place}", "--data-dir")
            paths = [path for path in (copy, *copy.rglob("*")) if path.is_file()]
            assert {str(p)[len(str(copy)) :]: p.read_bytes() for p in paths} == found
    assert capsys.readouterr().out.count("copying") == 4


@pytest.mark.parametrize("name", ["snapshots", "sub"])
def test_a_folder_that_cannot_be_listed_is_not_empty(name, tmp_path, monkeypatch):
    for folder in ("sub", "snapshots"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").touch()
    listed = LocalFileSystem.ls

    def ls(fs, path, **options):
        if path.endswith(name):
            raise PermissionError(path)
        return listed(fs, path, **options)

    monkeypatch.setattr(LocalFileSystem, "ls", ls)
    with pytest.raises(storage.StorageError, match="PermissionError"):
        storage.fetch(f"file://{tmp_path}", tmp_path / "copy")
    if name == "snapshots":
        with pytest.raises(storage.StorageError, match="PermissionError"):
            storage.list_complete(f"file://{tmp_path}")


@pytest.mark.parametrize("call", ["exists", "__init__"])
def test_a_server_that_never_answers(call, store, monkeypatch):
    """The next call connects anew."""
    with monkeypatch.context() as broken:
        broken.setattr(storage, "ANSWER", 0.1)
        broken.setattr(MemoryFileSystem, call, lambda *_, **__: time.sleep(9))
        with pytest.raises(storage.StorageError, match="cannot be read .TimeoutError: no answer"):
            storage.list_complete(store.url)
    with storage.opened(store.url, "read") as first, storage.opened(store.url, "read") as second:
        assert first[0] is not second[0]
