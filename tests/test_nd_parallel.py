"""Every pair of dimensions on four ranks, every triple on eight, four on 16 and all five on 32 end
with the weights of the single process. (PyTorch's private LocalTensorMode computes all ranks in one
process, but no pipelines, ring attention or uneven shards; a model built outside has wrong weights,
silently.)"""

import itertools
import json

import pytest
import torch
from conftest import HOOKED, cases, launcher, relative_difference, run_program, succeed
from contract_cases import PACKED, TOLERANCE

from report import matrix

JOB = "--context 16 --dataset synthetic --train-samples 64 --eval-samples 20 --batch-size 16"
JOB += " --epochs 9 --max-steps 6 --warmup-steps 3 --clip-grad 0.5 --double"
MODELS = {"gpt": "--model gpt-2x4x16", "llama": "--model llama-2x4x16 --kv-heads 2"}
MIXTURES = {  # with norms of queries and keys; by a loss, but for micro-batches by a bias
    "mixture": "--model qwen3moe-2x4x16 --kv-heads 2 --experts 4",
    "biased": "--model qwen3moe-2x4x16 --kv-heads 2 --experts 4 --balance bias",
}
DIMENSIONS = {"replicate": "--dp-replicate 2", "shard": "--dp-shard 2"}
DIMENSIONS |= {name: f"--{name} 2" for name in ("tp", "pp", "cp")}
PAIRS, TRIPLES, *LARGE = ([*itertools.combinations(DIMENSIONS, n)] for n in (2, 3, 4, 5))
ALL = "--sequence-parallel --tie --accumulate 2 --ac full"
EXTRAS = ["", "--ac full", "--ac selective", "--accumulate 2", "--tie", "--sequence-parallel", ALL]
RARE = ["--offload", "--compile", "--packed --attention allgather"]
ON_CPU = "--ac full --offload-activations"
LONG = f"{ON_CPU} --loss-chunks 5"  # a million tokens: 5 does not divide the tokens of a rank


def rows():
    """Of a pair all, of a triple what can differ: its model and one extra in turn; of more one."""
    for pair, model, optimizer, extra in itertools.product(PAIRS, MODELS, TOLERANCE, EXTRAS):
        if "--sequence-parallel" not in extra or "tp" in pair:
            yield "+".join(pair), model, optimizer, extra
    for pair, extra in itertools.product(PAIRS, RARE):
        yield "+".join(pair), "gpt", "adamw", extra
    for triple, model, optimizer in itertools.product(TRIPLES, MODELS, TOLERANCE):
        for extra in ("", ALL):
            if "tp" not in triple:
                extra = extra.replace("--sequence-parallel ", "")
            yield "+".join(triple), model, optimizer, extra
    for pair, optimizer in itertools.product(PAIRS, TOLERANCE):
        attentions = ["ring"]
        if "cp" in pair:  # with tp, a rank has one head of keys, which ulysses cannot divide
            attentions += ["allgather"] if "tp" in pair else ["allgather", "ulysses"]
        for attention in attentions:
            extra = f"{ON_CPU if 'pp' in pair else LONG} --attention {attention}"
            yield "+".join(pair), "llama", optimizer, extra
        if "pp" not in pair:
            yield "+".join(pair), "gpt", optimizer, f"{LONG} --tie --accumulate 2 --offload"
    yield "shard+cp", "mixture", "adamw", f"{LONG} --ep 2"
    yield "tp+cp", "llama", "adamw", f"{ON_CPU} --sequence-parallel"
    yield "shard+cp", "gpt", "adamw", f"{LONG} --packed --attention allgather"
    for some in PAIRS + TRIPLES:
        if {"shard", "cp"} & set(some):
            yield "+".join(some), "mixture" if "pp" not in some else "biased", "adamw", "--ep 2"
            extra = "--ep 2 --sequence-parallel" if "tp" in some else "--ep 2"
            yield "+".join(some), "biased", "adamw", f"{extra} --accumulate 2 --ac full"
    for many in itertools.chain(*LARGE):
        yield "+".join(many), "llama", "adamw", ALL if "tp" in many else ""


