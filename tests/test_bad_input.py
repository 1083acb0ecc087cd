"""What a user gets wrong ends in one line that names it, exit code 2, no traceback and no hang."""

import argparse
import contextlib
import re
import shutil
import socket

import pytest
import torch
from conftest import ROOT, free_port, launch, launcher, succeed
from PIL import Image

import common

LAST = "step-00000002-evaluated"
SMALL = "--dataset synthetic --train-samples 48 --eval-samples 12 --batch-size 24 --epochs 1"


@pytest.fixture(scope="session")
def places(tmp_path_factory, image_folder):
    """Folders and files that are wrong in one way each."""
    root = tmp_path_factory.mktemp("places")
    (root / "a_file").write_text("no folder, no weights, no snapshot")
    for name in ["empty_class", "broken", "other_classes", "no_test"]:
        shutil.copytree(image_folder, root / name)
    shutil.rmtree(root / "no_test" / "test")
    for file in (root / "empty_class" / "train" / "green").iterdir():
        file.unlink()
    jpeg = root / "broken" / "train" / "red" / "000.jpg"
    jpeg.write_bytes(jpeg.read_bytes()[:200])
    (root / "other_classes" / "test" / "yellow").mkdir()
    Image.new("RGB", (32, 32)).save(root / "other_classes" / "test" / "yellow" / "0.png")
    succeed(f"python pytorch_SingleGPU.py {SMALL} --output-dir {root}/run", forked=True)
    shutil.copytree(root / "run" / "snapshots" / LAST, root / "damaged")
    damaged = root / "damaged" / "state.pt"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    torch.save([1, 2], root / "a_list.pt")
    (root / "same").mkdir()
    shutil.copy(root / "run" / "model.pt", root / "same")
    return root


# flags of pytorch_SingleGPU.py, and what the line must name: the value, and the way out
MISTAKES = [
    ("--model resnet19", ["--model resnet19", "resnet18"]),
    ("--dataset imagenet", ["--dataset", "imagenet", "synthetic"]),
    ("--norm layer", ["--norm", "layer", "group"]),
    ("--norm sync", ["--norm sync", "--norm group"]),
    ("--device cuda", ["--device cuda", "--device cpu"]),
    ("--batch-size 0", ["--batch-size", "0", "1 or more"]),
    ("--epochs -1", ["--epochs", "-1", "1 or more"]),
    ("--epochs two", ["--epochs", "two is not a valid int"]),
    ("--lr 0", ["--lr", "0", "more than 0"]),
    ("--lr nan", ["--lr", "nan", "more than 0"]),
    ("--momentum 1", ["--momentum", "1", "less than 1"]),
    ("--weight-decay -0.1", ["--weight-decay", "-0.1", "0 or more"]),
    ("--seed -1", ["--seed", "-1", "0 or more"]),
    ("--train-samples 0", ["--train-samples", "0", "1 or more"]),
    ("--learning-rate 1", ["--learning-rate", "--help"]),
    ("@no_such.args", ["no_such.args"]),
    ("--dataset folder --data-dir {0}/nowhere", ["{0}/nowhere", "train"]),
    ("--dataset folder --data-dir {0}/no_test", ["{0}/no_test", "test or val"]),
    ("--dataset folder --data-dir {0}/empty_class", ["{0}/empty_class", "green"]),
    ("--dataset folder --data-dir {0}/broken", ["{0}/broken/train/red/000.jpg", "remove"]),
    ("--dataset folder --data-dir {0}/other_classes", ["{0}/other_classes", "yellow"]),
    ("--train-samples 20 --batch-size 21", ["--batch-size 21", "20", "smaller"]),
    ("--image-size 32 --model alexnet", ["--model alexnet", "32x32", "larger --image-size"]),
    ("--batch-size 1", ["resnet18", "32x32", "larger --image-size or --batch-size"]),
    ("--output-dir {0}/a_file/run", ["{0}/a_file/run", "Not a directory", "another"]),
    ("--output-dir {0}/a_file", ["{0}/a_file", "File exists", "another"]),
    ("--resume {0}/nowhere.pt", ["--resume {0}/nowhere.pt", "no such folder"]),
    ("--resume {0}/damaged", ["--resume {0}/damaged", "state.pt is not what was written"]),
    ("--resume {0}/run/model.pt", ["{0}/run/model.pt", "holds no snapshot", "--weights"]),
    ("--resume {0}/no_test", ["{0}/no_test", "holds no snapshot"]),
    ("--resume {0}/run --model resnet34", ["resnet18", "resnet34", "--resume none"]),
    ("--resume {0}/run/snapshots --batch-size 12", ["--batch-size 24", "this one has 12"]),
    ("--on-nan carry-on", ["--on-nan", "carry-on", "skip"]),
    ("--on-save-error pray", ["--on-save-error", "pray", "stop"]),
    ("--snapshot-every 0", ["--snapshot-every", "0", "1 or more"]),
    ("--timeout 0", ["--timeout", "0", "more than 0"]),
    ("--weights {0}/nowhere.pt", ["--weights {0}/nowhere.pt", "no such file"]),
    ("--weights {0}/same/model.pt --output-dir {0}/same", ["{0}/same/model.pt", "replace"]),
    ("--weights {0}/a_list.pt", ["--weights {0}/a_list.pt", "list"]),
    ("--weights {0}/run/model.pt --model resnet34", ["{0}/run/model.pt", "--model resnet34"]),
    ("--weights imagenet", ["--weights imagenet", "download"]),
]


