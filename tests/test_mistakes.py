"""User errors end in a one-line error that names the value, exit code 2, no traceback, no hang.

Most are in mistakes.txt, and are tried in this process: a script runs until it refuses its flags.
"""

import argparse
import contextlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import CLOSED_PORT, ROOT, TABLES, Finished, cases, launch, launcher, refused, succeed
from PIL import Image
from torch.testing._internal.distributed.fake_pg import FakeStore

import common
from jobs.sizes import size_of_name
from libraries import download, hub
from report import matrix
from techniques import LIBRARIES, TECHNIQUES

LAST = "step-00000002-evaluated"
ONE_PROCESS = {t.script for t in TECHNIQUES if "one_process" in t.traits}
ONLY_GPT = {t.script for t in TECHNIQUES if "needs_gpt" in t.traits}
SMALL = "--dataset synthetic --train-samples 48 --eval-samples 12 --batch-size 24 --epochs 1"
A_GPT = f"{SMALL} --model gpt-4x2x16 --context 16"
LIBRARY = {t.script: t.script.partition("_")[0] for t in LIBRARIES}
LIBRARY["pytorch_DeepSpeed"] = "deepspeed"
DEEPSPEED = TABLES["wrong_deepspeed_configs"]  # in places


@pytest.fixture(scope="session")
def places(tmp_path_factory, image_folder):
    """Folders and files that are wrong in one way each."""
    root = tmp_path_factory.mktemp("places")
    (root / "a_file").write_text("no folder, no weights, no snapshot")
    for name in ["empty_class", "one_class", "broken", "other_classes", "no_test"]:
        shutil.copytree(image_folder, root / name)
    for name in ("green", "red"):
        shutil.rmtree(root / "one_class" / "train" / name)
    shutil.rmtree(root / "no_test" / "test")
    for file in (root / "empty_class" / "train" / "green").iterdir():
        file.unlink()
    jpeg = root / "broken" / "train" / "red" / "000.jpg"
    jpeg.write_bytes(jpeg.read_bytes()[:200])
    (root / "other_classes" / "test" / "yellow").mkdir()
    Image.new("RGB", (32, 32)).save(root / "other_classes" / "test" / "yellow" / "0.png")
    job = f"{SMALL} --model shufflenet_v2_x0_5"
    succeed(f"python pytorch_SingleGPU.py {job} --output-dir {root}/run", forked=True)
    shutil.copytree(root / "run" / "snapshots" / LAST, root / "damaged")
    shutil.copytree(root / "run" / "snapshots", root / "stopped" / "snapshots")
    damaged = root / "damaged" / "state.pt"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    shutil.copytree(root / "damaged", root / "all_damaged" / "snapshots" / LAST)
    torch.save([1, 2], root / "a_list.pt")
    (root / "short").write_text("0123456789")
    (root / "latin").write_bytes("süß".encode("latin-1") * 99)
    for name, text in DEEPSPEED.items():
        (root / f"{name}.json").write_text(text)
    (root / "no_weights").mkdir()
    config = hub.make_config(size_of_name("mixtral-1x2x8", None, None), 16, 27, False)
    (root / "no_weights" / "config.json").write_text(json.dumps(config | {"sliding_window": 8}))
    (root / "adapted" / "adapter").mkdir(parents=True)
    (root / "same").mkdir()
    shutil.copy(root / "run" / "model.pt", root / "same")
    return root


