"""What keeps a long job from being lost, for common.py, which decides when.

processes     workers end with their launcher, and listen on no other machine's network
snapshots     written whole, with checksums, and verified before they are read
stop          SIGTERM and Ctrl-C are requests, granted at the end of a step
hangs         who was missing, when a collective timed out
"""

import contextlib
import ctypes
import errno
import hashlib
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

PARENT = os.getppid()  # the launcher, if there is one
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
LAUNCHED = "LOCAL_RANK" in os.environ
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))

# ----------------------------------------------------------------------------------- processes


def end_with_launcher() -> None:
    """Have the kernel kill this process when the launcher dies, even of SIGKILL (Linux only).

    Otherwise the ranks would go on, or wait for each other, with nobody to look after them.
    """
    if not LAUNCHED or sys.platform != "linux":
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    orphan = os.getppid() != PARENT  # it died before this call
    if os.getppid() == 1 and "TORCHELASTIC_RUN_ID" in os.environ:  # or before PyTorch was imported
        orphan = b"torch" not in Path("/proc/1/cmdline").read_bytes()
    if orphan:
        raise SystemExit(1)
    if b"deepspeed.launcher.launch" in Path(f"/proc/{PARENT}/cmdline").read_bytes():
        threading.Thread(target=end_with_runner, daemon=True).start()


def end_with_runner() -> None:
    """``deepspeed`` itself starts a process that starts the ranks, and on one machine passes no
    signal on to it: when it is gone, this rank is asked to stop."""
    runner = parent_of(PARENT)
    while parent_of(PARENT) == runner:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def stay_on_this_machine() -> None:
    """Let ranks that share a machine listen on loopback only, unless the user chose an interface.

    That is for the connections among ranks. The store in which they find each other is torchrun's
    own and listens everywhere.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)


def launch_id() -> str:
    """The same for all attempts of one launch, and another for the next launch."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run != "none":
        return run
    started = ""
    with contextlib.suppress(OSError):  # Linux only; a container gives the same number every time
        started = Path(f"/proc/{PARENT}/stat").read_text().rpartition(")")[2].split()[19]
    return f"process {PARENT} {started}"


# ----------------------------------------------------------------------------------- snapshots

SUMS = "SHA256SUMS"  # what `sha256sum --check SHA256SUMS` reads, in the folder of a snapshot


def sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def files_of(folder: Path) -> list[str]:
    """The files of a snapshot, as its list of checksums names them."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in paths if path.name != SUMS)


def find_damage(folder: Path) -> str | None:
    """What is wrong with a snapshot's files; ``None`` if they are as they were written."""
    try:
        *lines, end = (folder / SUMS).read_bytes().decode().split("\n")
        expected = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
        if end or not expected:
            raise ValueError("cut off")
        if differ := sorted(expected.keys() ^ set(files_of(folder))):
            return f"{differ[0]} is {'missing' if differ[0] in expected else 'not of it'}"
        for name, digest in expected.items():
            if sha256(folder / name) != digest:
                return f"{name} is not what was written"
    except (OSError, ValueError) as error:  # ValueError: no such line, or no text
        return f"{SUMS} cannot be read ({type(error).__name__})"
    return None


def list_snapshots(folder: Path) -> list[Path]:
    """Those in a folder, newest first, good or not."""
    return sorted(folder.glob("step-*"), reverse=True)


