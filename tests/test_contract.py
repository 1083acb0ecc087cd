"""The contract of every technique, on a GPT in float64: it ends with the weights of the single
process, has the memory and communication of the theory, resumes at another number of ranks or in
another script, and loses no bit when it is stopped or killed. A new technique adds a line to
TECHNIQUES, THEORY, GOES_ON and SAME_BITS."""

import signal
from typing import NamedTuple

import pytest
import torch
from conftest import (
    HOOKED,
    cases,
    launch,
    launcher,
    read_run,
    relative_difference,
    snapshots,
    started,
    succeed,
    wait_for,
)
from test_bytes import KEPT, SENT

# Twelve heads, eight blocks, and 24 positions in two chunks for each rank: two, three and four
# ranks can divide them.
LAYERS, WIDTH, CONTEXT, BATCH, TOKENS = 8, 24, 24, 24, 27  # TOKENS: of the vocabulary
JOB = (
    f"--model gpt-{LAYERS}x12x{WIDTH} --context {CONTEXT} --dataset synthetic --train-samples 150 "
    f"--eval-samples 20 --batch-size {BATCH} --epochs 9 --print-freq 1 --clip-grad 0.5 --double"
)
# Weights: rounding alone; AdamW divides by the root of a small number, which enlarges it.
TOLERANCE = {"sgd": 1e-12, "adamw": 1e-11}


class Technique(NamedTuple):
    script: str
    ranks: tuple[int, ...]  # all that are proven; the usual run takes the first
    usual: str = "adamw"  # its optimizer there
    model: str = ""  # flags of the model, for the single process, too


MAY_TIE = ("FSDP", "torchrun_DDP", "DDP_ZeRO", "FSDP_by_hand", "PP --pipeline-schedule zbv")
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
    Technique("pytorch_checkpoint", (2, 3)),
    Technique("pytorch_Muon", (3, 1, 2, 4)),
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
    Technique("pytorch_PP --pipeline-schedule dualpipev", (2, 1, 3, 4)),
    Technique("pytorch_CP --attention ring", (3, 1, 2, 4), "sgd"),
    Technique("pytorch_CP --attention allgather", (2, 1, 3, 4)),
    Technique("pytorch_CP --attention ulysses", (3, 1, 2, 4)),
    *(Technique(f"pytorch_{script}", (2,), model="--tie") for script in MAY_TIE),
    Technique("pytorch_torchrun_DDP", (2,), model="--experts 4 --balance 0"),
    Technique("pytorch_EP", (3, 2), model="--experts 6"),
    Technique("pytorch_EP", (4, 2), model="--experts 8 --top-k 2"),
    Technique("pytorch_EP", (2, 4), "sgd", model="--experts 4 --balance 0"),
]
LLAMA = "--model llama-4x12x24 --kv-heads 6"
TECHNIQUES += [
    Technique("pytorch_torchrun_DDP", (2,), model=LLAMA),
    Technique("pytorch_FSDP", (2,), model=f"{LLAMA} --tie"),
    Technique("pytorch_FSDP_by_hand", (2,), model=LLAMA),
    Technique("pytorch_TP", (2, 3), model=f"{LLAMA} --mlp-width 48"),
    Technique("pytorch_TP --sequence-parallel", (2,), "sgd", model=f"{LLAMA} --tie"),
    Technique("pytorch_FSDP_TP --tp 2 --sequence-parallel", (4,), model=LLAMA),
    Technique("pytorch_PP --pipeline-schedule zbv", (2,), model=LLAMA),
    Technique("pytorch_CP --attention ring", (3, 2), "sgd", model=LLAMA),
    Technique("pytorch_CP --attention allgather", (2,), model=LLAMA),
    Technique("pytorch_CP --attention ulysses", (2, 3), model=LLAMA),
    Technique("pytorch_EP", (2,), model=f"{LLAMA} --experts 4 --balance 0"),
]
ND = "pytorch_ND_parallel"
TECHNIQUES += [
    Technique(f"{ND} --dp-shard 2 --tp 2", (4,)),
    Technique(f"{ND} --tp 2 --pp 2", (4,)),
    Technique(f"{ND} --pp 2 --cp 2", (4,)),
    Technique(f"{ND} --dp-replicate 2 --dp-shard 2 --ac full", (4,)),
    Technique(f"{ND} --reshard-after-forward 2 --prefetch 1", (4,)),
    Technique(f"{ND} --reshard-after-forward no", (4,)),
    Technique(f"{ND} --keep-last --prefetch 2", (4,)),
]
SHARED = (ND, "pytorch_TP", "pytorch_FSDP_TP", "pytorch_PP", "pytorch_CP", "pytorch_EP")
FULL = ("pytorch_DP", "pytorch_DDP", "pytorch_FSDP_TP --tp 1", "pytorch_FSDP_TP --tp 3")
FULL += (f"{ND} --reshard-after-forward no", f"{ND} --keep-last --prefetch 2")
PARITY = [
    (t.script, n, optimizer, t.model)
    for t in TECHNIQUES
    for n in t.ranks
    for optimizer in TOLERANCE
    if optimizer == "adamw" or "Muon" not in t.script
]
REFERENCE = {"pytorch_Muon": "muon"}  # what runs the single process, if not itself
USUAL = [
    (t.script, t.ranks[0], t.usual, t.model)
    for t in TECHNIQUES
    if t.script not in FULL and not (t.model == "--tie" and "FSDP" not in t.script)
]


