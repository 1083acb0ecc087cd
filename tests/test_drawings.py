"""The pictures of the collectives show what they do; the table and the plot of their sweep."""

import json
from xml.etree import ElementTree

import pytest
from checkout import copy_checkout
from conftest import ROOT
from test_collectives import expected

import benchmark
from report import measured, pages, plots
from report.results import Unusable

ARROW = 233  # in a panel: what is left of it was there before
SVG = "{http://www.w3.org/2000/svg}"
FILES = ["collectives.svg", "collectives.zh-CN.svg"]
BEFORE, AFTER = expected(4)
DRAWN = [name for name in AFTER if name != "asynchronous"]  # an all_reduce


def read_panels(file):
    """Those of a picture in docs/, without the key."""
    return ElementTree.parse(ROOT / "docs" / file).getroot().findall(f"{SVG}g")[:-1]


def read_tiles(panel):
    """Labels and colours of each rank's tiles, before and after."""
    elements = list(panel)
    ys = [text.get("y") for text in elements if (text.text or "").startswith("rank ")][:4]
    sides = [[[] for _ in ys] for _ in range(2)]
    for rect, text in zip(elements, elements[1:], strict=False):
        if text.get("text-anchor"):
            side = sides[float(text.get("x")) > ARROW]
            side[ys.index(text.get("y"))].append((text.text, rect.get("fill"), text.get("fill")))
    return sides


def numbers(tiles):
    """What they stand for, where rank r's numbers are 10 r + 1 to 10 r + 4."""
    found = []
    for (letter, *part), *_ in tiles:
        ranks = range(4) if letter == "Σ" else ["abcd".index(letter)]
        parts = [int(*part)] if part else range(4)
        found += [sum(10 * rank + part + 1 for rank in ranks) for part in parts]
    return found or None


@pytest.mark.parametrize("file", FILES)
def test_each_picture_is_what_the_collective_does(file):
    """As tests/test_collectives.py has found it to be; and has its title."""
    for name, panel in zip(DRAWN, read_panels(file), strict=True):
        title = panel.find(f"{SVG}text").text.replace("send, recv", "send_and_receive")
        assert name in title.replace(" ", "_") and title.isascii() == ("zh-CN" not in file)
        before, after = read_tiles(panel)
        for shown, had in zip(before, BEFORE.tolist(), strict=True):
            assert numbers(shown) == had or name == "scatter" and not shown
        assert numbers(before[0]) == BEFORE[0].tolist()
        has = [None if row is None else row.tolist() for row in AFTER[name]]
        assert [numbers(shown) for shown in after] == has, name
        for label, fill, _ in [tile for row in before + after for tile in row]:
            colours = plots.COLOURS[:4]
            if label[0] != "Σ":
                colours = [colours["abcd".index(label[0])]]
            assert fill == ("url(#sum)" if len(colours) == 4 else colours[0])


# ------------------------------------------------------------------------------------- the sweep


def small_sweep():
    """One that a formula wrote: 100 µs and 2 GB/s of all_gather, twice that of broadcast."""
    operations = {}
    for name, factor, latency in (("all_gather", 0.5, 1e-4), ("broadcast", 1, 2e-4)):
        rows = []
        for size in (4096, 65536, 2**20):
            seconds = latency + factor * size / 2e9
            row = {"bytes": size, "seconds": seconds, "algorithm": size / seconds}
            rows.append(row | {"bus": factor * size / seconds})
        operations[name] = {"latency": latency, "bandwidth": 2e9, "rows": rows}
    command = "torchrun --nproc_per_node=2 pytorch_collectives.py --sweep"
    hardware = {"cpu": "A CPU", "cores": 2, "cpu_flags": ["avx2"], "gpus": []}
    found = {"backend": "gloo", "ranks": 2, "operations": operations, "command": command}
    return found | {"hardware": hardware, "versions": {"torch": "2.15.0"}, "git_commit": None}


def test_the_table_of_a_sweep():
    *_, first, second, _, below = measured.sweep_block(ROOT, small_sweep()).splitlines()
    assert first == "| `all_gather` | 100 | 2.00 | 1.45 |"
    assert second == "| `broadcast` | 200 | 2.00 | 1.45 |"
    about = "A CPU, 2 cores, avx2; gloo, 2 ranks, messages up to 1 MiB; torch 2.15.0; "
    assert below == f"{about}[results/collectives.json](results/collectives.json)"
    chinese = pages.translate(measured.sweep_block(ROOT, small_sweep()))
    assert "| 集合通信 | 延迟 µs | 带宽" in chinese and "2 个进程, 消息最大 1 MiB" in chinese


def test_the_plot_of_a_sweep(tmp_path):
    data = plots.bandwidths(small_sweep())["collectives"]
    assert data["unit"] == "bus bandwidth, GB/s (2 ranks, gloo)"
    lines = data["values"]["all_gather"]
    assert lines["measured"] == {"4096": 0.0203, "65536": 0.282, "1048576": 1.45}
    assert lines["fitted"] == lines["measured"], "it is of the same formula"
    path = tmp_path / "collectives.svg"
    plots.draw(path, data)
    texts = {text.text for text in ElementTree.parse(path).iter(f"{SVG}text")}
    assert {"4 KiB", "64 KiB", "1 MiB", "all_gather", "broadcast", data["unit"]} <= texts
    assert plots.digest_of(path) == plots.digest(data)


def test_a_sweep_that_is_not_there_or_says_too_little(tmp_path):
    assert pages.read_sweep(tmp_path) == {} and plots.bandwidths({}) == {}
    missing = "not measured yet: `python benchmark.py --suite collectives`"
    assert measured.sweep_block(tmp_path, {}) == missing
    path = tmp_path / "results/collectives.json"
    path.parent.mkdir()
    for text in (json.dumps({"ranks": 2, "operations": {}}), "{", "[]"):
        path.write_text(text)
        with pytest.raises(Unusable, match="collectives.json .*; measure it again"):
            pages.read_sweep(tmp_path)


def test_pages_pictures_and_the_plot_follow(tmp_path):
    copy_checkout(tmp_path, "README*.md", "docs", "config", "results")
    (tmp_path / "results/collectives.json").write_text(json.dumps(small_sweep()))
    changed, drawn = pages.find_changes(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in drawn] == ["results/collectives.svg"]
    assert len([path for path in changed if "`all_gather` | 100 |" in changed[path]]) == 2
    pages.render(changed, drawn)
    assert pages.find_changes(tmp_path) == ({}, {})


def test_steps_are_kept_with_where_they_were_measured(tmp_path, monkeypatch):
    """But what the last one says itself stands."""
    script = 'mkdir -p "$3"; echo \'{"ranks": 2, "git_commit": "its own"}\' > "$3/made.json"'
    (tmp_path / "measure.sh").write_text(script)
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    monkeypatch.setattr(benchmark, "RUNS", tmp_path / "runs")
    suite = {"steps": ["sh measure.sh --sweep --output-dir {folder}"], "writes": "made.json"}
    benchmark.run_steps(suite, tmp_path / "kept.json")
    found = json.loads((tmp_path / "kept.json").read_text())
    assert found["ranks"] == 2 and found["git_commit"] == "its own"
    assert found["command"] == "sh measure.sh --sweep"
    assert found["hardware"] == benchmark.hardware() and found["versions"]["torch"]
    assert found["date"] == benchmark.today()
