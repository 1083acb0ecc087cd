"""Launch the scripts as a user does, in separate processes, on the CPU and offline; or fork these
processes, where a test is not about the launcher."""

import atexit
import contextlib
import functools
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch
import torch.distributed as dist
import yaml
from fork_server import Server
from torch.distributed.checkpoint import HuggingFaceStorageReader

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from techniques import TECHNIQUES  # noqa: E402

# A shell's background job ignores Ctrl-C, one of nohup SIGHUP, and so would all that a test starts:
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

torch.set_num_threads(1)  # see environment()

SESSION = f"launched-by-tests-{uuid.uuid4()}"
TEMPORARY = Path(tempfile.mkdtemp(prefix="tests-"))  # for what launchers leave behind
atexit.register(shutil.rmtree, TEMPORARY, ignore_errors=True)
if "PYTEST_XDIST_WORKER" in os.environ:  # whose loaders' sockets nobody would remove
    tempfile.tempdir = str(TEMPORARY)
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ONE_PROCESS = [t.script for t in TECHNIQUES if "one_process" in t.traits]
CLOSED_PORT = "http://127.0.0.1:9"  # the discard service, which nobody runs: it refuses
HOOKED = "tests/hooks.py"  # runs a script with small models, and what HOOKS asks for
TABLES = yaml.safe_load((ROOT / "tests/tables.yaml").read_text())  # of parameters
LIBRARIES = {  # what a server imports for scripts with such a name
    # What deepspeed.initialize() imports for stages 1 to 3 is most of DeepSpeed's own time.
    "deepspeed": ("deepspeed", "deepspeed.runtime.zero.muon.original_muon"),
    "(accelerate|lightning|transformers)_": ("accelerate", "lightning", "transformers.trainer"),
}
OF_A_LIBRARY = "(?i)deepspeed|accelerate|ecosystem|test_(examples|accum|vision)|only_a_config"
LONG = ("test_faults", "test_docs", "test_multi_node", "test_benchmark")  # come first

pytest_plugins = ["data_folders", "example_runs"]  # with more fixtures
servers = {}  # by what they have imported besides PyTorch


def name_of(path):
    return str(path.relative_to(ROOT))


def environment(**changes):
    """Ours, without what a launcher or the network would add. One thread a process: tests run side
    by side, and threads that wait for each other's cores make both many times slower."""
    env = {k: v for k, v in os.environ.items() if k not in LAUNCHERS}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    env |= {"LAUNCHED_BY": SESSION, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "default"}
    env |= {"http_proxy": CLOSED_PORT, "https_proxy": CLOSED_PORT, "no_proxy": ""}
    return env | {"OMP_NUM_THREADS": "1", "TMPDIR": str(TEMPORARY)} | changes


class Finished(NamedTuple):
    """What a command left behind: exit code, both streams, seconds."""

    command: str | list
    by_hand: str
    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def lines(self):
        return self.stdout.splitlines()

    @property
    def lists(self):
        """What ranks have printed as JSON, each in a line."""
        return [json.loads(line) for line in self.lines if line.startswith("[")]

    @property
    def errors(self):
        """Our own error lines, on any rank."""
        return re.findall(r"^\w+: error: .*$", self.stdout + self.stderr, re.MULTILINE)

    @property
    def refusal(self):
        """The one line with which it ended, with exit code 2, whatever ranks said it."""
        assert self.code == 2 and "Traceback" not in self.stderr, str(self)
        [line] = set(self.errors)
        return line

    @property
    def our_warnings(self):
        """Python's warnings that point at a line of ours."""
        scripts = r"(?:pytorch|accelerate|lightning|transformers)_\w+"
        rooms = r"(?:harness|hangs|parallel|libraries|jobs)/\w+"
        ours = rf"^\S*\b(?:common|{scripts}|{rooms})\.py:\d+: .*$"
        return re.findall(ours, self.stderr, re.MULTILINE)

    def __str__(self):
        return f"$ {self.by_hand}\n{self.stdout}\n{self.stderr}\nexit code {self.code}"


def server(words):
    """That which has imported what a command needs, started when first asked for."""
    scripts = " ".join(word for word in words if word.endswith(".py")).lower()
    modules = next((m for name, m in LIBRARIES.items() if re.search(name, scripts)), ())
    if modules not in servers:
        servers[modules] = Server(environment(DS_ACCELERATOR="cpu"), *modules)
    return servers[modules]