def write_snapshot(folder: Path, write: Callable[[Path], None], needed: int) -> str | None:
    """Write a snapshot that is there whole or not at all, and drop all but the last two.

    It is written under a name that begins with a dot, brought to the disk, and given its name by a
    rename. All ranks call this.

    Args:
        folder: ``.../step-*``; the last two by name are kept.
        write: puts its files into the folder it is given; all ranks call it.
        needed: bytes that all ranks together will write, to see beforehand whether they fit.

    Returns:
        ``None``, or why it could not be written, on all ranks. What was there before still is.
    """
    part = folder.with_name(f".{folder.name}.part")

    def prepare(_):
        if RANK == 0:
            folder.parent.mkdir(parents=True, exist_ok=True)
            for old in folder.parent.glob(".*.part"):  # of an attempt that was killed
                shutil.rmtree(old)
            if shutil.disk_usage(folder.parent).free < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            part.mkdir()

    def fill(_):
        write(part)

    def list_files(_):
        return files_of(part) if RANK == 0 else None

    def bring_to_disk(lists):
        names = lists[0][RANK::WORLD_SIZE]
        for name in names:
            sync(part / name)
        return {name: sha256(part / name) for name in names}

    def publish(sums):
        if RANK == 0:
            lines = sorted(f"{theirs[name]}  {name}\n" for theirs in sums for name in theirs)
            (part / SUMS).write_text("".join(lines))
            sync(part / SUMS)
            sync(part)
            if folder.exists():  # of a damaged one, from which nobody could go on
                shutil.rmtree(folder)
            os.replace(part, folder)
            sync(folder.parent)
            for old in list_snapshots(folder.parent)[2:]:
                shutil.rmtree(old, ignore_errors=True)  # the new one is there in any case

    results = []  # of all ranks, of the stage before
    for stage in (prepare, fill, list_files, bring_to_disk, publish):
        failure = result = None
        try:
            result = stage(results)
        except (OSError, RuntimeError) as error:
            failure = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        everyone = everywhere((failure, result))
        if failures := [why for why, _ in everyone if why]:
            return explain(folder, needed, part, failures[0])
        results = [result for _, result in everyone]
    return None


def explain(folder: Path, needed: int, part: Path, why: str) -> str:
    """Tidy up after a snapshot that could not be written, and say what would have been needed."""
    free = "unknown"
    with contextlib.suppress(OSError):
        free = f"{shutil.disk_usage(folder.parent).free:,}"
    if RANK == 0:
        shutil.rmtree(part, ignore_errors=True)
    return f"{folder} could not be written ({why}; {needed:,} bytes needed, {free} free)"


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def everywhere(value):
    """The values of all ranks, on every rank. All ranks call it."""
    values = [value]
    if dist.is_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


class UntrustedSnapshot(Exception):
    """A snapshot that asks for code to be run while it is read."""


