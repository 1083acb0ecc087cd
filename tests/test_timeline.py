"""Pictures of traces: their content, on CPUs and GPUs, and traces that cannot be used."""

import gzip
import json
import re
import shlex
import sys
from xml.etree import ElementTree

import pytest
from checkout import copy_checkout
from conftest import ROOT, launch

from harness import trace_rows
from report import pages, timeline_picture
from report.results import Unusable

SVG = "{http://www.w3.org/2000/svg}"
TECHNIQUES = ["DDP_ZeRO", "FSDP", "gradient_accumulation", "torchrun_DDP"]
TRACES = ROOT / "results/traces"


def event(cat, name, ts, dur, tid=1, **args):
    found = {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid}
    return found | {"args": args}


def kernel(name, ts, dur, **args):
    return event("kernel", name, ts, dur, tid=7, **args)


NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GPU = [  # of a step: two kernels, under the second of which an all_reduce begins
    event("user_annotation", "forward", 0, 100),
    event("user_annotation", "backward", 100, 300),
    event("cpu_op", "aten::mm", 0, 90),
    kernel("sgemm", 50, 100),
    kernel("sgemm", 200, 100),
    kernel(NCCL, 250, 150, **{
        "Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000,
        "dtype": "BFloat16",
    }),
    event("gpu_user_annotation", "nccl:all_reduce", 250, 150),
]  # fmt: skip


def test_rows_of_a_gpu():
    """Kernels are what computes, but for those of nccl."""
    rows = trace_rows.make_rows(GPU, rank=3)
    kinds = {kind: [(e["name"], e["ts"], e["dur"]) for e in rows if e.get("cat") == kind]
             for kind in trace_rows.ROWS}  # fmt: skip
    assert kinds["phases"] == [("forward", 0, 100), ("backward", 100, 300)]
    assert kinds["compute"] == [("compute", 50, 100), ("compute", 200, 100)]
    assert kinds["communication"] == [("all_reduce", 250, 150)]
    assert kinds["overlap"] == [("overlap", 250, 50)]
    found = trace_rows.sum_up(rows, steps=1)
    assert found["overlapped_ms"] == 0.05 and found["exposed_ms"] == pytest.approx(0.1)
    assert found["collectives"] == {"all_reduce": {"per_step": 1, "bytes_per_step": 2000}}


def test_an_operation_that_waits_within_itself():
    """As those on DTensors do, for what another has sent: the wait is no compute."""
    events = [
        event("user_annotation", "forward", 0, 100),
        event("cpu_op", "aten::add", 10, 50),
        event("cpu_op", "_c10d_functional::wait_tensor", 20, 30),
    ]
    rows = trace_rows.make_rows(events, rank=0)
    compute = [(e["ts"], e["dur"]) for e in rows if e.get("cat") == "compute"]
    assert compute == [(10, 10), (50, 10)]


def test_rows_of_gloo():
    """It sends a reduce_scatter as an all_reduce; what was asked for has the name and the bytes. A
    range that may contain a wait is no compute, and nor is what another thread does."""
    events = [
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
    del events[4]  # began before the trace
    [sent] = [row for row in trace_rows.make_rows(events, 0) if row.get("cat") == "communication"]
    assert sent["name"] == "all_reduce" and sent["args"] == {"bytes": 32}


# ---------------------------------------------------------------------------------------- pictures


def write(path, events, base=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"baseTimeNanoseconds": base, "traceEvents": events})
    path.write_bytes(gzip.compress(text.encode()))


def test_ranks_are_drawn_on_one_clock(tmp_path):
    """Rank 1 begins 0.1 ms later, whatever the numbers in its file begin with."""
    write(tmp_path / "rank0.pt.trace.json.gz", GPU + trace_rows.make_rows(GPU, 0), base=1_000_000)
    write(tmp_path / "rank1.pt.trace.json.gz", GPU + trace_rows.make_rows(GPU, 1), base=1_100_000)
    ranks = timeline_picture.read_traces(tmp_path)
    assert [rank["phases"][0].begin for rank in ranks] == [0, pytest.approx(0.1)]
    picture = ElementTree.fromstring(timeline_picture.draw(ranks))
    titles = [title.text for title in picture.iter(f"{SVG}title")]
    assert titles.count("all_reduce 1.95 KiB, 0.15 ms") == 2
    assert titles.count("backward, 0.3 ms") == 2
    small = tmp_path / "small"
    timeline_picture.slim(tmp_path, small)
    assert timeline_picture.draw(timeline_picture.read_traces(small)) == timeline_picture.draw(
        ranks
    )
    assert sorted(path.name for path in small.iterdir()) == ["rank0.json.gz", "rank1.json.gz"]


