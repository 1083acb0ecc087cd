"""When a collective hangs: which one, the ranks that joined it, and the line where each rank is.

PyTorch records the collectives of each process in its flight recorder. When one times out, loses a
rank or aborts, the ranks that notice it ask all others where they are, every rank writes its record
to a folder, and one of them prints a diagnosis.
"""

import atexit
import contextlib
import ctypes
import linecache
import os
import pickle
import signal
import sys
import sysconfig
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from hangs import recorder
from hangs.diagnosis import diagnose
from hangs.peers import ANSWER, ask, serve

WORDS = ("Timed out", "timed out", "Application timeout", "Connection closed", "Connection reset")
WORDS += ("Broken pipe",)  # in errors of gloo, NCCL and the store: another rank is late or gone
PREFIX, REPORT = "rank_", "report.txt"  # file names; PyTorch's own tool expects the first
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
LINGER = 2  # seconds that a rank has to end by itself, once the diagnosis is printed

Frames = list[tuple[FrameType, int]]  # with line numbers, from the outermost to the innermost


class Watch:
    """Collects and reports what every rank of a hanging run is doing.

    Args:
        script: the file whose lines are reported first.
        folder: for the records.
        one_machine: all ranks share it.
    """

    def __init__(self, script: Path, folder: Path, rank: int, one_machine: bool):
        self.script, self.folder, self.rank, self.one_machine = script, folder, rank, one_machine
        self.process, self.began, self.peers = os.getpid(), time.time(), []
        self.account, self.describing = None, threading.RLock()
        self.stopped_at, self.continued = None, 0.0  # what locate() returns, and when
        self.claimed, self.over = threading.Lock(), threading.Event()
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives; default: none
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / PREFIX))  # of NCCL's watchdog
        # If Python ends while a thread is in C++, it aborts: nothing is described from then on.
        atexit.register(self.describing.acquire, timeout=ANSWER)
        sys.excepthook = self.after_exception
        if sys.platform == "linux":  # gloo aborts if sizes differ, NCCL's watchdog after a timeout
            self.on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(self.before_abort)
            ctypes.CDLL(None).signal(signal.SIGABRT, self.on_abort)
            atexit.register(ctypes.CDLL(None).signal, signal.SIGABRT, None)  # no Python by then

    def start(self) -> None:
        """Answer the other ranks. If the last run in this folder could not report why it ended,
        rank 0 does. All ranks call it."""
        answers = {
            "claim": lambda: self.claimed.acquire(blocking=False),  # whether it is the first
            "where": lambda: self.describe(main_frames(), ""),
            "end": self.end,
        }
        own = None
        try:
            own = serve(self.one_machine, answers)
        except OSError as error:
            print(f"rank {self.rank} cannot be asked where it hangs: {error}", file=sys.stderr)
        peers = [None] * dist.get_world_size()
        dist.all_gather_object(peers, own)
        self.peers = peers
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGCONT"):
            signal.signal(signal.SIGCONT, self.after_stop)
        if self.rank == 0:
            self.explain_last_run()

    def explain_last_run(self) -> None:
        """NCCL's watchdog may have written the records before it ended the process."""
        files = {path.name[len(PREFIX) :]: path for path in self.folder.glob(f"{PREFIX}*")}
        said = self.folder / REPORT
        try:
            newest = max(path.stat().st_mtime for path in files.values())
            if said.exists() and said.stat().st_mtime > newest:
                return
            accounts = {}
            for rank, path in files.items():
                with open(path, "rb") as file:
                    recorded = recorder.PlainUnpickler(file).load()
                accounts[int(rank)] = recorder.account_of(recorded, self.name_places)
            report = self.write_report(accounts, {}, len(files))
            print(f"the last run hung: {report}", flush=True)
        except Exception:  # missing or foreign files must not prevent training
            return

    def after_exception(self, kind, error, trace) -> None:
        frames, cause = list(traceback.walk_tb(trace)), error
        while cause and not any(words in str(cause) for words in WORDS):
            cause = cause.__cause__ or cause.__context__  # a pipeline's schedule wraps it
            frames += traceback.walk_tb(cause.__traceback__) if cause else []
        hung = cause and dist.is_initialized()
        if hung:
            self.describe(frames, "waits")  # before another rank asks
        sys.__excepthook__(kind, error, trace)
        if hung:
            self.report()

    def before_abort(self, signum: int) -> None:
        """Called by the thread that aborts the process, which ends when this returns."""
        if os.getpid() == self.process and dist.is_initialized():
            self.describe(main_frames(), "aborts")
            self.report()

    def after_stop(self, signum: int, frame: FrameType) -> None:
        """Called first when a process that a signal had stopped is continued: see :func:`ask`."""
        self.stopped_at, self.continued = self.locate(outermost_first(frame)), time.time()

    def ask(self, question: str) -> dict:
        """The answers of all ranks, including this one."""
        with ThreadPoolExecutor(64) as pool:
            found = pool.map(lambda own: own and ask(question, *own), self.peers)
            return {rank: "it cannot be asked" if a is None else a for rank, a in enumerate(found)}

    def report(self) -> None:
        """Ask all ranks, and print the diagnosis unless another rank does."""
        first = next((a for a in self.ask("claim").values() if isinstance(a, bool)), False)
        if first:  # to ask the lowest rank that can answer
            answers = self.ask("where")
            silent = {rank: why for rank, why in answers.items() if isinstance(why, str)}
            accounts = {rank: answers[rank] for rank in answers.keys() - silent.keys()}
            report = self.write_report(accounts, silent, len(answers))
            print(f"{self.script.stem}: error: {report}", file=sys.stderr, flush=True)
            self.over.set()
            self.ask("end")
        elif self.peers:  # otherwise the next start explains the records
            self.over.wait(3 * ANSWER)

    def end(self) -> None:
        """The diagnosis is printed. The launcher would end a rank that does not wait only later."""
        if not self.over.is_set():
            self.over.set()
            timer = threading.Timer(LINGER, os._exit, [1])
            timer.daemon = True
            timer.start()

    def describe(self, frames: Frames, why: str) -> dict:
        """Write this rank's record; its account for :func:`diagnose`. The first call counts."""
        with self.describing:
            if self.account:
                return self.account
            recorded = recorder.read_recorder()
            with contextlib.suppress(OSError):  # such as a full disk
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / f"{PREFIX}{self.rank}").write_bytes(pickle.dumps(recorded))
            stopped = time.time() - self.continued < ANSWER
            at = self.stopped_at if stopped else self.locate(frames)
            if stopped:
                entries, until = recorded["entries"], self.continued * 1e9
                recorded["entries"] = [e for e in entries if e["time_created_ns"] < until]
            account = recorder.account_of(recorded, self.name_places, *at, why, stopped)
            self.account = account
            return account

    def locate(self, frames: Frames) -> tuple[str, dict | None]:
        """The line, and the message that it waits for."""
        places = [(Path(frame.f_code.co_filename), line) for frame, line in frames]
        return self.name_places(places), recorder.awaited_message(frames)

    def name_places(self, places: list[tuple[Path, int]]) -> str:
        """The line of the script, and the innermost line outside of libraries."""
        ours = [p for p in places if p[0].is_file() and not str(p[0]).startswith(LIBRARIES)]
        ours = [p for p in ours if p[0].parent != Path(__file__).parent]
        of_script = [p for p in ours if p[0].absolute() == self.script]
        named = dict.fromkeys([*of_script[-1:], *ours[-1:]])
        return ", in ".join(
            f"{path.name}:{line} {linecache.getline(str(path), line).partition('  #')[0].strip()}"
            for path, line in named
        )

    def write_report(self, accounts: dict, silent: dict, size: int) -> str:
        """Write the diagnosis of the ranks' accounts, and remove files of an earlier run."""
        first, *others = diagnose(accounts, silent, size)
        report = "\n  ".join([f"{first}; recorded in {self.folder}", *others])
        with contextlib.suppress(OSError):
            for path in self.folder.glob(f"{PREFIX}*"):
                if self.account and path.stat().st_mtime < self.began:
                    path.unlink()
            (self.folder / REPORT).write_text(report + "\n")
        return report


watch: Watch | None = None  # of this process


def prepare(script: Path, folder: Path, rank: int, size: int, one_machine: bool) -> None:
    """Start to record collectives, to explain them if they fail.

    Args:
        script: the file whose lines are reported first.
        folder: for the records of all ranks.
        rank, size: of this process, and of the run.
        one_machine: all ranks share it, so no other machine has to reach them.
    """
    global watch
    if size > 1:
        watch = Watch(script, folder, rank, one_machine)


def listen(timeout: float) -> None:
    """Answer other ranks from now on. Groups that a device mesh or a library has created get the
    timeout of the group of all ranks. All ranks call it, again after creating such groups.

    Args:
        timeout: in seconds.
    """
    if watch and dist.is_initialized():
        for group in recorder.groups_of_process():
            recorder.set_timeout(timedelta(seconds=timeout), group)
        if not watch.peers:
            watch.start()


def main_frames() -> Frames:
    return outermost_first(sys._current_frames()[threading.main_thread().ident])


def outermost_first(frame: FrameType) -> Frames:
    return list(traceback.walk_stack(frame))[::-1]
