"""benchmark.py: measured end to end, stopped and continued, rendered, and held to what it says."""

import contextlib
import itertools
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import collect_proof
import pytest
import torch
from checkout import copy_checkout
from conftest import ROOT, environment, launch, succeed

import benchmark
from report import pages, plots, stale, tables
from report.results import Unusable, read_results
from report.theory import kept_bytes, theory

JOB = "--dataset synthetic --train-samples 64 --eval-samples 16 --batch-size 16 --epochs 1"


@pytest.fixture
def checkout(tmp_path):
    """A copy of what benchmark.py reads and writes."""
    return copy_checkout(tmp_path, "README*.md", "docs", "config", "results", "tests")


def write_suite(checkout, *rows, repeats=1):
    rows = [dict(zip(("name", "command", "timeout"), row, strict=False)) for row in rows]
    suite = {"about": "a test", "job": JOB, "repeats": repeats, "tables": ["quick"], "rows": rows}
    (checkout / "config/suite_quick.json").write_text(json.dumps(suite))


def run(checkout, flags):
    return launch(f"python benchmark.py {flags}", cwd=checkout, forked=True)


@pytest.mark.full
def test_quick_suite(checkout):
    finished = run(checkout, "--suite quick")
    assert finished.code == 0, str(finished)
    found = json.loads((checkout / "results/quick.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["SingleGPU", "torchrun_DDP x2", "FSDP x2"]
    assert found["complete"] and not (checkout / "results/quick.partial.json").exists()
    assert found["hardware"]["cores"] > 0 and found["versions"]["torch"]
    for row, ranks in zip(found["rows"], (1, 2, 2), strict=True):
        assert row["failed"] is None
        [measured] = row["runs"]
        assert measured["world_size"] == ranks and measured["images_per_second"] > 0
        assert "--output-dir" in measured["command"] and measured["steps"] == 12
        assert row["name"].split()[0] in finished.stdout
    single, ddp, fsdp = (row["runs"][0] for row in found["rows"])
    assert single["weights_difference"] is None
    assert ddp["weights_difference"] > 0, "BatchNorm sees other images on two ranks"
    assert 2.2 * sum(fsdp["state_bytes"].values()) > sum(single["state_bytes"].values())
    assert sum(fsdp["state_bytes"].values()) < 0.6 * sum(single["state_bytes"].values())
    assert (checkout / "runs/benchmark/quick/FSDP-x2/model.pt").is_file()


@pytest.mark.full
def test_a_row_that_fails_says_why(checkout):
    single = "python pytorch_SingleGPU.py"
    write_suite(
        checkout,
        ("flags", f"{single} --batch-size 0"),
        ("memory", "python -c \"raise RuntimeError('CUDA out of memory. Tried to allocate')\""),
        ("package", "python -c 'import no_such_package'"),
        ("bug", "python -c '1/0'"),
        ("program", "no_such_launcher pytorch_SingleGPU.py"),
        ("silent", "python -c 'import time; time.sleep(60)'", 3),
        ("good", single),
    )
    finished = run(checkout, "--suite quick")
    assert (
        finished.code == 0
        and "failed: flags, memory, package, bug, program, silent" in finished.stdout
    )
    rows = json.loads((checkout / "results/quick.json").read_text())["rows"]
    why = {row["name"]: row["failed"] for row in rows}
    assert "--batch-size" in why["flags"]
    assert why["memory"] == "out of memory"
    assert why["package"] == "no_such_package is not installed"
    assert "ZeroDivisionError" in why["bug"]
    assert why["program"] == "no_such_launcher is not installed"
    assert why["silent"] == "no end after 3 s"
    assert why["good"] is None and len(rows[-1]["runs"]) == 1
    assert "no_such_package is not installed" in finished.stdout, "the table says it"


def started_here(folder):
    """Processes whose working directory is the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").resolve() == folder:
                found.append((process / "cmdline").read_text())
    return found


def test_stopped_and_continued(checkout):
    """Stopped as a terminal does it; of a launcher's workers none is left."""
    ddp = "torchrun --standalone --nproc_per_node=2 pytorch_torchrun_DDP.py"
    write_suite(checkout, ("first", "python pytorch_SingleGPU.py"), ("second", ddp))
    process = subprocess.Popen(
        [sys.executable, "benchmark.py", "--suite", "quick"],
        cwd=checkout, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    partial = checkout / "results/quick.partial.json"
    deadline = time.monotonic() + 120
    while not partial.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    time.sleep(4)  # the workers of the second row have begun
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "goes on" in stderr
    assert not started_here(checkout)
    before = json.loads(partial.read_text())
    measured = [run for row in before["rows"] for run in row["runs"]]
    assert len(measured) == 1 and not before["complete"]
    assert not (checkout / "results/quick.json").exists()

    finished = run(checkout, "--suite quick")
    assert finished.code == 0 and "has 1 runs" in finished.stdout
    after = json.loads((checkout / "results/quick.json").read_text())
    assert [len(row["runs"]) for row in after["rows"]] == [1, 1]
    assert after["rows"][0]["runs"][0] == before["rows"][0]["runs"][0]

    partial.write_text(json.dumps(before | {"git_commit": "another"}))
    finished = run(checkout, "--suite quick")
    assert finished.code == 2 and "git_commit" in finished.errors[0]


@pytest.mark.full
def test_a_single_row_does_not_replace_the_others(checkout):
    rows = [(name, f"python pytorch_{name}.py") for name in ("SingleGPU", "DP")]
    write_suite(checkout, *rows, repeats=3)
    whole = checkout / "results/quick.json"
    whole.write_text("of all rows")
    finished = run(checkout, "--suite quick --only DP --repeats 1")
    assert finished.code == 0, str(finished)
    assert whole.read_text() == "of all rows"
    [row] = json.loads((checkout / "results/quick.only.json").read_text())["rows"]
    assert row["name"] == "DP" and len(row["runs"]) == 1


def changes(checkout):
    """Names of what rendering would change."""
    changed, drawn = pages.find_changes(checkout)
    return {str(path.relative_to(checkout)) for path in [*changed, *drawn]}


def test_render_and_check(checkout):
    """Rendering twice is rendering once; one digit more or less is found, wherever it is."""
    assert not changes(checkout)
    blocks = {"README": "front-gpt", "docs/measuring": "cpu", "docs/proof": "bytes"}
    for name, block in blocks.items():
        for path in (checkout / f"{name}.md", checkout / f"{name}.zh-CN.md"):
            text = path.read_text()
            place = re.search(rf"<!-- {block} -->.*?\d [(+].*?(\d)", text, re.DOTALL).start(1)
            other = str((int(text[place]) + 1) % 10)
            path.write_text(text[:place] + other + text[place + 1 :])
            assert changes(checkout) == {str(path.relative_to(checkout))}
            pages.render(*pages.find_changes(checkout))
            assert path.read_text() == text
    path = checkout / "results/cpu.json"
    results = json.loads(path.read_text())
    for measured in results["rows"][0]["runs"]:
        measured["images_per_second"] *= 10
    path.write_text(json.dumps(results))
    names = ("docs/techniques/README", "docs/measuring")
    assert changes(checkout) == {f"{name}{end}" for name in names for end in (".md", ".zh-CN.md")}


def test_the_command_to_render_and_check(checkout):
    succeed("python benchmark.py --check", cwd=checkout)
    path, results = checkout / "README.md", checkout / "results/cpu.json"
    text = path.read_text()
    path.write_text(text.replace("| 16 (16) |", "| 17 (16) |"))
    finished = run(checkout, "--check")
    assert finished.code == 1 and "README.md" in finished.stderr
    assert path.read_text() != text, "a check changes nothing"
    succeed("python benchmark.py --render", cwd=checkout)
    assert path.read_text() == text
    results.write_text(results.read_text()[:1000])
    finished = run(checkout, "--render")
    assert finished.code == 2 and len(finished.errors) == 1 and "cpu.json" in finished.errors[0]
    assert path.read_text() == text


def test_without_the_history_pages_keep_what_they_say(checkout):
    """As in a shallow clone, or in none at all."""
    assert not changes(checkout)
    inference = json.loads((checkout / "results/inference.json").read_text())
    assert stale.note(checkout, inference["git_commit"], []) == stale.UNKNOWN
    for end, said in {"": "; since then changed: a.py", ".zh-CN": "; 此后改动过: a.py"}.items():
        path = checkout / f"docs/inference{end}.md"
        link = "[results/inference.json](../results/inference.json)"
        text = re.sub(rf"{re.escape(link)}.*", f"{link}{said}", path.read_text())
        path.write_text(text)
    assert not changes(checkout)


def test_what_tests_measured_is_collected(checkout):
    """Out of pytest's own file, with the properties that tests record, comes proof.json again."""
    path = checkout / "results/proof.json"
    proof = json.loads(path.read_text())
    rows = [(table, row) for table in collect_proof.TABLES for row in proof[table]]
    (checkout / "test_record.py").write_text(
        f"import json\n\ndef test_record(record_property):\n    for table, row in {rows!r}:\n"
        "        record_property(table, json.dumps(row))\n"
    )
    succeed("python -m pytest -o addopts= --junitxml=measured.xml test_record.py", cwd=checkout)
    path.unlink()
    succeed("python tests/collect_proof.py measured.xml", cwd=checkout)
    collected = json.loads(path.read_text())
    for table in collect_proof.TABLES:
        assert collected[table] == proof[table]


def test_the_repository_is_rendered():
    assert not changes(ROOT), "python benchmark.py --render"


@pytest.mark.parametrize(
    "command, ranks, optimizer, expected",
    [  # computed by hand from the table of docs/proof.md, "What a rank keeps and sends"
        ("python pytorch_SingleGPU.py", 1, "sgd", 12),
        ("python pytorch_SingleGPU.py", 1, "adamw", 16),
        ("torchrun pytorch_torchrun_DDP.py", 4, "adamw", 16),
        ("python pytorch_half_precision.py", 1, "sgd", 6),
        ("python pytorch_half_precision.py --master-weights", 1, "sgd", 12),
        ("torchrun pytorch_FSDP.py", 4, "sgd", 3),
        ("torchrun pytorch_FSDP.py", 4, "adamw", 4),
        ("torchrun pytorch_DDP_ZeRO.py", 4, "sgd", 12),
        ("torchrun pytorch_DDP_ZeRO.py --use_zero", 4, "sgd", 9),
        ("torchrun pytorch_DDP_ZeRO.py --use_zero", 2, "adamw", 12),
        ("torchrun pytorch_ZeRO_by_hand.py", 4, "sgd", 9),
        ("torchrun pytorch_ZeRO_by_hand.py --stage 2", 4, "sgd", 6),
        ("torchrun pytorch_FSDP_by_hand.py", 4, "sgd", 3),
        ("x pytorch_DeepSpeed.py --deepspeed_config config/zero_stage0_config.json", 4, "sgd", 12),
        ("x pytorch_DeepSpeed.py --deepspeed_config config/zero_stage2_config.json", 4, "sgd", 7),
        ("x pytorch_DeepSpeed.py --deepspeed_config config/zero_stage3_config.json", 4, "sgd", 5),
    ],
)
def test_theory(command, ranks, optimizer, expected):
    assert sum(theory(command.split(), ranks, optimizer).values()) == expected


def test_what_was_kept_is_what_theory_says():
    """In the committed results; ZeroRedundancyOptimizer deals out whole tensors."""
    for row in read_results(ROOT / "results/cpu.json")["rows"]:
        for measured in row["runs"]:
            if measured["state_bytes"]:
                kept, expected = kept_bytes(measured)
                assert kept == pytest.approx(expected, rel=0.06), row["name"]


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--suite nosuch", "nosuch"),
        ("--suite quick --only nosuch", "nosuch"),
        ("--suite quick --only 'FSDP x64'", "FSDP x64"),
        ("--suite quick --output /proc/x/y.json", "/proc/x/y.json"),
        ("--suite quick --repeats 0", "--repeats"),
        ("--suite gpu", "--suite cpu"),
        ("--render --only x", "--only"),
        ("--check --dry-run", "--dry-run"),
        ("", "--suite"),
    ],
)
def test_mistakes(flags, named, monkeypatch, capfd):
    monkeypatch.setattr("sys.argv", ["benchmark.py", *shlex.split(flags)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as error:
        benchmark.main()
    stderr = capfd.readouterr().err
    assert error.value.code == 2 and stderr.count("error: ") == 1 and named in stderr


@pytest.mark.parametrize(
    "how, name",
    [
        ("schema", "cpu.json"),
        ("damaged", "cpu.json"),
        ("no beginning", "README.md"),
        ("no end", "docs/proof.md"),
        ("no place", "faults"),
        ("twice", "docs/reliability.md"),
        ("unknown", "docs/inference.md"),
        ("no page", "docs/proof.zh-CN.md"),
    ],
)
def test_nothing_is_rendered_from_what_is_wrong(how, name, checkout):
    def edit(path, old, new):
        path = checkout / path
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))

    if how == "schema":
        edit("results/cpu.json", '"schema": 1', '"schema": 99')
    if how == "damaged":
        (checkout / "results/cpu.json").write_text("{")
    if how == "no beginning":
        edit(name, "<!-- front-gpt -->", "")
    if how == "no end":
        edit(name, "<!-- end -->", "")
    if how == "no place":
        faults = re.compile(r"<!-- faults -->.*?<!-- end -->", re.DOTALL)
        path = checkout / "docs/reliability.md"
        path.write_text(faults.sub("", path.read_text()))
    if how == "twice":
        edit(name, "<!-- faults -->", "<!-- faults -->\n<!-- end -->\n<!-- faults -->")
    if how == "unknown":
        edit(name, "<!-- inference -->", "<!-- inferences -->")
    if how == "no page":
        (checkout / name).unlink()
    with pytest.raises(Unusable, match=re.escape(name)):
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


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8])
def test_the_batch_divides_among_these_gpus(count, gpus):
    gpus(count)
    assert left_out("gpu") == {}