# flags of the other scripts
TECHNIQUES = [
    ("pytorch_half_precision", "--dtype float32", ["--dtype", "float32", "bfloat16"]),
    ("pytorch_half_precision", "--double", ["--double", "bfloat16"]),
    ("pytorch_half_precision", "--loss-scale 0", ["--loss-scale", "0", "1 or more"]),
    (
        "pytorch_half_precision",
        "--dtype float16 --optimizer adamw",
        ["adamw", "float16", "--master-weights"],
    ),
    ("pytorch_auto_mixed_precision", "--double", ["--double", "bfloat16"]),
    ("pytorch_auto_mixed_precision", "--clip-grad 0", ["--clip-grad", "0", "more than 0"]),
    ("pytorch_DP", "--dtype float64", ["--dtype", "float64", "bfloat16"]),
    ("pytorch_FSDP", "--dtype bfloat16 --double", ["--double", "bfloat16"]),
    ("pytorch_FSDP", "--resume {0}/nowhere", ["--resume {0}/nowhere", "no such folder"]),
    ("pytorch_FSDP", "--resume {0}/run", ["{0}/run", "pytorch_SingleGPU.py", "--weights"]),
    ("pytorch_DDP_ZeRO", "--use_zero --optimizer lbfgs", ["--optimizer", "lbfgs", "adamw"]),
    ("pytorch_gradient_accumulation", "--accumulate 25", ["--accumulate 25", "24 images"]),
    ("pytorch_gradient_accumulation", "--accumulate 24", ["resnet18", "1 images", "larger"]),
    ("pytorch_comm_hooks", "--comm-hook int8", ["--comm-hook", "int8", "powersgd"]),
]

ALONE = [("pytorch_SingleGPU", *mistake) for mistake in MISTAKES] + TECHNIQUES


@pytest.mark.parametrize("script, flags, words", ALONE, ids=[f"{m[0]} {m[1]}" for m in ALONE])
def test_one_process(script, flags, words, places, tmp_path):
    check_one_process(script, flags, words, places, tmp_path, forked=True)


@pytest.mark.parametrize("script, flags, words", [ALONE[0], ALONE[-1]])
def test_one_process_of_its_own(script, flags, words, places, tmp_path):
    check_one_process(script, flags, words, places, tmp_path, forked=False)


def check_one_process(script, flags, words, places, folder, forked):
    command = f"python {script}.py {SMALL} --output-dir {folder}/run {flags.format(places)}"
    finished = launch(command, timeout=60, forked=forked, TORCH_HOME=str(folder))
    check_line(finished, [word.format(places) for word in words])
    assert finished.stderr.rstrip().splitlines()[-1] == finished.errors[0]
    assert not list(folder.glob("run/*"))


def check_line(finished, words):
    assert finished.code == 2 and "Traceback" not in finished.stderr, str(finished)
    [line] = finished.errors
    for word in words:
        assert word in line


# the same on two or three ranks
RANKS = [
    ("pytorch_torchrun_DDP", 3, "--batch-size 32", ["--batch-size 32", "3 ranks", "30"]),
    ("pytorch_DDP", 3, "--batch-size 32", ["--batch-size 32", "3 ranks", "30"]),
    ("pytorch_DDP", 2, "--model resnet19", ["--model resnet19", "resnet18"]),
    ("pytorch_torchrun_DDP", 2, "--dataset folder --data-dir {0}/broken", ["red/000.jpg"]),
    ("pytorch_torchrun_DDP", 2, "--output-dir {0}/a_file/run", ["{0}/a_file/run"]),
    ("pytorch_torchrun_DDP", 2, "--dataset cifar10", ["--dataset cifar10", "synthetic"]),
    ("pytorch_torchrun_DDP", 2, "--resume {0}/run --norm group", ["--norm batch"]),
]


@pytest.mark.parametrize("dtype, other", [("float16", "bfloat16"), ("bfloat16", "float16")])
def test_a_device_that_cannot_compute_in_half(dtype, other, monkeypatch, capsys):
    def refuse(*args):
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(common.F, "conv2d", refuse)
    with pytest.raises(SystemExit) as exit:
        common.get_dtype(argparse.Namespace(dtype=dtype), torch.device("cpu"))
    assert exit.value.code == 2
    line = capsys.readouterr().err
    assert f"--dtype {dtype}" in line and f"use --dtype {other}" in line


