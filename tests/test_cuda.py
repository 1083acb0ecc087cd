"""Code paths for GPUs, run without a GPU: fake_gpu.py lists what is simulated."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchvision
from conftest import TABLES, cases, refused, succeed
from contract_cases import FLOAT16
from fake_gpu import GIB, FakeCuda, FakeGpus
from torch._subclasses import fake_tensor
from torch.distributed.optim import ZeroRedundancyOptimizer

import common
import harness.world
from harness import result, state
from harness.data import TaskData
from jobs import classifiers, images, llama, sizes, text
from parallel import attention_kernels
from techniques import TECHNIQUES
from theory import IN_A_V

# 16 steps in two epochs, with snapshots after steps 6 and 12, and a warm-up that ends after 10.
JOB = "--dataset synthetic --train-samples 384 --eval-samples 96 --batch-size 48 --epochs 2 "
JOB += "--model small_resnet --image-size 32 --print-freq 5 --snapshot-every 6"
GPT_JOB = "--model gpt-8x12x48 --context 24 --dataset synthetic --train-samples 192 "
GPT_JOB += "--eval-samples 24 --batch-size 24 --epochs 1 --print-freq 5 --clip-grad 1"  # 8 steps

FP32 = "float32"
# What messages or files hold is not known here; several GPUs in a process, and a V's halves of
# backward, need real ones.
NOT_FAKED = ("comm_hooks", "compile", "checkpoint", "FSDP_offload", "DeepSpeed", "DP")
CASES = [*((t, case) for t in TECHNIQUES for case in t.cases), *FLOAT16]
FAKED = [
    ("needs_gpt" in t.traits, f"{t.script} {case.flags}".rstrip(), case.ranks[0])
    for t, case in CASES
    if t.name not in NOT_FAKED and case.ranks[0] <= 4 and not set(IN_A_V) & {*case.flags.split()}
]
NAMES = {script: n for _, script, n in FAKED}  # on how many ranks
USUALLY_RESUMED = ("DDP_ZeRO",)
SMALL_JOB = "--model gpt-4x12x48 --context 24 --dataset synthetic --train-samples 96 "
SMALL_JOB += "--eval-samples 24 --batch-size 24 --epochs 2"  # 8 steps
USUAL = [f"pytorch_{script}" for script in TABLES["branches_of_a_gpu"]]


def faked(on_gpts):
    rows = [(script, n) for needs_gpt, script, n in FAKED if needs_gpt == on_gpts]
    return cases("script, n", rows, lambda script, n: script in USUAL)


def pretend(script, n, job, output):
    """Train on fake GPUs: as the first of n ranks, which writes the files, but on the last of n
    GPUs. What was noted, and the result."""
    name, _, flags = script.partition(" ")
    command = f"python tests/fake_gpu.py {name}.py --device cuda {job} {flags}"
    env = {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "LOCAL_RANK": str(n - 1)}
    env |= {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
    env = env if n > 1 else {}
    finished = succeed(f"{command} --output-dir {output}", forked=True, **env)
    assert not finished.our_warnings
    seen, result = (json.loads((output / f"{name}.json").read_text()) for name in ("log", "result"))
    return SimpleNamespace(**seen), result


@faked(on_gpts=False)
def test_the_branches_of_a_gpu(script, n, tmp_path):
    [dtype] = re.findall(r"--dtype (\w+)", script) or [FP32]
    gpu = f"cuda:{n - 1}"
    seen, result = pretend(script, n, JOB, tmp_path)
    check_begin(seen.log, n, gpu)
    check_tensors(seen, script, dtype, gpu)
    check_copies(seen.log, 48 // n)
    check_clock(seen.log, gpu)
    check_phases(seen.log, script)
    assert ["synchronize"] not in seen.log
    check_result(result, dtype, n, gpu)
    assert seen.precision == "high"


def check_begin(log, n, gpu):
    """The GPU is chosen before the group is made, and both come before any tensor is on it."""
    if n == 1:
        assert not {"set_device", "init_process_group"} & {name for name, *_ in log}
    else:
        assert log[:2] == [["set_device", gpu], ["init_process_group", "nccl", gpu]]


def check_tensors(seen, script, dtype, gpu):
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
    assert of["convolution"] == of["addmm"] == {(gpu, kind) for kind in kinds}
    autocast = "mixed_precision" in script or "AMP" in script  # the loss's kernel casts by itself
    loss = dtype if autocast else FP32
    assert of["_log_softmax"] == {(gpu, loss), (gpu, FP32)}  # in training, in evaluation
    steps = {name: kinds for name, kinds in of.items() if name.startswith("_fused")}
    name = script.split()[0].removeprefix("pytorch_")
    of_dtensors = name in ("FSDP", "HSDP", "SimpleFSDP_by_hand", "optimizer_in_backward")
    assert steps == ({} if of_dtensors else {"_fused_sgd_": {(gpu, weights)}})  # they have none


def check_copies(log, batch_size):
    """Images are sent once. After that a step sends numbers, and fetches none between prints."""
    images = [e[3] for e in log if e[0] == "to cuda" and e[2] == "torch.uint8" and "32" in e[3]]
    assert images == ["[384, 3, 32, 32]", "[96, 3, 32, 32]"]
    first = log.index(["epoch"])
    last = log.index(["end of epoch"])
    sent = [entry[2:] for entry in log[first:last] if entry[0] == "to cuda"]
    index = ["torch.int64", f"[{batch_size}]"]
    crops = ["torch.int64", f"[{batch_size}, 3]"]
    assert sent.count(index) == sent.count(crops) == 8
    assert not [what for what in sent if what not in (index, crops) and what[1].count(",") > 1]
    step = 0
    waits = set()
    for name, *_ in log[first:last]:
        step += name == "step"
        if name == "to cpu":
            waits.add(step)
    assert waits == {0, 5, 6}  # before the first, at the print and at the snapshot


def check_clock(log, gpu):
    """Events are on the stream that computes; memory is of the steps: it is read when they end for
    a snapshot or an epoch, and reset before they go on."""
    events = {what[0] for name, *what in log if name == "Event.record" and what}
    assert events == {f"current stream of {gpu}"}
    looked = {"reset_peak_memory_stats": "reset", "max_memory_allocated": "read"}
    happened = [looked[name] for name, *what in log if name in looked and what == [gpu]]
    assert happened == 5 * ["reset", "read"]  # two epochs, a snapshot in each, and the warm-up


def check_phases(log, script):
    """Each step has all of them, but for a half model beside the one that is known; the first step
    is the one to find that out."""
    apart = "master" not in script
    times = 4 if "--accumulate 4" in script else 1
    inner = f"rest {times * 'forward backward '}" if apart else "forward and backward "
    phases = " ".join(entry[1] for entry in log if entry[0] == "phase")
    steps = [step.strip() for step in phases.split("data")]
    update = "" if "in_backward" in script else "optimizer rest "
    assert steps.count(f"{inner}{update}end") == 15 + apart


def check_result(result, dtype, world_size, gpu):
    assert result["device"] == "Fake GPU"
    assert result["world_size"] == result["devices"] == world_size
    assert result["gpu_uuids"] == [f"GPU-of {gpu}"] * world_size
    assert set(result["tf32"].values()) == {result["precision"] == FP32}
    data = (384 + 96) * (3 * 32 * 32 + 8) / GIB  # no part of its peak
    expected = {"allocated": 3 - data, "reserved": 4 - data, "process": 19 - data}
    assert result["peak_memory_gib"] == pytest.approx(expected | {"dataset": data})
    assert result["images_per_second"] == pytest.approx(480)  # an event says 100 milliseconds
    assert result["steps"] == 16 and result["eval_samples"] == 96


@faked(on_gpts=True)
def test_a_shard_of_a_gpt_on_a_gpu(script, n, tmp_path):
    """All is on its GPU, whatever is sent is, too, and no step waits for the GPU between prints; a
    step with experts once in each block, for how many tokens there are."""
    seen, result = pretend(script, n, GPT_JOB, tmp_path)
    log = seen.log
    gpu = f"cuda:{n - 1}"
    check_begin(log, n, gpu)
    frozen = re.findall(r"LoRA --dtype (\w+)", script)
    kinds = ["bfloat16"] if "--bf16-weights" in script else [*frozen, FP32]
    model = ["model", *(f"{kind} on {gpu}" for kind in kinds)]
    assert [model] == [entry for entry in log if entry[0] == "model"]
    assert 8 * [[gpu, gpu]] == [[entry[1], entry[4]] for entry in log if entry[0] == "step"]
    step = 0
    waits = {}
    for what, *more in log:
        step += what == "step"
        if what in ("synchronize", "Stream.synchronize") or (what, *more) == ("to cpu", "item"):
            waits[step] = waits.get(step, 0) + 1
    blocks = 8 * ("--experts" in script) * (2 if "--pp" in script else 1)  # 4 micro-batches of 4
    assert all(waits.get(step, 0) == blocks for step in (2, 3, 4, 6, 7))
    assert result["world_size"] == n and result["gpu_uuids"] == n * [f"GPU-of {gpu}"]
    assert result["steps"] == 8


def test_buffers_are_on_the_gpu_while_parameters_are_not(tmp_path):
    """The biases and loads of experts, in each block."""
    script = "pytorch_ND_parallel --offload --experts 4 --balance bias"
    job = f"{GPT_JOB} --max-steps 2 --model gpt-2x2x16"
    seen, _ = pretend(script, 2, job, tmp_path)
    assert ["model", "float32 on cpu", "float32 on cuda:1"] in seen.log


RESUMED = sorted({f"{t.script} {t.cases[0].flags}".rstrip() for t in TECHNIQUES} & set(NAMES))


@cases("script", RESUMED, lambda script: script.split()[0][8:] in USUALLY_RESUMED)
def test_a_run_on_a_gpu_resumes(script, tmp_path):
    """Two steps and two more: no state of the optimizer has moved, or has another dtype."""
    n = NAMES[script]
    job = f"{SMALL_JOB} --optimizer adamw --max-steps"
    before, _ = pretend(script, n, f"{job} 2", tmp_path / "before")
    resume = f"{job} 4 --resume {tmp_path / 'before'}"
    after, result = pretend(script, n, resume, tmp_path / "after")
    [kinds] = [set(entry) for entry in before.log if entry[0] == "optimizer"]
    [resumed] = [set(entry) for entry in after.log if entry[0] == "optimizer"]
    assert resumed <= kinds and result["steps"] == 4


# ----------------------------------------------------------------------------- one part at a time
@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    fake.install(monkeypatch.setattr)
    return fake


@pytest.fixture
def gpus(cuda, monkeypatch):
    """Of which tensors have no data."""
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda device: None)
    return FakeGpus(cuda)


def test_get_device(cuda, become, monkeypatch):
    """Four ranks, and as many GPUs or one that each of them sees."""
    become(size=4)
    args = common.argument_parser("").parse_args(["--device", "cuda"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(common, "count_cores", lambda: 10)
    called = []
    monkeypatch.setattr(torch, "set_num_threads", called.append)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", called.append)
    assert common.get_device(args, 3) == torch.device("cuda:3")
    assert called == [2, "high"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    words = ["torchrun", "--virtual-local-rank"]
    monkeypatch.setattr(harness.world, "launcher_words", lambda: words)
    assert common.get_device(args, 0) == torch.device("cuda:0")
    words.remove("--virtual-local-rank")
    with refused("4 ranks need as many GPUs, and this machine has 1; use --nproc_per_node=1"):
        common.get_device(args, 0)


def test_zero_resumes_with_its_steps_on_the_gpu(gpus, tmp_path):
    """Where a fused AdamW needs them: ZeroRedundancyOptimizer loads them to the CPU
    (pytorch/pytorch#124133)."""
    entries = {"exp_avg": torch.ones(2, 4), "exp_avg_sq": torch.ones(2, 4), "step": torch.tensor(3)}
    saved = {f"optimizer.weight.{name}": tensor for name, tensor in entries.items()}
    state.save(saved | {"model.weight": torch.ones(2, 4)}, tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with gpus:
        model = torch.nn.Linear(4, 2, bias=False, device="cuda:0")
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True)
        dist.destroy_process_group()  # which could not send what is fake
        state.load(tmp_path, {"param_groups": []}, model, optimizer)
    [found] = optimizer.optim.state.values()
    assert found.keys() == entries.keys()
    assert {str(tensor.device) for tensor in found.values()} == {"cuda:0"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_of_a_ring_take_what_they_are_given(dtype, gpus):
    with gpus:
        q, k, v = (torch.empty(2, n, 50, 16, device="cuda:0", dtype=dtype) for n in (4, 2, 2))
        out, sums = attention_kernels.forward(q, k, v, True)
        found = attention_kernels.backward(out, q, k, v, out, sums, True)
    assert sums.shape == (2, 4, 50) and [t.shape for t in found] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_queries_keys_and_values_have_one_dtype(family, gpus):
    """Under autocast, also behind norms, which return fp32: ring attention would send twice as many
    bytes, and no flash kernel would take them."""
    seen = []
    size = sizes.FAMILIES[family](1, 4, 64).complete(family, 2, None)

    def attend(q, k, v):
        seen.extend((q.dtype, k.dtype, v.dtype))
        return q

    with gpus, torch.device("cuda:0"), torch.autocast("cuda", torch.bfloat16):
        model = llama.Llama([0, 1], size)
        model.blocks[0].attention.attend = attend
        model(torch.zeros(1, 8, dtype=torch.int64))
    assert seen == 3 * [torch.bfloat16]


@pytest.mark.parametrize("gpu, hip, able", TABLES["float8_gpus"])
def test_which_gpus_multiply_float8(gpu, hip, able, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**gpu))
    monkeypatch.setattr(torch.version, "hip", hip)
    pytest.importorskip("torchao")
    from pytorch_float8 import multiplies_float8

    assert multiplies_float8(torch.device("cuda:0")) == able


@pytest.mark.parametrize("free, kept", [(10 * 8 * (48 + 8), True), (10 * 8 * (48 + 8) - 1, False)])
def test_a_dataset_leaves_nine_tenths_of_the_free_memory(free, kept, cuda, monkeypatch):
    moved = []
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: moved.append(tensor.nbytes) or tensor)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 * GIB))
    monkeypatch.setattr(TaskData, "bytes_on_gpu", 0)
    pixels = torch.zeros(8, 3, 4, 4, dtype=torch.uint8)
    labels = torch.zeros(8).long()
    images.Images(pixels, labels, ["a"], 4).keep_on_gpu()
    assert moved == ([8 * 48, 8 * 8] if kept else [])
    assert images.Images.bytes_on_gpu == sum(moved)


