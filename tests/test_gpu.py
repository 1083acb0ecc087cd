"""The same tests on GPUs; skipped without any."""

import json
import os

import pytest
import torch
from conftest import HOOKED, launch, launcher, succeed

JOB = "--dataset synthetic --train-samples 256 --eval-samples 101 --batch-size 32 --image-size 64"
GPUS = torch.cuda.device_count()
VISIBLE = ",".join(map(str, range(GPUS)))

pytestmark = pytest.mark.gpu


def start(script, world_size=1, through=""):
    """By torchrun also DeepSpeed, whose own launcher ignores CUDA_VISIBLE_DEVICES."""
    command = launcher(script, world_size, through)
    if command.startswith("deepspeed"):
        name, _, flags = script.partition(" ")
        command = f"torchrun --standalone --nproc_per_node={world_size} {through} {name}.py {flags}"
    return " ".join(command.split())


def train(script, world_size, flags, output, through="", **env):
    env = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", VISIBLE)} | env
    command = f"{start(script, world_size, through)} {JOB} {flags} --output-dir {output}"
    finished = succeed(command, **env)
    assert not finished.our_warnings
    weights = torch.load(output / "model.pt", weights_only=True)
    return weights, json.loads((output / "result.json").read_text())


SCRIPTS = [
    "pytorch_SingleGPU",
    "pytorch_half_precision --dtype float16",
    "pytorch_half_precision --dtype float16 --master-weights",
    "pytorch_auto_mixed_precision --dtype float16 --clip-grad 1",
    "pytorch_auto_mixed_precision --dtype bfloat16",
    "pytorch_DP",
    "pytorch_DP --dtype bfloat16",
    "pytorch_DP --dtype float16",
    "pytorch_DDP",
    "pytorch_torchrun_DDP",
    "pytorch_torchrun_DDP --norm sync",
    "pytorch_FSDP",
    "pytorch_FSDP --dtype bfloat16",
    "pytorch_DDP_ZeRO --use_zero",
    "pytorch_DDP_AMP --dtype float16",
    "pytorch_gradient_accumulation",
    "pytorch_comm_hooks --comm-hook fp16",
    "pytorch_comm_hooks --comm-hook powersgd",
    "pytorch_activation_checkpointing",
    "pytorch_activation_checkpointing --selective",
    "pytorch_compile",
    "pytorch_compile --blocks",
    "pytorch_HSDP",
    "pytorch_DDP_by_hand",
    "pytorch_DDP_by_hand --average each",
    "pytorch_ZeRO_by_hand",
    "pytorch_ZeRO_by_hand --stage 2",
    "pytorch_FSDP_by_hand",
    "pytorch_checkpoint --async-save",
]
ON_GPTS = ["pytorch_Muon", "pytorch_float8", "pytorch_float8 --scaling rowwise --compile"]
OFFLOAD = "pytorch_FSDP_offload"  # whose steps wait for the CPU's optimizer
DEEPSPEED = [
    "pytorch_DeepSpeed --deepspeed_config config/zero_stage2_config.json",
    "pytorch_DeepSpeed --deepspeed_config config/zero_stage3_offload_config.json",
    "pytorch_DeepSpeed --deepspeed_config config/zero_stage2_bf16_config.json",
]


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
@pytest.mark.parametrize("script", [*SCRIPTS, OFFLOAD, *DEEPSPEED])
def test_one_gpu(script, tmp_path):
    _, result = train(script, 1, "--model resnet18 --epochs 2", tmp_path)
    assert result["device"] == torch.cuda.get_device_name(0)
    assert result["devices"] == len(result["gpu_uuids"]) == (GPUS if "_DP" in script else 1)
    memory = result["peak_memory_gib"]
    assert 0 < memory["allocated"] <= memory["reserved"] < memory["process"]
    assert memory["dataset"] > 0 and len(result["trained_between"]) == 2
    assert result["images_per_second"] > 0 and result["eval_samples"] == 101
    full = result["precision"] == "float32" and torch.cuda.get_device_capability() >= (8, 0)
    assert result["tf32"] == {"convolutions": full, "matrix_products": full}


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
@pytest.mark.parametrize("script", [*SCRIPTS, *ON_GPTS, OFFLOAD, *DEEPSPEED])
def test_a_language_model(script, tmp_path):
    flags = "--model gpt-2x2x64 --context 32 --epochs 4"
    job = JOB.replace(" --image-size 64", "")
    env = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", VISIBLE)}
    succeed(f"{start(script)} {job} {flags} --output-dir {tmp_path}", **env)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["eval_loss"][-1] < 3.2 and result["tokens_per_second"] > 0


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
@pytest.mark.parametrize("script", SCRIPTS)
def test_no_step_waits_between_prints(script, tmp_path):
    """PyTorch itself raises an error where one would, from the batch to the record of the loss."""
    flags = "--model resnet18 --epochs 1 --print-freq 3"
    train(script, 1, flags, tmp_path, through=HOOKED, HOOKS="waits")
    steps = json.loads((tmp_path / "waits-0.json").read_text())
    assert len(steps) == 8 and not any(
        kinds for step, kinds in steps.items() if int(step) not in (3, 6, 8)
    )


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
def test_the_same_bits_with_and_without_the_images_on_the_gpu(tmp_path):
    """A loader with processes cannot keep them there."""
    flags = "--model resnet18 --epochs 2 --deterministic"
    held, with_images = train("pytorch_SingleGPU", 1, flags, tmp_path / "held")
    sent, without = train("pytorch_SingleGPU", 1, f"{flags} --workers 1", tmp_path / "sent")
    assert with_images["peak_memory_gib"]["dataset"] > without["peak_memory_gib"]["dataset"] == 0
    assert all(torch.equal(held[name], sent[name]) for name in held)


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
def test_no_deterministic_version_is_told_in_a_line(tmp_path):
    flags = f"--model alexnet --deterministic {JOB} --output-dir {tmp_path}"
    finished = launch(f"python pytorch_SingleGPU.py {flags}", CUDA_VISIBLE_DEVICES="0")
    assert finished.code == 2 and "AdaptiveAvgPool2d" in finished.errors[0], str(finished)


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
def test_each_rank_sees_one_gpu(tmp_path):
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", VISIBLE)
    command = f"torchrun --standalone --virtual-local-rank --nproc_per_node={min(GPUS, 2)}"
    flags = f"--model resnet18 --epochs 1 {JOB} --output-dir {tmp_path}"
    succeed(f"{command} pytorch_torchrun_DDP.py {flags}", CUDA_VISIBLE_DEVICES=visible)
    assert json.loads((tmp_path / "result.json").read_text())["devices"] == min(GPUS, 2)


