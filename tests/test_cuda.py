"""Code paths for GPUs, run without a GPU: fake_gpu.py lists what is simulated."""

import argparse
import json
import re
from types import SimpleNamespace

import pytest
import torch
import torchvision
from conftest import ONE_PROCESS, cases, succeed
from fake_gpu import GIB, FakeCuda

import common
import harness.world
from harness import clock, result
from harness.data import TaskData
from jobs import classifiers, images

# 16 steps in two epochs, with snapshots after steps 6 and 12, and a warm-up that ends after 10.
JOB = "--dataset synthetic --train-samples 192 --eval-samples 96 --batch-size 24 --epochs 2 "
JOB += "--model small_resnet --image-size 32 --print-freq 5 --snapshot-every 6"

FP32, FP16, BF16 = "float32", "float16", "bfloat16"
STAGE_2 = "--deepspeed_config config/zero_stage2_config.json"
USUAL = [
    "pytorch_half_precision --dtype bfloat16 --master-weights",
    "pytorch_auto_mixed_precision --clip-grad 1",
    "pytorch_DP --dtype bfloat16",
    "pytorch_torchrun_DDP",
    "pytorch_LocalSGD --sync-every 2 --outer-momentum 0.9",
    "pytorch_FSDP --dtype bfloat16",
    "pytorch_DDP_ZeRO --use_zero",
    "pytorch_DDP_AMP --clip-grad 1",
    "pytorch_activation_checkpointing",
    "pytorch_FSDP_by_hand",
]
MORE = [  # whose branches are those of other rows
    "pytorch_SingleGPU",
    "pytorch_half_precision --dtype float16",
    "pytorch_auto_mixed_precision --dtype bfloat16",
    "pytorch_DP",
    "pytorch_DP --dtype float16",
    "pytorch_DDP",
    "pytorch_FSDP",
    "pytorch_FSDP --optimizer adamw",
    "pytorch_DDP_AMP --dtype bfloat16",
    "pytorch_gradient_accumulation --accumulate 2",
    "pytorch_comm_hooks --comm-hook fp16",
    "pytorch_comm_hooks --comm-hook bf16",
    "pytorch_comm_hooks --comm-hook powersgd",
    f"pytorch_DeepSpeed {STAGE_2}",
    "pytorch_HSDP --shard 2",
    "pytorch_DDP_by_hand",
    "pytorch_ZeRO_by_hand --stage 2",
]
FSDP = ("pytorch_FSDP", "pytorch_FSDP --dtype bfloat16", "pytorch_HSDP --shard 2")


def command(script, flags, output):
    name, _, own = script.partition(" ")
    return f"python tests/fake_gpu.py {name}.py {own} {JOB} {flags} --output-dir {output}"


def rank_of(world_size, local_rank):
    """The first rank, which writes the files, but not on the first GPU."""
    return {
        "RANK": "0",
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
    }


def pretend(script, output, **env):
    """Train on fake GPUs; what was noted, and the result."""
    forked = "DeepSpeed" not in script  # a server has imported it for the CPU
    finished = succeed(command(script, "--device cuda", output), forked=forked, **env)
    assert not finished.our_warnings
    files = [output / name for name in ("log.json", "result.json")]
    seen, result = (json.loads(path.read_text()) for path in files)
    return SimpleNamespace(**seen), result


def dtype_of(script):
    """In what it computes convolutions: half precision is float16 by default, on a GPU."""
    if named := re.search(r"--dtype (\w+)", script):
        return named[1]
    return FP16 if "mixed_precision" in script or "AMP" in script else FP32


@pytest.mark.parametrize("script", cases([(s,) for s in USUAL + MORE], USUAL.__contains__))
def test_the_branches_of_a_gpu(script, tmp_path):
    dtype = dtype_of(script)
    alone = script.split()[0] in ONE_PROCESS
    gpu = "cuda:0" if alone else "cuda:3"
    gpus = [f"cuda:{i}" for i in range(4)] if "_DP" in script else [gpu]
    seen, result = pretend(script, tmp_path, **({} if alone else rank_of(4, 3)))
    check_begin(seen.log, alone, gpu)
    check_tensors(seen, script, dtype, gpus, gpu)
    check_copies(seen.log, 24 if alone else 6)
    check_clock(seen.log, gpus, gpu)
    check_phases(seen.log, script)
    waits = [name for name, *_ in seen.log].count("synchronize")
    assert waits == (6 if "powersgd" in script else 0)  # PyTorch's hook, in the steps after ten
    check_result(result, dtype, 1 if alone else 4, gpus)
    assert seen.precision == "high"


