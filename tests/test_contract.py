"""The contract of every technique, on a GPT in float64: it ends with the weights of the single
process, goes on at another number of ranks or in another script, and loses no bit when it is
stopped or killed. A new technique adds a line to TECHNIQUES, GOES_ON and SAME_BITS."""

import signal
from typing import NamedTuple

import pytest
import torch
from conftest import cases, launcher, read_run, snapshots, started, succeed, wait_for
from test_bytes import KEPT
from test_parity import relative_difference

# Twelve heads and positions, and eight blocks: two, three and four ranks can divide them.
JOB = (
    "--model gpt-8x12x24 --context 12 --dataset synthetic --train-samples 150 --eval-samples 20 "
    "--batch-size 24 --epochs 9 --print-freq 1 --clip-grad 0.5 --double"
)
# Weights: rounding alone; AdamW divides by the root of a small number, which enlarges it.
TOLERANCE = {"sgd": 1e-12, "adamw": 1e-11}


class Technique(NamedTuple):
    script: str
    ranks: tuple[int, ...]  # all that are proven; the usual run takes the first
    usual: str = "adamw"  # its optimizer there
    model: str = ""  # flags of the model, for the single process, too


TECHNIQUES = [
    Technique("pytorch_DP", (1,)),
    Technique("pytorch_DDP", (2,)),
    Technique("pytorch_torchrun_DDP", (2, 1, 3, 4)),
    Technique("pytorch_FSDP", (3, 1, 2, 4)),
    Technique("pytorch_DDP_ZeRO --use_zero", (3, 1, 2, 4)),
    Technique("pytorch_gradient_accumulation --accumulate 4", (2,)),
    Technique("pytorch_activation_checkpointing", (2, 1)),
    Technique("pytorch_activation_checkpointing --selective", (2,)),
    Technique("pytorch_HSDP --shard 2", (4, 2)),
    Technique("pytorch_FSDP_offload", (2, 1)),
    Technique("pytorch_DDP_by_hand", (2, 1, 3, 4)),
    Technique("pytorch_ZeRO_by_hand", (2, 1, 3, 4)),
    Technique("pytorch_ZeRO_by_hand --stage 2", (3, 1, 2, 4)),
    Technique("pytorch_FSDP_by_hand", (3, 1, 2, 4)),
    Technique("pytorch_TP", (3, 2, 4), "sgd"),
    Technique("pytorch_TP --sequence-parallel", (2, 3, 4)),
    Technique("pytorch_FSDP_TP --tp 1", (2,)),
    Technique("pytorch_FSDP_TP --tp 2", (4, 2)),
    Technique("pytorch_FSDP_TP --tp 2 --sequence-parallel", (4,)),
    Technique("pytorch_FSDP_TP --tp 3", (3,)),
    Technique("pytorch_PP --pipeline-schedule gpipe", (2, 1, 3, 4)),
    Technique("pytorch_PP --pipeline-schedule 1f1b", (3, 1, 2, 4), "sgd"),
    Technique("pytorch_PP --pipeline-schedule interleaved", (2, 1, 3, 4)),
    Technique("pytorch_PP --pipeline-schedule zbv", (3, 1, 2, 4)),
    Technique("pytorch_CP --attention ring", (3, 1, 2, 4), "sgd"),
    Technique("pytorch_CP --attention allgather", (2, 1, 3, 4)),
    Technique("pytorch_CP --attention ulysses", (3, 1, 2, 4)),
    Technique("pytorch_EP", (3, 2), model="--experts 6"),
    Technique("pytorch_EP", (4, 2), model="--experts 8 --top-k 2"),
    Technique("pytorch_EP", (2, 4), "sgd", model="--experts 4 --balance 0"),
]
SHARED = ("pytorch_TP", "pytorch_FSDP_TP", "pytorch_PP", "pytorch_CP", "pytorch_EP")
FULL = ("pytorch_DP", "pytorch_DDP", "pytorch_FSDP_TP --tp 1", "pytorch_FSDP_TP --tp 3")
PARITY = [
    (t.script, n, optimizer, t.model)
    for t in TECHNIQUES
    for n in t.ranks
    for optimizer in TOLERANCE
]
USUAL = [(t.script, t.ranks[0], t.usual, t.model) for t in TECHNIQUES if t.script not in FULL]


