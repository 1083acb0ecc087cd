"""benchmark.py: measure end to end, interrupt and resume, render, and check the pages."""

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
from conftest import ROOT, environment, launch, succeed, wait_for

import benchmark
from measure import again, mutations, outcome, runner
from report import draw, pages, translations
from report.results import Unusable
from techniques import TECHNIQUES

JOB = "--dataset synthetic --train-samples 64 --eval-samples 16 --batch-size 16 --epochs 1"
SUITES = sorted(path.stem for path in ROOT.glob("measure/suites/*.json"))


@pytest.fixture
def checkout(tmp_path):
    """A copy of what benchmark.py reads and writes."""
    return copy_checkout(tmp_path, "README*.md", "docs", "config", "results", "tests")


def write_suite(checkout, *rows, **more):
    rows = [dict(zip(("name", "command", "timeout"), row, strict=False)) for row in rows]
    suite = {"about": "a test", "job": JOB, "repeats": 1, "tables": ["quick"], "rows": rows} | more
    suite["rows"] += suite.pop("others", [])
    (checkout / "measure/suites/quick.json").write_text(json.dumps(suite))


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
    finished = run(checkout, "--suite quick", code=1)
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
    run(checkout, "--suite quick --only good")
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


@pytest.mark.full
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
    partial.rename(checkout / "results/quick.only.partial.json")
    [line] = run(checkout, "--suite quick --only second", code=2).errors
    assert "differs in git_commit, rows" in line, "of which this call would have shown the first"


def changes(checkout):
    """Names of what rendering would change."""
    changed, drawn = pages.find_changes(checkout)
    return {str(path.relative_to(checkout)) for path in [*changed, *drawn]}


def test_render_and_check(checkout):
    """Rendering twice is rendering once; one digit more or less is found, wherever it is."""
    (checkout / "results/collectives.svg").write_text("")
    (checkout / "docs/images/schematic-TP.svg").unlink()
    blocks = {"README": "front-llama", "docs/measuring": "peers"}
    texts = {}
    for name, block in blocks.items():
        for path in (checkout / f"{name}.md", checkout / f"{name}.zh-CN.md"):
            text = texts[path] = path.read_text()
            place = re.search(rf"<!-- {block} -->.*?\d\.(\d)", text, re.DOTALL).start(1)
            other = str((int(text[place]) + 1) % 10)
            path.write_text(text[:place] + other + text[place + 1 :])
    wrong = {"results/collectives.svg", *(str(path.relative_to(checkout)) for path in texts)}
    assert changes(checkout) == wrong, "python benchmark.py --render"
    said = run(checkout, "--check", code=1).stderr
    assert "schematic-TP.svg" in said and all(name in said for name in wrong)
    run(checkout, "--render")
    assert all(path.read_text() == text for path, text in texts.items())
    assert not changes(checkout)
    path = checkout / "results/peers.json"
    results = json.loads(path.read_text())
    for measured in results["rows"][0]["runs"]:
        measured["images_per_second"] *= 10
    path.write_text(json.dumps(results))
    assert {"docs/measuring.md", "docs/measuring.zh-CN.md"} <= changes(checkout)
    path.write_text(path.read_text()[:1000])
    [line] = run(checkout, "--render", code=2).errors
    assert "peers.json" in line and "measure it again" in line


WRONG = [  # a file, what stands in it, and what would be wrong in its place
    ("README.md", "<!-- front-llama -->", ""),
    ("docs/measuring.md", "<!-- end -->", ""),
    ("docs/measuring.md", "<!-- peers -->", "<!-- peer -->"),
]


@pytest.mark.parametrize("name, old, new", WRONG)
def test_nothing_is_rendered_from_what_is_wrong(name, old, new, checkout):
    text = (checkout / name).read_text()
    assert old in text
    (checkout / name).write_text(text.replace(old, new, 1))
    with pytest.raises(Unusable, match=name):
        pages.find_changes(checkout)


# ------------------------------------------------------------------ rows, and what leaves them out
@pytest.fixture
def see_gpus(monkeypatch):
    """A function that lets PyTorch see so many GPUs, of a name and a compute capability."""

    def see(count, name="NVIDIA A100", capability=(8, 0)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capability)
        monkeypatch.setattr(runner.importlib.util, "find_spec", lambda package: True)

    return see