def test_rows_that_a_gpu_cannot_run_say_why(gpus, monkeypatch):
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
    assert not why
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: name != "deepspeed")
    why = left_out("gpu")
    assert why["DeepSpeed zero_stage1 x1"] == "deepspeed is not installed"


def test_five_epochs_have_their_time():
    """On a P40, which took 1546 s for them (docs/measuring.md)."""
    rows = [row for row in benchmark.read_suite("gpu")["rows"] if row["table"] == "gpu-accuracy"]
    assert rows and all(row["timeout"] > 2 * 1546 for row in rows)


def test_suites_train_on_visible_gpus_alone():
    """`deepspeed --num_gpus` takes the machine's first GPUs, whatever CUDA_VISIBLE_DEVICES says."""
    for path in (ROOT / "config").glob("suite_*.json"):
        commands = [row.get("command", "") for row in json.loads(path.read_text())["rows"]]
        assert not [command for command in commands if command.startswith("deepspeed")], path


@pytest.mark.parametrize(
    "suite",
    [
        "by_hand",
        "collectives",
        "cpu",
        "ecosystem",
        "gpt",
        "gpu",
        "inference",
        "quick",
        "reviews",
        "shakespeare",
    ],  # fmt: skip
)
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
    assert ("this machine has no GPU" in printed) == (suite == "gpu")
    assert "python " in printed or "torchrun " in printed


