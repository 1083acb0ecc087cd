"""report/: tables of results from GPUs, and of code that has changed since it was measured."""

import json
import re

import pytest
from conftest import ROOT

from measure import everything
from report import fresh, measured, pages, predictions, suites
from report.results import Unusable, read_suite
from techniques import TECHNIQUES

# ----------------------------------------------------------------------------------------- tables


def on_gpus(row, ranks, devices):
    """A committed row as four GPUs would have it."""
    for run in row["runs"]:
        run |= {"device": "NVIDIA A100", "world_size": ranks, "devices": devices}
        run["peak_memory_gib"] |= {"allocated": 1.5, "reserved": 2.0, "dataset": 0.1}
        run["tf32"] = {"convolutions": True, "matrix_products": False}
        run["gpu"] = {"utilization_percent": 87.5, "memory_used_gib": 3}
    return row


def test_tables_tell_ranks_from_gpus():
    found = read_suite(ROOT, "cpu")
    rows = {row["name"]: row for row in found["rows"]}
    old = suites.techniques_table([rows["DP"]])  # without the key
    assert "| ranks |" in old and "| `DP` | 1 | float32 |" in old
    new = [on_gpus(rows["DP"], 1, 4), on_gpus(rows["torchrun_DDP x4"], 4, 4)]
    drawn = suites.techniques_table(new)
    assert "| ranks (GPUs) |" in drawn and "| `DP` | 1 (4) | float32 (TF32) |" in drawn
    assert "| `torchrun_DDP` | 4 | float32 (TF32) |" in drawn and "| 1.50 (2.00) | 88 |" in drawn
    proof, predicted = {"parity": [], "loss": []}, {"DP": 3 * 2**30}
    front = suites.front_table(ROOT, found, proof, ["DP"], predicted)
    assert "| 1 (4) |" in front and "| 3.00 |" in front


def test_what_was_run_on_which_hardware():
    found = read_suite(ROOT, "cpu")
    inference = json.loads((ROOT / "results/inference.json").read_text())
    drawn = measured.hardware_table({"cpu": found}, inference)
    cpu, all_scripts = found["hardware"]["cpu"], len(TECHNIQUES)
    assert re.search(rf"\| training on a CPU \| 12 / {all_scripts} \| {re.escape(cpu)} \|", drawn)
    assert f"| training on one GPU | 0 / {all_scripts} | not run yet |" in drawn
    rows = {row["name"]: row for row in found["rows"]}
    gpu = {"rows": [on_gpus(rows["DP"], 1, 4)], "hardware": {"gpus": ["A100"] * 4}}
    gpu |= {"versions": {"torch": "2.15.0"}, "date": "2027-01-01"}
    drawn = measured.hardware_table({"gpu": gpu}, inference | {"device": "A100"} | gpu)
    assert f"| training on a CPU | 0 / {all_scripts} | not run yet |" in drawn
    assert (
        f"| training on several GPUs | 1 / {all_scripts} | 4 × A100 | 2.15.0 | 2027-01-01 |"
        in drawn
    )
    assert "| inference on a GPU |  | 4 × A100 |" in drawn
    assert f"| 在多个 GPU 上训练 | 1 / {all_scripts} |" in pages.translate(drawn)


@pytest.mark.parametrize("row", TECHNIQUES[1:], ids=lambda row: row.name)
def test_a_page_shows_the_lines_that_make_its_technique_and_its_traps(row):
    lines = pages.technique_lines((ROOT / f"{row.script}.py").read_text(), row.shows)
    assert 0 < len(lines) <= 25
    page = (ROOT / f"docs/techniques/{row.name}.md").read_text()
    assert all(f"\n## {heading}\n" in page for heading in ("When not", "Traps", "Sources"))


@pytest.mark.parametrize("chinese", [False, True])
def test_no_page_is_long(chinese):
    lines = {page: len(page.read_text().splitlines()) for page in pages.list_pages(ROOT, chinese)}
    assert max(lines.values()) <= 250, max(lines, key=lines.get)


# ------------------------------------------------------------------------------ what is out of date


