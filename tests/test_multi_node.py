"""Several machines, simulated on one: two torchrun agents, and two networks; files for clusters."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess

import jsonschema
import pytest
import yaml
from conftest import ROOT, environment, free_port, snapshots, started, succeed, wait_for
from test_snapshots import JOB, same
from test_stop import stop

SMALL = f"{JOB} --model shufflenet_v2_x0_5 --deterministic --epochs 20"  # seconds, for a signal
FLAGS = "--nnodes=2 --nproc_per_node=1 --max-restarts=3 --rdzv_backend=c10d --rdzv_id=job"
ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def check_that_a_lost_agent_can_come_back(nodes, output, reference, lost=1, how=signal.SIGKILL):
    """Train on both nodes, end an agent by a signal, start it again, and finish. The first agent
    holds the store where they meet: without it the other one ends, too, and both start again."""
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(started(command, **env)) for command, env in nodes]
        wait_for(lambda: snapshots(output))
        agents[lost].send(how)  # with SIGKILL: the agent, and by its death its rank
        gone = {lost, 1}
        ends = [agents[rank].end() for rank in gone]
        assert agents[0].running == (lost == 1)
        for rank in gone:
            command, env = nodes[rank]
            agents[rank] = stack.enter_context(started(command, **env))
        codes = [finished.code for finished in ends]
        ends += [agent.end(240) for agent in agents]
    text = "\n".join(map(str, ends))
    assert set(codes) == {1 if how == signal.SIGTERM else -how}, text
    assert not any(finished.code for finished in ends[-2:]), text
    assert "resumed from" in text
    assert how != signal.SIGTERM or "stopped by SIGTERM after step" in text
    assert same(output, reference)
    assert json.loads((output / "result.json").read_text())["world_size"] == 2


@pytest.fixture
def reference(run_once):
    """The same job on two ranks of one machine, without an accident."""
    return run_once("pytorch_torchrun_DDP", 2, SMALL)[1]


def kubeflow_node(rank, port, output):
    """What Kubeflow Trainer runs in a Pod, and the variables there."""
    documents = yaml.safe_load_all((ROOT / "config" / "kubeflow_torchrun.yaml").read_text())
    runtime, job = (document["spec"] for document in documents)
    [pods] = runtime["template"]["spec"]["replicatedJobs"]
    trainer = job["trainer"]
    [container] = pods["template"]["spec"]["template"]["spec"]["containers"]
    labels = "metadata.labels['jobset.sigs.k8s.io/jobset-name']"
    fields = {"status.podIP": "127.0.0.1", labels: "job"}
    env = {  # those of the file, and its own
        each["name"]: each.get("value") or fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container["env"]
    }
    env |= {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": "1"}
    env |= {"PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": "127.0.0.1"}
    env |= {"PET_MASTER_PORT": str(port)}
    flags = f"{SMALL} --output-dir {output}".split()
    return [*trainer["command"], *trainer["args"], *flags], env


def skypilot_node(rank, port, output):
    """What SkyPilot runs on a machine, and the variables there."""
    task = yaml.safe_load((ROOT / "config" / "skypilot_torchrun.yaml").read_text())
    env = task["envs"] | {
        "BUCKET": str(output.parent),
        "FLAGS": f"{task['envs']['FLAGS']} {SMALL}",
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "SKYPILOT_TASK_ID": output.name,
    }
    return ["bash", "-c", task["run"].replace("29400", str(port))], env


@pytest.mark.full
@pytest.mark.parametrize("node, lost, how", [
    (kubeflow_node, 1, signal.SIGTERM),  # only this Pod is replaced
    (kubeflow_node, 1, signal.SIGKILL),
    (kubeflow_node, 0, signal.SIGTERM),  # all of them are,
    (skypilot_node, 0, signal.SIGTERM),  # and all machines
])  # fmt: skip
def test_files_of_clusters(node, lost, how, reference, tmp_path):
    """Their commands, as they are, with the variables that the cluster sets."""
    port = free_port()
    output = tmp_path / "job"
    nodes = [node(rank, port, output) for rank in (0, 1)]
    check_that_a_lost_agent_can_come_back(nodes, output, reference, lost, how)


as_root = os.geteuid() == 0 and shutil.which("ip") is not None


@pytest.fixture
def networks():
    """Two network namespaces that see each other through a virtual cable."""
    names = [f"{side}{os.getpid()}" for side in "ab"]
    a, b = names
    setup = [f"ip netns add {name}" for name in names]
    setup += [f"ip link add v{a} netns {a} type veth peer v{b} netns {b}"]
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
    nodes = []
    for number, name in enumerate(networks, 1):
        agent = f"torchrun {FLAGS} --rdzv_endpoint=10.77.0.1:29400 --local_addr=10.77.0.{number}"
        # a machine whose name leads to its address sees this by itself
        agent += f" --rdzv_conf=is_host={'true' if number == 1 else 'false'}"
        command = f"ip netns exec {name} {agent} pytorch_torchrun_DDP.py {SMALL}"
        command += f" --resume auto --output-dir {tmp_path}"
        nodes.append((command, ENV | {"GLOO_SOCKET_IFNAME": f"v{name}"}))
    check_that_a_lost_agent_can_come_back(nodes, tmp_path, reference)


@pytest.mark.full
def test_slurm_file(tmp_path):
    """Run by bash, with stand-ins for Slurm's commands: it trains; at the signal it saves a
    snapshot and queues itself again; and the second time it goes on from there."""
    tools, calls, output = (tmp_path / name for name in ("tools", "calls", "run"))
    tools.mkdir()
    stand_ins = {
        "scontrol": '[ "$1" = show ] && echo 127.0.0.1 || echo "$@" >> "$CALLS"',
        "srun": 'echo $$ > "$CALLS.srun"; exec "$@"',
        "scancel": 'kill -TERM "$(cat "$CALLS.srun")"',
    }
    for name, body in stand_ins.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    path = os.pathsep.join([str(tools), environment()["PATH"]])
    env = {"PATH": path, "CALLS": str(calls), "SLURM_JOB_ID": str(os.getpid())}
    env |= {"SLURM_JOB_NODELIST": "node1", "SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "1"}
    command = f"bash config/slurm_torchrun.sbatch {SMALL} --output-dir {output}"
    finished = stop(command, output, **env)
    assert "stopped by SIGTERM after step" in finished.stdout, str(finished)
    assert calls.read_text() == f"requeue {os.getpid()}\n"
    assert not (output / "model.pt").exists()
    finished = succeed(command, **env, SLURM_RESTART_COUNT="1")
    assert "resumed from" in finished.stdout and (output / "model.pt").is_file()


def kubeflow_accepts(text):
    """Whether the classes of its API have all that a file says: they leave out unknown keys."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    documents = list(yaml.safe_load_all(text))
    with contextlib.suppress(ValueError):
        kinds = [getattr(models, f"TrainerV1alpha1{document['kind']}") for document in documents]
        both = zip(kinds, documents, strict=True)
        return documents == [kind.from_dict(document).to_dict() for kind, document in both]
    return False


def skypilot_accepts(text):
    schema = json.loads((ROOT / "tests/schemas/skypilot_task.json").read_text())
    return jsonschema.Draft202012Validator(schema).is_valid(yaml.safe_load(text))


@pytest.mark.parametrize("name, accepts, keys", [
    ("kubeflow", kubeflow_accepts, "restartStrategy terminationGracePeriodSeconds claimName"),
    ("kubeflow", kubeflow_accepts, "numProcPerNode podFailurePolicy onPodConditions status"),
    ("skypilot", skypilot_accepts, "num_nodes use_spot max_restarts_on_errors run"),
])  # fmt: skip
def test_schemas_of_clusters(name, accepts, keys):
    """Also, that a misspelt key is refused: Kubernetes would drop it and say nothing."""
    text = (ROOT / "config" / f"{name}_torchrun.yaml").read_text()
    assert accepts(text)
    assert not [key for key in keys.split() if accepts(re.sub(rf"\b{key}:", f"{key}s:", text))]


def test_hostfile():
    """DeepSpeed's own reader understands it."""
    deepspeed = pytest.importorskip("deepspeed.launcher.runner")
    assert deepspeed.fetch_hostfile(str(ROOT / "config/hostfile")) == {"node1": 4, "node2": 4}