@pytest.mark.parametrize("packed", [None, False, True])
def test_a_text_in_memory_is_sent_from_pinned_memory(packed, monkeypatch):
    """As a GPU then copies it while the CPU goes on."""
    pinned = []
    sent = []
    tokens = torch.arange(200, dtype=torch.uint8)
    names = ["a"] * 200
    data = text.Text(tokens, names, 8)
    if packed is not None:
        data = text.Documents(tokens, names, 8, np.array([[0, 8, 8], [20, 4, 4]]), packed)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: pinned.append(t) or t)
    monkeypatch.setattr(torch.Tensor, "to", lambda t, *to, **_: sent.append((t, *to)) or t)
    data.prepare_evaluation((torch.arange(1),), torch.device("cuda"))
    to_gpu = [tensor for tensor, device in sent if device != torch.device("cpu")]
    assert len(to_gpu) == 2
    assert all(any(tensor is other for other in pinned) for tensor in to_gpu)


def test_where_tf32_is_used(cuda, monkeypatch):
    """On GPUs that have it, and in matrix products where it is asked for."""
    gpu = torch.device("cuda:0")
    used = {"convolutions": True, "matrix_products": False}
    assert not any(result.used_tf32("float32", torch.device("cpu")).values())
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert result.used_tf32("float32", gpu) == used
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))
    assert not any(result.used_tf32("float32", gpu).values())


def test_what_is_not_deterministic_is_refused():
    with torch.device("meta"):
        models = {name: torchvision.models.get_model(name) for name in ("alexnet", "vgg11")}
        classifiers.check_deterministic("resnet50", torchvision.models.resnet50())
    for name, model in models.items():
        with refused(f"--deterministic: {name} has AdaptiveAvgPool2d"):
            classifiers.check_deterministic(name, model)
