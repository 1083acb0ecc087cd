"""``model.pt`` of every technique is the same kind of file, and every technique starts from it."""

import json

import pytest
import torch
import torchvision
from conftest import launcher, succeed

TINY = (
    "--dataset synthetic --train-samples 96 --eval-samples 203 --batch-size 24 --model "
    "shufflenet_v2_x0_5 --max-steps 2"
)
# At this rate no weight changes, and no norm keeps statistics: what was loaded is evaluated.
FROZEN = f"{TINY} --norm group --weight-decay 0 --lr 1e-30"
TECHNIQUES = [
    ("pytorch_SingleGPU", 1),
    ("pytorch_half_precision --dtype bfloat16 --master-weights", 1),
    ("pytorch_auto_mixed_precision --dtype bfloat16", 1),
    ("pytorch_DP", 1),
    ("pytorch_DDP", 2),
    ("pytorch_torchrun_DDP", 2),
    ("pytorch_FSDP", 2),
    ("pytorch_DDP_ZeRO --use_zero", 2),
    ("pytorch_DDP_AMP --dtype bfloat16", 2),
    ("pytorch_gradient_accumulation", 2),
    ("pytorch_comm_hooks", 2),
]
PURE_HALF = ("pytorch_half_precision --dtype bfloat16", 1)


def run(technique, flags, output):
    succeed(f"{launcher(*technique)} {flags} --output-dir {output}")
    return output / "model.pt", json.loads((output / "result.json").read_text())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Path of model.pt, and result, of a technique that trained at a rate at which it learns."""
    runs = {}

    def get(technique, norm):
        if (technique, norm) not in runs:
            flags = f"{TINY} --norm {norm} --lr 0.005"
            runs[technique, norm] = run(technique, flags, tmp_path_factory.mktemp("written"))
        return runs[technique, norm]

    return get


IDS = [script for script, _ in TECHNIQUES]


@pytest.mark.parametrize("technique", [*TECHNIQUES, PURE_HALF], ids=[*IDS, PURE_HALF[0]])
def test_files_are_alike_and_plain(technique, written):
    """Same names, shapes and dtypes, whoever wrote it: so what one script reads, each does."""
    path, _ = written(technique, "batch")
    state = torch.load(path, weights_only=True)
    model = torchvision.models.shufflenet_v2_x0_5(num_classes=10)
    expected = {name: (t.shape, t.dtype, t.device) for name, t in model.state_dict().items()}
    assert {name: (t.shape, t.dtype, t.device) for name, t in state.items()} == expected
    model.load_state_dict(state, strict=True)


@pytest.mark.parametrize("technique", TECHNIQUES, ids=IDS)
def test_single_process_reads_it(technique, written, tmp_path):
    path, result = written(technique, "group")
    copy, read = run(("pytorch_SingleGPU", 1), f"{FROZEN} --weights {path}", tmp_path)
    check_equal(path, copy)
    assert read["eval_accuracy"] == result["eval_accuracy"]
    assert read["eval_loss"] == pytest.approx(result["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("technique", TECHNIQUES, ids=IDS)
def test_it_reads_that_of_the_single_process(technique, written, tmp_path):
    path, result = written(("pytorch_SingleGPU", 1), "group")
    copy, read = run(technique, f"{FROZEN} --weights {path}", tmp_path)
    check_equal(path, copy)
    assert read["eval_accuracy"] == result["eval_accuracy"]
    assert read["eval_loss"] == pytest.approx(result["eval_loss"], rel=1e-5)


def check_equal(path, copy):
    ours, theirs = (torch.load(p, weights_only=True) for p in (path, copy))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_pure_half_reads_it_rounded(written, tmp_path):
    path, _ = written(("pytorch_SingleGPU", 1), "group")
    copy, _ = run(PURE_HALF, f"{FROZEN} --weights {path}", tmp_path)
    ours, theirs = (torch.load(p, weights_only=True) for p in (path, copy))
    assert all(torch.equal(ours[name].bfloat16().float(), theirs[name]) for name in ours)
