"""report/: tables of results from GPUs, and of code that has changed since it was measured."""

import json
import re
import subprocess

import pytest
from conftest import ROOT

from report import ecosystem, everything, pages, predictions, stale, tables
from report.results import Unusable, read_results
from report.scripts import DEFINITIONS, PARENTS

# ----------------------------------------------------------------------------------------- tables


def on_gpus(row, ranks, devices):
    """A committed row as four GPUs would have it."""
    for measured in row["runs"]:
        measured |= {"device": "NVIDIA A100", "world_size": ranks, "devices": devices}
        measured["peak_memory_gib"] |= {"allocated": 1.5, "reserved": 2.0, "dataset": 0.1}
        measured["tf32"] = {"convolutions": True, "matrix_products": False}
        measured["gpu"] = {"utilization_percent": 87.5, "memory_used_gib": 3}
    return row


def test_tables_tell_ranks_from_gpus():
    found = read_results(ROOT / "results/cpu.json")
    rows = {row["name"]: row for row in found["rows"]}
    old = tables.techniques_table([rows["DP"]])  # without the key
    assert "| ranks |" in old and "| `DP` | 1 | float32 |" in old
    new = [on_gpus(rows["DP"], 1, 4), on_gpus(rows["torchrun_DDP x4"], 4, 4)]
    drawn = tables.techniques_table(new)
    assert "| ranks (GPUs) |" in drawn and "| `DP` | 1 (4) | float32 (TF32) |" in drawn
    assert "| `torchrun_DDP` | 4 | float32 (TF32) |" in drawn and "| 1.50 (2.00) | 88 |" in drawn
    proof, predicted = {"parity": [], "loss": []}, {"DP": 3 * 2**30}
    front = tables.front_table(found, proof, ["DP"], predicted)
    assert "| 1 (4) |" in front and "| 3.00 |" in front


def test_what_was_run_on_which_hardware():
    found = read_results(ROOT / "results/cpu.json")
    inference = json.loads((ROOT / "results/inference.json").read_text())
    drawn = tables.hardware_table({"cpu": found}, inference)
    cpu, all_scripts = found["hardware"]["cpu"], len(PARENTS) + 1
    assert re.search(rf"\| training on a CPU \| 12 / {all_scripts} \| {re.escape(cpu)} \|", drawn)
    assert f"| training on one GPU | 0 / {all_scripts} | not run yet |" in drawn
    rows = {row["name"]: row for row in found["rows"]}
    gpu = {"rows": [on_gpus(rows["DP"], 1, 4)], "hardware": {"gpus": ["A100"] * 4}}
    gpu |= {"versions": {"torch": "2.15.0"}, "date": "2027-01-01"}
    drawn = tables.hardware_table({"gpu": gpu}, inference | {"device": "A100"} | gpu)
    assert f"| training on a CPU | 0 / {all_scripts} | not run yet |" in drawn
    assert (
        f"| training on several GPUs | 1 / {all_scripts} | 4 × A100 | 2.15.0 | 2027-01-01 |"
        in drawn
    )
    assert "| inference on a GPU |  | 4 × A100 |" in drawn
    assert f"| 在多个 GPU 上训练 | 1 / {all_scripts} |" in pages.translate(drawn)


@pytest.mark.parametrize("name", PARENTS)
def test_a_page_shows_the_lines_that_make_its_technique_and_its_traps(name):
    lines = pages.technique_lines((ROOT / f"pytorch_{name}.py").read_text(), DEFINITIONS.get(name))
    assert 0 < len(lines) <= 25
    page = (ROOT / f"docs/techniques/{name}.md").read_text()
    assert all(f"\n## {heading}\n" in page for heading in ("When not", "Traps", "Sources"))


@pytest.mark.parametrize("chinese", [False, True])
def test_no_page_is_long(chinese):
    lines = {page: len(page.read_text().splitlines()) for page in pages.list_pages(ROOT, chinese)}
    assert max(lines.values()) <= 250, max(lines, key=lines.get)


# ------------------------------------------------------------------------------ what is out of date


