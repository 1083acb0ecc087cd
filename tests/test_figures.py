"""Figures on pages that a program predicts: some are predicted again, by the command that is beside
them, and are within 1% of the committed ones. If not, an earlier commit has changed them."""

import json
import re

import pytest
from conftest import ROOT, cases, launch, succeed

from report import predictions
from report.results import read_result

GIVEN = json.loads((ROOT / "measure/published.json").read_text())
FRONT = read_result(ROOT, "front")["outputs"]
PEAKS = [row["name"] for row in read_result(ROOT, "published")["peaks"]]
OF_CODE = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/blob/[0-9a-f]{40}/\S+#L\d+(-L\d+)?")
FIT = json.loads((ROOT / "website/data/fit.json").read_text())["data"]["cells"]
CELLS = {"{model} on {gpus} {memory}".format_map(cell): cell for cell in FIT}
OLD = "what is on pages is old: measure it again by {}, then python benchmark.py --render".format


@cases("name", FRONT, "FSDP 4 x TP 2, selective".__eq__)
def test_predicted_peaks_of_the_readme(name):
    finished = launch(FRONT[name]["command"], forked=True)  # ends with 2 if nothing fits
    [found] = json.loads(finished.stdout)
    [committed] = FRONT[name]["output"]
    for figure in ("peak", "sent"):
        again = OLD("python benchmark.py --suite front")
        assert found[figure] == pytest.approx(committed[figure], rel=0.01), again


@pytest.mark.full  # as those of the README, of larger models
@pytest.mark.parametrize("name", PEAKS)
def test_predicted_peaks_beside_published_ones(name):
    command = ["python", "measure/estimates/language_models.py", name]
    printed = succeed(command, forked=True, timeout=900, PYTHONPATH=str(ROOT)).stdout
    of_tensors, reserved = (pytest.approx(int(n) / 2**30, rel=0.01) for n in printed.split())
    [row] = [row for row in read_result(ROOT, "published")["peaks"] if row["name"] == name]
    again = OLD("python benchmark.py --suite published")
    assert row["lowest"] == of_tensors and row["highest"] in (of_tensors, reserved), again


def test_published_runs_cite_the_code_that_was_measured():
    """Each option of a prediction was read in a line at a commit, or says that none was found."""
    names = []
    for row in GIVEN["runs"]:
        names.append(row["name"])
        options = GIVEN["because"][row.get("program", "script")]
        for line in [row["because"], *options.values()]:
            assert line == "not found" or OF_CODE.fullmatch(line), line
    assert names == PEAKS


def test_a_range_says_how_far_both_ends_are_off():
    assert predictions.off({"published": 50, "lowest": 52, "highest": 52}) == "+4.0%"
    assert predictions.off({"published": 50, "lowest": 40, "highest": 52}) == "-20.0% to +4.0%"


def test_a_recommendation_of_the_site_is_made_again():
    """By its program; the others by the command that the page shows."""
    committed = CELLS["gpt-12x12x768 on 1 H100"]
    given = ("gpt-12x12x768", 1, "H100")
    code = f"import json; from website import make_data; print(json.dumps(make_data.cell{given}))"
    again = json.loads(succeed(["python", "-c", code]).stdout)
    assert again.pop("peak") == pytest.approx(committed["peak"], rel=0.01)
    assert again.items() <= committed.items()


@pytest.mark.full  # the largest models: the usual golden rows are those above
@pytest.mark.parametrize("name", CELLS)
def test_recommendations(name):
    committed = CELLS[name]
    printed = launch(committed["estimate"], forked=True).stdout
    again = OLD("python website/make_data.py")
    peak = re.search(r"peak ([\d.]+) GiB", printed)[1]
    assert float(peak) * 2**30 == pytest.approx(committed["peak"], rel=0.01), again
    assert f"{committed['command']}\n" in printed, again