# ----------------------------------------------------------------------------- kept and sent
# Bytes, in fp32, that a rank keeps of the parameters, and sends in a step in the mean over ranks.

MATRICES = 4 * LAYERS * 12 * WIDTH**2  # bytes, of the blocks
NORMS = 4 * LAYERS * 4 * WIDTH
FIRST, LAST = 4 * (TOKENS + CONTEXT) * WIDTH, 4 * (TOKENS + 2) * WIDTH  # embeddings; norm, head
WHOLE = MATRICES + NORMS + FIRST + LAST
EXPERT = MATRICES * 8 / 12  # bytes, of one expert in each block
A = 4 * BATCH * CONTEXT * WIDTH  # bytes between two layers


def share(n):
    return (n - 1) / n


def tensor(n, tp=None):
    """Bytes of parameters, and sent in the blocks."""
    return MATRICES / n + WHOLE - MATRICES, 8 * LAYERS * A * share(n)


def sequence(n):
    matrices = MATRICES + FIRST + LAST - 4 * 2 * WIDTH  # all but norms
    _, sent = tensor(n)
    sent += 4 * A * share(n)  # before the first block and after the last
    return matrices / n + WHOLE - matrices, sent


def grid(n, tp=2):
    rows = n // tp
    rest = WHOLE - MATRICES
    # Gathered twice and reduce-scattered; what is in no block stays gathered until backward.
    of_part = (3 * (MATRICES / tp + NORMS) + 2 * (rest - NORMS)) * share(rows)
    return (MATRICES / tp + rest) / rows, tensor(tp)[1] / rows + of_part


def pipeline(n, cuts=1, ends=max):
    """``cuts``: between two ranks."""
    return (MATRICES + NORMS) / n + ends((FIRST, LAST)), 2 * A * cuts * (n - 1) / n


def looped(n):
    return pipeline(n)[0], 2 * A * (2 * n - 1) / n * (n > 1)


def in_a_v(n):
    return pipeline(n, cuts=2, ends=sum)


def context(of_layer):
    return lambda n: (WHOLE, 2 * WHOLE * share(n) + LAYERS * A * of_layer(n) * share(n))


def experts(e, k):
    def of(n):
        shared = WHOLE - EXPERT + 4 * LAYERS * e * WIDTH  # and the routers
        sent = 2 * shared * share(n) + 4 * k * LAYERS * A / n * share(n)
        return shared + e * EXPERT / n, sent

    return of


