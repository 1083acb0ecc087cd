"""What TensorBoard reads in the files of runs, and its HPARAMS page asks for."""

import json
import subprocess
import sys
import time
import urllib.request

import pytest
from conftest import environment, free_port, launcher, succeed

SCRIPTS = ["pytorch_SingleGPU", "pytorch_torchrun_DDP"]
JOB = "--dataset synthetic --train-samples 64 --eval-samples 16 --batch-size 16 --epochs 2"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of a TensorBoard over the runs of two scripts."""
    runs, port = tmp_path_factory.mktemp("runs"), free_port()
    for script in SCRIPTS:
        succeed(f"{launcher(script)} {JOB} --output-dir {runs}/{script}", forked=True)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", runs, "--port", str(port)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()
    )
    try:
        deadline = time.monotonic() + 60
        while set(ask(port, "data/runs") or []) != set(SCRIPTS):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.5)
        yield port
    finally:
        process.kill()
        process.wait()


def ask(port, what, data=None):
    try:
        data = data and json.dumps(data).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/{what}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.load(answer)
    except (OSError, ValueError):
        return None


def test_hparams_has_a_session_of_each_run(address):
    """As the HPARAMS page asks for them: the technique in the one, final figures in the other."""
    experiment = ask(address, "data/plugin/hparams/experiment", {"experimentName": ""})
    assert {"technique", "batch_size", "lr"} <= {h["name"] for h in experiment["hparamInfos"]}
    tags = {info["name"]["tag"] for info in experiment["metricInfos"]}
    assert {"final/accuracy", "final/images_per_second"} <= tags
    wanted = {"experimentName": "", "allowedStatuses": ["STATUS_SUCCESS", "STATUS_UNKNOWN"]}
    wanted |= {"colParams": [{"hparam": "technique"}], "startIndex": 0, "sliceSize": 100}
    groups = ask(address, "data/plugin/hparams/session_groups", wanted)["sessionGroups"]
    assert {group["hparams"]["technique"] for group in groups} == set(SCRIPTS)