def combined(dimensions, extra):
    return " ".join([*(DIMENSIONS[name] for name in dimensions.split("+")), extra]).strip()


# The contract has another pair.
USUAL = [("shard+pp", "biased", "adamw", "--ep 2 --accumulate 2 --ac full")]


@cases("dimensions, model, optimizer, extra", [*rows()], lambda *row: row in USUAL)
def test_parity(dimensions, model, optimizer, extra, train):
    if extra == "--compile" and torch.__version__ < "2.13":
        pytest.skip("pytorch#185539: compiled attention in float64")
    n = 2 ** len(dimensions.split("+"))
    flags = combined(dimensions, extra)
    job = f"{(MODELS | MIXTURES)[model]} --optimizer {optimizer}"
    job += "".join(f" {flag}" for flag in ("--tie", "--packed") if flag in extra)
    expected, expected_result = train("pytorch_SingleGPU", 1, job)
    given = f"{job} {flags.replace('--tie', '').replace('--packed', '')}"
    weights, result = train("pytorch_ND_parallel", n, given)
    assert list(weights) == list(expected)
    assert relative_difference(weights, expected) < TOLERANCE[optimizer]
    for name in ("train_loss", "eval_loss", "eval_accuracy"):
        assert result[name] == pytest.approx(expected_result[name], rel=1e-9)


def test_what_the_matrix_calls_proven():
    """Each command is a case of this test, or of the contract's."""
    tested = {f"pytorch_ND_parallel {combined(row[0], row[-1])}" for row in rows()}
    tested |= {f"{row.script} {case.flags}" for row, case in PACKED}
    assert {*matrix.COMBINED} <= tested
    assert ("EP", "CP") in matrix.pairs(tested) and ("compile", "LoRA") not in matrix.pairs(tested)


@pytest.mark.full
def test_weights_kept_between_forward_and_backward(tmp_path):
    """In backward, of 8 blocks: all, or half of each, and two gathered: the last, and the one
    prefetched. In the evaluation and the forward, versions of PyTorch differ."""
    job = "--model gpt-8x4x64 --context 8 --dataset synthetic --train-samples 96 --eval-samples 24 "
    job += "--batch-size 4 --epochs 1 --max-steps 3 --optimizer sgd"
    block = 4 * (12 * 64**2 + 4 * 64)
    peaks = {}
    for kept in ("no", "2"):
        command = launcher("pytorch_ND_parallel", 4, HOOKED)
        command += f" {job} --reshard-after-forward {kept} --output-dir {tmp_path / kept}"
        succeed(command, forked=True, HOOKS="live:backward")
        peaks[kept] = json.loads((tmp_path / kept / "rank0.json").read_text())["temporary"]
    saved = (peaks["no"] - peaks["2"]) / block  # one peak is a block later: other temporaries
    assert saved == pytest.approx(8 - (8 / 2 + 2), abs=0.15)


GATHER = """
from harness.measure import peak_memory_gib, reset_peak_memory
from parallel.mesh import gather_weights

rank, cpu, model = dist.get_rank(), torch.device("cpu"), torch.nn.Module()
for n in range(8):
    value = torch.full((2**20,), rank, dtype=torch.float64)
    model.register_parameter(f"{rank}-{n}", torch.nn.Parameter(value))
dist.barrier()
reset_peak_memory(cpu)
before = peak_memory_gib(cpu)["process"]
weights = gather_weights(model, STAGES)
more = peak_memory_gib(cpu)["process"] - before
if rank == 0:
    values = {name: tensor.unique().tolist() for name, tensor in weights.items()}
    print(json.dumps([more, values]))
dist.barrier()
"""


@pytest.mark.parametrize("stages", [1, 2])
def test_rank_0_gathers_one_copy_of_the_weights(stages, tmp_path):
    """Beside its own, which are 64 MiB here, it has what other stages have; of no tensor a second
    copy, as gather_object would need several."""
    program = GATHER.replace("STAGES", str(stages))
    [[more, values]] = run_program(program, 2, tmp_path).lists
    assert values == {f"{stage}-{n}": [stage] for stage in range(stages) for n in range(8)}
    assert more < (stages - 1) / 16 + 0.02