def left_out(suite):
    rows = runner.read_suite(suite)["rows"]
    return {row["name"]: row["left_out"] for row in rows if row["left_out"]}


def test_rows_that_gpus_cannot_run_say_why(see_gpus, monkeypatch):
    for count in (1, 2, 3, 4, 6, 8):
        see_gpus(count)
        halves = {f"GPT: FSDP_TP --tp 2 x{n}": n for n in {1, count} if n % 2}
        groups = "{} ranks cannot be divided into groups of 2".format
        expected = {name: groups(n) for name, n in halves.items()}
        if 24 % (4 * count):
            why = f"a batch of 24 cannot be divided into {4 * count} parts"
            expected[f"GPT: gradient_accumulation --accumulate 4 x{count}"] = why
        assert left_out("gpu") == expected
    see_gpus(5)
    why = left_out("gpu")
    assert why["torchrun_DDP x5"] == "a batch of 96 cannot be divided into 5 parts"
    assert "20 parts" in why["gradient_accumulation --accumulate 4 x5"]
    assert "DP" not in why and "torchrun_DDP x1" not in why
    see_gpus(1, "Tesla P40", (6, 1))
    why = left_out("gpu")
    for row in runner.read_suite("gpu")["rows"]:
        if "bfloat16" in row["command"]:
            assert why.pop(row["name"]) == "Tesla P40 has no bfloat16"
    assert list(why) == ["GPT: FSDP_TP --tp 2 x1"]
    monkeypatch.setattr(runner.importlib.util, "find_spec", lambda name: name != "deepspeed")
    why = left_out("gpu")
    assert why["DeepSpeed zero_stage1 x1"] == "deepspeed is not installed"


def test_each_script_that_one_gpu_can_run_is_measured_on_one():
    """On ResNet-50, if it trains images, and on GPT-2."""
    commands = {"gpu": "", "gpu-gpt": ""}
    for row in runner.read_suite("gpu")["rows"]:
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
    for row in runner.read_suite(suite)["rows"]:
        assert f"{row['name']}: {shlex.join(row['command'])}" in printed
        # whose --num_gpus takes the machine's first GPUs, whatever CUDA_VISIBLE_DEVICES says
        assert row["command"][0] != "deepspeed"
    assert ("this machine has no GPU" in printed) == (suite == "gpu")
    assert "python " in printed or "torchrun " in printed


@pytest.mark.full
def test_a_suite_of_text(checkout):
    """Tokens, the curve of the loss, and memory; all in results/."""
    job = "--device cpu --model gpt-1x2x16 --context 8 --dataset synthetic --train-samples 32 "
    job += "--eval-samples 4 --batch-size 8 --epochs 1 --print-freq 2"
    row = ("SingleGPU", "python pytorch_SingleGPU.py --profile-memory")
    write_suite(checkout, row, job=job, curves=True)
    finished = run(checkout, "--suite quick")
    assert "tokens/s (min–max)" in finished.stdout and "| loss |" not in finished.stdout
    found = json.loads((checkout / "results/quick.json").read_text())
    [row] = found["rows"]
    [measured] = row["runs"]
    assert measured["steps"] == 4 and measured["context"] == 8
    assert "--output-dir" in measured["command"]
    memory = measured["peak_memory_gib"]
    assert 0 < memory["allocated"] < memory["process"]
    assert "| peak GiB (allocated) |" in finished.stdout
    assert [step for step, _ in measured["curve"]] == [2, 4]
    tokens, _ = draw.loss_by_tokens(found["rows"])["lines"]["SingleGPU"]["-"]
    assert tokens == pytest.approx([128e-6, 256e-6])


# ----------------------------------------------------------------------- once more, and what stays
ABOUT = {"hardware": {"cpu": "a CPU", "cores": 2, "cpu_flags": [], "gpus": []}}
OLD = ABOUT | {"versions": {"torch": "2.14"}, "date": "2026-11-01", "git_commit": "1" * 40}
NEW = ABOUT | {"versions": {"torch": "2.15"}, "date": "2026-12-01", "git_commit": "2" * 40}


def row_of(name, speed, memory):
    run = {"tokens_per_second": speed, "peak_memory_gib": {"process": memory, "reserved": None}}
    return {"name": name, "failed": None, "runs": [run]}


