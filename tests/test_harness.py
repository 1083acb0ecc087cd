"""Unit tests of harness/."""

import argparse
import signal
import sys
import time

import pytest
import torch
from conftest import launch

from harness import clock, profile, stop, world


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can begin anew")
def test_the_peak_is_that_of_the_steps():
    """Not that of an evaluation, or of a snapshot, between them."""
    steps = clock.StepClock([torch.device("cpu")])
    for _ in range(2):
        steps.start()
        for _ in range(clock.WARMUP_STEPS):
            steps.tick()
        steps.end_epoch()
        before = steps.peak_memory["process"]
        torch.ones(2**28, dtype=torch.uint8)  # 0.25 GiB
    assert steps.peak_memory["process"] - before < 0.1
    [[began, ended], [again, end]] = steps.spans
    assert began <= ended <= again <= end


# ---------------------------------------------------------------------------------------- phases


def make_clock(model, devices=1):
    """On a CPU, with an optimizer that has something to do; an epoch begins."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = clock.StepClock([torch.device("cpu")] * devices)
    ours.attach(model, optimizer)
    ours.start()
    return ours, optimizer


def train_step(ours, model, optimizer, pause=0.0):
    ours.has_data()
    loss = model(torch.ones(1, 2)).sum()
    time.sleep(pause)
    loss.backward()
    optimizer.step()
    ours.tick()


def test_the_phases_of_a_step():
    """Blocked, not computing: that is waiting. An evaluation after the step is no part of it."""
    model = torch.nn.Linear(2, 2)
    ours, optimizer = make_clock(model)
    train_step(ours, model, optimizer, pause=0.1)
    ours.end_epoch()
    model(torch.ones(1, 2))
    [(number, seconds, waits)] = ours.steps
    assert number == 1 and list(seconds) == ["data", "rest", "forward", "backward", "optimizer"]
    assert waits["backward"] > 0.09 > seconds["backward"] and waits["data"] == 0


def test_a_step_with_a_snapshot_is_left_out_and_memory_is_bounded():
    model = torch.nn.Linear(2, 2)
    ours, optimizer = make_clock(model)
    for _ in range(2 * clock.KEPT + 5):
        train_step(ours, model, optimizer)
        assert len(ours.unread) <= clock.KEPT
    ours.pause()
    train_step(ours, model, optimizer)
    ours.end_epoch()
    assert len(ours.seconds) == 2 * clock.KEPT + 6
    assert len(ours.steps) == clock.KEPT and ours.steps[-1][0] == len(ours.seconds) - 1


@pytest.mark.parametrize("how", ["compiled", "threads"])
def test_a_forward_without_hooks_is_one_with_backward(how):
    """Of a compiled model they would cut the graph; replicas would call them from threads."""
    model = torch.nn.Linear(2, 2)
    if how == "compiled":
        model.compile(backend="eager")
    ours, optimizer = make_clock(model, devices=2 if how == "threads" else 1)
    assert not model._forward_hooks and not model._forward_pre_hooks
    for _ in range(2):
        train_step(ours, model, optimizer)
    ours.end_epoch()
    _, (_, seconds, _) = ours.steps
    assert list(seconds) == ["data", "forward and backward", "optimizer", "rest"]


# ------------------------------------------------------------------------------------- launchers


def test_what_tensors_take_on_a_cpu():
    """At most, and of those from before only what is there at the end; no dataset."""
    mib = 2**20
    kept = torch.zeros(4 * mib, dtype=torch.uint8)
    data = torch.utils.data.TensorDataset(torch.zeros(64 * mib, dtype=torch.uint8))
    data.images = data.tensors[0]
    before = profile.bytes_of_tensors()
    assert kept.nbytes <= before < data.images.nbytes
    look = profile.AllocatorProfile()
    look.start()
    most = torch.zeros(16 * mib, dtype=torch.uint8), torch.zeros(8 * mib, dtype=torch.uint8)
    del most
    grown = torch.zeros(2 * mib, dtype=torch.uint8)
    assert look.peak_bytes() == before + 24 * mib
    assert profile.bytes_of_tensors() == before + grown.nbytes


@pytest.mark.parametrize(
    "env, words",
    [
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "node1"},
            "WORLD_SIZE is 4, LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE",
        ),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS is 2, RANK, docs/multi_node.md"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is 2, RANK, docs/multi_node.md"),
    ],
)
def test_ranks_that_srun_or_mpirun_leaves_unclear(env, words, tmp_path):
    command = f"python pytorch_torchrun_DDP.py --dataset synthetic --output-dir {tmp_path}"
    finished = launch(command, forked=True, **env)
    assert finished.code == 2, str(finished)
    [line] = finished.errors
    assert all(word in line for word in words.split(", "))


def test_mpirun_says_how_many_ranks_are_here():
    env = {"WORLD_SIZE": "8", "MASTER_ADDR": "node1"}
    assert world.count_local_ranks(env) is None
    assert world.count_local_ranks(env | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}) == 4
    assert world.count_local_ranks(env | {"MASTER_ADDR": "127.0.0.1"}) == 8


# ----------------------------------------------------------------------------------------- votes


class Ranks:
    """Stands in for torch.distributed: another rank was sent SIGTERM, at the fifth vote."""

    ReduceOp, calls = torch.distributed.ReduceOp, 0

    def get_backend(self):
        return "gloo"

    def all_reduce(self, votes, op, async_op):
        assert async_op and op == self.ReduceOp.MAX
        self.calls += 1
        votes[0] = float(signal.SIGTERM) * (self.calls == 5)
        return argparse.Namespace(wait=lambda: None)


@pytest.mark.parametrize("seconds, last", [(0.001, 2002), (0.1, 22), (0.6, 6), (5, 6)])
def test_votes_come_about_twice_a_second(seconds, last, monkeypatch, become):
    """And are read one step later; a slow step has a vote each."""
    become(size=2)
    monkeypatch.setattr(stop, "dist", Ranks())
    now = 0.0
    monkeypatch.setattr(stop.time, "perf_counter", lambda: now)
    request = stop.StopRequest()
    for step in range(1, 3000):
        now += seconds
        request.vote(step)
        if request.agreed:
            break
    assert request.agreed == signal.SIGTERM and step == pytest.approx(last, abs=1 + last // 100)