@pytest.fixture
def clone(tmp_path):
    """A repository with one commit; ``git`` runs commands in it."""

    def git(words):
        name = "-c user.name=x -c user.email=x@x"
        command = ["git", "-C", tmp_path, *f"{name} {words}".split()]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    names = "common.py", "harness/run.py", "hangs/watch.py", "pytorch_DDP.py", "pytorch_DP.py"
    for path in (*names, "docs/a.py", "results/a.json"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(
            '"""What."""\n\n\ndef f():\n    """How."""\n    return 1  # why\n'
        )
    git("init -q")
    git("add -A")
    git("commit -qm x")
    return tmp_path, git


def test_changed_code_makes_a_result_stale(clone):
    """But not comments and docstrings, nor other files; and to commit it alters nothing."""
    root, git = clone
    commands = ["torchrun pytorch_DDP.py --device cpu --output results/a.json"]
    commit = git("rev-parse HEAD")
    old = (root / "common.py").read_text()
    (root / "common.py").write_text(old.replace("What", "That").replace("# why", "# since"))
    (root / "harness/new.py").write_text("import os\n")
    (root / "pytorch_DP.py").unlink()
    (root / "results/a.json").write_text("")
    (root / "hangs/watch.py").unlink()
    assert stale.note(root, commit, commands) == ""
    assert stale.note(root, commit, commands, ["hangs/watch.py"]).endswith(": hangs/watch.py")
    (root / "common.py").write_text(old.replace("1", "2"))
    (root / "harness/run.py").unlink()
    said = "; since then changed: common.py, harness/run.py"
    assert stale.note(root, commit, commands) == said
    git("add -A")
    assert stale.note(root, commit, commands) == said
    git("commit -qm y")
    assert stale.note(root, commit, commands) == said
    assert stale.note(root, commit, ["python pytorch_DP.py"]) == f"{said}, pytorch_DP.py"
    assert stale.note(root, f"{commit}-dirty", commands).startswith("; measured on uncommitted")
    assert stale.note(root, git("rev-parse HEAD"), commands) == ""
    assert stale.note(root, None, commands) == ""
    assert stale.note(root, "0" * 40, commands) == stale.UNKNOWN


def test_a_proof_with_a_commit_says_what_has_changed(clone):
    root, git = clone
    proof = {"versions": {"torch": "2.15"}, "parity": [{"script": "pytorch_DP --x"}]}
    proof["commits"] = {"parity": git("rev-parse HEAD"), "bytes": "0" * 40}
    assert pages.proof_note(root, proof, "parity").endswith("(results/proof.json)")
    (root / "pytorch_DP.py").write_text("1")
    note = pages.proof_note(root, proof, "parity")
    assert note.endswith("(results/proof.json); since then changed: pytorch_DP.py")


def test_a_part_stays_measured_if_its_suite_has_only_lost_rows(clone):
    root, git = clone
    suite = root / "config/suite_cpu.json"
    suite.parent.mkdir()
    kept = {"job": "--device cpu", "rows": [{"name": "DP"}]}
    suite.write_text(json.dumps(kept | {"rows": [*kept["rows"], {"name": "DDP"}]}))
    git("add -A")
    git("commit -qm z")
    done = {"cpu": {"code": 0, "git_commit": git("rev-parse HEAD")}}
    (root / "results/all.json").write_text(json.dumps(done))
    part = {"cpu": {"commands": ["python benchmark.py --suite cpu"]}}
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
        assert not pages.NOTE.search(path.read_text()), path


def test_predictions_beside_measurements():
    """Of a step of two ranks and of memory; a GPU's column fills when there is one."""
    found = {
        "published": [{"name": "DP", "gpus": 4, "published_gb": 3.08, "predicted": 3_012_000_000}],
        "suites": {"gpu": {"DP": 2 * 2**30}},
        "messages": {"FSDP": {"2": 0.05, "1024": 0.3}},
    }
    row = "| `DP` | 4 | 3.08 | 3.01 | 0.978 | 2.00 |"
    assert predictions.published_table(found, None).endswith(f"{row}  |")
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
    assert tables.relative_speed(slow, fast) == "0.90 (0.75–1.25)"
    assert tables.relative_speed(slow, slow) == "1.00"


def test_speeds_with_other_threads_are_not_compared():
    """As when `accelerate launch` gives one process a single thread."""

    def row(technique, threads):
        run = {"technique": technique, "world_size": 1, "threads": threads, "state_bytes": None}
        return {"name": technique, "runs": [run | {"images_per_second": 100.0 * threads}]}

    raw = row("pytorch_torchrun_DDP", 2)
    drawn = ecosystem.ecosystem_table(ROOT, [raw, row("accelerate_DDP", 2)])
    [line] = [line for line in drawn.splitlines() if line.startswith("| `accelerate_DDP` |")]
    assert "| 1.00 |" in line
    with pytest.raises(Unusable, match="threads"):
        ecosystem.ecosystem_table(ROOT, [raw, row("accelerate_DDP", 1)])
