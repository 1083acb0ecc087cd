"""report/: tables, pictures of collectives, and of traces."""

import gzip
import json
import re
from collections import defaultdict
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from conftest import ROOT, name_of, succeed
from matplotlib.colors import to_rgb
from test_collectives import expected

from harness import trace_rows
from report import diffs, draw, front, pages, palette, recorded, suites, traces
from report.results import Unusable, read_result
from techniques import TECHNIQUES
from website import schedules, schematics

SVG = "{http://www.w3.org/2000/svg}"
EXAMPLES = [path for path in ROOT.glob("examples/*.py") if path.stem != "plain"]
TEXT = ("gpt", "shakespeare")


def on_gpus(row, name, ranks, devices):
    """A committed row as four GPUs would have it."""
    for run in row["runs"]:
        run |= {"device": "NVIDIA A100", "world_size": ranks, "devices": devices}
        run["peak_memory_gib"] |= {"allocated": 1.5, "reserved": 2.0, "dataset": 0.1}
        run["tf32"] = {"convolutions": True, "matrix_products": False}
    return row | {"name": name}


def test_tables_tell_ranks_from_gpus():
    one, other, third = read_result(ROOT, "peers")["rows"]
    new = [on_gpus(one, "DP", 1, 4), on_gpus(other, "torchrun_DDP x4", 4, 4)]
    drawn = suites.techniques_table([*new, third | {"runs": [], "left_out": "slow"}])
    assert drawn.count("left out: slow") == 1 and "{" not in drawn and "| ranks (GPUs) |" in drawn
    assert "| `DP` | 1 (4) | float32 (TF32) |" in drawn
    assert "| `torchrun_DDP` | 4 | float32 (TF32) |" in drawn and "| 1.50 (2.00) |" in drawn


def test_a_result_of_a_few_steps_is_not_shown():
    """All rows but LoRA's are worse than a uniform guess then."""
    rows = read_result(ROOT, "peers")["rows"]
    assert "accuracy" not in suites.techniques_table(rows)
    for row in rows:
        for run in row["runs"]:
            run |= {"steps": 1000, "eval_accuracy": 0.5}
    assert "| accuracy |" in suites.techniques_table(rows)
    untimed = {n: suites.techniques_table(read_result(ROOT, n)["rows"], False) for n in TEXT}
    assert "loss |" not in untimed["gpt"] and "| loss |" in untimed["shakespeare"]


def test_a_line_says_where_figures_are_from():
    """Of all rows the same, or of some by an earlier measurement."""
    found = read_result(ROOT, "gpt")
    line = (
        "torch {torch}; {date}; {git_commit:.9}; 1 run of each; `python benchmark.py --suite gpt`"
    )
    line = line.format_map(found | found["versions"])
    assert line in suites.suite_table(found, "gpt")
    found["rows"][0]["from"] = "an old machine"
    n = len(found["rows"]) - 1
    drawn = suites.suite_table(found, "gpt")
    assert "an old machine (rows: 1)" in drawn and f"{found['git_commit'][:9]} (rows: {n})" in drawn


@pytest.mark.parametrize("chinese", [False, True])
def test_a_silent_mistake_has_its_program_and_its_section(chinese):
    found = read_result(ROOT, "outputs")
    all_pages = pages.list_pages(ROOT, chinese)
    [text] = [path.read_text() for path in all_pages if path.name.startswith("silent_mistakes.")]
    sections = dict(part.split("\n", 1) for part in re.split(r"^##+ ", text, flags=re.M)[1:])
    drawn = recorded.silent_table(ROOT, found, chinese)
    links = re.findall(r"\((examples/silent/\w+\.py)\) \| \[(.+)\]\(#.+\) \|$", drawn, re.M)
    assert len(links) == len(recorded.WORDS)
    assert all(f"# {program}\n" in sections[section] for program, section in links)