@pytest.mark.full
def test_rows_left_out_are_not_run(checkout):
    write_suite(checkout, ("good", "python pytorch_SingleGPU.py"))
    path = checkout / "config/suite_quick.json"
    suite = json.loads(path.read_text())
    command = "torchrun --nproc_per_node={ranks} pytorch_DDP_AMP.py"
    suite["rows"] += [{"name": "odd", "command": command, "ranks": [3]}]
    suite["rows"] += [{"name": "none", "command": "python none.py", "needs": ["none_such"]}]
    path.write_text(json.dumps(suite))
    finished = succeed("python benchmark.py --suite quick", cwd=checkout)
    assert "done: " in finished.lines[-1] and "left out: odd x3, none" in finished.lines[-1]
    assert "failed" not in finished.lines[-1]
    assert "left out: none_such is not installed" in finished.stdout, "the table says it"
    assert "left out: a batch of 16 cannot be divided into 3 parts" in finished.stdout


@pytest.mark.parametrize("suite", ["cpu", "gpu"])
def test_one_model_in_three_precisions(suite, gpus, monkeypatch):
    """Every technique in every precision, or why not."""
    gpus(2)
    monkeypatch.setattr(benchmark, "computes_float16", lambda: False)
    rows = [row for row in benchmark.read_suite(suite)["rows"] if row["table"] == f"{suite}-amp"]
    names = {tuple(re.sub(r" x\d$", "", row["name"]).split(", ")) for row in rows}
    precisions = ("fp32", "autocast", "autocast with GradScaler")
    assert names == set(itertools.product(("SingleGPU", "DP", "DDP"), precisions))
    measured = [
        run for row in read_results(ROOT / "results/cpu.json")["rows"] for run in row["runs"]
    ]
    for row, run in zip(rows, measured, strict=False):
        row |= {"failed": None, "runs": [] if row["left_out"] else [run]}
    drawn = tables.amp_table(rows)
    assert "| SingleGPU | fp32 | 1 |" in drawn and "| 1.00 |" in drawn
    why = "| DP | autocast with GradScaler |  | left out: this CPU has no float16 arithmetic"
    assert (why in drawn) == (suite == "cpu")


