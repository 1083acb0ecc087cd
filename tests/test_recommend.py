"""estimate.py: how long messages take, and what it recommends."""

import json
import re

import pytest
from conftest import HOOKED, ROOT, refused, succeed
from test_estimate import TEXT, estimate, live_bytes

from estimate import gpu_of, job_of, parse_args
from estimator import network, recommend, tables, techniques
from estimator.sent import Message
from harness import flops


def test_seconds_of_a_message(tmp_path):
    """By the formulas of Thakur et al., worked out by hand. A link that was measured gives back, at
    the swept number of ranks, what was fitted."""
    links = network.link_of("1000,1")  # a millisecond, 1 GB/s
    for kind, ranks, expected in (
        ("allreduce", 1, 0),
        ("allreduce", 2, 0.002 + 1.0),
        ("allreduce", 4, 0.006 + 1.5),  # a ring, as the tree takes 2 * (2 ms + 1 s)
        ("allgather", 4, 0.003 + 0.75),
        ("reduce_scatter", 4, 0.003 + 0.75),
    ):
        found = network.seconds(Message(kind, 10**9, ranks), links)
        assert found == pytest.approx(expected), (kind, ranks)
    small = network.seconds(Message("allreduce", 1000, 1024), links)
    assert small == pytest.approx(2 * (10 * 0.001 + 1e-6))  # a tree
    names = "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"
    operations = {name: {"latency": 4e-4, "bandwidth": 1e9} for name in names}
    sweep = {"ranks": 2, "operations": operations}
    (tmp_path / "collectives.json").write_text(json.dumps(sweep))
    links = network.link_of(f"{tmp_path}/collectives.json")
    assert network.seconds(Message("allreduce", 10**6, 2), links) == pytest.approx(4e-4 + 1e-3)
    assert network.seconds(Message("allgather", 10**6, 2), links) == pytest.approx(4e-4 + 5e-4)


def test_what_overlaps_is_not_waited_for():
    links = network.link_of("0,1")
    kinds = ("allreduce", "temporary"), ("broadcast", "update")
    messages = [Message(kind, 10**9, 2, phase) for kind, phase in kinds]
    assert network.waiting(messages, 3.0, links) == pytest.approx((0.5, 1.5))
    assert network.waiting(messages, 0.75, links) == pytest.approx((1.0, 1.5))