def test_the_bars_are_whole_peaks():
    found = read_result(ROOT, "front")
    bars = front.pictures(ROOT, {"front": found})["memory"]["values"]
    shown = json.loads((ROOT / "measure/suites/front.json").read_text())["picture"]
    assert list(bars) == list(shown)
    for label, name in shown.items():
        peak = found["outputs"][name]["output"][0]["peak"] / 2**30
        assert peak == pytest.approx(sum(bars[label].values()), abs=0.03) and peak > 10


def test_rows_say_that_they_accumulate():
    """Which sends FSDP's bytes again for each part: most of what the row of CP sends."""
    found = read_result(ROOT, "front")["outputs"]
    for name, one in found.items():
        parts = re.search(r"--accumulate (\d+)", one["command"])
        assert bool(parts) == ("accumulate" in name)
        assert not parts or f"accumulate {parts[1]}" in name
    whole = found["CP 8, accumulate 8"]["output"][0]["sent"]
    assert whole / 2 < 8 * found["FSDP"]["output"][0]["sent"] < whole


SCHEMATICS = yaml.safe_load((ROOT / "website/schematics.yaml").read_text())["schematics"]


def spans(line):
    """Kind, label, begin and length of the boxes of a line, after its first column."""
    boxes = [schematics.read(part, {}) for part in line.split(",")]
    begin = 0.0
    for box in boxes[1:]:
        yield box.kind, box.label, begin, box.width
        begin += box.width


@pytest.mark.parametrize("name, ranks", [("PP", 2), ("PP_by_hand", 3)])
def test_a_pipeline_is_drawn_as_its_schedule(name, ranks):
    """By the same rules as the form below it: a backward takes as long as two forwards."""
    lines = [line for line in SCHEMATICS[name].splitlines() if line.startswith("rank ")]
    drawn = []
    for line in lines:
        drawn.append([box[:1] + box[2:] for box in spans(line) if box[0] not in (None, "idle")])
    timetable = schedules.timetable("1f1b", ranks, 4)["rows"]
    kinds = {"F": "forward", "B": "backward"}
    assert drawn == [[(kinds[row[0]], row[3], row[4]) for row in rank] for rank in timetable]


def test_buckets_are_drawn_in_backward():
    backward, sent = SCHEMATICS["torchrun_DDP"].splitlines()[-2:]
    ends = {label: begin + length for kind, label, begin, length in spans(backward) if kind}
    [first, last] = [(begin, begin + length) for kind, *_, begin, length in spans(sent) if kind]
    assert first[0] < max(ends.values()) < last[1]


def test_schematics_draw_what_their_pages_say():
    """LoRA's factor, without which merging is wrong; what is offloaded is on the CPU."""
    assert "W x + alpha / rank × B A x" in SCHEMATICS["LoRA"]
    [offload] = re.findall("^offload .*", SCHEMATICS["activation_checkpointing"], re.MULTILINE)
    assert re.findall("CPU|input", offload) == ["CPU", "CPU", "CPU"]


PAGES = {name: place.page.read_text() for name, place in pages.find_places(ROOT).items()}
# Pages that teach have sections of their own: tests/test_course.py.
SHOWING = [row for row in TECHNIQUES[1:] if "\n## Predict, then run\n" not in PAGES[row.name]]


@pytest.mark.parametrize("row", SHOWING, ids=lambda row: row.name)
def test_a_page_shows_what_makes_its_technique_and_its_pitfalls(row):
    page = PAGES[row.name]
    for heading in ("The code|What changes", "When.*to use it", "Pitfalls|What goes.*", "Sources"):
        assert re.search(rf"^## ({heading})$", page, re.MULTILINE), f"no section ## {heading}"


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_an_example_is_shown_with_what_trains(path):
    """The lines that are left out save, resume, or make the model and the data."""
    pair = diffs.example_of(ROOT, path.stem)
    lines = pair.diff()
    assert 0 < sum(line[0] in "+-" for line in lines) and len(lines) <= 115
    for text, kept in ((pair.old, pair.old_lines), (pair.new, pair.new_lines)):
        every = (ROOT / text).read_text().splitlines()
        assert not {*kept} - {*every}
        assert pair.whole or {line for line in every if "optimizer.step()" in line} <= {*kept}


