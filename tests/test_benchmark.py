"""benchmark.py: measure end to end, interrupt and resume, render, and check the pages."""

import functools
import json
import re
import shlex
import signal
import subprocess
import sys

import psutil
import pytest
import torch
from checkout import copy_checkout
from conftest import ROOT, environment, launch, wait_for

import benchmark
from measure import everything
from report import draw, pages
from report.results import Unusable
from techniques import TECHNIQUES

JOB = "--dataset synthetic --train-samples 64 --eval-samples 16 --batch-size 16 --epochs 1"
SUITES = sorted(path.stem.removeprefix("suite_") for path in ROOT.glob("config/suite_*"))


@pytest.fixture
def checkout(tmp_path):
    """A copy of what benchmark.py reads and writes."""
    return copy_checkout(tmp_path, "README*.md", "docs", "config", "results", "tests")


def write_suite(checkout, *rows, **more):
    rows = [dict(zip(("name", "command", "timeout"), row, strict=False)) for row in rows]
    suite = {"about": "a test", "job": JOB, "repeats": 1, "tables": ["quick"], "rows": rows} | more
    suite["rows"] += suite.pop("others", [])
    (checkout / "config/suite_quick.json").write_text(json.dumps(suite))


def run(checkout, flags, code=0):
    finished = launch(f"python benchmark.py {flags}", cwd=checkout, forked=True)
    assert finished.code == code, str(finished)
    return finished


@pytest.mark.full
def test_a_row_that_fails_says_why(checkout):
    single = "python pytorch_SingleGPU.py"
    ddp = "torchrun --nproc_per_node={ranks} pytorch_DDP_AMP.py"
    write_suite(
        checkout,
        ("flags", f"{single} --batch-size 0"),
        ("memory", "python -c \"raise RuntimeError('CUDA out of memory. Tried to allocate')\""),
        ("package", "python -c 'import no_such_package'"),
        ("bug", "python -c '1/0'"),
        ("program", "no_such_launcher pytorch_SingleGPU.py"),
        ("silent", "python -c 'import time; time.sleep(60)'", 3),
        others=[
            {"name": "good", "command": single},
            {"name": "ddp", "command": "torchrun --nproc_per_node=2 pytorch_torchrun_DDP.py"},
            {"name": "odd", "command": ddp, "ranks": [3]},
            {"name": "none", "command": "python none.py", "needs": ["none_such"]},
        ],
    )
    finished = run(checkout, "--suite quick")
    assert "failed: flags, memory, package, bug, program, silent; left" in finished.lines[-1]
    assert "left out: odd x3, none" in finished.lines[-1]
    whole = (checkout / "results/quick.json").read_text()
    rows = json.loads(whole)["rows"]
    why = {row["name"]: row["failed"] for row in rows}
    assert "--batch-size" in why["flags"] and "ZeroDivisionError" in why["bug"]
    assert why["memory"] == "out of memory"
    assert why["package"] == "no_such_package is not installed"
    assert why["program"] == "no_such_launcher is not installed"
    assert why["silent"] == "timed out after 3 s"
    assert why["good"] is None and [len(row["runs"]) for row in rows] == [0] * 6 + [1, 1, 0, 0]
    for said in ("no_such_package is not installed", "left out: none_such is not installed"):
        assert said in finished.stdout, "the table says it"
    assert "left out: a batch of 16 cannot be divided into 3 parts" in finished.stdout
    # a single row does not replace the others
    run(checkout, "--suite quick --only good --repeats 1")
    assert (checkout / "results/quick.json").read_text() == whole
    [row] = json.loads((checkout / "results/quick.only.json").read_text())["rows"]
    assert row["name"] == "good" and len(row["runs"]) == 1


# As a worker of a launcher: the first time it does not end, then it has the first row's result.
WORKER = """
if test -e runs/begun-$RANK; then
    test $RANK != 0 || { mkdir -p "$2" && cp runs/benchmark/quick/first/*.* "$2"; }
    exit
fi
touch runs/begun-$RANK
sleep 60
"""


