"""estimate.py: predictions on fake tensors match the memory of real tensors."""

import json
import re

import pytest
import torch
from conftest import HOOKED, ROOT, cases, launch, launcher, refused, succeed
from test_mistakes import PREDICTED

from estimate import gpu_of, job_of, parse_args
from estimator import allocator, fit, gpu_rules, network, recommend, tables, techniques
from estimator.live_bytes import LiveBytes
from estimator.sent import Message
from harness import flops
from jobs.gpt import GPT
from jobs.sizes import size_of_name
from techniques import TECHNIQUES, technique
from theory import decoder

IMAGES = "--model resnet18 --batch-size 32"
TEXT = "--model gpt-4x4x64 --context 64 --batch-size 16"
RUNS = [
    (f"{row.script} {case.flags}".strip(), n, job)
    for row in TECHNIQUES
    if "needs_gpt" not in row.traits and not row.unpredicted
    for case in row.cases
    for n in case.ranks
    if n in (1, 2, 4)
    for job in (IMAGES, TEXT)
]
RUNS += [("pytorch_TP_by_hand", n, TEXT) for n in (2, 4)]
RUNS += [(f"pytorch_LoRA{flags}", n, TEXT) for flags in ("", " --dtype bfloat16") for n in (2, 4)]
BITS = "QLoRA --dtype bfloat16", "low_bit_optimizer --dtype bfloat16 --bf16-weights"
RUNS += [(f"pytorch_{name}", 2, TEXT) for name in ("chunked_loss", *BITS)]
RUNS = [(*row, "") for row in RUNS]
# By hooks.route: all tokens to the first experts with 0, equally to all with 1
RUNS += [("pytorch_EP", 2, TEXT, 0), ("pytorch_EP", 2, TEXT, 1)]
RUNS += [("pytorch_EP --balance bias", 4, TEXT, 0)]
RUNS += [("pytorch_EP --ep 2 --top-k 2", 4, TEXT, step) for step in (0, 1)]
USUAL = [("pytorch_EP", 2, TEXT, 0), ("pytorch_FSDP", 2, TEXT, "")]
USUAL += [("pytorch_torchrun_DDP", 2, IMAGES, "")]


def live_bytes(start, script, flags, folder, fake_ranks="", hooks=""):
    """At the peak of a step, by kind, of each rank; or of rank 0 of so many on fake tensors."""
    command = f"{start} {HOOKED} {script} {flags} --output-dir {folder}"
    succeed(command, forked=True, HOOKS=f"{hooks} live:{fake_ranks}")
    return [json.loads(file.read_text()) for file in sorted(folder.iterdir())]


@cases("script, ranks, job, step", RUNS, lambda *row: row in USUAL)
def test_what_is_predicted_is_what_tensors_take(script, ranks, job, step, tmp_path):
    """Bytes of all tensors at the peak of a step, on the fullest rank: within 1 %."""
    name, _, flags = script.partition(" ")
    start = launcher(name, ranks).rpartition(" ")[0]
    flags = f"{flags} {job}"
    hooks = "" if step == "" else f"route:{step}"
    real = live_bytes(start, f"{name}.py", flags, tmp_path / "real", hooks=hooks)
    took = [sum(kinds.values()) for kinds in real]
    fake_ranks = "0" if start == "python" else f"{ranks}{',to_one' * (step == 0)}"
    [predicted] = live_bytes("python", f"{name}.py", flags, tmp_path / "fake", fake_ranks)
    assert len(took) == ranks
    # DeepSpeed frees a bucket when it is sent, which takes a rank longer that has no core.
    fullest = min(took) if "DeepSpeed" in script else max(took)
    assert sum(predicted.values()) == pytest.approx(fullest, rel=0.01)
    assert predicted["parameters"] and predicted["activations"]


def test_the_largest_share_of_zero_is_predicted(tmp_path):
    """ZeroRedundancyOptimizer gives the last rank the position embedding on top of its share."""
    flags = "--use_zero --optimizer adamw --model gpt-1x1x64 --context 512 --batch-size 4"
    script = "pytorch_DDP_ZeRO.py"
    start = "torchrun --standalone --nproc_per_node=4"
    real = live_bytes(start, script, flags, tmp_path / "real")
    [predicted] = live_bytes("python", script, flags, tmp_path / "fake", "4")
    states = [kinds["optimizer"] for kinds in real]
    assert states[0] < 0.6 * max(states)
    assert predicted["optimizer"] == max(states)
    assert predicted == max(real, key=lambda kinds: sum(kinds.values()))