@pytest.fixture
def measured_code(tmp_path):
    """A folder of ours, and what a result says of it."""
    names = "common.py", "harness/run.py", "pytorch_DDP.py", "pytorch_DP.py", "config/a.json"
    for path in (*names, "docs/a.py", "results/a.json"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(
            '"""What."""\n\n\ndef f():\n    """How."""\n    return 1  # why\n'
        )
    commands = ["torchrun pytorch_DDP.py --x config/a.json", "python pytorch_DP.py --device cpu"]
    return tmp_path, {"git_commit": "0" * 40, "files": fresh.files_of(tmp_path, commands)}


def test_changed_code_makes_a_result_stale(measured_code):
    """But not comments and docstrings, nor other files; and a table only by its own scripts."""
    root, found = measured_code
    assert {*found["files"]} == {
        "common.py", "harness/run.py", "pytorch_DDP.py", "pytorch_DP.py", "config/a.json"
    }  # fmt: skip
    ddp = ["torchrun pytorch_DDP.py --x config/a.json"]
    old = (root / "common.py").read_text()
    (root / "common.py").write_text(old.replace("What", "That").replace("# why", "# since"))
    (root / "harness/new.py").write_text("import os\n")
    (root / "results/a.json").write_text("")
    (root / "pytorch_DP.py").unlink()
    assert fresh.note(root, found, ddp) == ""
    assert fresh.note(root, found) == "; since then changed: pytorch_DP.py"
    (root / "common.py").write_text(old.replace("1", "2"))
    (root / "harness/run.py").unlink()
    assert fresh.note(root, found, ddp) == "; since then changed: common.py, harness/run.py"
    dirty = found | {"git_commit": "1-dirty", "files": fresh.files_of(root, ddp)}
    assert fresh.note(root, dirty) == "; measured on uncommitted changes"
    (root / "config/a.json").write_text("{}")
    assert fresh.note(root, found, ddp).endswith("common.py, config/a.json, harness/run.py")


def test_a_hash_is_the_same_in_every_version_of_python():
    source = b"def f(x: int = 1) -> str:\n    return f'{x!r:>{3}}' 'y' if x in (.5, b'z') else ..."
    assert fresh.hash_of(source, ".py") == "c2250db3d135"


def test_a_part_stays_measured_if_its_suite_has_only_lost_rows(measured_code):
    root, _ = measured_code
    suite = root / "config/suite_cpu.json"
    kept = {"job": "--device cpu", "rows": [{"name": "DP"}]}
    suite.write_text(json.dumps(kept | {"rows": [*kept["rows"], {"name": "DDP"}]}))
    part = {"cpu": {"commands": ["python benchmark.py --suite cpu"]}}
    done = {"cpu": {"code": 0, "measured": everything.state_of(root, "cpu", part["cpu"])}}
    (root / "results/all.json").write_text(json.dumps(done))
    assert everything.to_do(root, part) == []
    suite.write_text(json.dumps(kept))
    assert everything.to_do(root, part) == []
    suite.write_text(json.dumps(kept | {"job": "--device cuda"}))
    assert everything.to_do(root, part) == ["cpu"]
    suite.write_text(json.dumps(kept | {"rows": [{"name": "FSDP"}]}))
    assert everything.to_do(root, part) == ["cpu"]
    suite.write_text(json.dumps(kept))
    (root / "common.py").write_text("3")
    assert everything.to_do(root, part) == ["cpu"]


def test_no_page_says_that_code_has_changed_if_none_has():
    """So a suite that was left out of the last measurement is found."""
    if changed := everything.to_do(ROOT, everything.list_parts(ROOT, gpu=False)):
        pytest.skip(f"to be measured again: {', '.join(changed)}")
    for path in pages.list_pages(ROOT, chinese=False) + pages.list_pages(ROOT, chinese=True):
        assert not re.search("; since then|此后改动过", path.read_text()), path


def test_predictions_beside_measurements():
    """Of a step of two ranks and of memory; a GPU's column fills when there is one."""
    found = {
        "published": [{"name": "DP", "gpus": 4, "published_gb": 3.08, "predicted": 3_012_000_000}],
        "suites": {"gpu": {"DP": 2 * 2**30}},
        "messages": {"FSDP": {"2": 0.05, "1024": 0.3}},
    }
    row = "| `DP` | 4 | 3.08 | 3.01 | 0.978 | 2.00 |"
    assert predictions.published_table(found, {"rows": []}).endswith(f"{row}  |")
    memory = {"peak_memory_gib": {"allocated": 2.125}}
    gpu = {"rows": [{"name": "DP", "runs": [memory]}]}
    assert predictions.published_table(found, gpu).endswith(f"{row} 2.12 |")
    run = {"model": "resnet18", "image_size": 32, "device": "cpu"}
    steps = {1: [100, 90, 120], 2: [160, 170, 150]}
    rows = [
        {"name": f"FSDP x{n}", "runs": [run | {"step_ms": {"p50": ms}} for ms in took]}
        for n, took in steps.items()
    ]
    table = predictions.scaling_table(found, {"rows": rows})
    assert table.endswith("| `FSDP` | 100 | 150 | 160 | 0.94 |")
    [plot] = predictions.scaling_plot(found, {"rows": rows}).values()
    lines = plot["values"]["FSDP"]
    assert lines["measured"] == {1: 1.0, 2: 0.625}
    assert lines["model"] == {1: 1.0, 2: 0.667, 1024: 0.25}


def test_relative_speeds_have_a_range():
    slow, fast = [[{"images_per_second": s} for s in runs] for runs in ((8, 10, 9), (10, 8, 12))]
    assert suites.relative_speed(slow, fast) == "0.90 (0.75–1.25)"
    assert suites.relative_speed(slow, slow) == "1.00"


def test_speeds_with_other_threads_are_not_compared():
    """As when `accelerate launch` gives one process a single thread."""

    def row(technique, threads):
        run = {"technique": technique, "world_size": 1, "threads": threads, "state_bytes": None}
        return {"name": technique, "runs": [run | {"images_per_second": 100.0 * threads}]}

    raw = row("pytorch_torchrun_DDP", 2)
    drawn = suites.ecosystem_table([raw, row("accelerate_DDP", 2)])
    [line] = [line for line in drawn.splitlines() if line.startswith("| `accelerate_DDP` |")]
    assert "| 1.00 |" in line
    with pytest.raises(Unusable, match="threads"):
        suites.ecosystem_table([raw, row("accelerate_DDP", 1)])
