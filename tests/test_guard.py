"""NaN and Inf in every script: what is lost, and what is reported."""

import json
import re
import shlex

import pytest
import torch
from conftest import cases, hooked, launch, state, succeed, tensors_of

from techniques import TECHNIQUES

JOB = "--dataset synthetic --train-samples 384 --eval-samples 12 --batch-size 32 --epochs 1"
JOB += " --model small_resnet --print-freq 5 --snapshot-every 3"
GRADIENT = "the gradient of conv1.weight is NaN or Inf"
STAGE = "pytorch_DeepSpeed --deepspeed_config config/zero_stage{}_config.json".format
UNWATCHED = ("compile", "checkpoint", "DDP_by_hand", "ZeRO_by_hand")  # no more to see
UNWATCHED += ("optimizer_in_backward",)  # refuses stop and skip
NAMED = {  # what --on-nan stop names when a gradient is infinite, where it is another thing
    "pytorch_half_precision --dtype bfloat16": "the gradient of the loss is NaN or Inf",
    "pytorch_FSDP_by_hand": "a gradient is NaN or Inf",  # its weights are freed by then
    # of whose shards DeepSpeed keeps no names:
    **dict.fromkeys(map(STAGE, (1, 2, 3)), "a gradient is NaN or Inf"),
}
SCRIPTS = [
    (script, case.ranks[0], NAMED.get(script, GRADIENT))
    for t in TECHNIQUES
    for case in t.cases
    if "needs_gpt" not in t.traits and t.name not in UNWATCHED
    if case == t.cases[0] or t.name in ("half_precision", "DeepSpeed")
    for script in [f"{t.script} {case.flags}".rstrip()]
]
LEAVES_OUT = [STAGE(1), STAGE(2), STAGE(3)]  # DeepSpeed does by itself, and says nothing
# Branches of the guard; ranks of Local SGD do not share their gradients.
BRANCHES = ("pytorch_torchrun_DDP", "pytorch_FSDP", "pytorch_LocalSGD", STAGE(2))
USUAL = {"watch": BRANCHES[::2], "stop": BRANCHES[:1], "skip": BRANCHES[2:]}
EVERYWHERE = [(mode, *row) for mode in USUAL for row in SCRIPTS]
EVERYWHERE = [row for row in EVERYWHERE if row[0] != "watch" or row[1] not in LEAVES_OUT]


def run(script, ranks, poison, flags, output, check=launch):
    command = [*hooked(script, ranks, f"{JOB} {flags}").split(), "--output-dir", output]
    return check(command, forked=True, HOOKS=f"poison:{poison}")


def all_finite(output):
    """Of all that a run has left, in snapshots and model.pt."""
    files = [*output.glob("snapshots/*/state.pt"), *output.glob("model.pt")]
    assert files
    ours = [path.parent for path in output.glob("snapshots/*/tensors")]  # not DeepSpeed's
    tensors = [tensor for snapshot in ours for tensor in tensors_of(snapshot).values()]
    for file in files:
        found = torch.load(file, weights_only=True)
        tensors += [t for t in torch.utils._pytree.tree_leaves(found) if torch.is_tensor(t)]
    return all(tensor.isfinite().all() for tensor in tensors)


@cases("mode, script, ranks, named", EVERYWHERE, lambda mode, script, *_: script in USUAL[mode])
def test_a_bad_gradient(mode, script, ranks, named, tmp_path):
    output = tmp_path / "two words"
    flags = "" if mode == "watch" else f"--on-nan {mode}"  # the default
    finished = run(script, ranks, f"gradient,7,7,{ranks - 1}", flags, output)
    if mode == "skip":  # all ranks leave the step out, and the run ends well
        assert finished.code == 0, str(finished)
        assert f"step 7: {named}" in finished.stdout and "the step is skipped" in finished.stdout
        result = json.loads((output / "result.json").read_text())
        assert result["steps"] == 12 and all(loss == loss for loss in result["train_loss"])
    else:
        assert finished.code == 3, str(finished)
        assert not (output / "model.pt").exists() and state(output)["step"] == 6
        [line] = finished.errors
    if mode == "stop":  # before a weight changes
        assert f"error: step 7: {named}" in line and "no weight has changed" in line
    elif mode == "watch":  # before the next snapshot; the command that is given finds the step
        assert "between steps 7 and 9 weights or optimizer became NaN or infinite" in line
        last = output / "snapshots" / "step-00000006"
        said, _, command = line.partition(" To find the first step: ")
        assert said.endswith(f"the last good snapshot is {last}.")
        assert shlex.split(command)[-4:] == ["--resume", str(last), "--on-nan", "stop"]
    assert all_finite(output)


@cases("script", LEAVES_OUT, lambda s: s == STAGE(2))
def test_deepspeed_leaves_a_step_out_by_itself(script, tmp_path):
    """So its weights stay good, and the scheduler is one step behind."""
    run(script, 2, "gradient,7,7,1", "", tmp_path, succeed)
    result = json.loads((tmp_path / "result.json").read_text())
    assert all_finite(tmp_path) and result["steps"] == 12
    assert state(tmp_path)["scheduler"]["last_epoch"] == 11