def test_collectives_at_the_same_time_are_below_each_other():
    bars = [timeline_picture.Bar("all_reduce", a, a + 3, 8) for a in (0, 1, 4)]
    drawn = " ".join(timeline_picture.draw_communication(bars, [], scale=100))
    assert len(set(re.findall(r'<rect [^>]*\by="(\d+)"', drawn))) == 2


@pytest.mark.parametrize("name", TECHNIQUES)
def test_what_the_pages_say_is_to_be_seen(name):
    """Buckets leave during backward; of several parts, during the last; FSDP gathers a block before
    it computes, twice; ZeRO sends what it has updated."""
    for rank in timeline_picture.read_traces(TRACES / name):
        phases, sent = rank["phases"], rank["communication"]
        of = {kind: [bar for bar in phases if bar.name == kind] for kind in timeline_picture.PHASES}
        in_phase = {
            kind: [s.name for s in sent if any(b.begin <= s.begin < b.end for b in bars)]
            for kind, bars in of.items()
        }
        if name == "FSDP":
            assert in_phase["forward"] == ["all_gather"] * 9
            assert in_phase["backward"].count("reduce_scatter") == 9
            assert not rank["overlap"]
            continue
        assert in_phase["backward"] == ["all_reduce"] * 3 and not in_phase["forward"]
        assert rank["overlap"][0].begin < of["backward"][-1].end
        assert len(of["backward"]) == (2 if "accumulation" in name else 1)
        assert sent[0].begin > of["backward"][-1].begin
        assert in_phase["optimizer"] == (["broadcast"] * 2 if "ZeRO" in name else [])


@pytest.mark.parametrize("language", ["", ".zh-CN"])
@pytest.mark.parametrize("name", TECHNIQUES)
def test_the_pictures_in_docs(name, language):
    """They are those of the traces, are small, and can be read on their own background."""
    file = f"timeline-{name}{language}.svg"
    text = (ROOT / "docs" / file).read_text()
    assert text == timeline_picture.pictures(ROOT)[file] and len(text) < 20_000
    picture = ElementTree.fromstring(text)
    paper = picture.find(f"{SVG}rect")
    assert paper.get("fill") == timeline_picture.PAPER and paper.get("width") == picture.get(
        "width"
    )
    assert f"](../{file})" in (ROOT / f"docs/techniques/{name}{language}.md").read_text()
    sizes = [path.stat().st_size for path in (TRACES / name).iterdir()]
    assert sum(sizes) < 20_000


def test_a_new_trace_changes_its_pictures(tmp_path):
    copy_checkout(tmp_path, "README*.md", "docs", "config", "results")
    path = tmp_path / "results/traces/FSDP/rank1.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    write(path, [e | {"ts": e["ts"] + 1000} for e in events])
    changed, _ = pages.find_changes(tmp_path)
    assert {p.name for p in changed} == {"timeline-FSDP.svg", "timeline-FSDP.zh-CN.svg"}


# ----------------------------------------------------------------------------------------- mistakes


def draw(folder, **options):
    return launch(f"{sys.executable} timeline.py {shlex.quote(str(folder))}", **options)


def test_draw_as_typed(tmp_path):
    """The command is python timeline.py FOLDER."""
    write(tmp_path / "rank0.pt.trace.json.gz", trace_rows.make_rows(GPU, 0))
    finished = draw(tmp_path)
    assert finished.code == 0 and finished.lines == [f"drawn: {tmp_path}/timeline.svg"]
    ElementTree.parse(tmp_path / "timeline.svg")


def test_a_folder_without_traces(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        finished = draw(folder, forked=True)
        assert finished.code == 2
        [line] = finished.errors
        assert str(folder) in line and "--trace N" in line and "Traceback" not in finished.stderr


GOOD = gzip.compress(json.dumps({"traceEvents": trace_rows.make_rows(GPU, 0)}).encode())


@pytest.mark.parametrize(
    "content, word",
    [
        (GOOD[:-20], "damaged"),
        (GOOD[:40] + b"\0\0\0\0" + GOOD[44:], "damaged"),
        (b"no gzip", "damaged"),
        (gzip.compress(mtime=0, data=b"{"), "damaged"),
        (gzip.compress(mtime=0, data=b"[]"), "damaged"),
        (gzip.compress(mtime=0, data=b'{"traceEvents": [{"cat": "phases"}]}'), "damaged"),
        (gzip.compress(mtime=0, data=b'{"traceEvents": []}'), "has no phases"),
    ],
)
def test_a_damaged_trace(content, word, tmp_path):
    path = tmp_path / "rank0.pt.trace.json.gz"
    path.write_bytes(content)
    with pytest.raises(Unusable, match=f"{path} .*{word}.*--trace"):
        timeline_picture.read_traces(tmp_path)


def test_a_missing_rank(tmp_path):
    write(tmp_path / "rank1.pt.trace.json.gz", trace_rows.make_rows(GPU, 1))
    with pytest.raises(Unusable, match="none of rank0"):
        timeline_picture.read_traces(tmp_path)