def test_what_was_on_the_meta_device_takes_no_memory(tmp_path):
    """A variable of the script's loop is still a whole parameter, when the model has its shards."""
    flags = f"--dtype bfloat16 --bf16-weights {TEXT}"
    [found] = live_bytes("python", "pytorch_low_bit_optimizer.py", flags, tmp_path, "1")
    model = GPT([*range(65)], size_of_name("gpt-4x4x64", None, None), context=64, dropout=0)
    parameters = sum(p.numel() for p in model.parameters())
    assert found["parameters"] == 2 * parameters + 8 * 65  # code points of the characters, in int64


OF_FOUR = ["PP.py", "EP.py --top-k 2", "TP.py --sequence-parallel", "ND_parallel.py --ac full"]
OF_FOUR += [f"{name}.py --dtype bfloat16" for name in ("FSDP", "LoRA", "chunked_loss")]
OF_FOUR += ["ND_parallel.py --cp 4 --ac full --loss-chunks 5"]


@pytest.mark.full
@pytest.mark.parametrize("name", OF_FOUR)
def test_a_rank_alone_takes_what_is_predicted(name, tmp_path):
    """As measure/one_gpu.py runs it, here on a CPU; the last one, of a pipeline: within 1 %."""
    row = {"name": "row", "command": f"pytorch_{name}", "ranks": 4, "classes": 100}
    row["rank"] = 3 * ("PP" in name)
    suite = tmp_path / "suite.json"
    suite.write_text(json.dumps({"usual": {}, "job": TEXT, "cases": [row]}))
    command = f"python measure/one_gpu.py --device cpu --suite {suite} --output-dir {tmp_path}"
    succeed(command, forked=True, PYTHONPATH=str(ROOT))
    [found] = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert found["allocated"] == pytest.approx(found["predicted"], rel=0.01)


def test_below_autograd_a_cast_is_counted():
    """As in the loss of sharded logits: to() is an operation there, which may copy."""
    half = torch.zeros(100, dtype=torch.bfloat16)
    with torch.inference_mode(), LiveBytes(block=1) as live:
        casts = half.to(torch.bfloat16), half.to(torch.float32)
        assert [size for _, size in live.alive.values()] == [400], casts


def test_every_technique_has_a_row_or_a_reason():
    for row in TECHNIQUES:
        estimated = any("estimated" in case.traits for case in row.cases)
        assert estimated != bool(row.unpredicted), row.name
    rows = [techniques.techniques_for(n, True) for n in (1, 4, 16)]
    alone, four, sixteen = ({one.name.split()[0] for one in some} for some in rows)
    predicted = {row.name for row in TECHNIQUES if not row.unpredicted}
    assert sixteen == predicted and four == predicted - {"HSDP"}
    assert {"SingleGPU", "FSDP_offload", "DeepSpeed"} < alone and not alone & {"FSDP", "TP", "DP"}


def estimate(flags, code=0, through="", hooks=""):
    finished = launch(f"python {through} estimate.py {flags}", forked=True, HOOKS=hooks)
    assert finished.code == code, str(finished)
    return finished


def test_an_evaluation_needs_no_more_than_a_step():
    """With a large vocabulary it would, if it had the whole batch at once."""
    flags = "--model gpt-2x4x64 --context 128 -b 32 --classes 50000 --gpus 2 --json "
    flags += "--only torchrun_DDP,gradient_accumulation"
    rows = {row["technique"]: row["peak"] for row in json.loads(estimate(flags).stdout)}
    assert rows["gradient_accumulation --accumulate 4"] < 0.35 * rows["torchrun_DDP"]


@pytest.mark.full
def test_a_row_for_each_technique():
    """As a program reads it, and that the sum is made of its parts."""
    flags = f"{IMAGES} --gpus 2 --json --memory 8 --only SingleGPU,DDP_ZeRO,FSDP"
    rows = {row["technique"]: row for row in json.loads(estimate(flags).stdout)}
    single, zero, fsdp, half = rows.values()
    assert [*rows][2:] == ["FSDP", "FSDP --dtype bfloat16"] and single["technique"] == "SingleGPU"
    for row in rows.values():
        assert row["fits"] and row["peak"] == sum(row["kinds"].values())
    parameters = 11_181_642  # of ResNet-18 with ten classes
    assert single["kinds"]["parameters"] == pytest.approx(4 * parameters, rel=0.01)
    assert fsdp["kinds"]["parameters"] == pytest.approx(2 * parameters, rel=0.01)
    assert single["sent"] == 0 and fsdp["sent"] == pytest.approx(6 * parameters, rel=0.1)
    assert half["peak"] < 0.9 * fsdp["peak"]
    sent = zero["sent_in"]  # after the step, where nothing hides it
    assert sent["forward"] == 0 and sent["update"] == pytest.approx(sent["backward"] / 2, rel=0.01)


