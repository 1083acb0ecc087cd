"""estimate.py --module: any architecture, any row; and what is recommended for one."""

import json
import re

import pytest
import yaml
from conftest import ROOT, cases
from test_estimate import HALF, estimate

FILE = ROOT / "tests" / "architectures.py"
_, _, OWN = FILE.read_text().partition("\nARCHITECTURES")
LISTED = yaml.safe_load(FILE.with_suffix(".yaml").read_text())
ARCHITECTURES = {*re.findall(r'^    "(\w+)": ', OWN, re.M), *(n for n in LISTED if n[0] != ".")}
REASONS = {  # of rows that cannot be predicted
    "clip": "doesn't support scalar parameters",
    "detector": "values of a tensor",  # all rows
    "masked_autoencoder": "cannot train a model with frozen parameters",
    "t5": "a cache needs use_cache=False|needs blocks that return one tensor",
    "whisper": "cannot train a model with frozen parameters",
}
USUAL = ("two_inputs", f"{HALF},DDP_AMP,FSDP")
ROWS = [USUAL, ("mixtral", "DDP_AMP,FSDP"), *((name, "") for name in sorted(ARCHITECTURES))]


@cases("name, only", ROWS, lambda *row: row == USUAL)
def test_architectures(name, only):
    """All rows, or ``only`` some. One that fails says why; DDP keeps as many bytes of gradients as
    of weights, and FSDP half of them."""
    flags = f"--module {FILE}:{name} -b 8 --gpus 2 --json" + f" --only {only}" * bool(only)
    if name == "detector":
        assert REASONS[name] in estimate(flags, code=2).stderr
        return
    rows = {row["technique"]: row for row in json.loads(estimate(flags).stdout)}
    for row in rows.values():
        assert bool(row["kinds"]) != bool(row["mistake"])
        assert not row["mistake"] or re.search(REASONS[name], row["mistake"]), row["technique"]
    ddp = rows["DDP_AMP --dtype bfloat16"]["kinds"]
    fsdp = rows["FSDP"]["kinds"]
    assert ddp["gradients"] == pytest.approx(ddp["parameters"], rel=0.05, abs=2**17)
    assert not fsdp or fsdp["parameters"] <= 0.6 * ddp["parameters"] + 2**17


def test_a_module_of_ones_own_is_recommended():
    """Without recomputation first, which takes less memory; with the file to copy."""
    flags = f"--module {FILE}:residual -b 64 --gpus 2 --recommend --memory 1 --spare 0"
    text = estimate(flags).stdout
    peaks = dict(re.findall(r"^\d\. (.*): peak (\S+) MiB", text, re.M))
    *plain, last = peaks
    again = ", activation checkpointing of the largest nn.ModuleList"
    assert again not in "".join(plain) and last.endswith(again)
    assert float(peaks[last]) < float(peaks[last.removesuffix(again)])
    assert "copy examples/fsdp.py (docs/your_own_model.md)" in text
    assert "for block in model.LAYERS:" in text