BEFORE, AFTER = expected(4)
TILES = {}  # what a tile of the pictures stands for
for letter, row in zip("abcd", BEFORE.tolist(), strict=True):
    TILES[letter] = row
    TILES |= {f"{letter}{i}": [number] for i, number in enumerate(row)}
TILES |= {f"Σ{i}": [number] for i, number in enumerate(BEFORE.sum(0).tolist())}


def test_a_chinese_page_has_the_chinese_pictures_that_exist(tmp_path):
    page = tmp_path / "docs/techniques/A.zh-CN.md"
    picture = tmp_path / "docs/images/schematic-A.zh-CN.svg"
    for path in (page, picture):
        path.parent.mkdir(parents=True)
        path.write_text("<!-- a -->\n<!-- end -->")
    blocks = {"a": "![A](../images/schematic-A.svg)\n![B](docs/images/step-B.svg)"}
    text = pages.fill(tmp_path, page, blocks, set(), chinese=True)
    assert "schematic-A.zh-CN.svg)" in text
    assert "step-B.svg)" in text


def test_a_chinese_picture_of_a_step_has_no_english_words():
    """But for those of the Chinese pages."""
    for path in (ROOT / "docs/images").glob("step-*.zh-CN.svg"):
        words = " ".join(re.findall(r"<text .*?>(.*?)</text>", path.read_text()))
        found = set(re.findall(r"\b[a-z]{3,}", words))
        assert found <= {"autocast", "token", "float", "bfloat"}, path.name


@pytest.mark.parametrize("file", ["collectives.svg", "collectives.zh-CN.svg"])
def test_each_picture_is_what_the_collective_does(file):
    """As tests/test_collectives.py has found it to be. Tiles have centred labels."""
    picture = ElementTree.parse(ROOT / "docs/images" / file).getroot()
    *panels, _ = picture.findall(f"{SVG}g")  # and a key
    drawn = {name: has for name, has in AFTER.items() if name != "asynchronous"}  # an all_reduce
    for (name, has), panel in zip(drawn.items(), panels, strict=True):
        title, *texts = panel.findall(f"{SVG}text")
        assert name in title.text.replace("send, recv", "send_and_receive").replace(" ", "_")
        heights = [text.get("y") for text in texts if text.text.startswith("rank ")][:4]
        left = [[] for _ in heights]
        right = [[] for _ in heights]
        for tile in (text for text in texts if text.get("text-anchor")):
            side = right if float(tile.get("x")) > 233 else left  # of the arrow
            side[heights.index(tile.get("y"))] += TILES[tile.text]
        assert right == [[] if row is None else row.tolist() for row in has], name
        had = BEFORE if name != "scatter" else BEFORE[:1]
        assert [row for row in left if row] == had.tolist(), name


def event(cat, name, ts, dur, tid=1, **args):
    found = {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid}
    return found | {"args": args}


GPU = json.loads((ROOT / "tests/gpu_trace.json").read_text())  # two kernels, and an all_reduce


