"""The same tests on GPUs; skipped without any."""

import contextlib
import json
import math
import os
import re

import pytest
import torch
import torch.nn.functional as F
from conftest import HOOKED, launch, launcher, read_run, succeed
from test_cuda import CASES
from torch.nn.attention.bias import causal_lower_right

from jobs.experts import MixtureOfExperts
from jobs.gpt import attend
from parallel import attention_kernels
from parallel.attention_kernels import repeat
from techniques import TECHNIQUES

JOB = "--dataset synthetic --train-samples 256 --eval-samples 101 --batch-size 32"
RESNET = "--model resnet18 --image-size 64"
LONG = "--model gpt-12x4x256 --context 512 --optimizer sgd --max-steps 4"
GPUS = torch.cuda.device_count()
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS))))

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU")]


def train(script, world_size, flags, output, through="", **env):
    """By torchrun also DeepSpeed, whose own launcher ignores CUDA_VISIBLE_DEVICES."""
    command = launcher(script, world_size, through)
    if command.startswith("deepspeed"):
        name, _, own = script.partition(" ")
        command = f"torchrun --standalone --nproc_per_node={world_size} {name}.py {own}"
    env = {"CUDA_VISIBLE_DEVICES": VISIBLE} | env
    finished = succeed(f"{command} {JOB} {flags} --output-dir {output}", **env)
    assert not finished.our_warnings
    if "LoRA" in script:  # it writes adapters instead of all weights
        return None, json.loads((output / "result.json").read_text())
    return read_run(output)


APART = ("HSDP", "FSDP_offload", "DeepSpeed", "LocalSGD")
SCRIPTS = ["pytorch_HSDP", "pytorch_DP --dtype bfloat16"]
SCRIPTS += ["pytorch_compile", "pytorch_DDP_by_hand --average each"]
SCRIPTS += [
    f"{t.script} {case.flags}".rstrip()
    for t, case in CASES
    if "needs_gpt" not in t.traits and t.name not in APART
]
ALIKE = [  # all weights as on one GPU
    f"{t.script} {t.cases[0].flags}".rstrip()
    for t in TECHNIQUES
    if not t.traits & {"needs_gpt", "rounds", "differs"} and t.name not in (*APART, "SingleGPU")
]
ON_GPTS = ["pytorch_float8", "pytorch_float8 --scaling rowwise --compile"]
ON_GPTS += ["pytorch_FSDP_TP --tp 1", "pytorch_FSDP_TP --tp 1 --dtype bfloat16"]
ON_GPTS += ["pytorch_FSDP --packed", "pytorch_CP --packed --attention allgather"]
ON_GPTS += ["pytorch_compile --blocks --packed"]
ON_GPTS += ["pytorch_ND_parallel --offload --experts 4 --balance bias"]
ON_GPTS += [  # of which a rank may be alone
    f"{t.script} {dtype}".rstrip()
    for t in TECHNIQUES
    if "needs_gpt" in t.traits and t.name not in ("float8", "FSDP_TP")
    for dtype in ("", *["--dtype bfloat16"] * ("by_hand" not in t.name))
]
BEYOND = [f"pytorch_{name}" for name in ("TP", "TP --sequence-parallel", "PP", "CP", "EP")]
BEYOND += [f"pytorch_CP --attention {name}" for name in ("allgather", "ulysses")]
BEYOND += [f"pytorch_ND_parallel --{name} 2" for name in ("tp", "pp", "cp", "dp-shard")]
BEYOND += [f"pytorch_PP --pipeline-schedule {name}" for name in ("gpipe", "interleaved", "zbv")]
BEYOND += ["pytorch_ND_parallel --cp 2 --ac full --offload-activations --loss-chunks 5"]
BEYOND += ["pytorch_ND_parallel --experts 4 --balance bias --offload"]
BEYOND += ["pytorch_ND_parallel --experts 4 --balance 0 --ep 2"]
RESUMED = ["SGD", "AdamW", "ZeRO AdamW", "ZeRO SGD", "sharded AdamW", "Muon", "master weights"]
RESUMED += ["DeepSpeed"]
BREAK = "pytorch_collectives.py --device cuda --break"
E4M3 = torch.float8_e4m3fn
SYNC = "pytorch_torchrun_DDP --norm sync"
OFFLOAD = "pytorch_FSDP_offload"  # which waits
DEEPSPEED = [
    "pytorch_DeepSpeed --deepspeed_config config/zero_stage2_config.json",
    "pytorch_DeepSpeed --deepspeed_config config/zero_stage3_offload_config.json",
    "pytorch_DeepSpeed --deepspeed_config config/zero_stage2_bf16_config.json",
]


