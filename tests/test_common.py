"""Unit tests of common.py."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from conftest import ROOT, TABLES
from torch import nn

import common
from harness import flops, settings, state
from harness.settings import as_words, read_flags
from jobs import images
from jobs.choice import Settings, resolve
from parallel import mesh


def arguments(*flags, **changes):
    args = read_flags(common.argument_parser(""), Settings, flags)
    small = {"model": "resnet18", "image_size": 32, "lr": 0.1, "weight_decay": 0.0}
    return dataclasses.replace(args, **small | changes)


def test_settings_are_frozen_and_know_the_options_of_the_script():
    parser = common.argument_parser("")
    parser.add_argument("--local-rank")  # the launcher's
    parser.add_argument("--dtype")  # a setting that other scripts have without a flag
    parser.add_argument("--shard", type=int, default=2)
    args = read_flags(parser, Settings, ["--dtype", "bfloat16", "--local-rank", "1"])
    assert settings.values_of(args, "own") == {"dtype": "bfloat16", "shard": 2}
    assert (args.local_rank, args.accumulate) == ("1", 1) and "--local-rank" not in as_words(args)
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.seed = 1


@pytest.mark.parametrize("free", ["yes", "no", "2"])
def test_recorded_settings_repeat_the_run(free):
    """Switches, numbers that equal True, and the flag that takes yes, no or a number."""
    parser = common.argument_parser("", only_gpt=True)
    parser.add_argument("--local-rank")  # the launcher's, and no setting
    mesh.add_flags(parser, ["ring"])
    flags = ["--compile", "--prefetch", "1", "--tie", "--reshard-after-forward", free]
    args = read_flags(parser, Settings, [*flags, "--local-rank", "1"])
    again = read_flags(parser, Settings, as_words(args))
    assert dataclasses.asdict(again) | {"local_rank": "1"} == dataclasses.asdict(args)


GPT = {"model": "gpt-2x4x64", "context": 32}
COUNTED = [  # settings, and parameters that a token computes with: the head's, and a block's
    (GPT, 65 * 64 + 2 * 12 * 64**2),
    (GPT | {"tie": True}, 65 * 64 + 2 * 12 * 64**2),
    (GPT | {"experts": 4, "top_k": 2}, 65 * 64 + 2 * ((4 + 2 * 8) * 64**2 + 4 * 64)),
    (GPT | {"model": "llama-2x4x64", "kv_heads": 2, "mlp_width": 96},
     65 * 64 + 2 * (3 * 64**2 + 3 * 64 * 96)),
]  # fmt: skip


@pytest.mark.parametrize("settings, n", COUNTED)
def test_flops_are_those_of_the_formula(settings, n):
    """6N + 12LHT per token, and 4N with frozen weights."""
    args = resolve(Settings(device="cpu", dataset="synthetic", **settings))
    data, _ = common.make_datasets(args)
    data.classes = [chr(code) for code in range(65)]
    model = common.make_model(args, data.classes)
    tokens = args.context
    attention = 12 * 2 * 64 * args.context
    found = flops.count_flops(args, data, model, torch.device("cpu"))
    assert found == tokens * (6 * n + attention)
    model.requires_grad_(False)
    found = flops.count_flops(args, data, model, torch.device("cpu"))
    assert found == tokens * (4 * n + attention)


@pytest.mark.parametrize("name, precision, tf32, teraflops", TABLES["peaks"])
def test_peaks(name, precision, tf32, teraflops):
    """Of the GPU itself, not of one with a similar name; of an unknown one there is none."""
    expected = teraflops and pytest.approx(1e12 * teraflops)
    assert flops.peak_flops(name, precision, tf32) == expected


def test_utilization_is_of_one_device():
    """Of eight that do two steps of 40 samples a second: 10 samples each."""
    result = {"global_batch_size": 40, "step_ms": {"p50": 500.0}, "devices": 8}
    result |= {"precision": "bfloat16", "tf32": {"convolutions": True}}
    found = flops.utilization(9.894e12, result | {"device": "NVIDIA H100 80GB HBM3"})
    assert found == {"model_tflops": pytest.approx(98.94), "mfu": pytest.approx(0.1)}
    found = flops.utilization(9.894e12, result | {"device": "cpu"})
    assert found == {"model_tflops": pytest.approx(98.94), "mfu": None}
    assert flops.utilization(None, result) == {"model_tflops": None, "mfu": None}


def test_evaluate_refuses_to_report_a_wrong_count():
    data = images.Images(torch.zeros(20, 3, 8, 8), torch.zeros(20).long(), list("0123456789"), 8)
    loader = common.make_loader(arguments(), data, 8, sampler=range(16))
    with pytest.raises(RuntimeError, match="16 of 20 samples"):
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
        common.evaluate(model, loader, torch.device("cpu"))


@pytest.mark.parametrize("version, dtype, fused", [
    ("2.13.0", torch.bfloat16, None), ("2.13.0", torch.float32, True),
    ("2.14.1", torch.bfloat16, True),
])  # fmt: skip
def test_sgd_of_16_bits_on_a_cpu_is_fused_where_it_is_right(version, dtype, fused, monkeypatch):
    """Before 2.14 its kernel was not (pytorch#191763)."""
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    model = nn.Linear(2, 2).to(dtype)
    groups = [{"params": list(model.parameters())}]
    monkeypatch.setattr(common, "parameter_groups", lambda args, model: groups)
    args = Settings(optimizer="sgd", lr=0.1, momentum=0.9, weight_decay=0.0)
    assert common.make_optimizer(args, model).defaults["fused"] is fused


def test_schedule():
    args = arguments("--epochs", "4", lr=1.0)
    optimizer = common.make_optimizer(args, torch.nn.Linear(1, 1))
    scheduler = common.make_scheduler(args, optimizer, steps_per_epoch=25)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:10] == pytest.approx([(i + 1) / 11 for i in range(10)])
    assert rates[10] == max(rates) == 1
    assert rates[55] == pytest.approx(0.5)
    assert sorted(rates[10:], reverse=True) == rates[10:]
    assert 0 < rates[-1] < 0.001 and optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-9)