def test_what_rows_keep_of_the_optimizer():
    """As the one list of techniques has it, in units of what one process keeps."""
    flags = "--model gpt-2x2x128 --context 16 -b 32 --gpus 16 --json --only SingleGPU,LocalSGD"
    flags += ",DDP_ZeRO,HSDP,ZeRO_by_hand,Muon"
    rows = {row["technique"]: row for row in json.loads(estimate(flags).stdout)}
    options = {"optimizer": "adamw", "use_zero": True, "stage": 2, "shard": 8, "sync_every": 3}
    options |= {"outer_lr": 1, "outer_momentum": 0, "decoder": decoder(2, 128, 65, 16, 32)}
    assert len(rows) == 7  # Muon's bfloat16 is one
    whole = rows["SingleGPU"]["kinds"]["optimizer"]
    for name, row in rows.items():
        of_row = options | ({} if "HSDP" in name else {"shard": 16})
        n = 1 if name == "SingleGPU" else 16
        theory = technique(name.split()[0]).keeps(n, of_row)["optimizer"] / 8
        # Small tensors take a block each; ZeroRedundancyOptimizer does not shard a tensor at all.
        most = 3 if "DDP_ZeRO" in name else 1.5
        assert 0.8 < row["kinds"]["optimizer"] / whole / theory < most, name


def test_what_a_table_says():
    """Sizes that nobody gave, and what is spared; no column of zeros; a batch that four GPUs cannot
    divide, but one need not."""
    flags = "--model resnet18 -b 10 --gpus 4 --only SingleGPU,auto_mixed_precision --memory H100"
    first, _, how, _, heads, *rows, _, fits = estimate(flags).stdout.splitlines()
    assert first == "resnet18, images of 32x32, global batch 10:" and how.startswith("sgd, in fl")
    assert heads.split() == "GPUs peak weights grads optim activ input temp fits".split()
    assert len(rows) == 2 and re.search(r"  1 +0\.\d\d +\d+M .* yes$", rows[0])
    assert fits.startswith("fits 79.1 GiB with 5.5 GiB reserved: SingleGPU, auto_mixed_precision")
    for only, notes in (("DDP_by_hand", 0), ("torchrun_DDP,FSDP", 1)):
        text = estimate(f"{TEXT} --gpus 2 --only {only}").stdout
        assert len(re.findall(r"plain DDP\(model\) holds its gradients\ntwice, wh", text)) == notes


@pytest.mark.full
def test_the_page_shows_what_is_printed():
    """One row of the table in docs/estimate.md, predicted once more."""
    page = (ROOT / "docs/estimate.md").read_text()
    flags = re.search(r"python estimate\.py (.* --memory 24)", page)[1]
    row = re.search(r"^torchrun_DDP .*$", page, re.M)[0]
    printed = estimate(f"{flags} --only torchrun_DDP").stdout
    again = re.search(r"^torchrun_DDP .*$", printed, re.M)[0]
    cells, same = ([c for c in one.split() if c != "0"] for one in (row, again))
    assert cells == same  # a column of zeros is not printed