def test_what_is_close_to_the_measurement_before_stays():
    """A row at a time: times within 10%, memory within 2%; then the line says where it is from."""
    old = OLD | {"rows": [row_of("a", 100, 1.0), row_of("b", 100, 1.0), row_of("c", 100, 1.0)]}
    new = NEW | {"rows": [row_of("a", 109, 1.019), row_of("b", 89, 1.0), row_of("c", 100, 1.03)]}
    line = "a CPU, 2 cores; torch 2.14; 2026-11-01; 111111111"
    first, *others = again.keep_old(new, old, line)["rows"]
    assert first == old["rows"][0] | {"from": line} and others == new["rows"][1:]
    old_one = OLD | {"rows": old["rows"][:1]}
    new_one = NEW | {"rows": new["rows"][:1]}
    assert again.keep_old(new_one, old_one, line) == old_one, "all of it stays"
    kept_before = new | {"rows": [first]}
    newest = NEW | {"rows": [first, row_of("d", 1, 1)]}
    once_more = again.keep_old(newest, kept_before, "another line")
    assert once_more["rows"][0]["from"] == line, "not that of the file that has kept it"
    printed = {"a": {"output": ["took 1.0 s, 2.00 GiB"]}, "b": {"output": ["took 1.0 s"]}}
    texts = {"a": {"output": ["took 1.09 s, 2.03 GiB"]}, "b": {"output": ["took 1.0 h"]}}
    kept = again.keep_old(NEW | {"outputs": texts}, OLD | {"outputs": printed}, line)
    assert kept["outputs"]["a"]["output"] == printed["a"]["output"]
    assert kept["outputs"]["a"]["from"] == line
    assert kept["outputs"]["b"] == texts["b"]


def test_a_line_names_the_hardware_that_measured():
    """Of a suite for CPUs, not the GPUs that the machine also has."""
    found = OLD | {"hardware": ABOUT["hardware"] | {"gpus": ["a GPU"]}}
    where = "torch 2.14; 2026-11-01; 111111111"
    for suite, machine in (
        ({}, "a CPU, 2 cores"), ({"device": "cuda"}, "a GPU"), ({"predicted": True}, "predicted"),
    ):  # fmt: skip
        assert runner.origin_of(suite, found) == f"{machine}; {where}"


def test_what_another_command_measured_is_replaced():
    """Though its figures are close: the table would name a command that did not measure them."""
    for part, key in (("rows", "runs"), ("outputs", "")):
        for steps, stays in ((100, True), (101, False)):
            measured = []
            for n in (100, steps):
                entry = {"name": "a", "command": f"python x.py --max-steps {n}", "output": []}
                if key:
                    entry = {"name": "a", key: [entry]}
                measured.append([entry] if key else {"a": entry})
            old = OLD | {part: measured[0]}
            kept = again.keep_old(NEW | {part: measured[1]}, old, "a line")
            assert (kept == old) == stays, f"{part} {steps}"


RECORDS = """#!/bin/sh
echo "$*" >> called
test "$*" != "benchmark.py --suite peers"
"""


def test_a_release_goes_on_after_a_failure(checkout):
    """And each of its commands has flags that exist: test_docs.py does not see them."""
    (checkout / "bin").mkdir()
    python = checkout / "bin/python"
    python.write_text(RECORDS)
    python.chmod(0o755)
    path = f"{python.parent}:{environment()['PATH']}"
    finished = launch("bash measure/release.sh", cwd=checkout, PATH=path)
    assert finished.code == 1 and finished.stderr == "failed: peers\n"
    assert "== gpt: python benchmark.py --suite gpt\n== gpt: 0 min\n" in finished.stdout
    called = (checkout / "called").read_text().splitlines()
    measured = {line.rpartition(" ")[2] for line in called if "--suite" in line}
    assert measured == {*SUITES} - {"quick", "gpu", "one_gpu"}
    assert called[-1] == "benchmark.py --render"
    for line in called:
        assert (checkout / line.split()[0]).is_file()