class Started:
    """A command that runs, as a group of processes. What it says is in files, so it never waits for
    a reader. If ``forked``, a server forks the processes of a script instead of its launcher, which
    takes seconds less; the exit code is that of the first rank that failed."""

    def __init__(self, command, cwd=ROOT, forked=False, **env):
        words = shlex.split(command) if isinstance(command, str) else list(map(str, command))
        if torch.__version__ < "2.12" and any("pytorch_QLoRA" in word for word in words):
            pytest.skip("pytorch_QLoRA.py needs PyTorch 2.12")
        if forked:
            of_files = TABLES["accelerate"]
            env |= next((of_files[word] for word in words if word in of_files), {})
        self.command = command
        self.by_hand = as_typed(words, env)
        self.began = time.monotonic()
        print("$", self.by_hand)  # pytest shows it if the test fails
        self.files = [tempfile.TemporaryFile() for _ in range(2)]
        options = dict(zip(("stdout", "stderr"), self.files, strict=True))
        options |= {"cwd": cwd, "env": environment(**env)}
        if forked:
            self.process = server(words).start(words, **options)
        else:
            self.process = subprocess.Popen(words, **options, start_new_session=True)

    @property
    def running(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0)
        return self.process.returncode is None

    @property
    def output(self):
        """What it has said so far, on either stream. (read() would move the place it writes to.)"""
        return [os.pread(file.fileno(), 2**24, 0).decode() for file in self.files]

    def send(self, signum, group=False):
        (os.killpg if group else os.kill)(self.process.pid, signum)

    def end(self, timeout=60):
        """Wait for its end; if that does not come, kill all of it."""
        try:
            self.process.wait(timeout)
            why = None
        except subprocess.TimeoutExpired:
            why = f"no end after {timeout} s"
        finally:
            self.kill()
        seconds = time.monotonic() - self.began
        code = self.process.returncode
        finished = Finished(self.command, self.by_hand, code, *self.output, seconds)
        assert not why, f"{why}\n{finished}"
        return finished

    def kill(self):
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.send(signal.SIGKILL, group=True)
            self.process.wait()


@contextlib.contextmanager
def started(command, **options):
    """A command that is killed in the end, if it has not ended."""
    process = Started(command, **options)
    try:
        yield process
    finally:
        process.kill()
        for file in process.files:
            file.close()


def launch(command, timeout=240, **options):
    """Run a shell command to its end; if that does not come, kill all that it started."""
    with started(command, **options) as process:
        return process.end(timeout)


def wait_for(condition, seconds=120, state=str):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen: {state()}"
        time.sleep(0.02)


def as_typed(words, env):
    """A command as one repeats it in the folder of the repository."""
    shown = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | env
    shown = [f"{name}={shlex.quote(value)}" for name, value in shown.items()]
    return " ".join([*shown, shlex.join(words)])


def cases(names, rows, usual):
    """Parameters of a test. Those that are not `usual(*row)` run when all are asked for: -m ''."""
    rows = [row if isinstance(row, tuple) else (row,) for row in rows]
    found = [pytest.param(*r, marks=[] if usual(*r) else pytest.mark.full) for r in rows]
    return pytest.mark.parametrize(names, found, ids=["-".join(map(str, row)) for row in rows])


def place_of(item):
    """A worker that has a test of a minute left while the others have none would be waited for. And
    tests of libraries are side by side, so on one worker: to import them takes as long as a test.
    """
    if item.path.stem in LONG:
        return 0
    return 1 if re.search(OF_A_LIBRARY, item.nodeid) else 2


def pytest_collection_modifyitems(items):
    items.sort(key=place_of)
    claims = (ROOT / "tests" / "gpu_claims.txt").read_text()
    for item in items:
        if f" => {item.nodeid}\n" in claims:
            item.add_marker("claim")


def succeed(command, **options):
    finished = launch(command, **options)
    assert finished.code == 0, str(finished)
    return finished


def run_program(text, n, folder):
    """Lines of Python on n ranks, which can import our files. They have json, torch and dist, and
    all ranks in a group."""
    imports = "import json, torch, torch.distributed as dist"
    begin = f"{imports}\ndist.init_process_group('gloo')\n"
    program = folder / "program.py"
    program.write_text(f"{begin}{text}\ndist.destroy_process_group()\n")
    command = f"torchrun --standalone --nproc_per_node={n} {program}"
    return succeed(command, forked=True, PYTHONPATH=str(ROOT))


@contextlib.contextmanager
def refused(*words):
    """What is run within has to end with exit code 2, and with one line that has these words."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), pytest.raises(SystemExit, match="2"):
        yield
    [line] = printed.getvalue().splitlines()
    assert all(word in line for word in words), line


def read_run(output):
    """The state dict that a run wrote, and its result."""
    state = torch.load(output / "model.pt", weights_only=True)
    return state, json.loads((output / "result.json").read_text())


def same_bits(ours, theirs):
    """Whether two state dicts are alike."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in theirs)