def test_stopped_and_continued(checkout):
    """Stopped as a terminal does it; of a launcher's workers none is left."""
    (checkout / "worker.sh").write_text(WORKER)
    ddp = "torchrun --standalone --nproc_per_node=2 --no-python sh worker.sh"
    first = f"python pytorch_SingleGPU.py {JOB} --model shufflenet_v2_x0_5"
    write_suite(checkout, ("first", first), ("second", ddp), job="")
    process = subprocess.Popen(
        [sys.executable, "benchmark.py", "--suite", "quick"],
        cwd=checkout, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    partial = checkout / "results/quick.partial.json"
    wait_for(lambda: process.poll() or len([*checkout.glob("runs/begun-*")]) == 2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "resumes" in stderr
    assert str(checkout) not in [p.info["cwd"] for p in psutil.process_iter(["cwd"])]
    before = json.loads(partial.read_text())
    measured = [run for row in before["rows"] for run in row["runs"]]
    assert len(measured) == 1 and not before["complete"]
    assert not (checkout / "results/quick.json").exists()

    assert "has 1 runs" in run(checkout, "--suite quick").stdout
    after = json.loads((checkout / "results/quick.json").read_text())
    assert [len(row["runs"]) for row in after["rows"]] == [1, 1]
    assert after["rows"][0]["runs"][0] == measured[0]
    partial.write_text(json.dumps(before | {"git_commit": "another"}))
    assert "git_commit" in run(checkout, "--suite quick", code=2).errors[0]


def changes(checkout):
    """Names of what rendering would change."""
    changed, drawn = pages.find_changes(checkout)
    return {str(path.relative_to(checkout)) for path in [*changed, *drawn]}


def test_render_and_check(checkout):
    """Rendering twice is rendering once; one digit more or less is found, wherever it is."""
    (checkout / "results/collectives.svg").write_text("")
    assert changes(checkout) == {"results/collectives.svg"}, "python benchmark.py --render"
    pages.render(*pages.find_changes(checkout))
    assert not changes(checkout)
    (checkout / "docs/images/schematic-TP.svg").write_text("")
    blocks, texts = {"README": "front-gpt", "docs/measuring": "cpu", "docs/proof": "bytes"}, {}
    for name, block in blocks.items():
        for path in (checkout / f"{name}.md", checkout / f"{name}.zh-CN.md"):
            text = texts[path] = path.read_text()
            place = re.search(rf"<!-- {block} -->.*?\d [(+].*?(\d)", text, re.DOTALL).start(1)
            other = str((int(text[place]) + 1) % 10)
            path.write_text(text[:place] + other + text[place + 1 :])
    said = run(checkout, "--check", code=1).stderr
    assert changes(checkout) == {str(path.relative_to(checkout)) for path in texts}
    assert all(str(path.relative_to(checkout)) in said for path in texts)
    assert "schematic-TP.svg; run" in said
    run(checkout, "--render")
    assert all(path.read_text() == text for path, text in texts.items())
    path = checkout / "results/cpu.json"
    results = json.loads(path.read_text())
    for measured in results["rows"][0]["runs"]:
        measured["images_per_second"] *= 10
    path.write_text(json.dumps(results))
    assert {"docs/measuring.md", "docs/measuring.zh-CN.md"} <= changes(checkout)
    path.write_text(path.read_text()[:1000])
    [line] = run(checkout, "--render", code=2).errors
    assert "cpu.json" in line and "measure it again" in line


WRONG = [  # a file, what stands in it, and what would be wrong in its place
    ("results/cpu.json", '"schema": 1', '"schema": 99'),
    ("README.md", "<!-- front-gpt -->", ""),
    ("docs/proof.md", "<!-- end -->", ""),
    ("docs/inference.md", "<!-- inference -->", "<!-- inferences -->"),
]


@pytest.mark.parametrize("name, old, new", WRONG)
def test_nothing_is_rendered_from_what_is_wrong(name, old, new, checkout):
    text = (checkout / name).read_text()
    assert old in text
    (checkout / name).write_text(text.replace(old, new, 1))
    with pytest.raises(Unusable, match=name.removeprefix("results/")):
        pages.find_changes(checkout)


# ------------------------------------------------------------------ rows, and what leaves them out
@pytest.fixture
def gpus(monkeypatch):
    """A function that lets PyTorch see so many GPUs, of a name and a compute capability."""

    def see(count, name="NVIDIA A100", capability=(8, 0)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capability)
        monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda package: True)

    return see


def left_out(suite):
    rows = benchmark.read_suite(suite)["rows"]
    return {row["name"]: row["left_out"] for row in rows if row["left_out"]}


def test_rows_that_gpus_cannot_run_say_why(gpus, monkeypatch):
    for count in (1, 2, 3, 4, 6, 8):
        gpus(count)
        halves = {f"GPT: FSDP_TP --tp 2 x{n}": n for n in {1, count} if n % 2}
        groups = "{} ranks cannot be divided into groups of 2".format
        expected = {name: groups(n) for name, n in halves.items()}
        if 24 % (4 * count):
            why = f"a batch of 24 cannot be divided into {4 * count} parts"
            expected[f"GPT: gradient_accumulation --accumulate 4 x{count}"] = why
        assert left_out("gpu") == expected
    gpus(5)
    why = left_out("gpu")
    assert why["torchrun_DDP x5"] == "a batch of 96 cannot be divided into 5 parts"
    assert "20 parts" in why["gradient_accumulation --accumulate 4 x5"]
    assert "DP" not in why and "torchrun_DDP x1" not in why
    gpus(1, "Tesla P40", (6, 1))
    why = left_out("gpu")
    for row in benchmark.read_suite("gpu")["rows"]:
        if "bfloat16" in row["command"]:
            assert why.pop(row["name"]) == "Tesla P40 has no bfloat16"
    assert list(why) == ["GPT: FSDP_TP --tp 2 x1"]
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: name != "deepspeed")
    why = left_out("gpu")
    assert why["DeepSpeed zero_stage1 x1"] == "deepspeed is not installed"