@pytest.mark.parametrize("script", [*SCRIPTS, SYNC, OFFLOAD, *DEEPSPEED])
def test_one_gpu(script, tmp_path):
    _, result = train(script, 1, f"{RESNET} --epochs 2", tmp_path)
    assert result["device"] == torch.cuda.get_device_name(0)
    assert result["devices"] == len(result["gpu_uuids"]) == (GPUS if "_DP" in script else 1)
    memory = result["peak_memory_gib"]
    assert 0 < memory["allocated"] <= memory["reserved"] < memory["process"]
    assert memory["dataset"] > 0 and len(result["trained_between"]) == 2
    assert result["images_per_second"] > 0 and result["eval_samples"] == 101
    full = result["precision"] == "float32" and torch.cuda.get_device_capability() >= (8, 0)
    assert result["tf32"] == {"convolutions": full, "matrix_products": full}


@pytest.mark.parametrize("script", [*SCRIPTS, *ON_GPTS, OFFLOAD, *DEEPSPEED])
def test_a_language_model(script, tmp_path):
    _, result = train(script, 1, "--model gpt-2x2x64 --context 32 --epochs 4", tmp_path)
    first, *_, last = result["eval_loss"]
    assert last < (first if "LoRA" in script else 3.2) and result["tokens_per_second"] > 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_step_waits_between_prints(script, tmp_path):
    """PyTorch itself raises an error where one would, from the batch to the record of the loss."""
    flags = f"{RESNET} --epochs 1 --print-freq 3"
    train(script, 1, flags, tmp_path, through=HOOKED, HOOKS="waits")
    steps = json.loads((tmp_path / "waits-0.json").read_text())
    assert len(steps) == 8 and {int(step) for step, kinds in steps.items() if kinds} <= {3, 6, 8}


OFF_THE_GPU = {  # script, job, the flag that moves it to the CPU, peak of what, GiB saved at least
    "images": ("pytorch_SingleGPU", f"{RESNET} --deterministic", "--workers 1", "dataset", 0),
    "activations": ("pytorch_activation_checkpointing", LONG, "--offload", "allocated", 1 / 8),
}


@pytest.mark.parametrize("what", OFF_THE_GPU)
def test_the_same_weights_with_and_without_it_on_the_gpu(what, tmp_path):
    """A loader with processes keeps no images there. Of 12 inputs of 1/64 GiB each, few do."""
    script, job, flag, kind, least = OFF_THE_GPU[what]
    flags = f"{job} --epochs 2"
    exact = "--deterministic" in job
    held, more = train(script, 1, flags, tmp_path / "held")
    sent, less = train(script, 1, f"{flags} {flag}", tmp_path / "sent")
    assert more["peak_memory_gib"][kind] > less["peak_memory_gib"][kind] + least
    torch.testing.assert_close(held, sent, rtol=0, atol=0 if exact else 1e-5)


def test_each_rank_sees_one_gpu(tmp_path):
    command = f"torchrun --standalone --virtual-local-rank --nproc_per_node={min(GPUS, 2)}"
    flags = f"{RESNET} --epochs 1 {JOB} --output-dir {tmp_path}"
    succeed(f"{command} pytorch_torchrun_DDP.py {flags}", CUDA_VISIBLE_DEVICES=VISIBLE)
    assert json.loads((tmp_path / "result.json").read_text())["devices"] == min(GPUS, 2)