@pytest.mark.parametrize("loop", ["bare", "seed"])
def test_peers_have_the_scripts_clock(loop, tmp_path):
    """And so what a suite keeps of a result."""
    flags = "--train-samples 32 --batch-size 8 --max-steps 4 --model shufflenet_v2_x0_5 -j 1"
    command = f"python tests/peers.py --loop {loop} --dataset synthetic {flags}"
    succeed(f"{command} --output-dir {tmp_path}", forked=True)
    result = json.loads((tmp_path / "result.json").read_text())
    of_text = {"context", "samples_per_second", "tokens_per_second", "first_step_seconds"}
    of_text |= {"reviews_per_second"}
    assert set(benchmark.KEPT) - of_text <= result.keys() and result["devices"] == 1
    [[begin, end]] = result["trained_between"]
    assert 0 < end - begin < 60 and result["gpu_uuids"] == []
    for name in ("peers", "measure_overhead"):
        text = (ROOT / f"tests/{name}.py").read_text()
        assert "StepClock(" in text and "synchronize(" not in text


@pytest.mark.full
def test_a_suite_of_text(checkout):
    """Tokens, the curve of the loss, and memory from a run of its own."""
    job = "--device cpu --model gpt-1x2x16 --context 8 --dataset synthetic --train-samples 32 "
    job += "--eval-samples 4 --batch-size 8 --epochs 1 --print-freq 2"
    rows = [{"name": "SingleGPU", "command": "python pytorch_SingleGPU.py"}]
    suite = {"about": "a test", "job": job, "repeats": 1, "tables": ["quick"], "rows": rows}
    suite |= {"curves": True, "memory": "--profile-memory --max-steps 3"}
    (checkout / "config/suite_quick.json").write_text(json.dumps(suite))
    finished = run(checkout, "--suite quick")
    assert "tokens/s (min–max)" in finished.stdout and "| loss |" in finished.stdout
    found = json.loads((checkout / "results/quick.json").read_text())
    [row] = found["rows"]
    [measured] = row["runs"]
    assert measured["steps"] == 4 and measured["context"] == 8
    assert "--profile-memory --max-steps 3" in row["memory"]["command"]
    memory = row["memory"]["peak_memory_gib"]
    assert measured["peak_memory_gib"] == memory and 0 < memory["allocated"] < memory["process"]
    assert "| peak GiB (allocated) |" in finished.stdout
    assert [step for step, _ in measured["curve"]] == [2, 4]
    drawn = plots.curves(found["rows"])
    assert list(drawn["values"]["SingleGPU"]) == ["128", "256"]
