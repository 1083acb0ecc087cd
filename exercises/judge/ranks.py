"""Runs an answer on forked ranks of this machine. Every wait ends, and no process is left."""

import contextlib
import faulthandler
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from exercises.judge.verdict import TO_WRITE, Finding
from hangs.diagnosis import diagnose, names
from hangs.recorder import account_of, locate, read_recorder

LIMIT = 6  # a rank that computes is given up after so many times the patience
ANSWER = 60  # seconds that a rank has to say where it is
GRACE = 0.5  # seconds after an error, in which other ranks may report theirs; between two questions


class Outcome(NamedTuple):
    """What a number of ranks has found, by rank; and how it ended, if it did not end well."""

    findings: dict[int, list[Finding]]
    end: str = ""  # a verb, such as "hangs"
    why: str = ""


def run(task: Callable, ranks: int, script: Path, patience: float) -> Outcome:
    """Call a task, which yields findings, on every rank of a new gloo group, in float64. Lines of
    the ``script`` are reported. After ``patience`` seconds without a word, ranks are asked where
    they are."""
    context = multiprocessing.get_context("fork")  # the child has already imported PyTorch
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "100")  # collectives that PyTorch records
    pipes = []
    processes = []
    with tempfile.TemporaryDirectory(prefix="exercise-") as folder:
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                pipes.append(ours)
                args = task, (rank, ranks), script, Path(folder), theirs, pipes
                processes.append(context.Process(target=work, args=args, daemon=True))
                processes[-1].start()
                theirs.close()
            return collect(pipes, script, Path(folder), patience)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def work(task, place: tuple[int, int], script: Path, folder: Path, pipe, inherited) -> None:
    rank, ranks = place
    for other in inherited:
        other.close()  # else the rank would not notice that the judge is gone
    sys.stdout.reconfigure(line_buffering=True)  # the judge kills this process
    sys.stderr = open(folder / f"stderr-{rank}", "w")
    os.dup2(sys.stderr.fileno(), 2)  # gloo prints there before it aborts
    faulthandler.enable(sys.stderr)
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.set_deterministic_debug_mode("warn")  # fills new memory with NaN
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    lock = threading.Lock()
    threading.Thread(target=answer, args=(pipe, lock, script), daemon=True).start()
    findings = []
    end = error = ""
    try:
        for finding in task():
            findings.append(finding)
    except (Exception, SystemExit) as raised:
        end, error = describe(raised, script)
    with lock:
        pipe.send({"findings": findings, "end": end, "error": error})
    threading.Event().wait()  # with open sockets, or ranks that still wait would fail instead


def answer(pipe: Connection, lock: threading.Lock, script: Path) -> None:
    """Tell the judge where the main thread is, each time that it asks; end with the judge."""
    main = threading.main_thread().ident
    while True:
        try:
            pipe.recv()
        except (EOFError, OSError):
            os._exit(1)
        frames = list(traceback.walk_stack(sys._current_frames()[main]))
        lines = [line for frame, line in frames if frame.f_code.co_filename == str(script)]
        account = account_of(read_recorder(stacks=False), script)
        _, message = locate(script, frames)
        account |= {"line": lines[0] if lines else 0, "message": message}
        account["waits"] = bool(account["waits"] or message)
        with lock:
            pipe.send(account)


def describe(error: BaseException, script: Path) -> tuple[str, str]:
    """How a rank has ended, and the learner's own line with the first line of the message."""
    message = next(iter(str(error).splitlines()), "")
    message = re.sub(r"^(\[.*?\]:? ?)+", "", message)  # gloo's source lines
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(script)]
    is_raised = own and own[-1] is frames[-1] and own[-1].line.startswith("raise")
    if isinstance(error, NotImplementedError) and is_raised:  # and not in PyTorch
        return TO_WRITE, f"{script.name}, line {own[-1].lineno}: {message}"
    if isinstance(error, AttributeError) and getattr(error.obj, "__name__", "") == "answer":
        return TO_WRITE, f"{script.name} does not define {error.name}()"
    if isinstance(error, SyntaxError):
        return "raises an error", f"line {error.lineno}: {error.msg}"
    where = f"line {own[-1].lineno}, `{own[-1].line}`" if own else "after your code has returned"
    return "raises an error", f"{where}: {type(error).__name__}: {message}"


def collect(pipes: list[Connection], script: Path, folder: Path, patience: float) -> Outcome:
    """Wait for what all ranks have found; or say why that does not come. Ranks that all wait hang
    if they still do so, in the same calls, when they are asked again."""
    deadline = time.monotonic() + LIMIT * patience
    heard = {}  # by rank, its report
    end = "", ""
    before = {}  # where all ranks waited at the last question
    while len(heard) < len(pipes) and not any(end):
        left = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in heard}
        failed = any(report["end"] for report in heard.values())
        ready = wait(list(left), GRACE if failed or before else patience)
        if failed and not ready:
            break
        accounts = {}
        for pipe in ready or left:
            with contextlib.suppress(OSError):  # of a rank that has just ended
                if not ready:
                    pipe.send("where")
            message = hear(pipe, left[pipe], script, folder)
            (heard if "findings" in message else accounts)[left[pipe]] = message
        asked_before = before
        before = {}
        if len(accounts) == len(left):
            if all(account["waits"] for account in accounts.values()):
                before = {rank: progress(account) for rank, account in accounts.items()}
            late = time.monotonic() > deadline
            if before and before == asked_before:
                end = "hangs", explain(accounts, sorted(heard))
            elif late and (asked_before or not before):
                end = "does not end", explain(accounts, sorted(heard))
    ends = [(r["end"], f"rank {rank}, {r['error']}") for rank, r in heard.items() if r["end"]]
    end = min(ends, default=end)  # "aborts" comes first: other ranks fail because of it
    return Outcome({rank: report["findings"] for rank, report in heard.items()}, *end)


def hear(pipe: Connection, rank: int, script: Path, folder: Path) -> dict:
    """A rank's next message: its report, or its account of where it is."""
    with contextlib.suppress(EOFError, OSError):  # of an end that nothing in Python has caught
        if pipe.poll(ANSWER):
            return pipe.recv()
    stderr = (folder / f"stderr-{rank}").read_text()
    at = re.search(rf'File "{re.escape(str(script))}", line (\d+)', stderr)
    error = "its process has ended, or is stuck"
    if "EnforceNotMet" in stderr:  # of gloo
        error = "it got a tensor of another size than it expected"
    error += f" (line {at[1]})" if at else ""
    return {"findings": [], "end": "aborts", "error": error}


def progress(account: dict) -> tuple:
    """What stays the same while a rank hangs."""
    numbers = [call["number"] for call in account["calls"]]
    return numbers, account["message"], account["line"]


def explain(accounts: dict[int, dict], left: list[int]) -> str:
    """Who waits where, while others have left."""
    answers = accounts | {rank: "it has left" for rank in left}
    first = diagnose(dict(sorted(answers.items())))[0]
    places = [f"rank {rank} {where(account)}" for rank, account in accounts.items()]
    has = "has" if len(left) == 1 else "have"
    gone = f" while {names(left)} {has} left" if left else ""
    reason = f"; {first}" if "differs" in first else ""
    return f"{', '.join(places)}{gone}{reason}"


def where(account: dict) -> str:
    line = f"line {account['line']}" if account["line"] else "the judge's code"
    calls = [call["kind"].removesuffix("_base") for call in account["calls"] if call["open"]]
    message = (account["message"] or {}).get("what")
    if message or calls:
        return f"waits in {message or calls[0]} ({line})"
    return f"waits in {line}" if account["waits"] else f"is in {line}"