def test_a_gpu_without_bfloat16(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla P40")
    with pytest.raises(SystemExit) as exit:
        common.get_dtype(argparse.Namespace(dtype="bfloat16"), torch.device("cuda"))
    assert exit.value.code == 2
    assert "Tesla P40 has none; use --dtype float16" in capsys.readouterr().err


@pytest.mark.parametrize("script, world_size, flags, words", RANKS, ids=[r[2] for r in RANKS])
def test_several_ranks(script, world_size, flags, words, places, tmp_path):
    command = f"{launcher(script, world_size)} {SMALL} --output-dir {tmp_path}"
    finished = launch(f"{command} {flags.format(places)}", timeout=60, forked=True)
    check_line(finished, [word.format(places) for word in words])


def check_report(finished, words):
    """Of a launcher, which adds its own to the line of ours."""
    assert finished.code != 0
    [line] = finished.errors
    for word in words:
        assert word in line
    ours = r'(common|pytorch_\w+|(harness|jobs)/\w+)\.py", line'
    assert not re.search(ours, finished.stderr), "a traceback of ours"
    assert "exitcode  : 2 " in finished.stderr, "the code with which the worker ended"


@pytest.mark.parametrize("script, world_size, flags, words", RANKS[:1])
def test_several_ranks_of_a_launcher(script, world_size, flags, words, tmp_path):
    command = f"{launcher(script, world_size)} {SMALL} --output-dir {tmp_path}"
    check_report(launch(f"{command} {flags}", timeout=60), words)


def test_a_mistake_that_one_rank_alone_makes_is_reported_too(tmp_path):
    """Local rank 0 does not speak for it, so it speaks itself before long."""
    script = tmp_path / "alone.py"
    script.write_text(
        "import time, common\ncommon.fail('only here') if common.RANK == 1 else time.sleep(50)\n"
    )
    command = f"torchrun --standalone --nproc_per_node=2 {script}"
    finished = launch(command, timeout=60, PYTHONPATH=str(ROOT))
    check_report(finished, ["only here"])


def test_single_process_script_under_a_launcher(tmp_path):
    command = "torchrun --standalone --nproc_per_node=2 pytorch_SingleGPU.py"
    finished = launch(f"{command} {SMALL} --output-dir {tmp_path}", timeout=60, forked=True)
    check_line(finished, ["pytorch_SingleGPU.py", "2 ranks", "python pytorch_SingleGPU.py"])


@pytest.mark.parametrize("local_rank", [0, 1])
def test_more_ranks_than_gpus(local_rank, monkeypatch, capsys):
    """Found by every rank at once, before any waits for another."""
    monkeypatch.setattr(common, "LOCAL_WORLD_SIZE", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit) as exit:
        common.get_device(argparse.Namespace(device="cuda"), local_rank)
    assert exit.value.code == 2
    line = capsys.readouterr().err
    assert "2 ranks" in line and "has 1" in line and "--nproc_per_node=1" in line


def test_script_without_its_launcher(tmp_path):
    command = f"python pytorch_DDP.py {SMALL} --output-dir {tmp_path}"
    finished = launch(command, timeout=60, forked=True)
    check_line(finished, ["python -m torch.distributed.launch"])


@contextlib.contextmanager
def proxy_that_never_answers():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("silent", [False, True], ids=["refused", "silent"])
def test_cifar10_without_data_or_network(silent, tmp_path):
    """One line, whether the network refuses at once or never answers."""
    with proxy_that_never_answers() if silent else contextlib.nullcontext() as proxy:
        proxy = proxy or f"http://127.0.0.1:{free_port()}"
        command = f"python pytorch_SingleGPU.py --dataset cifar10 --data-dir {tmp_path}/data"
        finished = launch(
            f"{command} --output-dir {tmp_path}/run",
            timeout=60,
            forked=True,
            https_proxy=proxy,
            http_proxy=proxy,
        )
    check_line(finished, ["--dataset cifar10", "--dataset synthetic"])
    assert ("5 s" in finished.errors[0]) == silent


def test_auto_without_data_or_network_says_so_and_goes_on(tmp_path):
    flags = "--train-samples 48 --eval-samples 12 --batch-size 24 --epochs 1"
    folders = f"--data-dir {tmp_path}/data --output-dir {tmp_path}/run"
    finished = succeed(f"python pytorch_SingleGPU.py {flags} {folders}", forked=True)
    assert "data: synthetic (CIFAR-10 is not in" in finished.lines[2]
    assert '"dataset": "synthetic"' in (tmp_path / "run" / "result.json").read_text()
