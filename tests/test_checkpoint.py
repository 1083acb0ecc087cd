"""pytorch_checkpoint.py: what its page says about DCP checkpoints. (That it resumes with the same
bits: test_contract.py. Killed while it writes: test_faults.py.)"""

import pytest
import torch
from conftest import ROOT, launch, launcher, read_run, same_bits, snapshots, succeed
from safetensors.torch import load_file

JOB = "--model gpt-2x2x16 --context 16 --dataset synthetic --train-samples 400 --eval-samples 8"
JOB += " --batch-size 8 --epochs 1 --print-freq 1 --dropout 0.1 --deterministic --snapshot-every 3"
COMMAND = f"{launcher('pytorch_checkpoint --async-save', 2)} {JOB}"
RUN = "runs/pytorch_checkpoint"  # as the page has it


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with a run."""
    root = tmp_path_factory.mktemp("checkpoint")
    succeed(f"{COMMAND} --output-dir {root / RUN}", forked=True)
    assert len(snapshots(root / RUN)) == 3, "two, and the one that was written last"
    return root


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_alone_as_one_file_and_as_safetensors(whole, monkeypatch):
    """By the file that the page shows. And DCP says nothing of a bit that has flipped."""
    lines = (ROOT / "examples/own/convert_checkpoint.py").read_text()
    monkeypatch.chdir(whole)
    exec(lines, {})
    expected, _ = read_run(whole / RUN)
    [safetensors] = (whole / "safetensors").glob("*.safetensors")
    for found in (torch.load("model.pt", weights_only=True), load_file(safetensors)):
        assert same_bits(found, expected)
    row = expected["blocks.0.attention.query.weight"][0].numpy().tobytes()
    [shards] = [p for p in snapshots(whole / RUN)[0].glob("*.distcp") if row in p.read_bytes()]
    shards.write_bytes(shards.read_bytes().replace(row, bytes([row[0] ^ 1]) + row[1:]))
    exec(lines, {})
    found = torch.load("model.pt", weights_only=True)
    assert sum(torch.equal(found[name], expected[name]) for name in expected) == len(expected) - 1


def test_another_model_and_another_script_are_refused_in_one_line(whole, tmp_path):
    for ours, other, words in (
        ("gpt-2x2x16", "gpt-2x2x32", "--model gpt-2x2x16, and this run has gpt-2x2x32"),
        ("checkpoint.py --async-save", "FSDP.py", "is DCP's own; use the script"),
    ):
        command = f"{COMMAND.replace(ours, other)} --output-dir {tmp_path} --resume {whole / RUN}"
        assert words in launch(command, forked=True).refusal
