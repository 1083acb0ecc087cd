"""When a collective hangs: which one, the ranks that joined it, and the line where each rank is.

PyTorch records the collectives of each process in its flight recorder. When one times out, loses a
rank or aborts, all ranks write their records to ``--output-dir``/flight_recorder and tell each
other where they are, and one of them prints a diagnosis. On a rank that does not wait itself, a
thread answers, which checks once per second whether another rank has failed.

Only the last two functions use private APIs of PyTorch.
"""

import atexit
import ctypes
import json
import linecache
import math
import os
import pickle
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from hangs.diagnosis import call_of, describe, diagnose
from harness.world import print0, world

WORDS = ("Timed out", "timed out", "Application timeout", "Connection closed", "Connection reset")
WORDS += ("Broken pipe",)  # in errors of gloo, NCCL and the store: another rank is late or gone
PREFIX, REPORT = "rank_", "report.txt"  # file names; PyTorch's own tool expects the first
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
ANSWER = 6  # seconds that a rank has to answer
LINGER = 2  # seconds that it then has to end by itself
LAST = 50  # number of collectives per group to compare
BEGIN = time.time()
STORE_ENDED = (KeyError, OSError, RuntimeError)  # or not a launcher's store

set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # 2.11

Frames = list[tuple[FrameType, int]]  # with line numbers, from the outermost to the innermost


class PlainUnpickler(pickle.Unpickler):
    """Reads a dump of PyTorch's flight recorder, which has dicts, lists, strings and numbers."""

    def find_class(self, module: str, name: str):
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


