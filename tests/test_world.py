"""What a launcher says of the ranks, and their votes on a stop."""

import argparse
import os
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from harness import stop, world

EXPORTED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "node1"}


@pytest.mark.parametrize("env, words", [
    (EXPORTED, "WORLD_SIZE is 4, LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE"),
    ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS is 2, RANK, docs/multi_node.md"),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is 2, RANK, docs/multi_node.md"),
])  # fmt: skip
def test_ranks_that_srun_or_mpirun_leaves_unclear(env, words, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    world.world.cache_clear()
    said = world.why_ranks_are_unclear()
    world.world.cache_clear()
    assert all(word in said for word in words.split(", "))


def test_mpirun_says_how_many_ranks_are_here():
    env = {"WORLD_SIZE": "8", "MASTER_ADDR": "node1"}
    assert world.count_local_ranks(env) is None
    assert world.count_local_ranks(env | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}) == 4
    assert world.count_local_ranks(env | {"MASTER_ADDR": "127.0.0.1"}) == 8


@pytest.mark.parametrize("files, cores", [
    ({}, 10), ({"cpu.max": "max 100000"}, 10), ({"cpu.max": "250000 100000"}, 2),
    ({"cpu.max": "50000 100000"}, 1), ({"cpu.max": "2000000 100000"}, 10),
    ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
    ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 10),
])  # fmt: skip
def test_a_container_has_fewer_cores_than_its_machine(files, cores, tmp_path, monkeypatch):
    """By the quota of its cgroup, v2 or v1: more threads than that would wait for each other."""
    monkeypatch.setattr(world.os, "sched_getaffinity", lambda _: range(10), raising=False)
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert world.count_cores(tmp_path) == cores


INTERRUPTED = """
import os, signal
from harness import world

other = os.fork()
os.environ["RANK"] = "0" if other else "1"
world.report_interrupts()
if other:
    assert os.wait() == (other, signal.SIGINT)
signal.raise_signal(signal.SIGINT)
"""


def test_an_interrupt_is_one_line_of_rank_0(tmp_path):
    """And the processes have died of it, as a shell expects: it ends with 130."""
    (tmp_path / "script.py").write_text(INTERRUPTED)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "script.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True)
    assert ended.returncode == -signal.SIGINT
    line = "script: interrupted at line 10: signal.raise_signal(signal.SIGINT)\n"
    assert ended.stderr == line


# ----------------------------------------------------------------------------------------- votes
class Ranks:
    """Stands in for torch.distributed: another rank was sent SIGTERM, at the fifth vote."""

    ReduceOp = torch.distributed.ReduceOp
    calls = 0

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