def tensors_in_stages(n):
    kept = (MATRICES / 2 + NORMS) / 2 + max(FIRST, LAST)
    return kept, tensor(2)[1] / 2 + A


def contexts_in_stages(n):
    kept = (MATRICES + NORMS) / 2 + max(FIRST, LAST)
    ring = LAYERS / 2 * A * 6 * share(2)
    # Gathered once in a step, as a pipeline's micro-batches share it, and reduce-scattered.
    return kept / 2, 2 * WHOLE / 2 * share(2) + ring + A / 2


def replicas(n):
    return WHOLE / 2, (3 * (MATRICES + NORMS) + 2 * (FIRST + LAST) + WHOLE) * share(2)


def gathered_again(of_blocks):
    """``of_blocks``: what backward gathers of each rank's blocks."""

    def of(n):
        return WHOLE / n, 2 * WHOLE * share(n) + of_blocks(n) * (MATRICES + NORMS)

    return of


THEORY = {
    f"{ND} --reshard-after-forward 2 --prefetch 1": gathered_again(lambda n: share(2)),
    f"{ND} --reshard-after-forward no": gathered_again(lambda n: 0),
    f"{ND} --keep-last --prefetch 2": gathered_again(lambda n: share(n) * (1 - 1 / LAYERS)),
    f"{ND} --dp-shard 2 --tp 2": grid,
    f"{ND} --tp 2 --pp 2": tensors_in_stages,
    f"{ND} --pp 2 --cp 2": contexts_in_stages,
    f"{ND} --dp-replicate 2 --dp-shard 2 --ac full": replicas,
    "pytorch_TP": tensor,
    "pytorch_TP --sequence-parallel": sequence,
    "pytorch_FSDP_TP --tp 2": grid,
    "pytorch_PP --pipeline-schedule gpipe": pipeline,
    "pytorch_PP --pipeline-schedule 1f1b": pipeline,
    "pytorch_PP --pipeline-schedule interleaved": looped,
    "pytorch_PP --pipeline-schedule zbv": in_a_v,
    "pytorch_PP --pipeline-schedule dualpipev": in_a_v,
    "pytorch_CP --attention ring": context(lambda n: 6),
    "pytorch_CP --attention allgather": context(lambda n: 4),
    "pytorch_CP --attention ulysses": context(lambda n: 8 / n),
    "pytorch_EP --experts 6": experts(6, 1),
    "pytorch_EP --experts 8 --top-k 2": experts(8, 2),
    "pytorch_EP --experts 4 --balance 0": experts(4, 1),
}


def by_theory(name, n):
    """Bytes per fp32 parameter of parameters, gradients and optimizer (in units of what it keeps
    for one), and what is sent; ``None`` where no formula is exact."""
    if LLAMA in name:
        return None  # the formulas are of a GPT's matrices
    if "PP" in name and LAYERS % n or "--sequence-parallel" in name and TOKENS % n > 1:
        return None  # some ranks have more
    if name in THEORY:
        kept, sent = THEORY[name](n)
        whole = THEORY[name](1)[0] if "--experts" in name else WHOLE
        return 4 * kept / whole, 4 * kept / whole, kept / whole, sent
    if name == "pytorch_Muon":  # of matrices one momentum, not two
        sent = (3 * WHOLE + 2 * MATRICES / n) * share(n)
        return 4 / n, 4 / n, (1 - MATRICES / WHOLE / 2) / n, sent
    script = name.removesuffix(" --selective")
    script = "pytorch_FSDP" if "HSDP" in script and n == 2 else script  # which is one row
    if script not in KEPT:
        return None
    kept = KEPT[script](n)
    sends = {script: table for script, ranks, table in SENT if n > 1 and ranks in (2, n)}
    sent = sum(sends.get(script, {"allreduce": 8}).values()) * share(n) / 4 * WHOLE
    return kept["parameters"], kept["gradients"], kept["state"], sent