def in_double(weights):
    """The vocabulary as well, which is of integers."""
    return {name: tensor.double() for name, tensor in weights.items()}


def kept(result, parameters):
    """Bytes per parameter of fp32."""
    return {name: 4 * size / parameters for name, size in result["state_bytes"].items()}


@pytest.mark.parametrize("script, n, optimizer, model", cases(PARITY, lambda *row: row in USUAL))
def test_parity(script, n, optimizer, model, train, measured):
    flags = f"--max-steps 12 --optimizer {optimizer} {model}".rstrip()
    expected, expected_result = train("pytorch_SingleGPU", 1, flags)
    weights, result = train(script, n, flags)
    assert list(weights) == list(expected)
    difference = relative_difference(in_double(weights), in_double(expected))
    table = "parity_shared" if script.split()[0] in SHARED else "parity_gpt"
    name = f"{script} {model}".rstrip()
    measured(table, script=name, ranks=n, optimizer=optimizer, value=difference)
    assert difference < TOLERANCE[optimizer]
    for name in ("train_loss", "eval_loss", "eval_accuracy"):
        assert result[name] == pytest.approx(expected_result[name], rel=1e-9)
    assert result["steps"] == 12 and result["eval_samples"] == expected_result["eval_samples"]
    if theory := KEPT.get(script.removesuffix(" --selective")):
        bytes_of = dict(theory(n))
        bytes_of["optimizer"] = bytes_of.pop("state") * {"sgd": 4, "adamw": 8}[optimizer]
        uneven = script.startswith("pytorch_DDP_ZeRO") and n > 2  # it partitions whole tensors
        parameters = expected_result["state_bytes"]["parameters"]
        assert kept(result, parameters) == pytest.approx(bytes_of, rel=0.5 if uneven else 0.05)


# ------------------------------------------------------------------------------------------ resume

GPIPE, ONE_F_ONE_B, INTERLEAVED, ZBV = (
    f"pytorch_PP --pipeline-schedule {name}" for name in ("gpipe", "1f1b", "interleaved", "zbv")
)
EXPERTS = "--experts 8 --top-k 2"
GOES_ON = [  # a script on some ranks up to each step, and then the next; flags of all
    ([("pytorch_HSDP --shard 2", 4, 3), ("pytorch_TP --sequence-parallel", 3, 5),
      ("pytorch_FSDP", 2, 8), ("pytorch_FSDP_TP --tp 2", 4, 10), ("pytorch_TP", 2, 12)], ""),
    ([("pytorch_DDP_ZeRO --use_zero", 2, 5), ("pytorch_FSDP_by_hand", 3, 8),
      ("pytorch_ZeRO_by_hand --stage 2", 2, 10), ("pytorch_SingleGPU", 1, 12)], ""),
    ([("pytorch_FSDP", 2, 5), (ZBV, 2, 8), (INTERLEAVED, 3, 10), (ONE_F_ONE_B, 1, 12)], ""),
    ([("pytorch_CP --attention ring", 2, 8), ("pytorch_CP --attention ulysses", 4, 12)], ""),
    ([("pytorch_EP", 2, 4), ("pytorch_EP", 4, 12)], EXPERTS),
    ([("pytorch_FSDP_offload", 1, 5), ("pytorch_FSDP", 3, 8), (ONE_F_ONE_B, 2, 12)], "--tie"),
    ([("pytorch_gradient_accumulation", 2, 5), ("pytorch_activation_checkpointing", 1, 8),
      ("pytorch_CP --attention allgather", 2, 10), (GPIPE, 2, 11), ("pytorch_torchrun_DDP", 3, 12)],
     ""),
    ([(INTERLEAVED, 2, 8), ("pytorch_FSDP", 1, 10), (ZBV, 2, 12)], "--tie"),
]  # fmt: skip


def way(legs):
    return "-".join(f"{script.removeprefix('pytorch_')}:{n}" for script, n, _ in legs)