@pytest.fixture
def refuse(become, monkeypatch, tmp_path):
    """A function that runs a script here, as rank 0 of several, until it refuses its flags. Nobody
    answers what it sends to the other ranks."""
    init_process_group = dist.init_process_group

    def init_alone(*_, rank=0, world_size=1, **__):
        init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    def alike(object_list, obj, group=None):
        object_list[:] = [obj] * len(object_list)

    monkeypatch.setattr(dist, "init_process_group", init_alone)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 1)]))
    monkeypatch.setattr(dist, "all_gather_object", alike)
    for name in ("broadcast_object_list", "monitored_barrier", "new_group"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)
    monkeypatch.setattr("harness.world.die_with_launcher", lambda: None)
    monkeypatch.setattr("hangs.watch.prepare", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("urllib.request._opener", None)  # which keeps the proxies of before,
    download.why_unreachable.cache_clear()  # and this what they answered
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, os.environ.get(name, CLOSED_PORT))
    monkeypatch.chdir(ROOT)

    def run(script, flags, ranks=0):
        path = str(ROOT / f"{script}.py")
        monkeypatch.setattr(sys, "argv", [path, *shlex.split(flags)])
        if ranks > 1 or ranks and script not in ONE_PROCESS:
            become(size=ranks)
        stderr = io.StringIO()
        with as_it_was(), contextlib.redirect_stderr(stderr), pytest.raises(SystemExit) as end:
            runpy.run_path(path, run_name="__main__")
        command = f"python {script}.py {flags}"
        return Finished(command, command, end.value.code, "", stderr.getvalue(), seconds=0)

    return run


