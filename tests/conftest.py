"""Launches the scripts as a user does, in processes of their own, on the CPU and offline."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# A shell's background job ignores Ctrl-C, and so would all that a test starts:
signal.signal(signal.SIGINT, signal.default_int_handler)

SESSION = f"launched-by-tests-{uuid.uuid4()}"
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ONE_PROCESS = (
    "pytorch_SingleGPU",
    "pytorch_half_precision",
    "pytorch_auto_mixed_precision",
    "pytorch_DP",
)
CLOSED_PORT = (
    "http://127.0.0.1:9"  # the discard service, which nobody runs: connections are refused
)


def environment(**changes):
    """Ours, without what a launcher or the network would add. One thread a process: tests run side
    by side, and threads that wait for each other's cores make both many times slower."""
    env = {k: v for k, v in os.environ.items() if k not in LAUNCHERS}
    env["OMP_NUM_THREADS"] = "1"
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    env |= {"LAUNCHED_BY": SESSION, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "default"}
    env |= {"http_proxy": CLOSED_PORT, "https_proxy": CLOSED_PORT, "no_proxy": ""}
    return env | changes


class Finished:
    """What a command left behind: exit code, both streams, seconds."""

    def __init__(self, command, code, stdout, stderr, seconds):
        self.command, self.code, self.seconds = command, code, seconds
        self.stdout, self.stderr = stdout, stderr

    @property
    def lines(self):
        return self.stdout.splitlines()

    @property
    def errors(self):
        """Our own error lines, on any rank."""
        return re.findall(r"^\w+: error: .*$", self.stdout + self.stderr, re.MULTILINE)

    @property
    def our_warnings(self):
        """Python's warnings that point at a line of ours."""
        return re.findall(r"^\S*\b(?:common|pytorch_\w+)\.py:\d+: .*$", self.stderr, re.MULTILINE)

    def __str__(self):
        return f"$ {self.command}\n{self.stdout}\n{self.stderr}\nexit code {self.code}"


def launch(command, timeout=240, cwd=ROOT, **env):
    """Run a shell command to its end; if that does not come, kill all that it started."""
    started = time.monotonic()
    process = subprocess.Popen(
        shlex.split(command) if isinstance(command, str) else command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=environment(**env),
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        pytest.fail(f"no end after {timeout} s\n$ {command}\n{stdout}\n{stderr}")
    return Finished(command, process.returncode, stdout, stderr, time.monotonic() - started)


def succeed(command, **options):
    finished = launch(command, **options)
    assert finished.code == 0, str(finished)
    return finished


def read_run(output):
    """The state dict that a run wrote, and its result."""
    state = torch.load(output / "model.pt", weights_only=True)
    return state, json.loads((output / "result.json").read_text())


def flat(state):
    """A state dict as one vector in float64."""
    return torch.cat([tensor.flatten().double() for tensor in state.values()])


def distance(ours, theirs):
    """How far two state dicts are apart, relative to the size of the second."""
    ours, theirs = flat(ours), flat(theirs)
    return ((ours - theirs).norm() / theirs.norm()).item()


def snapshots(folder):
    """Those in an output folder, newest first."""
    return sorted((folder / "snapshots").glob("step-*"), reverse=True)


def state(folder):
    """What the newest holds of the run."""
    return torch.load(snapshots(folder)[0] / "state.pt", weights_only=True)


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
    else:
        start = f"torchrun --standalone --nproc_per_node={world_size}"
    return " ".join(f"{start} {through} {name}.py {flags}".split())


def processes_of_this_session():
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if SESSION in (folder / "environ").read_text(errors="replace"):
                found.append(f"{folder.name}: {(folder / 'cmdline').read_text()[:200]}")
        except OSError:  # ended meanwhile, or not ours
            continue
    return found


@pytest.fixture(autouse=True, scope="session")
def no_process_is_left():
    yield
    deadline = time.monotonic() + 10
    while (left := processes_of_this_session()) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left, f"the tests left processes behind: {left}"


@pytest.fixture(scope="module")
def train(request, tmp_path_factory):
    """A function that trains by (script, world size, flags), on the `JOB` of the file of tests.

    It returns what `read_run` does. The same run is done only once.
    """
    folder = tmp_path_factory.mktemp("runs")
    outputs = {}

    def get(script, world_size=1, flags=""):
        key = script, world_size, flags
        if key not in outputs:
            output = folder / str(len(outputs))
            name, _, own_flags = script.partition(" ")
            finished = succeed(
                f"{launcher(name, world_size)} {request.module.JOB} {own_flags} {flags} "
                f"--output-dir {output}"
            )
            assert not finished.our_warnings
            shutil.rmtree(output / "snapshots", ignore_errors=True)  # most of the space
            outputs[key] = output
        return read_run(outputs[key])

    yield get
    shutil.rmtree(folder)


@pytest.fixture
def measured(record_property):
    """Notes what a test measured, for the README's tables: tests/collect_proof.py takes it from
    there."""
    return lambda table, **values: record_property(table, json.dumps(values))


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory):
    """A tiny ImageFolder: three colours, with some noise, in files of several kinds and sizes."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    colours = {"blue": (60, 90, 200), "green": (70, 180, 80), "red": (210, 70, 60)}
    for split, count in {"train": 20, "test": 7}.items():
        for name, colour in colours.items():
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                height, width = [(32, 32), (40, 32), (32, 48), (64, 64)][i % 4]
                pixels = rng.normal(colour, 25, size=(height, width, 3)).clip(0, 255)
                image = Image.fromarray(pixels.astype(np.uint8))
                if i % 5 == 4:
                    image = image.convert("P")
                image.save(root / split / name / f"{i:03}.{'png' if i % 5 == 4 else 'jpg'}")
    return root
