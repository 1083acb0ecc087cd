"""estimate.py: predictions on fake tensors match the memory of real tensors."""

import json
import re

import pytest
import torch
from conftest import HOOKED, ROOT, cases, launch, launcher, succeed
from test_mistakes import PREDICTED

from estimator import allocator, fit, gpu_rules, techniques
from estimator.live_bytes import LiveBytes
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


def test_the_evaluation_has_one_peak():
    """Its second half would begin behind the blocks of a small model, as much is freed after it."""
    live = LiveBytes()
    live.kinds = ["activations", "activations"]
    live.changes = [(0, 4), (0, -4), (1, 6), (1, -6), (0, 1), (0, -1)]
    live.phases = [(0, "forward"), (2, "evaluation")]
    assert [sum(peak.values()) for peak in live.peaks()] == [4, 4, 6]


def test_every_technique_has_a_row_or_a_reason():
    for row in TECHNIQUES:
        estimated = any("estimated" in case.traits for case in row.cases)
        assert estimated != bool(row.unpredicted), row.name

    def rows_of(n):
        return {one.name.split()[0] for one in techniques.techniques_for(n, True)}

    predicted = {row.name for row in TECHNIQUES if not row.unpredicted}
    assert rows_of(16) == predicted and rows_of(4) == predicted - {"HSDP"}
    alone = rows_of(1)
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
    assert [cell for cell in row.split() if cell != "0"] == again.split()  # no column of zeros


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
    assert words in failed.refusal and failed.stderr.count("\n") <= 2  # with the start
