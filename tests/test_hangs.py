"""Ranks that wait for another rank in vain: the diagnosis. See measure/faults/hang.py."""

import json
import pickle
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, cases, hooked, launch, launcher, server, succeed
from test_snapshots import attack
from torch.testing._internal.distributed.fake_pg import FakeStore

from hangs.diagnosis import diagnose
from hangs.recorder import account_of, read_recorder

sys.path.insert(0, str(ROOT / "measure" / "faults"))
import hang  # noqa: E402

ALL = {script[8:].partition(".")[0]: script for script in hang.every_script(hang.RANKS)}
HANGS = [(ALL["TP"], "shape"), (ALL["ND_parallel"], "loop"), (ALL["PP"], "stop")]
SCRIPT = "pytorch_torchrun_DDP.py"
JOB = "--dataset synthetic --train-samples 96 --eval-samples 12 --batch-size 24 --epochs 1"
GROUPS = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}


@cases("script, fault", HANGS, lambda *row: row == HANGS[0])
def test_rank_collective_and_line_are_named(script, fault):
    missed = hang.try_one(server([]), script, fault)  # prints the lines
    assert not missed


@pytest.mark.full
def test_under_its_launcher(tmp_path):
    """Which holds the store. It does not have to wait for the stopped rank, which ends itself."""
    fault = {"kind": "stop", "rank": 1, "step": 3, "phase": "forward", "events": f"{tmp_path}/e"}
    command = launcher("pytorch_torchrun_DDP", 2, "measure/faults/victim.py")
    command += f" {JOB} --model small_resnet --timeout 5 --output-dir {tmp_path}/run"
    finished = launch(command, timeout=60, FAULT=json.dumps(fault))
    assert finished.code == 1
    [line] = [line for line in finished.stderr.splitlines() if ": error: " in line]
    assert "error: rank 1 did not join collective " in line
    assert f"recorded in {tmp_path}/run/flight_recorder" in line
    assert "rank 0 waits at pytorch_torchrun_DDP.py:" in finished.stderr
    assert "rank 1 (stopped by a signal) is at pytorch_torchrun_DDP.py:" in finished.stderr
    assert line.partition("error: ")[2] in (tmp_path / "run/flight_recorder/report.txt").read_text()


ENDS = """
import pathlib, subprocess, sys
import torch.distributed as dist
import hangs.watch
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
folder = pathlib.Path(sys.argv[1])
hangs.prepare(folder / "script.py", folder, rank=0, size=2, one_machine=True)
hangs.listen(timeout=5)
watch = hangs.watch.watch
type(watch).account = property(lambda self: None, lambda self, account: None)  # reads each time
asks = "while isinstance(peers.ask('where', {}), dict): print('asked', flush=True)"
asks = "from hangs import peers\\n" + asks.format(watch.peers[0])
asker = subprocess.Popen([sys.executable, "-c", asks], stdout=subprocess.PIPE)
asker.stdout.read(20)
"""


def test_a_process_may_end_while_it_is_asked(tmp_path):
    """Python aborts if it ends while a thread is in C++."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    succeed(f"{sys.executable} {script} {tmp_path}/records", PYTHONPATH=str(ROOT))


def entry(n, over, name="all_reduce", script=SCRIPT):
    """As nccl records it."""
    frames = [{"name": "main", "filename": str(ROOT / script), "line": 60 + n}]
    return {
        "process_group": ("0", "default_pg"), "collective_seq_id": n, "p2p_seq_id": 0,
        "profiling_name": f"nccl:{name}", "input_sizes": [[512]], "output_sizes": [[512]],
        "input_dtypes": ["Float"], "output_dtypes": ["Float"], "time_created_ns": n,
        "state": "completed" if over else "started", "retired": over,
        "is_p2p": name != "all_reduce", "frames": frames,
    }  # fmt: skip


def dump(rank, last):
    """What nccl's watchdog records of a rank whose last collective did not end."""
    entries = [entry(n, n < 8) for n in range(1, last + 1)]
    return pickle.dumps({"version": "2.10", "entries": entries, "pg_config": GROUPS}, protocol=2)


def test_what_nccl_wrote_is_read_at_the_next_start(tmp_path):
    """Once: its watchdog ends a process without a word of Python. A file that would run code, and
    one that is cut off, are no records."""
    folder = tmp_path / "flight_recorder"
    folder.mkdir()
    flags = f"{JOB} --max-steps 1 --resume none --model small_resnet --output-dir {tmp_path}"
    command = hooked("pytorch_torchrun_DDP", 2, flags)

    def said(*files):
        for rank, content in enumerate(files):
            (folder / f"rank_{rank}").write_bytes(content)
        return succeed(command, forked=True).stdout

    hung = "the last run hung: rank 1 did not join collective 8, all_reduce of float32 [512]"
    assert "hung" not in said(pickle.dumps(attack(tmp_path / "attacked"), protocol=2), b"\x80\x04")
    assert not (tmp_path / "attacked").exists()
    found = said(dump(0, 8), dump(1, 7))
    assert hung in found and f"rank 0 waits at {SCRIPT}:68 " in found
    assert "hung" not in said()


@pytest.mark.parametrize("library, waits", [("nccl", 0), ("nccl2", 0), ("nccl2", 1)])
def test_a_message_of_nccl_is_named(library, waits):
    """Its call has returned, and the main thread waits for the GPU elsewhere. nccl2 is that of
    PyTorch 2.15, where only what is sent is an input."""
    script = "pytorch_PP.py"
    accounts = {}
    for rank, name in enumerate(("send 0->1", "recv 1<-0")):
        found = entry(0, rank != waits, name, script) | {"profiling_name": f"{library}:{name}"}
        if library == "nccl2" and rank == 1:
            found |= {"input_sizes": [], "input_dtypes": []}
        recorded = {"entries": [found], "pg_config": GROUPS}
        accounts[rank] = account_of(recorded, ROOT / script, (f"loop.py:{rank}", None))
    what = ("send of float32 [512] to rank 1", "recv of float32 [512] from rank 0")[waits]
    message = f"rank {waits} waits for a message: {what}"
    does = ["waits" if rank == waits else "is" for rank in (0, 1)]
    places = [f"rank {rank} {does[rank]} at loop.py:{rank}" for rank in (0, 1)]
    assert diagnose(accounts) == [message, *places]


def test_what_another_nccl_calls_is_read(monkeypatch):
    """Since PyTorch 2.15, a hook records the collectives of "nccl" apart from the older one's."""
    if "backend" not in (torch._C._distributed_c10d._dump_fr_trace.__doc__ or ""):
        pytest.skip("PyTorch before 2.15")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    hook = torch._C._distributed_c10d.FlightRecorderHook.attach(dist.group.WORLD, [0, 1])
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    dist.all_reduce(torch.zeros(3))
    [found] = read_recorder(stacks=False)["entries"]
    hook.remove()
    dist.destroy_process_group()
    assert found["profiling_name"] == "fake:all_reduce" and found["input_sizes"] == [[3]]