def check_begin(log, alone, gpu):
    """The GPU is chosen before the group is made, and both come before any tensor is on it."""
    if alone:
        assert not {"set_device", "init_process_group"} & {name for name, *_ in log}
    else:
        assert log[:2] == [["set_device", gpu], ["init_process_group", "nccl", gpu]]


def check_tensors(seen, script, dtype, gpus, gpu):
    """Where model and batches are, and in what the operations compute."""
    weights = dtype if "half_precision" in script and "master" not in script else FP32
    [model] = [entry[1:] for entry in seen.log if entry[0] == "model"]
    assert model == [f"{weights} on {gpu}"]
    batches = [entry[1:] for entry in seen.log if entry[0] == "step"]
    kind = dtype if "half_precision" in script else FP32
    assert batches == 16 * [[gpu, f"torch.{kind}", "channels last: True", gpu]]
    of = {name: set() for name, *_ in seen.computed}
    for name, where, kind, _ in seen.computed:
        of[name].add((where, kind))
    norms = {kind for name, *_, kind in seen.computed if "batch_norm" in name}
    assert norms == {weights}, "theirs, whatever the input is"
    kinds = {dtype, FP32} if "master" in script else {dtype}  # with which it evaluates
    assert of["convolution"] == of["addmm"] == {(where, kind) for where in gpus for kind in kinds}
    autocast = "mixed_precision" in script or "AMP" in script  # the loss's kernel casts by itself
    loss = dtype if autocast else FP32
    assert of["_log_softmax"] == {(gpu, loss), (gpu, "float64")}  # in training, in evaluation
    sent = {kind[6:] for _, _, kind in (e for e in seen.log if e[0] == "all_reduce")}
    hook = {"fp16": {FP16}, "bf16": {BF16}}.get(script.split()[-1], set())
    assert sent & {FP16, BF16} == hook
    steps = {name: kinds for name, kinds in of.items() if name.startswith("_fused")}
    if script.endswith("adamw"):
        assert steps == {"_fused_adamw_": {(gpu, FP32)}}
    elif script in FSDP or "DeepSpeed" in script:  # none for DTensors; DeepSpeed's never comes
        assert steps == {}
    else:
        assert steps == {"_fused_sgd_": {(gpu, weights)}}


def check_copies(log, batch_size):
    """Images are sent once. After that a step sends numbers, and fetches none between prints."""
    images = [e[3] for e in log if e[0] == "to cuda" and e[2] == "torch.uint8" and "32" in e[3]]
    assert images == ["[192, 3, 32, 32]", "[96, 3, 32, 32]"]
    first, last = log.index(["epoch"]), log.index(["end of epoch"])
    sent = [entry[2:] for entry in log[first:last] if entry[0] == "to cuda"]
    index, crops = ["torch.int64", f"[{batch_size}]"], ["torch.int64", f"[{batch_size}, 3]"]
    assert sent.count(index) == sent.count(crops) == 8
    assert not [what for what in sent if what not in (index, crops) and what[1].count(",") > 1]
    step, waits = 0, set()
    for name, *what in log[first:last]:
        step += name == "step"
        if name == "to cpu" and what != ["torch.int32"]:  # a vote: to pinned memory, read later
            waits.add(step)
    assert waits == {0, 5, 6}  # before the first, at the print and at the snapshot


def check_clock(log, gpus, gpu):
    """Events are on the stream that computes; memory is of the steps alone."""
    words = {"reset_peak_memory_stats": "reset", "max_memory_allocated": "read"}
    happened = []
    for name, *what in log:
        if name in ("epoch", "end of epoch", "step"):
            happened.append(name)
        elif name in words and what == [gpu]:
            happened.append(words[name])
        elif name == "Event.record" and what:
            assert what == [f"current stream of {gpu}"]
        elif name == "phase" and what == ["data"]:
            happened.append("tick")
        elif name == "Event.elapsed_time" and happened[-1] != "times":
            happened.append("times")
        elif name == "save" and what[0] == "state.pt":
            happened.append("save")
    begin, end = ["epoch", "reset", "tick"], ["times", "read", "end of epoch", "save"]
    step, snapshot = ["step", "tick"], ["step", "read", "times", "save", "reset", "tick"]
    warmed_up = ["step", "read", "reset", "tick"]
    first = begin + 5 * step + snapshot + 2 * step + end
    second = begin + step + warmed_up + step + snapshot + 4 * step + end
    assert happened == first + second
    for name in words:
        counts = {where: log.count([name, where]) for where in gpus}
        assert len(set(counts.values())) == 1, "all GPUs are looked at alike"