def test_rows_of_a_gpu():
    """Kernels are what computes, but for those of nccl. A wait is of the CPU, not of them."""
    rows = trace_rows.make_rows(GPU, rank=3)
    kinds = defaultdict(list)
    for row in rows:
        if row.get("cat") in trace_rows.ROWS:
            kinds[row["cat"]].append((row["name"], row["ts"], row["dur"]))
    assert kinds == {
        "phases": [("forward", 0, 100), ("backward", 100, 300)],
        "compute": [("compute", 50, 100), ("compute", 200, 100)],
        "communication": [("all_reduce", 250, 150)],
        "overlap": [("overlap", 250, 50)],
    }
    found = trace_rows.sum_up(rows, steps=1)
    assert found["overlapped_ms"] == 0.05 and found["exposed_ms"] == pytest.approx(0.1)
    assert found["collectives"] == {"all_reduce": {"per_step": 1, "bytes_per_step": 4000}}
    sizes = {"Double": 8, "Long": 8, "BFloat16": 2, "Byte": 1, "Float8_e4m3fn": 1, "long int": 8}
    for kind, size in (sizes | {"c10::Half": 2, "unsigned char": 1}).items():
        assert trace_rows.bytes_of(10, kind) == 10 * size
    with pytest.raises(KeyError, match="strange"):
        trace_rows.bytes_of(10, "Strange")


def test_rows_of_gloo():
    """It sends a reduce_scatter as an all_reduce; what was asked for has the name and the bytes. A
    range that may contain a wait is no compute, and nor is what another thread does. What gloo
    began before the first phase belongs to the step before."""
    events = [
        event("user_annotation", "gloo:all_reduce", -9, 10, tid=3,
              **{"Input Dims": [[6]], "Input type": ["float"]}),  # of the step before
        event("user_annotation", "backward", 0, 100),
        event("cpu_op", "aten::mm", 10, 20),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 5, 90),
        event("cpu_op", "aten::add", 0, 50, tid=2),
        event("cpu_op", "c10d::_reduce_scatter_base_", 20, 2, **{"Input Dims": [[4], [8], []]}),
        event("user_annotation", "gloo:all_reduce", 25, 30, tid=3,
              **{"Input Dims": [[8]], "Input type": ["float"]}),
    ]  # fmt: skip
    rows = [row for row in trace_rows.make_rows(events, rank=0) if row["ph"] == "X"]
    found = {row["cat"]: (row["name"], row["ts"], row["dur"], row["args"]) for row in rows}
    assert found["compute"] == ("compute", 10, 20, {})
    assert found["communication"] == ("reduce_scatter", 25, 30, {"bytes": 32})
    assert found["overlap"] == ("overlap", 25, 5, {})
    del events[5]  # began before the trace
    # What an operation on DTensors waits for within itself is no compute either:
    events += [event("cpu_op", "_c10d_functional::wait_tensor", 15, 5)]
    rows = trace_rows.make_rows(events, rank=0)
    [sent] = [row for row in rows if row.get("cat") == "communication"]
    assert sent["name"] == "all_reduce" and sent["args"] == {"bytes": 32}
    spans = [(row["ts"], row["dur"]) for row in rows if row.get("cat") == "compute"]
    assert spans == [(10, 5), (20, 10)]


def write(path, events, base=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"baseTimeNanoseconds": base, "traceEvents": events})
    path.write_bytes(gzip.compress(text.encode()))


def test_ranks_are_drawn_on_one_clock(tmp_path):
    """Rank 1 begins 0.1 ms later, whatever the numbers in its file begin with."""
    write(tmp_path / "rank0.pt.trace.json.gz", GPU + trace_rows.make_rows(GPU, 0), base=1_000_000)
    write(tmp_path / "rank1.pt.trace.json.gz", GPU + trace_rows.make_rows(GPU, 1), base=1_100_000)
    ranks = traces.read_traces(tmp_path)
    assert [rank["phases"][0].begin for rank in ranks] == [0, pytest.approx(0.1)]
    drawn = tmp_path / "timeline.svg"
    assert succeed(f"python timeline.py {tmp_path}", forked=True).lines == [f"drawn: {drawn}"]
    texts = [text.text for text in ElementTree.parse(drawn).iter(f"{SVG}text")]
    assert texts.count("all_reduce 3.91 KiB") == 2 and texts.count("rank 1") == 1
    assert texts.count("backward") == 3, "two bars, and the legend"
    bars = [traces.Bar("all_reduce", a, a + 3, 8) for a in (0, 1, 4)]
    assert draw.in_lanes(bars) == [0, 1, 0], "those at the same time are below each other"
    small = tmp_path / "small"
    succeed(f"python timeline.py {tmp_path} --slim {small}", forked=True)
    assert traces.read_traces(small) == ranks
    assert sorted(path.name for path in small.iterdir()) == ["rank0.json.gz", "rank1.json.gz"]