def test_what_deterministic_asks_for(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    asked = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    for deterministic in (False, True):
        common.seed_everything(7, deterministic)
        assert torch.initial_seed() == 7 and asked == [True] * deterministic
        assert torch.backends.cudnn.benchmark != deterministic
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == deterministic


MODELS = [("resnet18", 32, "batch"), ("resnet18", 32, "group"), ("alexnet", 64, "group")]
MODELS += [("googlenet", 64, "batch")]  # which has extra outputs


@pytest.mark.parametrize("name, size, norm", MODELS)
def test_models(name, size, norm):
    """Names and shapes of plain torchvision, with GroupNorm put in by torchvision's own means."""
    model = common.make_model(arguments(model=name, image_size=size, norm=norm), list("abc"))
    options = {"googlenet": {"aux_logits": False, "init_weights": False}}.get(name, {})
    if norm == "group" and name != "alexnet":
        options["norm_layer"] = lambda channels: nn.GroupNorm(32, channels)
    plain = torchvision.models.get_model(name, num_classes=3, **options)
    plain.load_state_dict(model.state_dict(), strict=True)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert model(torch.zeros(2, 3, size, size)).shape == (2, 3)


def test_defaults_depend_on_device_and_dataset(monkeypatch, tmp_path):
    def parse(*flags):
        monkeypatch.setattr(sys, "argv", ["x.py", "--output-dir", str(tmp_path), *flags])
        return common.parse_args(common.argument_parser(""))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = parse()
    assert (args.model, args.image_size, args.train_samples) == ("resnet18", 32, 2048)
    args = parse("--dataset", "folder")
    assert (args.train_samples, args.eval_samples) == (None, None)
    assert args.lr == 0.01
    assert parse("--optimizer", "adamw").lr == 0.001
    written = parse("@config/reference.args", "--epochs", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = parse()
    assert (args.device, args.epochs, args.train_samples) == ("cuda", 5, None)
    for job in (args, written):
        assert (job.model, job.image_size, job.batch_size) == ("resnet50", 224, 128)
    assert (written.dataset, written.epochs) == ("cifar10", 2), "a later flag wins"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file.pt"
    state.save_file({"a": torch.zeros(3)}, path)

    def fail_half_way(state, file):
        Path(file).write_bytes(b"half")
        raise OSError("no space")

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(torch, "save", fail_half_way)
        state.save_file({"a": torch.ones(3)}, path)
    assert torch.equal(common.load_file(path, "--weights")["a"], torch.zeros(3))
    state.save_file({"a": torch.ones(3)}, path)
    assert torch.equal(common.load_file(path, "--weights")["a"], torch.ones(3))


@pytest.mark.full
def test_peak_memory_is_that_of_this_process_alone():
    """On Linux getrusage() also counts what the process that started this one had taken."""
    code = "import torch; from harness.measure import peak_memory_gib as peak; "
    code += "print(peak(torch.device('cpu'))['process'])"
    before = float(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True))
    ballast = torch.ones(2**31, dtype=torch.uint8)  # 2 GiB in the parent
    after = float(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True))
    del ballast
    assert 0.1 < before < 1 and abs(after - before) < 0.1
