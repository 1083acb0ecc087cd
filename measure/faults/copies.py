"""Kill a process while it uploads a snapshot, again and again, and see what the others find.

    python measure/faults/copies.py --trials 200 --seed 7

A trial has an S3 server on this machine, with one complete snapshot. A process uploads the next one
and is killed after a random time. Then another machine (an empty folder) downloads what a run with
``--resume auto`` would use, and the first machine saves once more. A trial is

    clean    the other machine used the newest snapshot whose upload was complete, with the same
             bits, and in the end the last two snapshots are complete on the server
    wrong    it ended in another way

Exit code: 0 if all trials were clean, else 1.
"""

import contextlib
import multiprocessing
import os
import random
import shlex
import shutil
import socket
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from types import SimpleNamespace

import torch  # noqa: F401  (before the processes are forked)

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import file_servers  # noqa: E402
import s3fs  # noqa: E402

from harness.measure import git_commit  # noqa: E402
from harness.snapshots import SnapshotStore, find_damage, write_snapshot  # noqa: E402
from remote.mirror import by_snapshot, complete  # noqa: E402

FILES, BYTES = ("state.pt", "tensors/1.safetensors", "tensors/2.safetensors"), 2**22
BEGUN = os.pipe()  # of a process that begins to upload
URL, OLD, NEW, LAST = "s3://bucket/run", "step-00000001", "step-00000002", "step-00000003"


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="copies-") as folder:
        server = file_servers.s3(Path(folder), port, os.environ)
        os.environ.update(server.env)
        with file_servers.running(server):
            run_trials(args, Path(folder))


def run_trials(args, folder):
    print(f"$ python measure/faults/copies.py {shlex.join(sys.argv[1:])}")
    print(f"commit {git_commit()}, torch {torch.__version__}; S3 by moto, on loopback", flush=True)
    rng, clean = random.Random(args.seed), 0
    assert in_process(folder, lambda: s3fs.S3FileSystem().mkdir("bucket")) == 0
    assert in_process(folder / "whole", prepare) == 0
    child, began = start(folder / "whole", upload), wait_for_upload()
    child.join()
    whole = time.monotonic() - began
    for number in range(1, args.trials + 1):
        here, there = (folder / f"{number}-{name}" for name in ("here", "there"))
        assert in_process(here, prepare) == 0
        seconds = rng.uniform(0, 1.1 * whole)
        child, _ = start(here, upload), wait_for_upload()
        time.sleep(seconds)
        child.kill()
        child.join()
        codes = [in_process(there, look), in_process(here, save_once_more)]
        verdict = f"wrong (exit codes {codes})" if any(codes) else "clean"
        clean += not any(codes)
        print(f"trial {number:3}: kill after {1e3 * seconds:4.0f} ms  {verdict}", flush=True)
        shutil.rmtree(here)
        shutil.rmtree(there)
    print(f"{args.trials} trials: {clean} clean, {args.trials - clean} wrong, 0 hung")
    sys.exit(clean != args.trials)


def in_process(folder, action):
    """Run an action in a folder and a process of its own. Returns its exit code."""
    child = start(folder, action)
    child.join()
    return child.exitcode


def start(folder, action):
    def act():
        os.chdir(folder)
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            action()

    folder.mkdir(exist_ok=True)
    child = multiprocessing.get_context("fork").Process(target=act)
    child.start()
    return child


def wait_for_upload():
    """Returns when it began."""
    os.read(BEGUN[0], 1)
    return time.monotonic()


def open_store():
    store = SnapshotStore(SimpleNamespace(output_dir=URL, resume="auto"), {})
    store.output_dir.mkdir(parents=True, exist_ok=True)
    return store


def content(step, name):
    return random.Random(f"{step} {name}").randbytes(BYTES)


def write(store, step):
    def write_files(part):
        for name in FILES:
            (part / name).parent.mkdir(exist_ok=True)
            (part / name).write_bytes(content(step, name))

    assert not write_snapshot(store.folder / step, write_files)


def prepare():
    """A new run: one snapshot on the server, and the next one still only on this machine."""
    store = open_store()
    for name in store.mirror.remote.list_files():
        store.mirror.remote.remove(name)
    store.archive_previous_run()
    write(store, OLD)
    assert not store.copy_snapshot(store.folder / OLD)
    write(store, NEW)


def upload():
    store = open_store()
    store.mirror.remote.list_files()  # connects
    os.write(BEGUN[1], b".")
    assert not store.copy_snapshot(store.folder / NEW)


def save_once_more():
    """Resume on the same machine, and save: both missing snapshots are uploaded."""
    store = open_store()
    store.fetch()
    write(store, LAST)
    assert not store.copy_snapshot(store.folder / LAST)
    assert complete(by_snapshot(store.mirror.remote.list_files())) == [LAST, NEW]


def look():
    """Another machine downloads the newest complete snapshot."""
    store = open_store()
    [newest, *_] = complete(by_snapshot(store.mirror.remote.list_files()))
    store.fetch()
    [found] = [path for path in store.folder.iterdir() if path.name.startswith("step-")]
    assert found.name == newest and not find_damage(found)
    assert all((found / name).read_bytes() == content(newest, name) for name in FILES)


if __name__ == "__main__":
    main()