class Watch:
    """Collects and reports what every rank of a hanging run is doing.

    Args:
        script: the file whose lines are reported first.
        folder: for the records.
    """

    def __init__(self, script: Path, folder: Path):
        self.script, self.folder = script, folder
        self.process, self.told, self.over = os.getpid(), threading.Lock(), threading.Event()
        self.stopped_at, self.continued = [], 0  # frames, and nanoseconds
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives; default: none
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / PREFIX))  # of NCCL's watchdog
        sys.excepthook = self.after_exception
        if sys.platform == "linux":  # gloo aborts if sizes differ, NCCL's watchdog after a timeout
            self.on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(self.before_abort)
            ctypes.CDLL(None).signal(signal.SIGABRT, self.on_abort)
            atexit.register(ctypes.CDLL(None).signal, signal.SIGABRT, None)  # no Python by then

    def start(self) -> None:
        """Start to listen to the other ranks, all of which have joined by now. If the last run in
        this folder could not report why it ended, rank 0 does."""
        self.listener = threading.Thread(target=self.listen, daemon=True)
        self.listener.start()
        atexit.register(self.stop_listening)
        if threading.current_thread() is threading.main_thread() and sys.platform == "linux":
            signal.signal(signal.SIGCONT, self.after_stop)
        if world().rank == 0:
            self.explain_last_run()

    def explain_last_run(self) -> None:
        """NCCL's watchdog may have written the records before it ended the process."""
        files = {path.name[len(PREFIX) :]: path for path in self.folder.glob(f"{PREFIX}*")}
        said = self.folder / REPORT
        try:
            newest = max(path.stat().st_mtime for path in files.values())
            if said.exists() and said.stat().st_mtime > newest:
                return
            found = {int(r): PlainUnpickler(path.open("rb")).load() for r, path in files.items()}
            accounts = {rank: self.account(recorded, "", None) for rank, recorded in found.items()}
            print0(f"the last run hung: {self.write_report(accounts, {}, len(files))}")
        except Exception:  # missing or foreign files must not prevent training
            return

    def after_exception(self, kind, error, trace) -> None:
        sys.__excepthook__(kind, error, trace)
        frames = list(traceback.walk_tb(trace))
        while error and not any(words in str(error) for words in WORDS):
            error = error.__cause__ or error.__context__  # a pipeline's schedule wraps it
            frames += traceback.walk_tb(error.__traceback__) if error else []
        if error and dist.is_initialized():
            self.report(frames, "waits")

    def before_abort(self, signum: int) -> None:
        """Called by the thread that aborts the process, which ends when this returns."""
        if os.getpid() == self.process:
            self.report(main_frames(), "aborts")

    def after_stop(self, signum: int, frame: FrameType) -> None:
        """Called first when a stopped process is continued: see :func:`collect`."""
        self.stopped_at, self.continued = outermost_first(frame), time.time_ns()

    def listen(self) -> None:
        try:
            store = connect()
            store.set(f"process {world().rank}", json.dumps([socket.gethostname(), os.getpid()]))
            if not self.appears(store, "failed"):
                return
            self.tell(store, main_frames(), "")
            if not self.appears(store, "printed", 2 * ANSWER):
                return
        except STORE_ENDED:
            return
        if not self.over.wait(LINGER):
            os._exit(1)  # otherwise the launcher would kill it half a minute later

    def appears(self, store: dist.Store, key: str, seconds: float = math.inf) -> bool:
        """Whether a key is in the store within the seconds, and before the process ends."""
        until = time.monotonic() + seconds
        while not store.check([key]):
            if self.over.wait(1) or time.monotonic() > until:
                return False
        return True

    def stop_listening(self) -> None:
        """Wait for the thread: if Python ends while it is in a call to the store, it aborts."""
        self.over.set()
        self.listener.join(ANSWER)

    def report(self, frames: Frames, why: str) -> None:
        """Collect the reports of all ranks, and print the diagnosis unless another rank does."""
        try:
            store = connect()
            store.set("failed", "")
            self.tell(store, frames, why)
            accounts, silent = collect(store)
            if store.compare_set("printer", "", str(world().rank)) == str(world().rank).encode():
                report = self.write_report(accounts, silent, world().size)
                print(f"{self.script.stem}: error: {report}", file=sys.stderr, flush=True)
                store.set("printed", "")
            store.wait(["printed"], timedelta(seconds=ANSWER))
        except STORE_ENDED:
            return

    def tell(self, store: dist.Store, frames: Frames, why: str) -> None:
        """Write this rank's records, and tell the others where it is; only once."""
        if not self.told.acquire(blocking=False):
            return
        recorded = read_recorder()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{PREFIX}{world().rank}").write_bytes(pickle.dumps(recorded))
        if stopped := store.check([f"stopped {world().rank}"]) and bool(self.stopped_at):
            frames, entries = self.stopped_at, recorded["entries"]
            recorded["entries"] = [e for e in entries if e["time_created_ns"] < self.continued]
        places = [(Path(frame.f_code.co_filename), line) for frame, line in frames]
        account = self.account(recorded, why, awaited_message(frames), self.name_places(places))
        account["stopped"] = stopped
        store.set(f"account {world().rank}", json.dumps(account))

    def account(self, recorded: dict, why: str, message: dict | None, place: str = "") -> dict:
        """This rank's account for :func:`diagnose`."""
        # Groups of other ranks may have the same name.
        key = {name: f"{name} of {g['ranks']}" for name, g in recorded["pg_config"].items()}
        calls, number_of = [], Counter()
        for entry in reversed(recorded["entries"]):
            name = entry["process_group"][0]
            number_of[name] += 1
            if number_of[name] <= LAST:
                frames = [(Path(f["filename"]), f["line"]) for f in entry.get("frames", [])[::-1]]
                place_of = self.name_places(frames)
                calls.insert(0, call_of(entry, place_of) | {"group": key.get(name, name)})
        groups = {key[name]: json.loads(g["ranks"]) for name, g in recorded["pg_config"].items()}
        place = place or (calls[-1]["place"] if calls else "")
        return {"why": why, "place": place, "message": message, "calls": calls, "groups": groups}

    def name_places(self, places: list[tuple[Path, int]]) -> str:
        """The line of the script, and the innermost line outside of libraries."""
        ours = [p for p in places if p[0].is_file() and not str(p[0]).startswith(LIBRARIES)]
        ours = [p for p in ours if p[0] != Path(__file__)]
        of_script = [p for p in ours if p[0].absolute() == self.script]
        named = dict.fromkeys([*of_script[-1:], *ours[-1:]])
        return ", in ".join(
            f"{path.name}:{line} {linecache.getline(str(path), line).partition('  #')[0].strip()}"
            for path, line in named
        )

    def write_report(self, accounts: dict, silent: dict, world: int) -> str:
        """Write the diagnosis of the ranks' accounts, and remove files of an earlier run."""
        for path in self.folder.glob(f"{PREFIX}*"):
            if accounts and world().rank in accounts and path.stat().st_mtime < BEGIN:
                path.unlink()
        first, *others = diagnose(accounts, silent, world)
        report = "\n  ".join([f"{first}; recorded in {self.folder}", *others])
        (self.folder / REPORT).write_text(report + "\n")
        return report


watch: Watch | None = None  # of this process


def prepare(script: Path, output_dir: Path) -> None:
    """Start to record collectives, and explain them if they fail."""
    global watch
    if world().size > 1:
        watch = Watch(script, output_dir / "flight_recorder")