def check_phases(log, script):
    """Each step has all of them, but for several replicas, whose forward is called by threads, and
    a half model beside the one that is known; the first step is the one to find that out."""
    inner = ["rest", "forward", "backward"]
    if "accumulation" in script:
        inner += ["forward", "backward"]
    apart = script.split()[0] != "pytorch_DP" and "master" not in script
    if not apart:
        inner = ["forward_and_backward"]
    phases = " ".join(what.replace(" ", "_") for _, what in (e for e in log if e[0] == "phase"))
    whole = f"data {' '.join(inner)} optimizer rest"
    steps = [phases.strip() for phases in phases.split("data")]
    steps = [f"data {phases}" for phases in steps if phases]  # at the end of an epoch none follows
    assert steps.count(f"{whole} end") == 15 + apart


def check_result(result, dtype, world_size, gpus):
    assert result["device"] == "Fake GPU" and result["world_size"] == world_size
    assert result["devices"] == world_size * len(gpus)
    assert result["gpu_uuids"] == [f"GPU-of {gpu}" for gpu in gpus] * world_size
    assert set(result["tf32"].values()) == {result["precision"] == FP32}
    data = (192 + 96) * (3 * 32 * 32 + 8) / GIB  # on the first GPU, and no part of its peak
    apart = data if len(gpus) == 1 else 0
    expected = {"allocated": 3 - apart, "reserved": 4 - apart, "process": 19 - apart}
    assert result["peak_memory_gib"] == pytest.approx(expected | {"dataset": data})
    assert result["images_per_second"] == pytest.approx(240)  # an event says 100 milliseconds
    assert result["steps"] == 16 and result["eval_samples"] == 96


GPT_JOB = "--model gpt-8x4x32 --context 16 --dataset synthetic --train-samples 192 "
GPT_JOB += "--eval-samples 24 --batch-size 24 --epochs 1 --print-freq 5 --clip-grad 1"  # 8 steps
ON_GPTS = [  # of which a rank holds a shard of the model or of the sequences
    "pytorch_TP",
    "pytorch_TP --sequence-parallel",
    "pytorch_FSDP_TP --tp 2",
    "pytorch_PP",
    "pytorch_PP --pipeline-schedule interleaved",  # a V's halves of backward need a real GPU
    "pytorch_CP",
    "pytorch_CP --attention allgather",
    "pytorch_CP --attention ulysses",
    "pytorch_EP",
    "pytorch_EP --top-k 2",
    "pytorch_ND_parallel --tp 2 --sequence-parallel",
    "pytorch_ND_parallel --tp 2 --pp 2 --ac full",
    "pytorch_ND_parallel --tp 2 --dtype bfloat16",
    "pytorch_TP --model llama-8x4x32 --kv-heads 4",
    "pytorch_Muon",
    "pytorch_float8 --scaling rowwise",
]
USUAL_GPTS = (
    "pytorch_ND_parallel --tp 2 --pp 2 --ac full",
    "pytorch_TP --sequence-parallel",
    "pytorch_PP",
    "pytorch_CP",
    "pytorch_EP --top-k 2",
)


@pytest.mark.parametrize("script", cases([(s,) for s in ON_GPTS], lambda s: s in USUAL_GPTS))
def test_a_shard_of_a_gpt_on_a_gpu(script, tmp_path):
    """All is on its GPU, whatever is sent is, too, and no step waits for the GPU between prints; a
    step of EP once in each block, for how many tokens there are."""
    name, _, flags = script.partition(" ")
    words = f"python tests/fake_gpu.py {name}.py --device cuda {GPT_JOB} {flags}"
    finished = succeed(f"{words} --output-dir {tmp_path}", forked=True, **rank_of(4, 3))
    assert not finished.our_warnings
    log, result = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("log", "result"))
    log = log["log"]
    check_begin(log, False, "cuda:3")
    [model] = [entry[1:] for entry in log if entry[0] == "model"]
    assert model == ["float32 on cuda:3"]
    batches = [entry[1:] for entry in log if entry[0] == "step"]
    assert [[batch[0], batch[3]] for batch in batches] == 8 * [["cuda:3", "cuda:3"]]
    step, waits = 0, {}
    for what, *more in log:
        step += what == "step"
        if what in ("synchronize", "Stream.synchronize") or (what, *more) == ("to cpu", "item"):
            waits[step] = waits.get(step, 0) + 1
    blocks = 8 if "EP" in script else 0
    assert all(waits.get(step, 0) == blocks for step in (2, 3, 4, 6, 7))
    assert result["world_size"] == 4 and result["gpu_uuids"] == 4 * ["GPU-of cuda:3"]
    assert result["steps"] == 8


