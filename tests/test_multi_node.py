"""Several machines, as far as one machine can show them: two torchrun agents, and two networks."""

import json
import os
import shutil
import signal
import subprocess

import pytest
from conftest import (
    ROOT,
    environment,
    free_port,
    launch,
    launcher,
    snapshots,
    started,
    succeed,
    wait_for,
)
from test_faults import JOB, listening, same

SMALL = f"{JOB} --model shufflenet_v2_x0_5 --deterministic"
FLAGS = "--nnodes=2 --nproc_per_node=1 --max-restarts=3 --rdzv_backend=c10d --rdzv_id=job"
ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def check_that_a_lost_agent_can_come_back(first, second, output, reference):
    """Train on both nodes, kill the second agent, start it again, and finish.

    Args:
        first, second: commands of the two agents; the first one holds the store where they meet.
    """
    with started(first, **ENV) as one:
        wait_for(lambda: listening(one.process.pid))  # it has opened the store
        with started(second, **ENV):
            wait_for(lambda: snapshots(output))
        # left with SIGKILL: the agent, and by its death its rank
        assert one.running
        step = snapshots(output)[0].name
        with started(second, **ENV) as back:
            ends = [one.end(240), back.end()]
    text = "\n".join(map(str, ends))
    assert not any(finished.code for finished in ends), text
    assert "resumed from" in text and step.startswith("step-")
    assert same(output, reference)
    assert json.loads((output / "result.json").read_text())["world_size"] == 2


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The same job on two ranks of one machine, without an accident."""
    folder = tmp_path_factory.mktemp("reference")
    command = f"{launcher('pytorch_torchrun_DDP', 2)} {SMALL} --epochs 6 --output-dir {folder}"
    succeed(command, forked=True)
    shutil.rmtree(folder / "snapshots")
    return folder


as_root = os.geteuid() == 0 and shutil.which("ip") is not None


@pytest.mark.skipif(as_root, reason="test_two_networks shows the same, and more")
def test_two_agents(reference, tmp_path):
    agent = f"torchrun {FLAGS} --rdzv_endpoint=127.0.0.1:{free_port()} --local_addr=127.0.0.1"
    command = f"{agent} pytorch_torchrun_DDP.py {SMALL} --epochs 6 --resume auto"
    command += f" --output-dir {tmp_path}"
    check_that_a_lost_agent_can_come_back(command, command, tmp_path, reference)


@pytest.fixture
def networks():
    """Two network namespaces that see each other through a virtual cable."""
    names = [f"{side}{os.getpid()}" for side in "ab"]
    setup = [f"ip netns add {name}" for name in names]
    setup += [
        f"ip link add v{names[0]} netns {names[0]} type veth peer v{names[1]} netns {names[1]}"
    ]
    for number, name in enumerate(names, 1):
        setup += [f"ip -n {name} addr add 10.77.0.{number}/24 dev v{name}"]
        setup += [f"ip -n {name} link set {device} up" for device in ("lo", f"v{name}")]
    try:
        for command in setup:
            done = subprocess.run(command.split(), capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"{command}: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.full
@pytest.mark.skipif(not as_root, reason="makes network namespaces, as root")
def test_two_networks(networks, reference, tmp_path):
    commands = []
    for number, name in enumerate(networks, 1):
        agent = f"torchrun {FLAGS} --rdzv_endpoint=10.77.0.1:29400 --local_addr=10.77.0.{number}"
        # a machine whose name leads to its address sees this by itself
        agent += f" --rdzv_conf=is_host={'true' if number == 1 else 'false'}"
        commands.append(
            f"ip netns exec {name} env GLOO_SOCKET_IFNAME=v{name} {agent} pytorch_torchrun_DDP.py "
            f"{SMALL} --epochs 6 --resume auto --output-dir {tmp_path}"
        )
    check_that_a_lost_agent_can_come_back(*commands, tmp_path, reference)


@pytest.mark.full
def test_slurm_file(tmp_path):
    """Run by bash, with stand-ins for Slurm's commands: it trains; at the signal it saves a
    snapshot and queues itself again; and the second time it goes on from there."""
    tools = tmp_path / "tools"
    tools.mkdir()
    stand_ins = {
        "scontrol": '[ "$1" = show ] && echo 127.0.0.1 || echo "$@" >> "$CALLS"',
        "srun": 'echo $$ > "$CALLS.srun"; exec "$@"',
        "scancel": 'kill -TERM "$(cat "$CALLS.srun")"',
    }
    for name, body in stand_ins.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    calls = tmp_path / "calls"
    output = tmp_path / "run"
    path = os.pathsep.join([str(tools), environment()["PATH"]])
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_GPUS_ON_NODE": "1",
    }
    env = slurm | {"PATH": path, "CALLS": str(calls)}
    command = f"bash config/slurm_torchrun.sbatch {SMALL} --epochs 6 --output-dir {output}"
    with started(command, **env) as job:
        wait_for(lambda: snapshots(output))
        job.send(signal.SIGTERM)
        finished = job.end()
    assert "stopped by SIGTERM after step" in finished.stdout, str(finished)
    assert calls.read_text() == f"requeue {os.getpid()}\n"
    assert not (output / "model.pt").exists()
    finished = launch(command, **env, SLURM_RESTART_COUNT="1")
    assert finished.code == 0, str(finished)
    assert "resumed from" in finished.stdout and (output / "model.pt").is_file()


def test_hostfile():
    """DeepSpeed's own reader understands it."""
    deepspeed = pytest.importorskip("deepspeed.launcher.runner")
    assert deepspeed.fetch_hostfile(str(ROOT / "config" / "hostfile")) == {"node1": 4, "node2": 4}


def test_the_files_agree_with_the_page():
    page = (ROOT / "docs" / "multi_node.md").read_text()
    assert (ROOT / "config" / "hostfile").read_text().split("\n", 2)[2].strip() in page
    for word in ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "--rdzv_backend=c10d", "29400"]:
        assert word in page and word in (ROOT / "config" / "slurm_torchrun.sbatch").read_text()