def test_a_row_once_more(checkout):
    """Each figure is printed beside the stored one, and nothing is written into results/."""
    tiny = "--model gpt-1x2x16 --context 8 --max-steps 2"
    write_suite(checkout, ("a", f"python pytorch_SingleGPU.py {tiny}"), ("b", "false"))
    figures = {"tokens_per_second": 1.0, "eval_loss": 100.0}
    stored = {"rows": [{"name": "a", "failed": None, "runs": [figures]}]}
    (checkout / "results/quick.json").write_text(json.dumps(stored))
    before = {path: path.read_text() for path in checkout.glob("results/*.*")}
    lines = run(checkout, "--suite quick --only a --again").lines
    assert lines[0].startswith("a: python pytorch_SingleGPU.py")
    loss = re.search(r"eval_loss: (\S+), stored 100, ratio (\S+)", "".join(lines))
    assert float(loss[1]) / 100 == pytest.approx(float(loss[2]), abs=1e-3)
    assert any("peak_memory_gib process: " in line and "not stored" in line for line in lines)
    assert before == {path: path.read_text() for path in checkout.glob("results/*.*")}
    [line] = run(checkout, "--suite quick --only b --again", code=3).errors
    assert "b failed" in line


def test_tables_need_neither_pytorch_nor_matplotlib():
    code = "import sys, benchmark; print({'torch', 'matplotlib'} & {*sys.modules})"
    assert succeed(f'python -c "{code}"').stdout.strip() == "set()"


def test_an_english_page_may_change_alone(checkout):
    """Its Chinese one is then behind, until somebody marks it."""
    page = checkout / "docs/course.md"
    chinese = checkout / "docs/course.zh-CN.md"
    translations.mark(chinese, checkout)
    behind = translations.list_behind(checkout)
    assert "docs/course.zh-CN.md" not in behind
    page.write_text(page.read_text() + "\nAnother sentence.\n")
    assert translations.list_behind(checkout) == sorted([*behind, "docs/course.zh-CN.md"])
    translations.mark(chinese, checkout)
    assert translations.list_behind(checkout) == behind
    text = chinese.read_text()
    chinese.write_text(re.sub(r"<!-- course -->.*?<!-- end -->", "", text, flags=re.S))
    assert not changes(checkout), "a table that a Chinese page lacks is no error"
    (checkout / "docs/techniques/FSDP.zh-CN.md").unlink()
    changes(checkout)  # raises nothing
    assert "docs/techniques/FSDP.zh-CN.md" in translations.list_behind(checkout)


def test_steps_are_kept_with_where_they_were_measured(tmp_path, monkeypatch):
    """But what the last one says itself stands."""
    script = 'mkdir -p "$3"; echo \'{"ranks": 2, "git_commit": "its own"}\' > "$3/made.json"'
    (tmp_path / "measure.sh").write_text(script)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    suite = {"steps": ["sh measure.sh --sweep --output-dir {folder}"], "writes": "made.json"}
    found = runner.run_steps(suite, tmp_path / "runs")
    assert found["ranks"] == 2 and found["git_commit"] == "its own"
    assert found["command"] == "sh measure.sh --sweep" and found["date"] == runner.today()
    assert found["hardware"] == runner.hardware() and found["versions"]["torch"]
    printed = f"printf 'a\\n{tmp_path}/b'"  # a path of this machine, which is left out
    suite = {"outputs": {"lines": printed, "data": "echo '{\"--json\": 1}'"}}
    found = runner.run_steps(suite, tmp_path / "runs")["outputs"]
    assert [one["output"] for one in found.values()] == [["a", "b"], {"--json": 1}]


def test_a_run_that_fails_records_nothing(tmp_path):
    """Though it printed something, and an earlier run left its result in the folder."""
    result = tmp_path / "runs/a/result.json"
    result.parent.mkdir(parents=True)
    result.write_text("{}")
    command = "sh -c 'echo begun; echo ValueError: too wrong >&2; exit 1' --output-dir runs/a"
    with pytest.raises(SystemExit, match="3"):
        outcome.record({"a": command}, tmp_path, environment())


def test_a_change_with_which_tests_do_not_end_is_found(monkeypatch):
    """And the changes after it are tried."""
    monkeypatch.setattr(mutations, "LIMIT", 0.1)
    row = {"file": "measure/suites/quick.json", "old": '"repeats": 1', "new": '"repeats": 2'}
    outcome = mutations.try_out(row | {"tests": "tests/test_benchmark.py -k nothing"})
    assert outcome == ("found", "no end within 0.1 s")