def listen(timeout: float) -> None:
    """Also answer other ranks; all ranks have joined by now. Groups that a device mesh or a library
    has created get the timeout of the group of all ranks: ``timeout`` seconds."""
    if watch and dist.is_initialized():
        for group in groups_of_process():
            set_timeout(timedelta(seconds=timeout), group)
        watch.start()


def main_frames() -> Frames:
    return outermost_first(sys._current_frames()[threading.main_thread().ident])


def outermost_first(frame: FrameType) -> Frames:
    return list(traceback.walk_stack(frame))[::-1]


def awaited_message(frames: Frames) -> dict | None:
    """The send or receive that waits at these lines, which gloo does not record."""
    if not frames or "torch/distributed" not in frames[-1][0].f_code.co_filename:
        return None  # it is computing
    for frame, _ in reversed(frames):
        given = frame.f_locals
        if frame.f_code.co_name in ("send", "recv") and "tensor" in given:
            end = "dst" if frame.f_code.co_name == "send" else "src"
            group, peer = given["group"] or dist.group.WORLD, given[end]
            peer = dist.get_global_rank(group, given[f"group_{end}"]) if peer is None else peer
            return message(frame.f_code.co_name, given["tensor"], peer)
        lists = [value for value in given.values() if isinstance(value, list)]
        ops = [op for op in sum(lists, []) if isinstance(op, dist.P2POp)]
        for op in sorted(ops, key=lambda op: op.op is dist.isend):
            return message("send" if op.op is dist.isend else "recv", op.tensor, op.peer)
    return None


def message(kind: str, tensor: torch.Tensor, peer: int) -> dict:
    what = describe(kind, [tensor.shape], tensor.dtype)
    return {"peer": peer, "what": f"{what} {'from' if kind == 'recv' else 'to'} rank {peer}"}


# ---------------------------------------------------------------------------------- other ranks


def connect() -> dist.Store:
    """A separate connection to the launcher's store: one that waits blocks every thread on it."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, timeout=timedelta(seconds=ANSWER))
    return dist.PrefixStore(f"hang {world().restarts}", store)


def collect(store: dist.Store) -> tuple[dict[int, dict], dict[int, str]]:
    """What each rank reports, and why a rank does not report. A stopped process is continued, so
    that it reports where it was; the run has failed in any case."""
    accounts, silent, until = {}, {}, time.monotonic() + ANSWER
    while (waited := set(range(world().size)) - {*accounts, *silent}) and time.monotonic() < until:
        for rank in waited:
            state, process = state_of(store, rank)
            if store.check([f"account {rank}"]):
                accounts[rank] = json.loads(store.get(f"account {rank}"))
            elif state == "T":
                store.set(f"stopped {rank}", "")
                os.kill(process, signal.SIGCONT)
            elif state == "gone":
                silent[rank] = "its process has ended"
        time.sleep(0.05)
    return accounts, silent | dict.fromkeys(waited, "it does not answer")


def state_of(store: dist.Store, rank: int) -> tuple[str, int]:
    """State of a rank's process on this machine: as in ``ps``, or gone."""
    if not store.check([f"process {rank}"]):
        return "", 0
    host, process = json.loads(store.get(f"process {rank}"))
    if host != socket.gethostname() or sys.platform != "linux":
        return "", 0
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone", process
    return "gone" if state in "ZX" else state, process


# -------------------------------------------------------------------------------------- PyTorch


def read_recorder() -> dict:
    """PyTorch's record: ``entries``, one per collective, and ``pg_config``, one per group. It
    includes send and receive only for NCCL."""
    try:
        own = torch._C._distributed_c10d
        read = own._dump_nccl_trace if "nccl" in dist.get_backend() else own._dump_fr_trace
        recorded = pickle.loads(read(includeCollectives=True, includeStackTraces=True))
    except AttributeError:  # another version of PyTorch
        recorded = {"version": "", "entries": []}
    recorded["pg_config"] = {  # empty with gloo, but PyTorch's tool needs it
        name: {
            "name": name,
            "desc": group.group_desc,
            "ranks": str(dist.get_process_group_ranks(group)),
        }
        for group, name in groups_of_process().items()
    }
    return recorded


def groups_of_process() -> dict[dist.ProcessGroup, str]:
    """The process groups of this process, by name."""
    world = getattr(dist.distributed_c10d, "_world", None)
    return dict(getattr(world, "pg_names", {}))
