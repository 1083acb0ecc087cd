"""The clock: phases of a step, peaks; and the breakdown shows why a run is slow:
each row of docs/slow.md, produced on purpose.
Its command: torchrun --standalone --nproc_per_node=2 pytorch_torchrun_DDP.py --trace 3
"""

import json
import os
import re
import sys
import time

import pytest
import slow
import torch
from conftest import ROOT, hooked, launch

from harness import clock
from report import traces


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


def make_clock(model, devices=1):
    """On a CPU, when an epoch begins; and a function that trains for a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = clock.StepClock([torch.device("cpu")] * devices)
    ours.attach(model, optimizer)
    ours.start()

    def train_step(pause=0.0):
        ours.mark(ours.after_data)
        loss = model(torch.ones(1, 2)).sum()
        time.sleep(pause)
        loss.backward()
        optimizer.step()
        ours.tick()

    return ours, train_step


def test_the_phases_of_a_step():
    """Blocked, not computing: that is waiting. An evaluation after the step is no part of it."""
    model = torch.nn.Linear(2, 2)
    ours, train_step = make_clock(model)
    train_step(pause=0.1)
    ours.end_epoch()
    model(torch.ones(1, 2))
    [(number, seconds, waits)] = ours.steps
    assert number == 1 and list(seconds) == ["data", "rest", "forward", "backward", "optimizer"]
    assert waits["backward"] > 0.09 > seconds["backward"] and waits["data"] == 0


def test_a_step_with_a_snapshot_is_left_out_and_memory_is_bounded():
    ours, train_step = make_clock(torch.nn.Linear(2, 2))
    for _ in range(2 * clock.KEPT + 5):
        train_step()
        assert len(ours.unread) <= clock.KEPT
    ours.pause()
    train_step()
    ours.end_epoch()
    assert len(ours.seconds) == 2 * clock.KEPT + 6
    assert len(ours.steps) == clock.KEPT and ours.steps[-1][0] == len(ours.seconds) - 1


def test_speed_is_that_of_the_steps_after_the_first_ten():
    """Of a short run, of its second half; and of the steps before it was resumed."""
    ours = clock.StepClock([torch.device("cpu")])
    ours.seconds = 10 * [9.0] + 12 * [0.1]
    assert ours.settled() == 12 * [0.1]
    ours.before = [0.3]
    assert ours.settled() == [0.3] + 12 * [0.1]
    ours.seconds = [9.0, 9.0, 0.1, 0.2, 0.4]
    assert ours.settled() == [0.3, 0.1, 0.2, 0.4]


@pytest.mark.parametrize("how", ["compiled", "threads"])
def test_a_forward_without_hooks_is_one_with_backward(how):
    """Of a compiled model they would cut the graph; replicas would call them from threads."""
    model = torch.nn.Linear(2, 2)
    if how == "compiled":
        model.compile(backend="eager")
    ours, train_step = make_clock(model, devices=2 if how == "threads" else 1)
    assert not model._forward_hooks and not model._forward_pre_hooks
    for _ in range(2):
        train_step()
    ours.end_epoch()
    _, (_, seconds, _) = ours.steps
    assert list(seconds) == ["data", "forward and backward", "optimizer", "rest"]


# ------------------------------------------------------------------------------- slow on purpose
JOB = "--model small_resnet --dataset synthetic --eval-samples 8 --batch-size 16 --epochs 1"
JOB += " --train-samples 384 --print-freq 6"  # 24 steps, of which the 23rd may be traced
LATE, LATENCY, STALL = (1e3 * seconds for seconds in (slow.LATE, slow.LATENCY, slow.STALL))


@pytest.fixture
def run_slowly(run_once):
    """A function that trains with DDP on two ranks, in a way of slow.py, and returns what
    result.json says of the steps."""

    def get(way, flags=""):
        finished, output = run_once("pytorch_torchrun_DDP", 2, f"{JOB} {flags}", way)
        line, done = finished.lines[-2:]
        result = json.loads((output / "result.json").read_text())
        return result["breakdown"] | {"line": line, "done": done, "result": result}

    return get


def test_a_slow_loader_on_one_rank(run_slowly):
    found = run_slowly("loader")
    fast, late = found["ranks"]
    assert late["data"]["p50"] > LATE > fast["data"]["p50"]
    assert fast["waiting_in"]["backward"] > LATE / 2 > late["waiting_in"]["backward"]
    assert found["straggler"]["rank"] == 1 and found["straggler"]["late_ms"] > LATE / 2
    assert re.search(r"; rank 1 is \d+ ms slower than the other$", found["line"])


@pytest.mark.full
def test_slow_loaders_on_all_ranks(run_slowly):
    assert all(rank["data"]["p50"] > LATE for rank in run_slowly("loaders")["ranks"])


@pytest.mark.full
def test_a_stall_now_and_then(run_slowly):
    """The median does not know of it; the mean, its shares and the throughput do."""
    found = run_slowly("stall")
    took = found["result"]["step_ms"]
    assert took["p50"] < took["mean"] - STALL / 10 and took["p95"] > STALL
    mean, p95 = (f"{took[name]:,.0f} ms" for name in ("mean", "p95"))
    assert f" ms (mean {mean}, 95% within {p95}), data " in found["line"]
    median, reached = re.search(r"median ([\d,]+) images/s \(([\d,]+) by", found["done"]).groups()
    median, reached = (int(number.replace(",", "")) for number in (median, reached))
    assert reached == pytest.approx(16e3 / took["mean"], abs=1) and reached < 0.9 * median


@pytest.mark.full
def test_a_rank_that_is_blocked_in_forward(run_slowly):
    """Where DDP sends nothing: so it is no message that it waits for."""
    free, blocked = run_slowly("blocked")["ranks"]
    assert blocked["waiting_in"]["forward"] > 0.9 * LATE > free["waiting_in"]["forward"]
    assert free["waiting_in"]["backward"] > LATE / 2


@pytest.mark.full
def test_a_batch_too_small_for_its_device(run_slowly):
    """Most of a step does not depend on it."""
    few, many = (run_slowly("", f"-b {size}")["result"]["images_per_second"] for size in (4, 96))
    assert many > 2 * few


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="ranks cannot be put on a core")
def test_a_rank_that_shares_its_core(run_slowly):
    """To queue for a core is no waiting: the rank takes longer, and the other waits for it."""
    # for longer than the kernel lets it run at once
    found = run_slowly("core", "--batch-size 32 --train-samples 768")
    free, shared = found["ranks"]
    assert free["waiting"]["p50"] > shared["waiting"]["p50"]
    if found["straggler"]:  # where other work takes turns on all cores, it may not be clear enough
        assert found["straggler"]["rank"] == 1


@pytest.mark.full
def test_tiny_buckets(run_slowly):
    tiny, usual = (run_slowly(way, "--trace 1")["collectives"] for way in ("buckets", ""))
    assert usual["all_reduce"]["per_step"] <= 3 and tiny["all_reduce"]["per_step"] >= 8
    sent = [found["all_reduce"]["bytes_per_step"] for found in (tiny, usual)]
    assert abs(sent[0] - sent[1]) <= 16, "a vote of harness/stop.py"


@pytest.mark.full
def test_looking_for_unused_parameters(run_slowly):
    """One collective more: which parameters were used on any rank, in an int for each. (And DDP
    leaves its buckets as they were at first, of which PyTorch 2.11 has one more.)"""
    more, usual = (run_slowly(way, "--trace 1")["collectives"] for way in ("unused", ""))
    assert more["all_reduce"]["per_step"] > usual["all_reduce"]["per_step"]
    extra = more["all_reduce"]["bytes_per_step"] - usual["all_reduce"]["bytes_per_step"]
    assert 0 < extra < 1000


@pytest.mark.full
def test_a_sync_in_the_loop(run_slowly):
    """On a slow network, the loss of all ranks in every step, or in every sixth."""
    every, none = (run_slowly("network", f) for f in ("--print-freq 1", ""))
    for often, seldom in zip(every["ranks"], none["ranks"], strict=True):
        assert often["waiting_in"]["rest"] > 0.8 * LATENCY > 2 * seldom["waiting_in"]["rest"]


def test_ranks_that_are_alike_are_no_stragglers():
    """Nor is one that was late in a few steps, or by a little."""

    def ranks(*own):
        return [[(i, {"forward": t}, {}) for i, t in enumerate(times)] for times in own]

    assert clock.find_straggler(ranks([1.0] * 8, [1.05] * 8)) is None
    assert clock.find_straggler(ranks([1.0] * 8, [9.0, 9.0] + [1.0] * 6)) is None
    assert clock.find_straggler(ranks([1.0] * 8)) is None
    found = clock.find_straggler(ranks([1.0] * 8, [1.0, 1.0, *[1.5] * 6], [1.0] * 8))
    assert found == {"rank": 1, "late_ms": 500.0}


# ------------------------------------------------------------------------------------------ traces
def test_a_trace_of_each_rank(run_slowly):
    """What overlaps is a share. A vote is waited for: gloo notes its end, even in freed memory."""
    found = run_slowly("late_vote:23", "--trace 1")
    folder = ROOT / found["result"]["command"].split()[-1]  # which is --output-dir
    sent = traces.read_traces(folder / "trace")[0]["communication"]
    assert sent[-1].bytes == 16 and sent[-1].end - sent[-1].begin > 900
    assert 0 <= found["overlap"] <= 1 and "of communication overlaps with compute" in found["line"]
    assert run_slowly("loader")["overlap"] is None


def test_a_run_that_is_stopped_while_it_is_traced(tmp_path):
    """Ends as any other does, and leaves no trace."""
    command = hooked("pytorch_SingleGPU", 1, f"{JOB} --trace 10 --output-dir {tmp_path}")
    finished = launch(command, forked=True, HOOKS="send:SIGTERM,0,18")
    assert finished.code == 143, str(finished)
    assert "stopped by SIGTERM after step 18 of 24" in finished.stdout
    assert not list(tmp_path.glob("trace/*")) and list(tmp_path.glob("snapshots/*"))


def test_the_page_has_a_row_for_each_way():
    """But for the run as it is, and the one that is stopped."""
    rows = re.findall(r"^\| .*`HOOKS=(\w+)` \|$", (ROOT / "docs/slow.md").read_text(), re.M)
    assert sorted(set(rows)) == sorted(slow.WAYS)