@pytest.mark.parametrize("script, n, optimizer, model", cases(PARITY, lambda *row: row in USUAL))
def test_parity_and_bytes(script, n, optimizer, model, train, measured):
    flags = f"--max-steps 12 --optimizer {optimizer} {model}".rstrip()
    single = "pytorch_SingleGPU"
    expected, expected_result = train(single, 1, flags, hooks=REFERENCE.get(script, ""))
    weights, result = train(script, n, flags, hooks="sent")
    assert list(weights) == list(expected)
    difference = relative_difference(weights, expected)
    shared = script.split()[0] in SHARED
    row = {"script": f"{script} {model}".rstrip(), "ranks": n}
    table = "parity_shared" if shared else "parity_gpt"
    measured(table, **row, optimizer=optimizer, value=difference)
    assert difference < TOLERANCE[optimizer]
    for name in ("train_loss", "eval_loss", "eval_accuracy"):
        assert result[name] == pytest.approx(expected_result[name], rel=1e-9)
    assert result["steps"] == 12 and result["eval_samples"] == expected_result["eval_samples"]
    if not (theory := by_theory(row["script"], n)):
        return
    numbers = expected_result["state_bytes"]["parameters"] / 8
    kinds = ("parameters", "gradients", "optimizer")
    kept = [result["state_bytes"][kind] / numbers / 2 for kind in kinds]  # as of fp32
    sent = sum(result["sent"].values()) / 2
    parameters, gradients, state, sent_theory = theory
    kept_theory = [parameters, gradients, state * {"sgd": 4, "adamw": 8}[optimizer]]
    if shared and optimizer == "adamw":
        measured(
            "shared", **row, kept=sum(kept), sent=sent, kept_theory=sum(kept_theory),
            sent_theory=sent_theory, how=list(result["sent"]),
        )  # fmt: skip
    uneven = script.startswith("pytorch_DDP_ZeRO") and n > 2  # it partitions whole tensors
    close = 0.02 if ND in script else 0.05
    assert kept == pytest.approx(kept_theory, rel=0.5 if uneven else close)
    assert sent == pytest.approx(sent_theory, rel=close)


# ------------------------------------------------------------------------------------------ resume

GPIPE, ONE_F_ONE_B, INTERLEAVED, ZBV = (
    f"pytorch_PP --pipeline-schedule {name}" for name in ("gpipe", "1f1b", "interleaved", "zbv")
)
EXPERTS = "--experts 8 --top-k 2"
MESHES = [f"{ND} {mesh}" for mesh in ("--tp 2 --sequence-parallel", "--pp 2 --cp 2")]
GOES_ON = [  # a script on some ranks up to each step, and then the next; flags of all
    ([("pytorch_checkpoint --async-save", 3, 5), ("pytorch_checkpoint", 2, 12)], ""),
    ([("pytorch_HSDP --shard 2", 4, 3), ("pytorch_TP --sequence-parallel", 3, 5),
      ("pytorch_FSDP", 2, 8), ("pytorch_FSDP_TP --tp 2", 4, 10), ("pytorch_TP", 2, 12)], ""),
    ([("pytorch_DDP_ZeRO --use_zero", 2, 5), ("pytorch_FSDP_by_hand", 3, 8),
      ("pytorch_ZeRO_by_hand --stage 2", 2, 10), ("pytorch_SingleGPU", 1, 12)], ""),
    ([("pytorch_FSDP", 2, 5), (ZBV, 2, 8), (INTERLEAVED, 3, 10), (GPIPE, 2, 11),
      (ONE_F_ONE_B, 1, 12)], ""),
    ([("pytorch_FSDP", 2, 3), (MESHES[0], 4, 5), (MESHES[1], 4, 8), (ZBV, 2, 10),
      (MESHES[0], 2, 11), ("pytorch_TP", 2, 12)], ""),
    ([(MESHES[1], 4, 5), (ONE_F_ONE_B, 3, 8), (f"{ND} --pp 2 --ac full", 4, 12)], "--tie"),
    ([("pytorch_CP --attention ring", 2, 8), ("pytorch_CP --attention ulysses", 4, 12)], ""),
    ([("pytorch_EP", 2, 4), ("pytorch_EP", 4, 12)], EXPERTS),
    ([("pytorch_FSDP_offload", 1, 5), ("pytorch_FSDP", 3, 8), (ONE_F_ONE_B, 2, 12)], "--tie"),
    ([("pytorch_gradient_accumulation", 2, 5), ("pytorch_activation_checkpointing", 1, 8),
      ("pytorch_CP --attention allgather", 2, 10), ("pytorch_torchrun_DDP", 3, 12)],
     ""),
    ([(INTERLEAVED, 2, 8), ("pytorch_FSDP", 1, 10), (ZBV, 2, 12)], "--tie"),
]  # fmt: skip