def test_reserved_memory_follows_the_allocators_rules():
    """In MiB: no stream uses what is free on another; an expandable segment grows at its end."""
    for expandable, after in ((False, [10, 20, 40, 70]), (True, [20, 20, 40, 60])):
        simulated = allocator.Allocator(expandable)
        reserved = []
        for number, (size, stream) in enumerate([(10, 0), (10, 0), (9, 1), (30, 0)]):
            simulated.take(number, size * 2**20, stream)
            reserved.append(simulated.reserved // 2**20)
            if number == 1:
                simulated.give_back(1)
        assert reserved == after


def test_operations_keep_what_a_gpus_keep():
    """Models and single operations, in fp32, in half precision and with autocast."""
    found = json.loads(succeed("python tests/compare_gpu.py", forked=True).stdout)
    assert len(found) > 150
    differ = {name: sides for name, sides in found.items() if sides["gpu"] != sides["told"]}
    assert not differ


def test_all_that_cudas_autocast_casts_is_known():
    """But for cuDNN's own, which nobody calls by name, one that it refuses, and a rare one."""
    listed = {f"aten::{name}" for names in gpu_rules.autocast_lists().values() for name in names}
    on_gpus = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    others = {n for n in set(on_gpus) - listed if n.startswith("aten::") and "cudnn" not in n}
    assert others - {"aten::linalg_matrix_sqrth"} == {"aten::binary_cross_entropy"}


def test_the_largest_batch():
    """Found where memory grows as a line, a step or not at all, each time by few trials."""
    shapes = {"line": lambda n: 10 + 3 * n, "bend": lambda n: 10 + 3 * n + max(0, n - 50)}
    shapes |= {"step": lambda n: 10 + 100 * (n // 7), "too much": lambda n: 5000 + n}
    for shape, takes in shapes.items():
        search = fit.trials(memory=1000)
        tried = []
        with pytest.raises(StopIteration) as end:
            tried.append(next(search))
            while True:
                tried.append(search.send(takes(tried[-1])))
        best = max((n for n in range(2, 1000) if takes(n) <= 1000), default=0)
        assert end.value.value == best and len(tried) < 12, shape


OFFLOADS = "--only 'activation_checkpointing --offload' --host-memory 0.02"
JOBS = ["--model resnet18 --only torchrun_DDP", f"--model gpt-4x4x64 --context 64 {OFFLOADS}"]


@pytest.mark.full
@pytest.mark.parametrize("job", JOBS)
def test_fit_names_the_largest(job):
    """In the memory of the GPU, and of the CPU."""
    job += " --gpus 2 --memory 2 --spare 1.5"
    batch = int(re.search(r"\S+\s+2\s+(\d+)\s", estimate(f"{job} --fit").stdout)[1])
    estimate(f"{job} -b {batch}")
    estimate(f"{job} -b {batch + 2}", code=2)


def test_a_row_that_fails_leaves_the_others():
    """The names are those of the table; a value of the user's replaces the row's; ranks that split
    the model do not divide the batch."""
    flags = f"{TEXT} -b 4 --gpus 8 --tp 2 --ac selective --host-memory 1 --memory 1 --spare 0"
    nd = "ND_parallel --dtype bfloat16 --ac selective"
    lines = estimate(f"{flags} --only 'FSDP,{nd}'").stdout.splitlines()
    assert lines[0].endswith("global batch 4 = 4 x 1:")
    [ac] = [line for line in lines if line.startswith(f"{nd} ")]
    assert ac.endswith("yes") and not any("--ac full" in line for line in lines)
    [fsdp] = [line for line in lines if line.startswith("FSDP   ")]
    assert "--tp" in fsdp or "--batch-size 4" in fsdp


@cases("flags, words", PREDICTED, lambda flags, _: "resnet19" in flags)
def test_a_mistake_is_one_line(flags, words):
    failed = estimate(flags, code=2)
    assert words in failed.refusal and failed.stderr.count("\n") == 1


# ------------------------------------------------------------------------------ how long it takes
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


def test_the_evaluation_has_one_peak():
    """Its second half would begin behind the blocks of a small model, as much is freed after it."""
    live = LiveBytes()
    live.kinds = ["activations", "activations"]
    live.changes = [(0, 4), (0, -4), (1, 6), (1, -6), (0, 1), (0, -1)]
    live.phases = [(0, "forward"), (2, "evaluation")]
    assert [sum(peak.values()) for peak in live.peaks()] == [4, 4, 6]


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
    text = estimate(f"{SMALL} -b 1 --gpus 1 --memory 0.003 --spare 0 --recommend").stdout
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


def job_for(words):
    args, flags = parse_args([*words.split(), "--recommend"])
    return args, job_of(args, flags)


def test_an_unknown_flag_is_not_tried_with_other_meshes(monkeypatch):
    one = techniques.Prediction(None, 8, mistake="unrecognized: --dtpe (--help lists the flags)")
    monkeypatch.setattr(techniques, "predict_all", lambda *_: [one])
    _, job = job_for("--model gpt2 --memory 24")
    with refused("--dtpe"):
        next(recommend.predict(job, [], 1))


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