def test_each_script_that_one_gpu_can_run_is_measured_on_one():
    """On ResNet-50, if it trains images, and on GPT-2."""
    commands = {"gpu": "", "gpu-gpt": ""}
    for row in benchmark.read_suite("gpu")["rows"]:
        if row["table"] in commands and row["ranks"] == 1:
            commands[row["table"]] += f" {shlex.join(row['command'])} "
    for row in TECHNIQUES:
        for table in ("gpu", "gpu-gpt"):
            trains = table == "gpu-gpt" or "needs_gpt" not in row.traits
            assert (f" {row.script}.py " in commands[table]) == trains, (row.name, table)


@pytest.mark.parametrize("suite", SUITES)
def test_a_dry_run_starts_nothing(suite, monkeypatch, capsys):
    def start(*words, **options):
        raise AssertionError(f"started {words}")

    before = sorted((ROOT / "results").iterdir())
    monkeypatch.setattr("sys.argv", ["benchmark.py", "--suite", suite, "--dry-run"])
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    benchmark.main()
    printed = capsys.readouterr().out
    assert sorted((ROOT / "results").iterdir()) == before
    for row in benchmark.read_suite(suite)["rows"]:
        assert f"{row['name']}: {shlex.join(row['command'])}" in printed
        # whose --num_gpus takes the machine's first GPUs, whatever CUDA_VISIBLE_DEVICES says
        assert row["command"][0] != "deepspeed"
    assert ("this machine has no GPU" in printed) == (suite == "gpu")
    assert "python " in printed or "torchrun " in printed