def test_messages_between_two_numbers_of_ranks():
    """The same collectives, whose padding grows with the ranks; or one for each rank."""
    few, many = ([Message("allgather", size, n)] for size, n in ((1000, 2), (2022, 1024)))
    [found] = network.between(few, many, 512)
    assert found == Message("allgather", 1510, 512)
    each = [[Message("broadcast", 2048 // n, n)] * n for n in (2, 1024)]
    assert network.between(*each, 256) == [Message("broadcast", 8, 256)] * 256
    assert network.extrapolate(few, [*few, found], times=2) == [*few, found, found]


@pytest.mark.full
def test_shares_of_a_step():
    """By number of ranks; with a faster link, or more to compute, they are smaller."""
    job = f"{TEXT} --gpus 2 --scale --only torchrun_DDP --json --step-ms"
    runs = [f"{job} 20 --link eth25", f"{job} 20 --link nvlink4", f"{job} 200 --link eth25"]
    slow, fast, long = (json.loads(estimate(run).stdout)["torchrun_DDP"] for run in runs)
    assert list(slow) == [str(2**k) for k in range(1, 11)]
    for n in slow:
        for least, most in (slow[n], fast[n], long[n]):
            assert 0 <= least <= most < 1
        assert fast[n][1] < slow[n][1] and long[n][1] < slow[n][1]
    assert slow["2"][1] < slow["1024"][1]


# ------------------------------------------------------------------------------- --recommend
SMALL = "--model llama-8x4x64 --kv-heads 2 --context 64"


@pytest.fixture(scope="module")
def recommended():
    flags = "--model llama-4x4x64 --kv-heads 2 --context 64 -b 8 --gpus 2 --memory 0.01 --spare 0"
    text = estimate(f"{flags} --recommend").stdout
    commands = re.findall(r"^   torchrun --standalone --nproc_per_node=2 (\S+) (.*)$", text, re.M)
    assert 3 <= len(commands) <= 5 and len(set(commands)) == len(commands)
    return commands


@pytest.mark.full
@pytest.mark.parametrize("number", range(3))
def test_what_is_recommended_runs_and_takes_what_is_predicted(number, recommended, tmp_path):
    """The commands as they are printed, on real ranks: bytes of all tensors at the peak of a step
    are within 2 % of those of the same rank on fake tensors."""
    start = "torchrun --standalone --nproc_per_node=2"
    real, *_ = live_bytes(start, *recommended[number], tmp_path / "real")
    [predicted] = live_bytes("python", *recommended[number], tmp_path / "fake", 2)
    assert sum(predicted.values()) == pytest.approx(sum(real.values()), rel=0.02)


def test_offload_is_recommended_where_only_activations_fit():
    """Weights, gradients and optimizer state take 5 MiB, of 3."""
    finished = estimate(f"{SMALL} -b 1 --gpus 1 --memory 0.003 --spare 0 --recommend")
    assert finished.stderr.startswith("predicting the best of "), "silent until it ends"
    text = finished.stdout
    [kinds] = re.findall(r"^1\. one GPU, offload: peak .* MiB \((.*)\)$", text, re.M)
    assert "activ" in kinds and not re.search("weights|grads|optim", kinds)
    assert "keeps 6.2 MiB per GPU in CPU memory" in text


LARGE = ["FSDP", "TP,activation_checkpointing", "ND_parallel --tp 2 --sequence-parallel"]
LARGE += ["ND_parallel --cp 4 --ac full --offload-activations --loss-chunks 40"]  # more than blocks


@pytest.mark.full
@pytest.mark.parametrize("only", LARGE)
def test_a_large_model_is_predicted_by_two_small_ones(only):
    """Of ten blocks by four and six: to the byte of what ten take."""
    flags = f"--model llama-10x4x64 --context 64 --gpus 4 -b 8 --json --only {only}"
    rows = json.loads(estimate(flags).stdout)
    few = techniques.few_blocks
    assert few(14) == ([4, 6], 5) and few(8) == ([], 0) and few(15) == ([5, 7], 5)
    whole = json.loads(estimate(flags, through=HOOKED, hooks="all_blocks").stdout)
    assert [row["kinds"] for row in rows] == [row["kinds"] for row in whole]
    assert [row["sent"] for row in rows] == [row["sent"] for row in whole]


MANY_PARTS = """
from estimate import job_of, parse_args
from estimator import recommend

words = "--model llama-2x4x64 --context 64 -b 64 --gpus 2 --memory 24 --recommend"
job = job_of(*parse_args(words.split()))
ways = [way for way in recommend.ways_of(job, 2) if way.accumulate == 16 and way.ac == "full"]
few = list(recommend.predict(job, ways, 2))
recommend.PARTS = 16, 16
for one, whole in zip(few, recommend.predict(job, ways, 2), strict=True):
    print(one.technique.describe())
    for name in ("technique", "kinds", "host", "sent"):
        assert getattr(one, name) == getattr(whole, name), name
"""


@pytest.mark.full
def test_a_batch_in_many_parts_is_predicted_by_few(tmp_path):
    """To the byte of what all parts take and send."""
    program = tmp_path / "program.py"
    program.write_text(MANY_PARTS)
    finished = succeed(f"python {program}", PYTHONPATH=str(ROOT))
    tried = " ".join(finished.lines)
    assert all(name in tried for name in ("DDP 2", "FSDP 2", "TP 2", "CP 2", "offload"))


def job_for(words):
    args, flags = parse_args([*words.split(), "--recommend"])
    return args, job_of(args, flags)


def test_an_unknown_flag_is_not_tried_with_other_meshes(monkeypatch):
    one = techniques.Prediction(None, 8, mistake="unrecognized: --dtpe (--help lists the flags)")
    monkeypatch.setattr(techniques, "predict_all", lambda *_: iter([one]))
    _, job = job_for("--model gpt2 --memory 24")
    with refused("--dtpe"):
        next(recommend.predict(job, [*recommend.ways_of(job, 1)][:1], 1))


def cost(ranks, **dimensions):
    """Overhead and communication of a GPT of 85 M parameters, at two sequences per H100. A speed
    only if ratios of published ones were met."""
    task = "--model gpt-12x12x768 --context 1024 --memory H100"
    args, job = job_for(f"{task} -b {2 * ranks} --gpus {ranks}")
    way = recommend.Way("ND_parallel", (), ranks=ranks, steps=1, **dimensions)
    speeds = recommend.speed_of(job, way, args.link)
    assert (0 < speeds[0] < speeds[1]) if way.compared else not speeds
    assert way.compared != bool({"tp", "pp", "cp", "offload"}.intersection(dimensions))
    return recommend.cost_of(job, way, args.link)


def test_what_compute_hides_costs_nothing():
    """FSDP's collectives overlap with compute. Those of tensor parallelism do not, and a pipeline
    is idle. Between equal overheads, less communication decides."""
    overhead, sent = cost(8, shard=8)
    assert overhead == 0 < sent
    assert cost(8, shard=4, tp=2)[0] > 0 and cost(8, shard=4, pp=2, microbatches=4)[0] > 0
    assert cost(8, shard=4, cp=2)[0] > 0 and cost(8, shard=8, ac="full")[0] > 0
    assert cost(64, shard=8, replicate=8) < cost(64, shard=4, replicate=8, tp=2)


def test_groups_on_several_machines():
    """All ranks of a machine send at once, over a link of each; groups with one rank on each
    machine have one. Of hops in a ring, one in eight leaves the machine."""
    inside = network.LINKS["nvlink4"]
    between = network.Link(10e-6, 50e9)
    assert network.mean_link(1, inside, between) == between
    found = network.mean_link(8, inside, between)
    assert found.bandwidth == 400e9 and found.latency == pytest.approx((10e-6 + 7 * 3.4e-6) / 8)
    assert network.mean_link(8, inside, network.Link(0, 100e9)).bandwidth == inside.bandwidth


FIRST = {  # that fits by theory, as docs/parallelism.md answers its first questions
    "--model gpt-12x12x768 --context 1024 -b 16 --gpus 8": "DDP 8",
    "--model gpt-12x12x768 --context 1024 -b 128 --gpus 64 --link ib400": "DDP 64",
    "--model llama3.2-1b --context 4096 -b 16 --gpus 8": "DDP 8",
    "--model llama3.2-1b --context 4096 -b 128 --gpus 64 --link ib400": "DDP 64",
    "--model llama3-8b --context 8192 -b 16 --gpus 8": "FSDP 8, gradient accumulation 2",
    "--model llama3-8b --context 8192 -b 8192 --gpus 4096 --link ib400": "HSDP",
    "--model llama3-70b --context 8192 -b 128 --gpus 64 --link ib400": "FSDP 64, activation",
}


@pytest.mark.parametrize("words", FIRST)
def test_the_simplest_of_equal_combinations_is_first(words):
    args, job = job_for(f"{words} --memory H100")
    room = tables.room_of(args)
    ways = recommend.ways_of(job, args.gpus)
    ways = [way for way in ways if recommend.kept_at_least(job, way) <= room]
    first = recommend.in_order(job, ways, args.link)[0]
    assert first.describe().startswith(FIRST[words])
    assert first.launch((), 8).startswith("torchrun --standalone") == (args.gpus == 8)


@pytest.mark.parametrize("given, gpu", [("A10G", "A10G"), ("a10", "A10"), ("24", "H100")])
def test_the_speed_is_that_of_the_gpu_named(given, gpu):
    """Also if another has as much memory. A number names none. Values may follow an equals sign."""
    words = "--model gpt-12x12x768 --gpus 1 -b 1 --dtype=float32 --optimizer=sgd"
    args, job = job_for(f"{words} --memory {given}")
    assert job.bytes == 4 and job.optimizer == "sgd"
    name, how = gpu_of(args)
    assert name == gpu and job.flops == 1e12 * flops.GPUS[gpu]["half"]
    assert ("names no GPU" in how) == (given == "24")
