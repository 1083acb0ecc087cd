"""examples/fsdp_accumulation.py: the ways to accumulate with FSDP and HSDP end in the weights of
one process, and differ in what a rank keeps between micro-batches, and in what it sends."""

import re

import pytest
from conftest import ROOT, cases, distance
from example_runs import best, start

WATCH = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from estimator.live_bytes import LiveBytes


def watch(model, i, live=[]):  # of rank 0: before a micro-batch, and at the end of a step
    if i == 0:
        live[:] = [LiveBytes(1)]
        live[0].__enter__()
        live[0].mark(model.parameters(), "parameters")
        live[0].before = live[0].allocated
    elif i == ACCUMULATE - 1:
        gc.collect()
        live[0].kept = live[0].allocated - live[0].before
    elif i == ACCUMULATE:
        live[0].__exit__(None, None, None)
        sent = [message.kind for message in live[0].messages]
        found = live[0].kept, sent.count("reduce_scatter"), sent.count("allreduce")
        print("watched", *found, file=sys.stdout if dist.get_rank() == 0 else open(os.devnull, "w"))
"""
LOOP = "        for i in range(ACCUMULATE):\n"
AFTER = "        for parameter in trained:\n"
WATCHED = {
    LOOP: f"{LOOP}            watch(model, i)\n",
    AFTER: f"        watch(model, ACCUMULATE)\n{AFTER}",
}
FOLDER = "    folder = find_checkpoint"
NAMES = "mesh_dim_names=('replicate', 'shard')"
MESH = {  # as in hsdp.py
    FOLDER: f"    mesh = dist.init_device_mesh('cpu', (2, 2), {NAMES})\n{FOLDER}",
    "mp_policy=policy)": "mesh=mesh, mp_policy=policy)",
}
LAST = "model.set_requires_all_reduce(i == ACCUMULATE - 1)"
ALWAYS = {LAST: "pass"}
LATE = {LAST: "model.set_requires_gradient_sync(i == ACCUMULATE - 1)"}
WAYS = {  # edits; the part of the gradient that is kept; reduce-scatters and all-reduces
    "fsdp": ({}, 1 / 2, 4, 0),
    "fsdp, synchronised late": (LATE, 1, 1, 0),
    "hsdp": (MESH, 1 / 2, 4, 1),
    "hsdp, always averaged": (MESH | ALWAYS, 1 / 2, 4, 4),
    "hsdp, synchronised late": (MESH | LATE, 1, 1, 1),
}
GRADIENT = 8 * (2 * 64 * 64 + 4 * 64 * 65)  # bytes, in float64
UNITS = 5  # four blocks, and the root


@cases("way", WAYS, lambda way: way == "fsdp")
def test_ways_to_accumulate(way, plain, tmp_path):
    edits, kept, scattered, reduced = WAYS[way]
    _, folder = plain()
    ranks = 4 if "hsdp" in way else 2
    finished = start("fsdp_accumulation", ranks, tmp_path, WATCH, changes=WATCHED | edits)
    assert finished.code == 0, str(finished)
    assert distance(best(tmp_path), best(folder)) <= 1e-9
    watched = re.findall(r"^watched (\d+) (\d+) (\d+)$", finished.stdout, re.M)
    assert len(watched) == 16, finished.stdout
    for size, *sent in watched:
        assert int(size) == pytest.approx(kept * GRADIENT, rel=0.25)  # up to a block
        assert [*map(int, sent)] == [scattered * UNITS, reduced * UNITS + 1]  # and the labels


def test_what_is_edited_is_there():
    text = (ROOT / "examples/fsdp_accumulation.py").read_text()
    assert all(old in text for old in (*WATCHED, *MESH, *LATE))
