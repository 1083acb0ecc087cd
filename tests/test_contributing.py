"""For contributors: the workflows, forms and notebook run what the tests run."""

import json
import re

import pytest
import yaml
from conftest import ROOT
from test_readme import commands, run_elsewhere

GITHUB = ROOT / ".github"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def steps(workflow):
    jobs = yaml.safe_load((GITHUB / "workflows" / workflow).read_text())["jobs"].values()
    return [step.get("run") for job in jobs for step in job["steps"] if "run" in step]


def test_workflows_run_the_check_and_build_the_site():
    assert steps("ci.yml") == [".ci/run"]
    assert steps("pages.yml") == [re.findall(r"```bash\n(.*)\n", CONTRIBUTING)[-1]]
    assert "mkdocs build --strict" in (ROOT / ".ci/run").read_text()


def test_ten_steps_name_what_exists():
    numbers = re.findall(r"^(\d+)\. \*\*", CONTRIBUTING, re.MULTILINE)
    assert numbers == [str(n) for n in range(1, 11)]
    named = re.findall(r"`((?:[\w.]+/)*[\w*]+\.(?:py|yml|json|md))`", CONTRIBUTING)
    for name in set(named) - {"pytorch_NAME.py", "NAME.zh-CN.md", "docs/techniques/NAME.md"}:
        assert list(ROOT.glob(name)), name
    contract = (ROOT / "tests/test_contract.py").read_text()
    for name in ("TECHNIQUES", "THEORY", "GOES_ON", "SAME_BITS"):
        assert f"`{name}`" in CONTRIBUTING and re.search(rf"^{name}\b", contract, re.MULTILINE)


@pytest.mark.parametrize("form", ["wrong_figure", "gpu_results"])
def test_issue_forms(form):
    found = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / f"{form}.yml").read_text())
    assert found["name"] and found["description"]
    fields = [item for item in found["body"] if item["type"] != "markdown"]
    assert len({item["id"] for item in fields}) == len(fields) >= 3
    assert all(item["attributes"]["label"] for item in fields)


def test_citation():
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["cff-version"] == "1.2.0"
    assert all(found[key] for key in ("message", "title", "authors", "license"))


def test_the_notebook_has_commands_that_other_tests_run():
    cells = json.loads((ROOT / "config/kaggle.ipynb").read_text())["cells"]
    lines = [line for cell in cells if cell["cell_type"] == "code" for line in cell["source"]]
    lines = [line.strip()[1:] for line in lines if line.startswith("!")]
    run = [line for line in lines if not line.startswith(("git clone", "pip install -q"))]
    known = {re.sub(r"nproc_per_node=\d", "nproc_per_node=2", command) for command in commands()}
    assert len(run) == 5
    for line in run:
        first = line in (ROOT / "README.md").read_text()
        assert line in known or run_elsewhere(line) or first, line
