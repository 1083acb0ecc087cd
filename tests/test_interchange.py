"""``model.pt`` has the same format for every technique, and every technique starts from it."""

import json
import shlex

import pytest
import torch
import torchvision
from conftest import launcher, succeed

import common
from jobs import images

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
    ("pytorch_ZeRO_by_hand --stage 2", 2),
    ("pytorch_FSDP_by_hand", 2),
]
PURE_HALF = ("pytorch_half_precision --dtype bfloat16", 1)


def run(technique, flags, output):
    succeed(f"{launcher(*technique)} {flags} --output-dir {output}", forked=True)
    return output / "model.pt", json.loads((output / "result.json").read_text())


def evaluates_in_half(technique):
    return technique == PURE_HALF or "AMP" in technique[0] or "auto_mixed" in technique[0]


ALIKE = ("pytorch_DDP", "pytorch_DDP_AMP", "pytorch_gradient_accumulation", "pytorch_comm_hooks")
ALIKE += ("pytorch_DP", "pytorch_auto_mixed_precision", "pytorch_FSDP_by_hand")


def rows_of(techniques, alike=()):
    """As parameters; of those that are `alike`, another shows the same."""
    full = [technique[0].split()[0] in alike for technique in techniques]
    return [
        pytest.param(technique, id=technique[0], marks=[pytest.mark.full] if more else [])
        for technique, more in zip(techniques, full, strict=True)
    ]


@pytest.mark.parametrize("technique", rows_of([*TECHNIQUES, PURE_HALF], ALIKE))
def test_files_are_alike_and_plain(technique, tmp_path):
    """Same names, shapes and dtypes, whoever wrote it: so what one script reads, each does. And
    stock PyTorch scores with it what the run reported, to the last sample."""
    path, result = run(technique, f"{TINY} --lr 0.005", tmp_path)
    state = torch.load(path, weights_only=True)
    model = torchvision.models.shufflenet_v2_x0_5(num_classes=10)
    expected = {name: (t.shape, t.dtype, t.device) for name, t in model.state_dict().items()}
    assert {name: (t.shape, t.dtype, t.device) for name, t in state.items()} == expected
    model.load_state_dict(state, strict=True)
    args = common.argument_parser("").parse_args(shlex.split(TINY))
    args.image_size = 32
    loader = common.make_loader(args, images.synthetic(args, "eval"), 24)
    metrics = common.evaluate(model, loader, torch.device("cpu"))
    if not evaluates_in_half(technique):
        assert metrics["accuracy"] == result["eval_accuracy"][-1]
    assert metrics["loss"] == pytest.approx(result["eval_loss"][-1], rel=1e-2)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """model.pt and result of the single process, without BatchNorm."""
    flags = f"{TINY} --norm group --lr 0.005"
    return run(("pytorch_SingleGPU", 1), flags, tmp_path_factory.mktemp("single"))


@pytest.mark.parametrize("technique", rows_of(TECHNIQUES, ALIKE))  # they load as plain DDP does
def test_it_reads_that_of_the_single_process(technique, single, tmp_path):
    path, result = single
    copy, read = run(technique, f"{FROZEN} --weights {path}", tmp_path)
    check_equal(path, copy)
    in_half = evaluates_in_half(technique)
    if not in_half:
        assert read["eval_accuracy"] == result["eval_accuracy"]
    assert read["eval_loss"] == pytest.approx(result["eval_loss"], rel=1e-2 if in_half else 1e-5)


def check_equal(path, copy):
    ours, theirs = (torch.load(p, weights_only=True) for p in (path, copy))
    assert ours.keys() == theirs.keys()
    # what was exactly 0 is now a rate of 1e-30 away from it
    assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-20) for name in ours)


def test_pure_half_reads_it_rounded(single, tmp_path):
    path, _ = single
    copy, _ = run(PURE_HALF, f"{FROZEN} --weights {path}", tmp_path)
    ours, theirs = (torch.load(p, weights_only=True) for p in (path, copy))
    rounded = {name: t.bfloat16().float() for name, t in ours.items()}
    assert all(torch.allclose(rounded[n], theirs[n], rtol=0, atol=1e-20) for n in ours)