def flat(state):
    """A state dict as one vector in float64."""
    return torch.cat([tensor.flatten().double() for tensor in state.values()])


def relative_difference(ours, theirs):
    """Largest difference of any tensor, relative to the tensor's largest value."""
    assert ours.keys() == theirs.keys()
    pairs = [(ours[name].double(), theirs[name].double()) for name in theirs]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def distance(ours, theirs):
    """How far two state dicts are apart, relative to the size of the second."""
    ours = flat(ours)
    theirs = flat(theirs)
    return ((ours - theirs).norm() / theirs.norm()).item()


def snapshots(folder):
    """Those in an output folder, newest first."""
    return sorted((folder / "snapshots").glob("step-*"), reverse=True)


def state(folder):
    """What the newest holds; of the run itself beside the parts."""
    found = torch.load(snapshots(folder)[0] / "state.pt", weights_only=True)
    return found | found["run"]


def tensors_of(snapshot):
    """All in a snapshot, whoever wrote it, by name."""
    from libraries.weights import read_shards

    reader = HuggingFaceStorageReader(str(snapshot / "tensors"))
    saved = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(t.size, dtype=t.properties.dtype) for name, t in saved.items()}
    read_shards(snapshot, tensors, reader)
    return tensors


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launcher(script, world_size=1, through=""):
    """A script's own launch command.

    Args:
        script: its name, with or without flags.
        through: a file of ours that runs the script, and is launched in its place.
    """
    name, _, flags = script.partition(" ")
    if name in ONE_PROCESS:
        start = "python"
    elif name == "pytorch_DDP":
        start = "python -m torch.distributed.launch --nnodes=1 "
        start += f"--nproc_per_node={world_size} --master_port={free_port()}"
    elif name == "pytorch_DeepSpeed":
        start = f"deepspeed --num_gpus {world_size} --master_port {free_port()}"
    elif name.startswith("accelerate_"):
        start = f"accelerate launch --config_file config/{name}.yml --num_processes {world_size}"
        start += f" --main_process_port {free_port()}"
    else:
        start = f"torchrun --standalone --nproc_per_node={world_size}"
    return " ".join(f"{start} {through} {name}.py {flags}".split())


def hooked(script, n=1, flags=""):
    """The command of a script on n ranks, with small models, and with HOOKS."""
    return f"{launcher(script, n, HOOKED)} {flags}"


def processes_of_this_session():
    found = (process.info for process in psutil.process_iter(["pid", "cmdline", "environ"]))
    return [info for info in found if (info.pop("environ") or {}).get("LAUNCHED_BY") == SESSION]


@pytest.fixture(autouse=True, scope="session")
def no_process_is_left():
    yield
    for running in servers.values():
        running.close()
    wait_for(lambda: not processes_of_this_session(), 10, processes_of_this_session)


@pytest.fixture(scope="module")
def run_once(tmp_path_factory):
    """A function that runs a script through hooks.py, by (script, world size, flags, hooks), and
    returns what the command left behind and its output folder. The same run is done only once."""
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def get(script, world_size=1, flags="", hooks=""):
        output = Path(tempfile.mkdtemp(dir=folder))
        command = hooked(script, world_size, f"{flags} --output-dir {output}")
        finished = succeed(command, forked=True, HOOKS=hooks)
        assert not finished.our_warnings
        return finished, output

    yield get
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def train(request, run_once):
    """A function that trains by (script, world size, flags), on the `JOB` of the file of tests if
    it has one, and with its `HOOKS`, or others. It returns what `read_run` does."""
    usual = getattr(request.module, "HOOKS", "")

    def get(script, world_size=1, flags="", hooks=usual):
        name, _, own_flags = script.partition(" ")
        job = getattr(request.module, "JOB", "")
        _, output = run_once(name, world_size, f"{job} {own_flags} {flags}", hooks)
        shutil.rmtree(output / "snapshots", ignore_errors=True)  # most of the space
        state, result = read_run(output)
        assert result["world_size"] == world_size, "fork_server.py does not know the launcher"
        return state, result

    return get


@pytest.fixture
def alone():
    """This process is a group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def double():
    """Tensors of this process are made in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def become(monkeypatch):
    """A function that makes this process a rank, as a launcher would by its environment."""
    from harness.world import world

    def become_rank(rank=0, size=1, local_size=None):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        for name, value in zip(names, (rank, rank, size, local_size or size), strict=True):
            monkeypatch.setenv(name, str(value))
        world.cache_clear()

    yield become_rank
    world.cache_clear()