OUT = "the model's output is NaN or Inf"
IN_FLOAT16 = "pytorch_auto_mixed_precision --dtype float16"
TINY = "--image-size 8"  # a CPU takes long for convolutions in float16
SPOILT = "--on-nan stop --lr 1e38 --warmup-steps 0 --norm group --model shufflenet_v2_x0_5"
ENDS = "--norm group --max-steps 8 --epochs 2 --print-freq 6 --train-samples 128"
FOUND = [  # script, ranks, poison, flags, and what the line of the end says
    ("pytorch_torchrun_DDP", 2, "input,1,1,1", "--on-nan stop", f"step 1: {OUT} on rank 1; "),
    # Not on the others, whose gradients are averaged with it:
    ("pytorch_torchrun_DDP", 2, "loss,7,7,1", "--on-nan stop", "step 7: .* the loss .* on rank 1;"),
    # At step 5 the loss is fetched, and good; then its gradient spoils the weights.
    ("pytorch_SingleGPU", 1, "gradient,5,5,0", "", "between steps 5 and 6 "),
    ("pytorch_SingleGPU", 1, "input,100,100,0", SPOILT, "error: step 2: the weight .* on rank 0;"),
    # At the end of an epoch the loss is fetched, too. In float16 the scaler keeps the weights good.
    (IN_FLOAT16, 1, "input,3,3,0", ENDS, "between steps 1 and 4 the loss became nan"),
]


@pytest.mark.parametrize("script, ranks, poison, flags, words", FOUND)
def test_it_is_found_where_it_is(script, ranks, poison, flags, words, tmp_path):
    finished = run(script, ranks, poison, flags, tmp_path)
    [line] = finished.errors
    assert finished.code == 3 and re.search(words, line), str(finished)


def test_a_bad_batch_is_left_out(tmp_path):
    """In the first step: BatchNorm's statistics forget it, or they would stay NaN for good."""
    finished = run("pytorch_SingleGPU", 1, "input,1,1,0", "--on-nan skip", tmp_path, succeed)
    assert f"step 1: {OUT} on rank 0; " in finished.stdout and all_finite(tmp_path)


def test_a_left_out_step_changes_nothing(tmp_path):
    """Eleven steps and one that is left out end as eleven do, but for the schedule: at a rate that
    is constant, bit for bit."""
    flags = "--warmup-steps 0 --norm group --deterministic --on-nan skip --optimizer adamw"
    run("pytorch_SingleGPU", 1, "gradient,12,12,0", flags, tmp_path / "skipped", succeed)
    with_it = torch.load(tmp_path / "skipped" / "model.pt", weights_only=True)
    before = tensors_of(tmp_path / "skipped" / "snapshots" / "step-00000009")
    assert any(not torch.equal(with_it[name], before[f"model.{name}"]) for name in with_it)
    run("pytorch_SingleGPU", 1, "gradient,10,12,0", flags, tmp_path / "three", succeed)
    three = torch.load(tmp_path / "three" / "model.pt", weights_only=True)
    assert all(torch.equal(three[name], before[f"model.{name}"]) for name in three)


ENDLESS = [(IN_FLOAT16, 1, ""), (STAGE(2), 2, ""), (IN_FLOAT16, 1, "--print-freq 40")]
ENDLESS += [("pytorch_SingleGPU", 1, "--on-nan skip"), (STAGE(3), 2, "--on-nan skip")]
ENDLESS += [("pytorch_DDP_AMP --dtype float16", 2, "--on-nan stop")]


@cases("script, ranks, flags", ENDLESS, lambda *row: row == ENDLESS[0])
def test_a_run_that_leaves_out_every_step_ends(script, ranks, flags, tmp_path):
    """A scale that halves for ever, or DeepSpeed's silence: not a run that learned nothing."""
    flags += f" {TINY} --epochs 4 --train-samples 96 --batch-size 8"
    finished = run(script, ranks, "gradient,2,1000,0", flags, tmp_path)
    assert finished.code == 3, str(finished)
    [line] = finished.errors
    step, skipped = re.search(r"step (\d+): the last (\d+) steps were skipped", line).groups()
    assert 25 <= int(skipped) <= int(step) <= 40
    assert not (tmp_path / "model.pt").exists()


def test_a_scaler_may_leave_out_a_step(tmp_path):
    """One overflow is what the scale is for, also where each step is looked at."""
    run(IN_FLOAT16, 1, "gradient,4,4,0", f"{TINY} --on-nan stop", tmp_path, succeed)
    assert all_finite(tmp_path)
    assert 0 < state(tmp_path)["scaler"]["scale"] < 2**16


def test_ignored(tmp_path):
    finished = run("pytorch_SingleGPU", 1, "input,7,7,0", "--on-nan ignore", tmp_path, succeed)
    assert "loss nan" in finished.stdout and not all_finite(tmp_path)