def way(legs):
    return "-".join(f"{script.removeprefix('pytorch_')}:{n}" for script, n, _ in legs)


@pytest.mark.parametrize(
    "legs, model",
    [
        pytest.param(*row, id=f"{way(row[0])} {row[1]}", marks=[] if i < 9 else pytest.mark.full)
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
    assert relative_difference(weights, expected) < TOLERANCE["adamw"]
    assert result["train_loss"] == pytest.approx(expected_result["train_loss"], rel=1e-9)


SAME_BITS = [
    ("pytorch_SingleGPU", 1),
    ("pytorch_torchrun_DDP", 2),
    ("pytorch_FSDP", 2),
    ("pytorch_checkpoint --async-save", 2),
    ("pytorch_Muon", 2),
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
    (f"{ND} --tp 2 --pp 2", 4),
]
DILOCO = ("pytorch_LocalSGD --sync-every 3 --outer-momentum 0.9", 2)  # a stop would sync
STOPPED = ("pytorch_FSDP", "pytorch_TP --sequence-parallel", ZBV, "pytorch_EP --experts 4")
KILLED = ("pytorch_SingleGPU", "pytorch_torchrun_DDP", "pytorch_FSDP")
KILLED += ("pytorch_checkpoint --async-save",)
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


@pytest.mark.parametrize("script, n", cases(SAME_BITS, lambda s, n: s == "pytorch_FSDP_by_hand"))
def test_resumed_after_the_last_step_it_only_evaluates(script, n, train, tmp_path):
    """As after SIGTERM in the last step: this process computes no gradients."""
    expected, _ = train(script, n, f"--max-steps 9 {WITH_DROPOUT}")
    flags = f"{JOB} {WITH_DROPOUT} --max-steps 9 --output-dir {tmp_path}"
    stopped = launch(f"{launcher(script, n, HOOKED)} {flags}", forked=True, HOOKS="stop_at:9")
    assert stopped.code and "by SIGTERM after step 9 of 9" in str(stopped), str(stopped)
    finished = succeed(f"{launcher(script, n)} {flags} --resume auto", forked=True)
    assert "resumed from" in finished.stdout
    weights, _ = read_run(tmp_path)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("script, n", cases([*SAME_BITS, DILOCO], lambda s, n: s in KILLED))
def test_killed_it_ends_with_the_same_bits(script, n, train, tmp_path):
    """All its processes at once, without a warning, wherever they are: a checkpoint of DCP's own is
    whole when there is a second one."""
    flags = f"{WITH_DROPOUT} --max-steps 40 --snapshot-every 2"
    expected, expected_result = train(script, n, flags)
    command = f"{launcher(script, n)} {JOB} {flags} --output-dir {tmp_path}"
    with started(command, forked=True) as process:
        wait_for(lambda: len(snapshots(tmp_path)) > 1 or not process.running)
        assert process.running, str(process.end())
        process.send(signal.SIGKILL, group=True)
        process.end()
    assert snapshots(tmp_path) and not (tmp_path / "model.pt").exists()
    finished = succeed(f"{command} --resume auto", forked=True)
    assert "resumed from" in finished.stdout
    weights, result = read_run(tmp_path)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert result["train_loss"] == expected_result["train_loss"] and result["steps"] == 40
