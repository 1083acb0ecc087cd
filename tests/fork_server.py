"""Runs scripts in processes that are forked from one that has already imported PyTorch, which is
most of the time of a test with `torchrun`.

For each run the server forks a launcher, which forks a process per rank, sets what `torchrun` would
set, forwards signals, and ends all ranks when one has failed. A rank runs its script as `python
SCRIPT` does; in another folder than this repository's it forgets our files, as there may be others
of these names. The server is separate from pytest, which has threads, and a fork copies only one
thread. Nor does it call torch.set_num_threads(): that creates a thread pool, which each rank would
have to create again, and autograd's threads abort ("Invalid thread pool!") when two try at once.

A forked rank differs from a real one, so every kind of test also has a case with a real launcher:
all MODULES are imported; C libraries have read their environment in the server; the ranks of all
runs share the server's seed of hash(); and modules are not freed at the end.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from typing import NoReturn

MODULES = """torch torch._dynamo torch.distributed.fsdp torch.distributed.nn
    torch.distributed.checkpoint.state_dict torch.distributed.optim
    torch.distributed.tensor.parallel torch.distributed.pipelining
    torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook torchvision torch.utils.tensorboard
    tensorboard.plugins.hparams.metadata tqdm PIL.Image numpy.ma""".split()
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OURS = ["common"]  # with the rooms below it
PATIENCE = 30  # seconds from SIGTERM to SIGKILL, as torchrun has it


class Server:
    """What pytest sees of a server, which has an environment, and imports ``modules`` besides
    MODULES: `start` starts a command as `subprocess.Popen` does."""

    def __init__(self, env: dict, *modules: str):
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno()), *modules]
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL
        )
        theirs.close()

    def start(self, words: list[str], stdout, stderr, cwd, env: dict) -> "Launched":
        """The command is one for a shell: `python` or a launcher, its flags, a script, its flags.
        Its ranks write to the two files."""
        at = next(i for i, word in enumerate(words) if word.endswith(".py"))
        flags = r"(?:--nproc_per_node=|--num_gpus |--num_processes )(\d+)"
        ranks = re.search(flags, " ".join(words[:at]))
        job = {"argv": words[at:], "ranks": int(ranks[1]) if ranks else 0, "cwd": str(cwd)}
        report, theirs = os.pipe()
        files = [theirs, stdout.fileno(), stderr.fileno()]
        socket.send_fds(self.requests, [json.dumps(job | {"env": env}).encode()], files)
        os.close(theirs)
        return Launched(report)

    def close(self) -> None:
        self.requests.shutdown(socket.SHUT_RDWR)  # forked loaders of pytest may hold it as well
        self.requests.close()
        self.process.wait()


class Launched:
    """What pytest sees of a launcher: the part of `subprocess.Popen` that tests use."""

    def __init__(self, report: int):
        self.report = open(report)
        self.pid = int(self.report.readline())  # of its group of processes, too
        self.returncode = None

    def wait(self, timeout: float | None = None) -> int:
        """The code of the rank that was the first to fail, or 0."""
        if self.returncode is None:
            if not select.select([self.report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            with self.report:
                self.returncode = int(self.report.read() or -signal.SIGKILL)
        return self.returncode


# ------------------------------------------------------- below: the server, launchers and ranks
def serve(requests: socket.socket) -> list[str]:
    """Fork a launcher for each request. Returns in ranks only, with the words of `python SCRIPT`
    after the first."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the launchers
    while True:
        message, files, _, _ = socket.recv_fds(requests, 2**20, 3)
        if not message:  # pytest has closed it, or ended
            os._exit(0)  # as in become_script()
        if not os.fork():
            requests.close()
            return launch(json.loads(message), *files)
        for file in files:
            os.close(file)


def launch(job: dict, report: int, stdout: int, stderr: int) -> list[str]:
    """Fork the ranks, and return in them."""
    os.setsid()
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    for number, file in enumerate([stdout, stderr], 1):
        os.dup2(file, number)
        os.close(file)
    os.write(report, f"{os.getpid()}\n".encode())
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    run = str(uuid.uuid4())
    ranks = set()
    for rank in range(job["ranks"] or 1):
        if not (pid := os.fork()):
            os.close(report)
            listener.close()
            die_with_parent()
            if job["ranks"]:
                os.environ.update(rank_environment(rank, job["ranks"], address, run))
            return job["argv"]
        ranks.add(pid)
    options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    store = torch.distributed.TCPStore(*address, **options)  # noqa: F841  until all have ended
    os.write(report, str(wait_for(ranks)).encode())
    os._exit(0)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of prctl(2)


def rank_environment(rank: int, world_size: int, address: tuple[str, int], run: str) -> dict:
    """What torchrun sets that PyTorch or our scripts read."""
    env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    env |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": address[0], "MASTER_PORT": address[1]}
    env |= {"TORCHELASTIC_RUN_ID": run, "TORCHELASTIC_RESTART_COUNT": 0}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": True}  # the launcher's
    return {name: str(value) for name, value in env.items()}


def wait_for(ranks: set[int]) -> int:
    """Until all have ended; as soon as one fails, the others have to. Returns its code, or 0."""

    def send(signum: int) -> None:
        for process in ranks:
            os.kill(process, signum)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, lambda signum, frame: send(signum))
    signal.signal(signal.SIGALRM, lambda signum, frame: send(signal.SIGKILL))
    first = 0
    while ranks:
        process, status = os.wait()
        ranks.remove(process)
        code = os.waitstatus_to_exitcode(status)
        if code and not first:
            first = code
            send(signal.SIGTERM)
            signal.alarm(PATIENCE)
    return first


def become_script(words: list[str]) -> NoReturn:
    """Run the words after `python` as the interpreter would. Only that does not free all its
    modules in the end, which takes longer than many a test."""
    sys.argv = words
    sys.orig_argv = ["python", *words]
    refresh_ours(words[0])
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [os.path.dirname(os.path.abspath(words[0])), *filter(None, places)]
    code = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as exit:
        code = exit.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def refresh_ours(script: str) -> None:
    """As if our files were imported now. What changes PyTorch first imports them itself."""
    sys.modules["harness.clock"].STARTED = time.perf_counter()
    if os.getcwd() != ROOT or script.endswith("fake_gpu.py"):
        for name, module in [*sys.modules.items()]:
            if (getattr(module, "__file__", None) or "").startswith(ROOT) and name != "__main__":
                del sys.modules[name]


if __name__ == "__main__":
    import torch

    sys.path[:0] = [ROOT]
    for module in MODULES + OURS + sys.argv[2:]:
        importlib.import_module(module)
    del sys.path[0]
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose a thread"
    # Else each rank compiles our files anew where Python is told to write nothing beside them:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = tempfile.mkdtemp()
    gc.freeze()  # what is there is not looked through, and so not copied, in each rank
    become_script(serve(socket.socket(fileno=int(sys.argv[1]))))