@contextlib.contextmanager
def as_it_was():
    """What a script changes in its process is undone."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    kept = mock.patch("sys.excepthook", sys.excepthook)
    with kept, mock.patch.dict(os.environ), torch.random.fork_rng(devices=[]):
        yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_default_dtype(torch.float32)


def check_line(finished, *words):
    """Only one rank speaks."""
    assert len(finished.errors) == 1, str(finished)
    for word in words:
        assert word in finished.refusal


# --------------------------------------------------------------------------------- in this process
def read_mistakes():
    """From mistakes.txt, by what stands above them: rows of flags and words."""
    found = {}
    rows = []
    for line in (ROOT / "tests/mistakes.txt").read_text().splitlines():
        if line.startswith("    "):
            flags, _, words = line.strip().partition("=> ")
            rows.append((flags, words))
        elif line and not line.startswith("#"):
            rows = found.setdefault(line, [])
    return found


MISTAKES = read_mistakes()
OF_IMAGES = MISTAKES.pop("0 x model_inference of images")  # test_inference.py trains it
PREDICTED = MISTAKES.pop("0 x estimate that predicts")  # test_estimate.py does, in processes
OF_A_GPT = MISTAKES.pop("0 x model_inference of a GPT")  # test_language.py trains it


def in_this_process(head):
    """Libraries are imported in another one."""
    return head.split()[2] not in LIBRARY


@cases("head", MISTAKES, in_this_process)
def test_a_mistake_ends_in_one_line(head, request, tmp_path, refuse):
    """And nothing is written."""
    ranks, _, script, *flags_of_all = head.split()
    job = "" if flags_of_all else SMALL
    if script in ONLY_GPT:
        job = A_GPT
    files = set(re.findall(r"{(\w+)}", f"{head} {MISTAKES[head]}"))
    files = {name: request.getfixturevalue(name) for name in files}
    for number, (flags, words) in enumerate(MISTAKES[head]):
        output = tmp_path / str(number)
        if script not in ("benchmark", "timeline", "model_inference", "pytorch_DTensor"):
            flags = " ".join([job, f"--output-dir {output}", *flags_of_all, flags])
        flags = flags.format(**files)
        words = words.format(**files).split(" | ")
        if script in LIBRARY:
            command = f"{launcher(script, int(ranks))} {flags}"
            check_line(launch(command, forked=True, timeout=60), *words)
        else:
            check_line(refuse(script, flags, int(ranks)), *words)
        assert not list(output.glob("[!.]*"))


@pytest.mark.parametrize("command, words, _", matrix.REFUSED.values())
def test_what_the_matrix_calls_refused(command, words, _, tmp_path, refuse, monkeypatch):
    monkeypatch.setattr("parallel.mesh.need_compiler", lambda device: None)
    script, _, flags = command.partition(" ")
    check_line(refuse(script, f"{A_GPT} --output-dir {tmp_path} {flags}", 2), words)


@pytest.mark.parametrize("script", LIBRARY)
def test_a_library_that_cannot_be_imported(script, refuse, monkeypatch):
    monkeypatch.setitem(sys.modules, LIBRARY[script], None)
    check_line(refuse(script, ""), script, LIBRARY[script], "None in sys.modules", "pip install")


@pytest.mark.parametrize("silent", [False, True], ids=["refused", "silent"])
def test_cifar10_without_data_or_network(silent, tmp_path, refuse, monkeypatch):
    """One line, whether the network refuses at once or never answers."""
    flags = f"--dataset cifar10 --data-dir {tmp_path}/data --output-dir {tmp_path}/run"
    with socket.socket() as held:  # as long as the test runs, no other process has its port
        held.bind(("127.0.0.1", 0))
        if silent:
            held.listen()
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{held.getsockname()[1]}")
        finished = refuse("pytorch_SingleGPU", flags)
    check_line(finished, "--dataset cifar10", "--dataset synthetic")
    assert ("5 s" in finished.stderr) == silent


@pytest.mark.parametrize("dtype, other", [("float16", "bfloat16"), ("bfloat16", "float16")])
def test_a_device_that_cannot_compute_in_half(dtype, other, monkeypatch):
    def refuse(*args):
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(common.F, "conv2d", refuse)
    with refused(f"--dtype {dtype}", f"use --dtype {other}"):
        common.get_dtype(argparse.Namespace(dtype=dtype), torch.device("cpu"))


# -------------------------------------------------------------------------- in processes of its own
@pytest.mark.parametrize("flags, words", [
    ("--output-dir {}/a_file/run", "{}/a_file/run"),  # only rank 0 looks at it
    ("--dataset cifar10 --data-dir {}/none", "--dataset synthetic"),  # one rank downloads
])  # fmt: skip
def test_no_rank_waits_for_another(flags, words, places, tmp_path):
    command = f"{launcher('pytorch_torchrun_DDP', 2)} {SMALL} --output-dir {tmp_path}"
    finished = launch(f"{command} {flags.format(places)}", timeout=60, forked=True)
    check_line(finished, words.format(places))


def test_several_ranks_of_a_launcher(tmp_path):
    """It adds lines of its own to ours, which it repeats at the end."""
    command = f"{launcher('pytorch_torchrun_DDP', 2)} {SMALL} --output-dir {tmp_path}"
    finished = launch(f"{command} --batch-size 25", timeout=60)
    [line] = set(finished.errors)  # a slow machine gives the others time to say it, too
    assert "--batch-size 25" in line and "2 ranks; use --batch-size 24" in line
    ours = r'(common|pytorch_\w+|(harness|jobs)/\w+)\.py", line'
    assert not re.search(ours, finished.stderr), "a traceback of ours"
    assert "exitcode  : 2 " in finished.stderr, "the code with which the worker ended"
    assert finished.stderr.rstrip("=\n").endswith(f"traceback : {line}")


def test_a_mistake_that_one_rank_alone_makes_is_reported_too(tmp_path):
    """Local rank 0 does not speak for it, so it speaks itself before long."""
    script = tmp_path / "alone.py"
    code = "common.fail('only here') if common.world().rank == 1 else time.sleep(50)"
    script.write_text(f"import time, common\n{code}\n")
    command = f"torchrun --standalone --nproc_per_node=2 {script}"
    finished = launch(command, timeout=60, forked=True, PYTHONPATH=str(ROOT))
    assert finished.code == 2 and finished.errors == ["alone: error: only here"]


def test_auto_without_data_or_network_says_so_and_goes_on(tmp_path):
    flags = f"{SMALL} --dataset auto --model shufflenet_v2_x0_5"
    folders = f"--data-dir {tmp_path}/data --output-dir {tmp_path}/run"
    finished = succeed(f"python pytorch_SingleGPU.py {flags} {folders}", forked=True)
    assert "data: synthetic (CIFAR-10 is not in" in finished.lines[2]
    assert '"dataset": "synthetic"' in (tmp_path / "run" / "result.json").read_text()
