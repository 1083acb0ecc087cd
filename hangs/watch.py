"""When a collective hangs: which one, the ranks that joined it, and the line where each rank is.

PyTorch records the collectives of each process in its flight recorder. When one times out, loses a
rank or aborts, the ranks that notice it ask all others where they are, every rank writes its record
to a folder, and one of them prints a diagnosis.
"""

import atexit
import contextlib
import ctypes
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from hangs.diagnosis import diagnose
from hangs.peers import ANSWER, ask, serve
from hangs.recorder import account_of, locate, read_file, read_recorder, set_timeouts

WORDS = ("Timed out", "timed out", "Application timeout", "Connection closed", "Connection reset")
WORDS += ("Broken pipe",)  # in errors of gloo, NCCL and the store: another rank is late or gone
PREFIX = "rank_"  # of the files with records, as PyTorch's own tool expects it
REPORT = "report.txt"
LINGER = 2  # seconds that a rank has to end by itself, once the diagnosis is printed


class Watch:
    """Collects and reports what every rank of a hanging run is doing; see :func:`prepare`."""

    def __init__(self, script: Path, folder: Path, rank: int, one_machine: bool):
        self.script = script
        self.folder = folder
        self.rank = rank
        self.one_machine = one_machine
        self.process = os.getpid()
        self.began = time.time()
        self.peers = []  # addresses of all ranks
        self.account = None  # what describe() returned first
        self.raised = []  # frames of the error of a collective
        self.describing = threading.RLock()
        self.stopped_at = None  # where a signal had stopped this process, from locate()
        self.continued = 0.0  # when it went on
        self.claimed = threading.Lock()  # by the rank that reports
        self.over = threading.Event()  # the diagnosis is printed
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / PREFIX))
        if torch.cuda.is_available():  # NCCL's watchdog writes there, and makes no folder
            folder.mkdir(parents=True, exist_ok=True)
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
        claim = partial(self.claimed.acquire, blocking=False)  # whether it is the first
        answers = {"claim": claim, "where": self.describe, "end": self.end}
        try:
            own = serve(self.one_machine, answers)
        except OSError as error:
            own = f"it cannot be asked: {error}"
        peers = [None] * dist.get_world_size()
        dist.all_gather_object(peers, own)
        self.peers = peers
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGCONT"):
            signal.signal(signal.SIGCONT, self.after_stop)
        if self.rank == 0:
            with contextlib.suppress(Exception):  # of missing and foreign files
                self.explain_last_run()

    def explain_last_run(self) -> None:
        """NCCL's watchdog may have written the records before it ended the process."""
        newest = max(self.folder.iterdir(), key=lambda path: path.stat().st_mtime)
        if newest.name != REPORT:
            accounts = {
                int(path.name.removeprefix(PREFIX)): account_of(read_file(path), self.script)
                for path in self.folder.glob(f"{PREFIX}*")
            }
            print(f"the last run hung: {self.write_report(accounts)}", flush=True)

    def after_exception(self, kind, error, trace) -> None:
        frames = list(traceback.walk_tb(trace))
        cause = error
        while cause and not any(words in str(cause) for words in WORDS):
            cause = cause.__cause__ or cause.__context__  # a pipeline's schedule wraps it
            frames += traceback.walk_tb(cause.__traceback__) if cause else []
        hung = cause and dist.is_initialized()
        if hung:
            self.raised = frames[::-1]  # the innermost first; also if another rank asks already
            self.describe()
        sys.__excepthook__(kind, error, trace)
        if hung:
            self.report()

    def before_abort(self, signum: int) -> None:
        """Called by the thread that aborts the process, which ends when this returns."""
        if os.getpid() == self.process and dist.is_initialized():
            self.describe(failed=True)
            self.report()

    def after_stop(self, signum: int, frame: FrameType) -> None:
        """Called first when a process that a signal had stopped is continued: see :func:`ask`."""
        self.stopped_at = locate(self.script, list(traceback.walk_stack(frame)))
        self.continued = time.time()

    def ask(self, question: str) -> list:
        """The answers of all ranks, including this one; strings say why there is none."""
        with ThreadPoolExecutor(64) as pool:
            return list(pool.map(partial(ask, question), self.peers))

    def report(self) -> None:
        """Ask all ranks, and print the diagnosis unless another rank does."""
        first = next((a for a in self.ask("claim") if isinstance(a, bool)), False)
        if first:  # to ask the lowest rank that can answer
            report = self.write_report(dict(enumerate(self.ask("where"))))
            print(f"{self.script.stem}: error: {report}", file=sys.stderr, flush=True)
            self.over.set()
            self.ask("end")
        elif self.peers:  # otherwise the next start explains the records
            self.over.wait(3 * ANSWER)

    def end(self) -> None:
        """The diagnosis is printed. The launcher would end a rank that does not wait only later."""
        if not self.over.is_set():
            self.over.set()
            time.sleep(LINGER)
            os._exit(1)

    def describe(self, failed: bool = False) -> dict:
        """Write this rank's record; its account, see :func:`account_of`. The first call counts."""
        with self.describing:
            if self.account:
                return self.account
            record = read_recorder()
            with contextlib.suppress(OSError):  # such as a full disk
                self.folder.mkdir(parents=True, exist_ok=True)
                path = self.folder / f"{PREFIX}{self.rank}"
                path.write_bytes(pickle.dumps(record, protocol=2))  # read_file() knows no other
            if stopped := time.time() - self.continued < ANSWER:
                at = self.stopped_at
                until = self.continued * 1e9
                record["entries"] = [e for e in record["entries"] if e["time_created_ns"] < until]
            else:
                main = sys._current_frames()[threading.main_thread().ident]
                at = locate(self.script, self.raised or list(traceback.walk_stack(main)))
            self.account = account_of(record, self.script, at, failed or bool(self.raised), stopped)
            return self.account

    def write_report(self, answers: dict) -> str:
        """Write the diagnosis of the ranks' answers, and remove files of an earlier run."""
        first, *others = diagnose(answers)
        report = "\n  ".join([f"{first}; recorded in {self.folder}", *others])
        with contextlib.suppress(OSError):
            for path in self.folder.glob(f"{PREFIX}*"):
                if self.account and path.stat().st_mtime < self.began:
                    path.unlink()
            (self.folder / REPORT).write_text(report + "\n")
        return report


watch: Watch | None = None  # of this process


def prepare(script: Path, folder: Path, rank: int, size: int, one_machine: bool) -> None:
    """Start to record collectives, in a ``folder`` for all ranks, to explain them if they fail.
    Lines of the ``script`` are reported first. If all ranks share ``one_machine``, no other has to
    reach them."""
    global watch
    if size > 1:
        watch = Watch(script, folder, rank, one_machine)


def listen(timeout: float) -> None:
    """Answer other ranks from now on. Groups that a device mesh or a library has created get the
    ``timeout`` of the group of all ranks, in seconds. All ranks call it, again after creating such
    groups."""
    if watch and dist.is_initialized():
        set_timeouts(timeout)
        if not watch.peers:
            watch.start()
