"""estimate.py FILE: a file with any architecture."""

import json
import re

import yaml
from conftest import ROOT, cases
from test_estimate import estimate

from estimator.compose import compose

FILE = ROOT / "tests" / "architectures.py"
_, _, OWN = FILE.read_text().partition("\nARCHITECTURES")
LISTED = yaml.safe_load(FILE.with_suffix(".yaml").read_text())
ARCHITECTURES = {*re.findall(r'^    "(\w+)": ', OWN, re.M), *(n for n in LISTED if n[0] != ".")}
FUNCTIONS = """
from architectures import Made

MADE = Made({name!r})


def make_model():
    return MADE.make_model()


def make_data():
    return MADE.samples, MADE.samples


def forward(model, batch):
    return MADE.forward(model, batch)


def loss_of(output, batch):
    loss = MADE.loss_of(output, batch)
    return torch.stack([loss, torch.ones_like(loss)])
"""


@cases("name", sorted(ARCHITECTURES), lambda name: name == "two_inputs")
def test_architectures(name, tmp_path):
    """DDP keeps as many bytes of gradients as of weights, and FSDP half of the weights."""
    found = {}
    for file in (FILE, FILE.with_suffix(".yaml")):
        (tmp_path / file.name).symlink_to(file)
    for example in ("ddp", "fsdp"):
        path = tmp_path / f"transformers_{example}.py"
        text = (ROOT / f"examples/{example}.py").read_text()
        path.write_text(compose(text, FUNCTIONS.format(name=name), path.stem, example))
        if name == "clip" and example == "fsdp":
            assert "doesn't support scalar parameters" in estimate(f"{path} --gpus 2", 1).stderr
            return
        finished = estimate(f"{path} --gpus 2 --json")
        found[example] = json.loads(finished.stdout)["kinds"]
    ddp = found["ddp"]
    assert ddp["gradients"] <= ddp["parameters"] * 1.05 + 2**17
    assert found["fsdp"]["parameters"] <= 0.6 * ddp["parameters"] + 2**17