@pytest.mark.parametrize("name", "DDP_ZeRO FSDP gradient_accumulation torchrun_DDP".split())
def test_what_the_pages_say_is_to_be_seen(name):
    """Buckets leave during backward; of several parts, during the last; FSDP gathers a block before
    it computes, twice; ZeRO sends what it has updated."""
    for rank in traces.read_traces(ROOT / "results/traces" / name):
        phases = rank["phases"]
        sent = rank["communication"]
        of = defaultdict(list)
        in_phase = defaultdict(list)
        for bar in phases:
            of[bar.name].append(bar)
            in_phase[bar.name] += [s.name for s in sent if bar.begin <= s.begin < bar.end]
        if name == "FSDP":
            assert in_phase["forward"] == ["all_gather"] * 9
            assert in_phase["backward"].count("reduce_scatter") == 9
            assert all(b.begin > of["optimizer"][-1].end for b in rank["overlap"])  # a vote's
            continue
        assert in_phase["backward"] == ["all_reduce"] * 3 and not in_phase["forward"]
        assert rank["overlap"][0].begin < of["backward"][-1].end
        assert len(of["backward"]) == (2 if "accumulation" in name else 1)
        assert sent[0].begin > of["backward"][-1].begin
        assert in_phase["optimizer"] == (["broadcast"] * 2 if "ZeRO" in name else [])


GOOD = gzip.compress(json.dumps({"traceEvents": trace_rows.make_rows(GPU, 0)}).encode())
DAMAGED = [GOOD[:-20], GOOD[:40] + b"\0\0\0\0" + GOOD[44:], b"no gzip"]
DAMAGED += map(gzip.compress, [b"{", b"[]", b'{"traceEvents": [{"cat": "phases"}]}'])


def test_a_damaged_or_missing_trace(tmp_path):
    write(tmp_path / "rank1.pt.trace.json.gz", trace_rows.make_rows(GPU, 1))
    with pytest.raises(Unusable, match="none of rank0"):
        traces.read_traces(tmp_path)
    path = tmp_path / "rank0.pt.trace.json.gz"
    wrong = dict.fromkeys(DAMAGED, "damaged")
    for content, word in (wrong | {gzip.compress(b'{"traceEvents": []}'): "has no phases"}).items():
        path.write_bytes(content)
        with pytest.raises(Unusable, match=f"{path} .*{word}.*--trace"):
            traces.read_traces(tmp_path)


def contrast(one, other):
    """WCAG 2's ratio, from 1 to 21."""
    parts = np.array([to_rgb(one), to_rgb(other)])
    parts = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    dark, light = sorted(parts @ [0.2126, 0.7152, 0.0722] + 0.05)
    return light / dark


def test_figures_are_legible():
    """Text as WCAG AA demands, on boxes and on pages; boxes on pages of both themes."""
    boxes = re.compile(r'<rect [^>]*fill="(#.{6})"[^>]*/>\n<text [^>]*fill="(#.{6})"')
    texts = set()
    for path in ROOT.glob("docs/images/*.svg"):
        texts |= {*boxes.findall(path.read_text())}
    fills = {*palette.MEMORY.values(), *palette.PHASES.values(), *palette.COLLECTIVES.values()}
    assert len(texts) > 10
    texts |= {(fill, palette.text_on(fill)) for fill in fills}
    for theme in palette.THEMES.values():
        for page in (theme["page"], theme["panel"]):
            texts.add((page, theme["ink"]))
            assert min(contrast(fill, page) for fill in fills) >= 3
    assert min(contrast(*pair) for pair in texts) >= 4.5