def test_a_gpu_without_tf32(tmp_path):
    _, result = pretend("pytorch_SingleGPU", tmp_path, CAPABILITY="7.0")
    assert result["tf32"] == {"convolutions": False, "matrix_products": False}


# ----------------------------------------------------------------------------- one part at a time


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    fake.install(monkeypatch.setattr)
    return fake


def run_clock(clock_, steps):
    """An epoch, as Run does it."""
    clock_.start()
    for _ in range(steps):
        clock_.tick()
    clock_.end_epoch()


def test_what_the_warm_up_took_is_forgotten(cuda, monkeypatch):
    ours = clock.StepClock([torch.device("cuda:1")])
    run_clock(ours, 10)
    assert ours.peak_memory["allocated"] == 3
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: GIB)
    run_clock(ours, 2)
    assert ours.peak_memory["allocated"] == 1


def test_the_clock_of_a_process_that_goes_on(cuda):
    """It has a warm-up of its own, and the steps of the process before."""
    ours = clock.StepClock([torch.device("cuda:1")])
    ours.before = [0.05] * 3
    run_clock(ours, 12)
    assert ours.settled() == [0.05] * 3 + [0.1] * 6


def arguments(**changes):
    args = common.argument_parser("").parse_args([])
    return argparse.Namespace(**vars(args) | {"device": "cuda"} | changes)


@pytest.fixture
def four_ranks(monkeypatch, cuda, become):
    become(size=4)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(common.os, "sched_getaffinity", lambda _: range(10), raising=False)
    called = []
    for name in ("set_num_threads", "set_float32_matmul_precision"):
        note = lambda value, name=name: called.append((name, value))  # noqa: E731
        monkeypatch.setattr(torch, name, note)
    return called


def test_get_device(four_ranks):
    assert common.get_device(arguments(), 3) == torch.device("cuda:3")
    assert four_ranks == [("set_num_threads", 2), ("set_float32_matmul_precision", "high")]


def test_get_device_where_each_rank_sees_one_gpu(four_ranks, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    words = ["torchrun", "--virtual-local-rank"]
    monkeypatch.setattr(harness.world, "launcher_words", lambda: words)
    assert common.get_device(arguments(), 0) == torch.device("cuda:0")
    words.remove("--virtual-local-rank")
    with pytest.raises(SystemExit, match="2"):
        common.get_device(arguments(), 0)
    [line] = capsys.readouterr().err.splitlines()
    assert "4 ranks need as many GPUs, and this machine has 1" in line


@pytest.mark.parametrize("free, kept", [(10 * 8 * (48 + 8), True), (10 * 8 * (48 + 8) - 1, False)])
def test_a_dataset_leaves_nine_tenths_of_the_free_memory(free, kept, cuda, monkeypatch):
    moved = []
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: moved.append(tensor.nbytes) or tensor)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 * GIB))
    monkeypatch.setattr(TaskData, "bytes_on_gpu", 0)
    pixels, labels = torch.zeros(8, 3, 4, 4, dtype=torch.uint8), torch.zeros(8).long()
    images.Images(pixels, labels, ["a"], 4).keep_on_gpu()
    assert moved == ([8 * 48, 8 * 8] if kept else [])
    assert images.Images.bytes_on_gpu == sum(moved)


def test_matrix_products_use_tf32_where_it_is_asked_for(cuda, monkeypatch):
    assert not any(result.used_tf32("float32", torch.device("cpu")).values())
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    used = {"convolutions": True, "matrix_products": False}
    assert result.used_tf32("float32", torch.device("cuda:0")) == used


def test_what_is_not_deterministic_is_refused(capsys):
    with torch.device("meta"):
        models = {name: torchvision.models.get_model(name) for name in ("alexnet", "vgg11")}
        classifiers.check_deterministic("resnet50", torchvision.models.resnet50())
    for name, model in models.items():
        with pytest.raises(SystemExit, match="2"):
            classifiers.check_deterministic(name, model)
        [line] = capsys.readouterr().err.splitlines()
        assert f"--deterministic: {name} has AdaptiveAvgPool2d" in line