class PlainUnpickler(pickle.Unpickler):
    """Reads the list of contents of a sharded snapshot. It is a pickle, which could ask for any
    function to be called (https://docs.python.org/3/library/pickle.html#restricting-globals)."""

    allowed = {
        "torch.distributed.checkpoint.metadata": {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "pathlib": {"PosixPath", "WindowsPath"},
        "pathlib._local": {"PosixPath", "WindowsPath"},  # as Python 3.13 calls it
        "torch": {"Size", "bfloat16", "float16", "float32", "float64", "int64"},
    }

    def find_class(self, module: str, name: str):
        if name not in self.allowed.get(module, ()):
            raise UntrustedSnapshot(f"it asks for {module}.{name}, which a list of tensors has not")
        return super().find_class(module, name)


def check_sharded(folder: Path) -> None:
    """Make sure that ``torch.distributed.checkpoint`` will read tensors only: it unpickles the list
    of contents, and all that is not a tensor, without asking.

    Raises:
        UntrustedSnapshot: if it would do more.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if list(folder.glob("__*.metadata")):  # which would be read where the list itself cannot be
        raise UntrustedSnapshot("it has a second list of contents")
    try:
        with open(folder / ".metadata", "rb") as file:
            contents = PlainUnpickler(file).load().state_dict_metadata
    except (OSError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        raise UntrustedSnapshot(f"its list of contents cannot be read ({error})") from error
    for name, kind in contents.items():
        if not isinstance(kind, TensorStorageMetadata):
            raise UntrustedSnapshot(f"{name} in it is not a tensor")


def check_deepspeed(folder: Path) -> None:
    """Make sure that DeepSpeed's checkpoint is what it writes: it unpickles whatever is asked for.

    Raises:
        UntrustedSnapshot: if it asks for more.
    """
    own = {
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    }
    for file in folder.glob("*.pt"):
        try:
            strange = set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - own
        except Exception as error:  # of a file in another form
            raise UntrustedSnapshot(f"{file.name} cannot be looked through ({error})") from error
        if strange:
            names = ", ".join(sorted(strange))
            raise UntrustedSnapshot(f"{file.name} asks for {names}, which DeepSpeed does not write")


@contextlib.contextmanager
def raise_at_the_end(owner, method: str):
    """Put off what a method raises on this rank, or the other ranks would wait for it in vain."""
    original, failures = getattr(owner, method), []

    def remember(*args, **kwargs):
        try:
            return original(*args, **kwargs)
        except (OSError, RuntimeError) as error:
            failures.append(error)

    setattr(owner, method, remember)
    try:
        yield
    finally:
        setattr(owner, method, original)
    if failures:
        raise failures[0]


# ---------------------------------------------------------------------------------------- stop


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Remembers SIGTERM or Ctrl-C: the run ends after the step that it is at.

    A process that waits for ranks that are gone does not come to the end of its step. So a thread
    ends it, if the main thread has not been heard of for some time since the signal.

    Args:
        patience: seconds; ``None`` waits for ever, for there an operation may take long, and on
            gloo one that waits for a dead rank fails at once.
    """

    def __init__(self, patience: float | None):
        self.signum = 0
        self.patience = patience
        self.heard = threading.Event()

    def listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():  # of a notebook
            return
        self.reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        signal.set_wakeup_fd(self.writer.fileno())  # written at once, whatever the main thread does
        threading.Thread(target=self.watch, daemon=True).start()
        for signum in STOP_SIGNALS:
            signal.signal(signum, self.note)  # called by the main thread, between two operations

    def note(self, signum: int, frame) -> None:
        self.signum = signum
        self.heard.set()
        if not LAUNCHED:  # pressed a second time, Ctrl-C ends the run at once
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def watch(self) -> None:
        while (signum := self.reader.recv(1)[0]) not in STOP_SIGNALS:
            pass  # a loader process ended: PyTorch looks after that
        if not self.heard.wait(self.patience):
            os._exit(128 + signum)


def leave_signals_to_the_main_process(worker: int) -> None:
    """A DataLoader's ``worker_init_fn``. Terminals and launchers send their signals to all that a
    rank has started, which would end it for want of data; :func:`end_loaders` ends them."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def end_loaders() -> None:
    """To be called at exit: otherwise, after an exception, Python would wait for the loaders, and
    the launcher for this rank."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's would report their end as an error
    for process in multiprocessing.active_children():
        process.kill()


# --------------------------------------------------------------------------------------- hangs


TIMED_OUT = ("Timed out", "timed out", "Application timeout")  # in messages of gloo and the store


def explain_timeouts(script: Path) -> None:
    """After the traceback of a collective that timed out, name the operation and who is missing.

    Args:
        script: the file whose line is named.
    """

    def hook(kind, error, trace):
        sys.__excepthook__(kind, error, trace)
        if dist.is_initialized() and any(words in str(error) for words in TIMED_OUT):
            frames = traceback.extract_tb(trace)
            frames = [frame for frame in frames if Path(frame.filename).absolute() == script]
            if frames:
                name_missing_ranks(f"{frames[-1].line} (line {frames[-1].lineno})", script.stem)

    sys.excepthook = hook


def name_missing_ranks(where: str, script: str) -> None:
    """Tell the others where this rank waited, and hear from those who waited as well."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(host, port, timeout=timedelta(seconds=5))
        store = dist.PrefixStore(f"timeout {RESTARTS}", store)
        store.set(str(RANK), where)
        time.sleep(3)  # they give up at about the same time
        waited = [rank for rank in range(WORLD_SIZE) if store.check([str(rank)])]
        places = {rank: store.get(str(rank)).decode() for rank in waited}
    except (OSError, RuntimeError):  # whose process has ended
        return
    if RANK != min(places):
        return
    if missing := sorted(set(range(WORLD_SIZE)) - set(places)):
        names = ", ".join(map(str, missing))
        why = f"rank {names} did not come to {where} within --timeout: it hangs, or is elsewhere"
    else:
        why = "ranks waited at different places: " + "; ".join(
            f"rank {rank} at {place}" for rank, place in places.items()
        )
    print(f"{script}: error: {why}", file=sys.stderr, flush=True)