@pytest.mark.parametrize(
    "legs, model",
    [
        pytest.param(*row, id=f"{way(row[0])} {row[1]}", marks=[] if i < 6 else pytest.mark.full)
        for i, row in enumerate(GOES_ON)
    ],
)
def test_it_goes_on_elsewhere(legs, model, train, tmp_path):
    """Within an epoch, at another number of ranks, in another script: as if all were one run."""
    # The warm-up is longer than the run, so the rate depends on the step and not on --max-steps.
    flags = f"--epochs 2 --warmup-steps 20 {model}".rstrip()
    expected, expected_result = train("pytorch_SingleGPU", 1, f"--max-steps 12 {flags}")
    for script, n, steps in legs:
        command = f"{launcher(script, n)} {JOB} {flags} --max-steps {steps}"
        finished = succeed(f"{command} --resume auto --output-dir {tmp_path}", forked=True)
        assert ("resumed from" in finished.stdout) == ((script, n, steps) != legs[0])
        assert not finished.our_warnings
    weights, result = read_run(tmp_path)
    assert relative_difference(in_double(weights), in_double(expected)) < TOLERANCE["adamw"]
    assert result["train_loss"] == pytest.approx(expected_result["train_loss"], rel=1e-9)


SAME_BITS = [
    ("pytorch_SingleGPU", 1),
    ("pytorch_torchrun_DDP", 2),
    ("pytorch_FSDP", 2),
    ("pytorch_DDP_ZeRO --use_zero", 2),
    ("pytorch_HSDP --shard 2", 4),
    ("pytorch_ZeRO_by_hand --stage 2", 2),
    ("pytorch_FSDP_by_hand", 2),
    ("pytorch_TP --sequence-parallel", 2),
    ("pytorch_FSDP_TP --tp 2", 4),
    (ONE_F_ONE_B, 2),
    (ZBV, 2),
    ("pytorch_CP --attention ring", 2),
    ("pytorch_EP --experts 4", 2),
    ("pytorch_compile --blocks", 2),
]
DILOCO = ("pytorch_LocalSGD --sync-every 3 --outer-momentum 0.9", 2)  # a stop would sync
STOPPED = ("pytorch_FSDP", "pytorch_TP --sequence-parallel", ZBV, "pytorch_EP --experts 4")
KILLED = ("pytorch_torchrun_DDP", "pytorch_FSDP")
WITH_DROPOUT = "--dropout 0.2 --schedule none --lr 0.001 --deterministic"


@pytest.mark.parametrize("script, n", cases(SAME_BITS, lambda script, n: script in STOPPED))
def test_a_stop_within_an_epoch_changes_no_bit(script, n, train, tmp_path):
    """With dropout: nothing is drawn in a first step that is not drawn in others."""
    expected, _ = train(script, n, f"--max-steps 9 {WITH_DROPOUT}")
    command = f"{launcher(script, n)} {JOB} {WITH_DROPOUT} --output-dir {tmp_path}"
    succeed(f"{command} --max-steps 4", forked=True)
    finished = succeed(f"{command} --max-steps 9 --resume auto", forked=True)
    assert "at epoch 1, step 5" in finished.stdout
    weights, _ = read_run(tmp_path)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("script, n", cases([*SAME_BITS, DILOCO], lambda s, n: s in KILLED))
def test_killed_it_ends_with_the_same_bits(script, n, train, tmp_path):
    """All its processes at once, without a warning, wherever they are."""
    flags = f"{WITH_DROPOUT} --max-steps 40 --snapshot-every 2"
    expected, expected_result = train(script, n, flags)
    command = f"{launcher(script, n)} {JOB} {flags} --output-dir {tmp_path}"
    with started(command, forked=True) as process:
        wait_for(lambda: snapshots(tmp_path) or not process.running)
        assert process.running, str(process.end())
        process.send(signal.SIGKILL, group=True)
        process.end()
    assert snapshots(tmp_path) and not (tmp_path / "model.pt").exists()
    finished = succeed(f"{command} --resume auto", forked=True)
    assert "resumed from" in finished.stdout
    weights, result = read_run(tmp_path)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert result["train_loss"] == expected_result["train_loss"] and result["steps"] == 40