@pytest.mark.full
def test_a_suite_of_text(checkout):
    """Tokens, the curve of the loss, and memory from a run of its own; all in results/."""
    job = "--device cpu --model gpt-1x2x16 --context 8 --dataset synthetic --train-samples 32 "
    job += "--eval-samples 4 --batch-size 8 --epochs 1 --print-freq 2"
    memory = "--profile-memory --max-steps 3"
    row = ("SingleGPU", "python pytorch_SingleGPU.py")
    write_suite(checkout, row, job=job, curves=True, memory=memory)
    finished = run(checkout, "--suite quick")
    assert "tokens/s (min–max)" in finished.stdout and "| loss |" in finished.stdout
    found = json.loads((checkout / "results/quick.json").read_text())
    [row] = found["rows"]
    [measured] = row["runs"]
    assert measured["steps"] == 4 and measured["context"] == 8
    assert "--output-dir" in measured["command"]
    assert "--profile-memory --max-steps 3" in row["memory"]["command"]
    memory = row["memory"]["peak_memory_gib"]
    assert measured["peak_memory_gib"] == memory and 0 < memory["allocated"] < memory["process"]
    assert "| peak GiB (allocated) |" in finished.stdout
    assert [step for step, _ in measured["curve"]] == [2, 4]
    tokens, _ = draw.loss_by_tokens(found["rows"])["lines"]["SingleGPU"]["-"]
    assert tokens == pytest.approx([128e-6, 256e-6])


# ------------------------------------------------------------------------------ all that there is
def test_all_is_measured_once(checkout, monkeypatch, capsys):
    counted, fails = checkout / "counted", checkout / "fails"
    fails.touch()
    parts = {
        "good": {"commands": [f"echo >> {counted}", f"echo said >> {counted}"]},
        "bad": {"commands": [f"echo to the log; test ! -e {fails}"]},
        "gpu": {"needs_gpu": True, "commands": ["false"]},
    }
    (checkout / "config/measure_all.json").write_text(json.dumps(parts))
    monkeypatch.setattr(everything, "busy_cores", lambda: 0.1)
    measure = functools.partial(everything.measure, checkout, "0" * 40, gpu=False)
    assert measure() == ["bad"]
    assert (checkout / "runs/all/bad.log").read_text() == "to the log\n"
    fails.unlink()
    assert not measure() and counted.read_text() == "\nsaid\n", "the good one is not run again"
    everything.print_plan(checkout, gpu=False)
    assert re.search(r"good +\d+\.\d min  done", capsys.readouterr().out)
    with pytest.raises(Unusable, match="--only gone: the parts are good, bad"):
        measure(only=["gone"])
    (checkout / "common.py").write_text("changed = True")
    monkeypatch.setattr(everything, "busy_cores", lambda: 1.3)
    with pytest.raises(Unusable, match=r"other programs use 1\.3 cores"):
        measure(only=["bad"])
    assert counted.read_text() == "\nsaid\n"


def test_utilization_is_of_the_gpus_and_the_time_that_trained():
    """Not of other GPUs, loading or evaluation, nor of the second before."""
    busy = [0, 100, 100, 40, 60, 0, 100, 80, 0]
    samples = [(float(i), {"GPU-a": busy[i], "GPU-b": 30, "GPU-split": None}) for i in range(9)]
    spans = [(2.0, 4.0), (6.0, 7.0)]  # of which the samples 3, 4 and 7 tell
    assert benchmark.mean_utilization(samples, ["GPU-a"], spans) == {"utilization_percent": 60}
    both = benchmark.mean_utilization(samples, ["GPU-a", "GPU-b"], spans)
    assert both == {"utilization_percent": 45}
    for unknown in (["MIG-c"], ["GPU-split"], ["GPU-a", "MIG-c"], []):
        assert benchmark.mean_utilization(samples, unknown, spans) is None
    assert benchmark.mean_utilization(samples, ["GPU-a"], [(2.0, 2.9)]) is None, "too short to tell"
