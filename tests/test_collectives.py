"""pytorch_collectives.py: what every rank has, how it measures, and the mistakes that it shows. And
pytorch_DTensor.py: placements, local shapes and what is sent."""

import json
import re
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT, TABLES, cases, succeed

import pytorch_collectives as script

COMMAND = "torchrun --standalone --nproc_per_node={} pytorch_collectives.py"


def expected(n):
    """What each rank has after each of them, by their definitions: `before[r]` is rank r's."""
    k = 4 if 4 % n == 0 else n
    before = torch.arange(1, k + 1) + 10 * torch.arange(n)[:, None]
    total = before.sum(0)
    first = before[:1]
    return before, {
        "broadcast": first.expand(n, k),
        "reduce": [total, *[None] * (n - 1)],
        "all_reduce": total.expand(n, k),
        "gather": [before.flatten(), *[None] * (n - 1)],
        "scatter": first.view(n, -1),
        "all_gather": before.view(1, -1).expand(n, -1),
        "reduce_scatter": total.view(n, -1),
        "all_to_all": before.view(n, n, -1).transpose(0, 1).reshape(n, k),
        "send_and_receive": before[[0, 0, *range(2, n)][:n]],
        "asynchronous": total.expand(n, k),
    }


def numbers(text):
    return None if text == "nothing" else [int(number) for number in text.strip("[]").split()]


@cases("n", [1, 2, 3, 4, 8], lambda n: n in (1, 3))
def test_each_is_what_it_says(n):
    command = COMMAND.format(n) if n > 1 else "python pytorch_collectives.py"
    finished = succeed(command, forked=n != 2)  # two as typed
    assert finished.lines[0] == f"pytorch_collectives: {n} x cpu (gloo)"
    assert ("A single rank sends nothing" in finished.stdout) == (n == 1)
    shown = re.findall(r"^(\w+): .*\n((?:    rank .*\n)+)", finished.stdout, re.MULTILINE)
    before, after = expected(n)
    names = [name for name in after if n > 1 or name != "send_and_receive"]
    assert [name for name, _ in shown] == names
    for name, lines in shown:
        rows = re.findall(r"rank (\d+)   (\[.*\])  ->  (.*)", lines)
        assert [int(rank) for rank, _, _ in rows] == list(range(n))
        assert [numbers(text) for _, text, _ in rows] == before.tolist()
        rights = [None if right is None else right.tolist() for right in after[name]]
        assert [numbers(text) for _, _, text in rows] == rights, name


def test_sweep(tmp_path):
    flags = f"--sweep --largest 256 --output-dir {tmp_path}"
    finished = succeed(f"{COMMAND.format(2)} {flags}", forked=True)
    found = json.loads((tmp_path / "collectives.json").read_text())
    assert found["ranks"] == 2 and found["backend"] == "gloo" and len(found["operations"]) == 6
    factors = {"broadcast": 1, "send and receive": 1, "all_reduce": 1}  # 2 (n - 1) / n
    for name, operation in found["operations"].items():
        assert [row["bytes"] // 1024 for row in operation["rows"]] == [4, 16, 64, 256]
        for row in operation["rows"]:
            assert row["algorithm"] == pytest.approx(row["bytes"] / row["seconds"])
            assert row["bus"] == pytest.approx(factors.get(name, 0.5) * row["algorithm"])
        assert f"{name:16} latency {1e6 * operation['latency']:,.0f} us" in finished.stdout


def test_fit():
    sizes = [4096 * 4**i for i in range(8)]
    latency, bandwidth = script.fit(sizes, [2e-4 + size / 3e9 for size in sizes])
    assert latency == pytest.approx(2e-4) and bandwidth == pytest.approx(3e9)
    for slower in (1.2, -0.1):  # large messages leave the cache; noise
        latency, bandwidth = script.fit(sizes, [1e-9 * size**slower for size in sizes])
        assert latency == 0 and bandwidth > 0


def test_a_collective_that_a_backend_lacks_is_named(monkeypatch, capsys):
    monkeypatch.setattr(script.dist, "get_backend", lambda: "gloo")
    with pytest.raises(SystemExit) as ended, script.explain_missing("all_to_all"):
        raise RuntimeError("Backend gloo does not support alltoall_base")
    assert ended.value.code == 2
    said = "gloo has no all_to_all (Backend gloo does not support alltoall_base); use --device cuda"
    assert said in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="Timed out"), script.explain_missing("all_to_all"):
        raise RuntimeError("Timed out")  # is no lack, and keeps its traceback


SAID = TABLES["broken_collectives"]  # by rank


@cases("mistake", SAID, lambda m: m in ("shape", "wait"))
def test_mistakes_end_by_themselves(mistake):
    command = f"{COMMAND.format(2)} --break {mistake} --timeout 2"
    finished = succeed(command, forked=True)
    for rank, words in SAID[mistake].items():
        assert re.search(rf"rank {rank}   {words}", finished.stdout)
    advice = "TORCH_DISTRIBUTED_DEBUG=DETAIL" if mistake != "wait" else "No debug setting"
    assert finished.lines[-1].startswith(("With " * (mistake != "wait")) + advice)


def test_the_rank_that_may_host_the_store_leaves_last(monkeypatch):
    monkeypatch.setitem(script.MISTAKES, "wait", print)
    monkeypatch.setattr(script, "dist", Mock(get_rank=int, get_world_size=lambda: 2))
    monkeypatch.setattr(script.os, "_exit", print)
    store = Mock()
    script.show_mistake(Mock(mistake="wait", timeout=1), torch.device("cpu"), store)
    assert store.mock_calls[-1][0] == "wait"


DTENSORS = TABLES["dtensors"]


def test_dtensors():
    """Their values are compared by the script itself. The page shows the last of its tables."""
    finished = succeed("torchrun --standalone --nproc_per_node=4 pytorch_DTensor.py", forked=True)
    shown = re.findall(r"^(\w+): .*\n((?:    .*\n)+)", finished.stdout, re.MULTILINE)
    assert [name for name, _ in shown] == [*DTENSORS, "mlp"]
    for name, lines in shown[:-1]:
        assert re.findall(r"(?:sent +|\] +)(\S.*?)(?:  |$)", lines, re.MULTILINE) == DTENSORS[name]
    page = (ROOT / "docs/under_the_hood.md").read_text()
    assert re.search(r"^mlp: .*?\n(?=```)", page, re.MULTILINE | re.DOTALL)[0] in finished.stdout
    assert finished.lines[-1].startswith("done: all")