@pytest.mark.parametrize("weights", ["model.pt", "model.onnx"])
def test_inference(weights, tmp_path):
    """Where onnxruntime has CUDA, and finds it."""
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime is built without CUDA")
    _, result = train("pytorch_SingleGPU", 1, f"{RESNET} --epochs 5", tmp_path)
    infer = f"python model_inference.py --device cuda --weights {tmp_path}"
    if weights == "model.onnx":
        succeed(f"{infer} --export {tmp_path}/model.onnx", CUDA_VISIBLE_DEVICES=VISIBLE)
    command = f"{infer}/{weights} --input test --json"
    answer = json.loads(succeed(command, CUDA_VISIBLE_DEVICES=VISIBLE).stdout)
    assert answer["accuracy"] == pytest.approx(result["eval_accuracy"][-1], abs=0.02)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_of_a_ring(dtype, kv_heads):
    """What a rank computes of its own keys, of a length that is no multiple of 32; and attention
    that ends with its last keys, of which nothing quadratic is kept."""
    torch.manual_seed(0)
    q, *kv = (torch.randn(2, n, 50, 16, device="cuda", dtype=dtype) for n in (4, *[kv_heads] * 2))
    given = [t.requires_grad_() for t in (q, *kv)]
    expected = attend(*given)
    gradient = torch.randn_like(q)
    of_each = torch.autograd.grad(expected, given, gradient)
    with torch.no_grad():
        out, sums = attention_kernels.forward(*given, True)
        found = attention_kernels.backward(gradient, *given, out, sums, True)
    near = {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close([out, *found], [expected, *of_each], **near)
    kept = []
    some = q[:, :, -20:]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        last = F.scaled_dot_product_attention(some, *repeat(q, *kv), causal_lower_right(20, 50))
    torch.testing.assert_close(last, expected[:, :, -20:], **near)
    assert not any(t.shape[-2:] == (20, 50) for t in kept)


@pytest.mark.parametrize("width", [16, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flex_attention_to_documents(dtype, width):
    """As with a mask; of a length that is no multiple of its blocks, and of narrow heads."""
    torch.manual_seed(0)
    lengths = [[50, 150, 100], [1, 298, 1]]
    begins = torch.tensor([[sum(row[:i]) for i, n in enumerate(row) for _ in range(n)]
                           for row in lengths], device="cuda")  # fmt: skip
    seen = attention_kernels.see_documents(begins)
    times = torch.arange(300, device="cuda")
    assert not torch.is_tensor(seen)
    shapes = [(2, heads, 300, width) for heads in (4, 2, 2)]
    given = [torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]
    found = attend(*given, seen)
    expected = attend(*given, attention_kernels.mask(begins, times, times))
    gradient = torch.randn_like(found)
    ours, theirs = ([t, *torch.autograd.grad(t, given, gradient)] for t in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("optimizer", RESUMED)
def test_it_resumes_with_the_state_of(optimizer, tmp_path):
    """Four steps and four more end as eight: measure/gpu_session.sh has the runs."""
    if optimizer == "DeepSpeed":
        pytest.importorskip("deepspeed")
    command = f"bash measure/gpu_session.sh --work {tmp_path} --only 'resume: {optimizer}'"
    succeed(command, CUDA_VISIBLE_DEVICES=VISIBLE)


def test_several_microbatches_need_one_half_copy_of_the_weights(tmp_path):
    """Of a stage's matrices in bfloat16, however many micro-batches are in flight."""
    flags = "--model gpt-4x8x512 --context 32 --max-steps 12 --dtype bfloat16"
    script = "pytorch_PP --pipeline-schedule gpipe --microbatches"
    copy = 4 * 12 * 512**2 * 2 / 2**30  # GiB
    peaks = []
    for n in (2, 8):
        _, result = train(f"{script} {n}", 1, flags, tmp_path / str(n))
        peaks.append(result["peak_memory_gib"]["allocated"])
    few, many = peaks
    assert many < few + 2 * copy


@pytest.mark.parametrize("width", [64, 36])
@pytest.mark.parametrize("counts", [[5, 0, 7], [0, 12, 0], [0, 0, 0]], ids=str)
def test_experts_without_a_token(counts, width):
    """Their gradients in bfloat16 are zeros, whatever the memory held, and all are near those in
    fp32; also of widths that a grouped product does not take."""
    torch.manual_seed(0)
    experts = MixtureOfExperts(width, 2 * width, len(counts), gated=True).experts.cuda()
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=width**-0.5)
    tokens = torch.randn(sum(counts), width, device="cuda")
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        held = torch.full((2**26,), math.nan, device="cuda")
        del held  # which the allocator gives to what is computed
        inputs = tokens.to(dtype).requires_grad_()
        experts(inputs, torch.tensor(counts, device="cuda")).square().sum().backward()
        found.append([weight.grad for weight in (inputs, *experts.parameters())])
        experts.zero_grad()
    exact, half = found
    for ours, theirs in zip(half, exact, strict=True):
        scale = theirs.abs().max().item() if theirs.numel() else 1.0
        torch.testing.assert_close(ours.float(), theirs, rtol=0.05, atol=0.05 * scale)
    for weight in half[1:]:
        assert not any(weight[expert].any() for expert, n in enumerate(counts) if not n)


def test_float8_where_it_is_said_to_be():
    pytest.importorskip("torchao")
    from pytorch_float8 import multiplies_float8

    a = torch.eye(16, device="cuda").to(torch.float8_e4m3fnuz if torch.version.hip else E4M3)
    one = torch.ones((), device="cuda")
    with contextlib.nullcontext() if multiplies_float8(a.device) else pytest.raises(RuntimeError):
        torch._scaled_mm(a, a.T, one, one, out_dtype=torch.bfloat16)


@pytest.mark.multigpu
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("script", ["alone", "order"])
def test_a_mistake_ends_by_itself(script):
    finished = launch(f"torchrun --standalone --nproc_per_node=2 {BREAK} {script}", timeout=90)
    assert finished.code == 0 and "Error after 5 s" in finished.stdout


@pytest.mark.multigpu
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("script", [*BEYOND, *ALIKE])
def test_two_gpus_end_with_the_weights_of_one(script, tmp_path):
    """Evaluated by each for itself, and gathered through the CPU. Of images, all GPUs."""
    flags = "--model gpt-4x4x32 --context 32 --double --max-steps 12 --clip-grad 1"
    n = 2
    if script in ALIKE:
        flags = f"{RESNET} --norm group --double --max-steps 12 --epochs 2"
        n = 1 << (GPUS.bit_length() - 1)  # a power of two divides the batch
    experts = re.findall(r"--(?:experts|balance) \w+", script) or ["--experts 8"] * ("EP" in script)
    single = " ".join(["pytorch_SingleGPU", *experts])
    expected, one = train(single, 1, flags, tmp_path / "one")
    weights, result = train(script, n, flags, tmp_path / "all")
    devices = (1, GPUS) if script == "pytorch_DP" else (n, n)
    assert (result["world_size"], result["devices"]) == devices
    assert devices[0] == 1 or (tmp_path / "all/flight_recorder").is_dir(), "of NCCL's watchdog"
    assert result["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-6)
    torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)


def test_gpu_and_cpu_agree(tmp_path):
    flags = f"{RESNET} --norm group --double --max-steps 5 --epochs 1"
    on_gpu, _ = train("pytorch_SingleGPU", 1, flags, tmp_path / "gpu")
    on_cpu, _ = train("pytorch_SingleGPU", 1, f"{flags} --device cpu", tmp_path / "cpu")
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-6, atol=1e-9)