@pytest.mark.multigpu
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("before, after", [(1, 2), (2, 1)])
def test_shards_are_read_by_another_number_of_gpus(before, after, tmp_path):
    flags = "--model resnet18 --norm group --double --epochs 2 --warmup-steps 20"
    expected, _ = train("pytorch_FSDP", 1, flags, tmp_path / "whole")
    train("pytorch_FSDP", before, f"{flags} --max-steps 8", tmp_path / "parts")
    weights, result = train("pytorch_FSDP", after, f"{flags} --resume auto", tmp_path / "parts")
    assert result["steps"] == 16
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=1e-6, atol=1e-9)


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
@pytest.mark.parametrize(
    "flags",
    [
        "--precision fp16",
        "--precision bf16",
        "--runtime compile",
        "--runtime onnxruntime",
        "--runtime onnxruntime --precision fp16",
        "--runtime onnxruntime --precision bf16",
        "--runtime onnxruntime --precision int8",
    ],
)
def test_inference(flags, tmp_path):
    """Where onnxruntime has CUDA, and finds it."""
    import onnxruntime

    if "onnxruntime" in flags:
        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            pytest.skip("this onnxruntime is built without CUDA")
    _, result = train("pytorch_SingleGPU", 1, "--model resnet18 --epochs 5", tmp_path)
    env = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", VISIBLE)}
    command = f"python model_inference.py --weights {tmp_path}/model.pt --input test --json {flags}"
    answer = json.loads(succeed(command, **env).stdout)
    assert answer["accuracy"] == pytest.approx(result["eval_accuracy"][-1], abs=0.02)


@pytest.mark.multigpu
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "script",
    [
        "pytorch_DP",
        "pytorch_torchrun_DDP",
        "pytorch_FSDP",
        "pytorch_DDP_ZeRO --use_zero",
        "pytorch_gradient_accumulation",
        "pytorch_DDP_by_hand",
        "pytorch_ZeRO_by_hand --stage 2",
        "pytorch_FSDP_by_hand",
    ],
)
def test_all_gpus_end_with_the_weights_of_one(script, tmp_path):
    flags = "--model resnet18 --norm group --double --max-steps 12 --epochs 2"
    world_size = 1 << (GPUS.bit_length() - 1)  # a power of two divides the batch
    expected, _ = train("pytorch_SingleGPU", 1, flags, tmp_path / "one")
    weights, result = train(script, world_size, flags, tmp_path / "all")
    assert result["world_size"] == (1 if script == "pytorch_DP" else world_size)
    assert result["devices"] == (GPUS if script == "pytorch_DP" else world_size)
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
def test_gpu_and_cpu_agree(tmp_path):
    flags = "--model resnet18 --norm group --double --max-steps 5 --epochs 1"
    on_gpu, _ = train("pytorch_SingleGPU", 1, flags, tmp_path / "gpu")
    cpu = f"{flags} --device cpu"
    on_cpu, _ = train("pytorch_SingleGPU", 1, cpu, tmp_path / "cpu")
    for name in on_cpu:
        torch.testing.assert_close(on_gpu[name], on_cpu[name], rtol=1e-6, atol=1e-9)
