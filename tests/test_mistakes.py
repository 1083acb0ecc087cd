"""User errors end in a one-line error that names the value, exit code 2, no traceback, no hang."""

import argparse
import contextlib
import re
import shutil
import socket

import pytest
import torch
from conftest import ROOT, cases, launch, launcher, started, succeed
from PIL import Image

import common

LAST = "step-00000002-evaluated"
NANO, INTERLEAVED = "--model gpt-nano", "--pipeline-schedule interleaved"
A_GPT = "--model gpt-4x2x16 --context 16"
ONLY_GPT = ("pytorch_TP", "pytorch_FSDP_TP", "pytorch_CP", "pytorch_EP", "pytorch_PP")
AT_ONCE = 6  # commands that run side by side: most of the time they wait
SMALL = "--dataset synthetic --train-samples 48 --eval-samples 12 --batch-size 24 --epochs 1"

DEEPSPEED = {  # files in places
    "no_json": "{",
    "a_list": "[1]",
    "batch": '{"train_batch_size": 64}',
    "micro_batch": '{"train_micro_batch_size_per_gpu": 7}',
    "accumulation": '{"gradient_accumulation_steps": 2}',
    "stage": '{"zero_optimization": {"stage": 7}}',
}


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
    shutil.copytree(root / "damaged", root / "all_damaged" / "snapshots" / LAST)
    torch.save([1, 2], root / "a_list.pt")
    (root / "short").write_text("0123456789")
    (root / "latin").write_bytes("süß".encode("latin-1") * 99)
    for name, text in DEEPSPEED.items():
        (root / f"{name}.json").write_text(text)
    (root / "same").mkdir()
    shutil.copy(root / "run" / "model.pt", root / "same")
    return root


# flags of pytorch_SingleGPU.py, and what the line must name: the value, and the way out
SINGLE = [
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
    (
        "--dataset folder --data-dir {0}/no_test",
        ["{0}/no_test", "test or val"],
    ),
    (
        "--dataset folder --data-dir {0}/empty_class",
        ["{0}/empty_class", "green"],
    ),
    (
        "--dataset folder --data-dir {0}/broken",
        ["{0}/broken/train/red/000.jpg", "remove"],
    ),
    (
        "--dataset folder --data-dir {0}/other_classes",
        ["{0}/other_classes", "yellow"],
    ),
    (
        "--train-samples 20 --batch-size 21",
        ["--batch-size 21", "20", "smaller"],
    ),
    (
        "--image-size 32 --model alexnet",
        ["--model alexnet", "32x32", "larger --image-size"],
    ),
    (
        "--batch-size 1",
        ["resnet18", "32x32", "larger --image-size or --batch-size"],
    ),
    (
        "--output-dir {0}/a_file/run",
        ["{0}/a_file/run", "Not a directory", "another"],
    ),
    ("--output-dir {0}/a_file", ["{0}/a_file", "File exists", "another"]),
    (
        "--resume {0}/nowhere.pt",
        ["--resume {0}/nowhere.pt", "no such folder"],
    ),
    (
        "--resume {0}/damaged",
        ["--resume {0}/damaged", "state.pt is not what was written"],
    ),
    (
        "--resume {0}/run/model.pt",
        ["{0}/run/model.pt", "has no valid snapshot", "--weights"],
    ),
    ("--resume {0}/all_damaged", ["--resume {0}/all_damaged", "no valid snapshot"]),
    ("--resume {0}/no_test", ["{0}/no_test", "has no valid snapshot"]),
    (
        "--resume {0}/run --model resnet34",
        ["resnet18", "resnet34", "--resume none"],
    ),
    (
        "--resume {0}/run/snapshots --batch-size 12",
        ["--batch-size 24", "this run has 12"],
    ),
    ("--on-nan carry-on", ["--on-nan", "carry-on", "skip"]),
    ("--on-save-error pray", ["--on-save-error", "pray", "stop"]),
    ("--snapshot-every 0", ["--snapshot-every", "0", "1 or more"]),
    ("--timeout 0", ["--timeout", "0", "more than 0"]),
    (
        "--weights {0}/nowhere.pt",
        ["--weights {0}/nowhere.pt", "no such file"],
    ),
    (
        "--weights {0}/same/model.pt --output-dir {0}/same",
        ["{0}/same/model.pt", "overwritten"],
    ),
    ("--weights {0}/a_list.pt", ["--weights {0}/a_list.pt", "list"]),
    (
        "--weights {0}/run/model.pt --model resnet34",
        ["{0}/run/model.pt", "--model resnet34"],
    ),
    ("--weights imagenet", ["--weights imagenet", "download"]),
    # a GPT
    (f"{NANO} --dataset text --data-dir {{0}}/short", ["need"]),
    (f"{NANO} --dataset text --data-dir {{0}}/latin", ["is not UTF-8"]),
    (f"{NANO} --dataset text --data-dir {{0}}/none", ["it contains no file"]),
    (f"{NANO} --dataset shakespeare --data-dir {{0}}", ["be downloaded"]),
    (f"{NANO} --dataset cifar10", ["cifar10 is not for --model gpt-nano"]),
    (f"{NANO} --norm group", ["--norm is for images"]),
    (f"{NANO} --context 65", ["has at most 64 positions"]),
    (f"{NANO} --weights imagenet", ["--weights imagenet", "gpt-nano"]),
    ("--model gpt-2x3x16", ["width 16 is not divisible by 3 heads"]),
    ("--model gpt-large", ["--model gpt-large is no decoder"]),
    ("--model resnet18 --context 8", ["--context is for a GPT"]),
    ("--dataset shakespeare", ["is not for images", "cifar10"]),
    (f"{NANO} --weights {{0}}/run/model.pt", ["does not fit"]),
    (f"{NANO} --top-k 2", ["add --experts 8"]),
    (f"{NANO} --experts 2 --top-k 3", ["--top-k 3 is more"]),
    ("--experts 2", ["--experts is for a GPT"]),
]
# the other scripts: ranks, flags, words
MISTAKES = [("pytorch_SingleGPU", 1, *row) for row in SINGLE] + [
    ("pytorch_half_precision", 1, "--dtype float32", ["--dtype", "float32", "bfloat16"]),
    ("pytorch_half_precision", 1, "--double", ["--double", "bfloat16"]),
    ("pytorch_half_precision", 1, "--loss-scale 0", ["--loss-scale", "0", "1 or more"]),
    (
        "pytorch_half_precision",
        1,
        "--dtype float16 --optimizer adamw",
        ["adamw", "float16", "--master-weights"],
    ),
    ("pytorch_auto_mixed_precision", 1, "--double", ["--double", "bfloat16"]),
    ("pytorch_auto_mixed_precision", 1, "--clip-grad 0", ["--clip-grad", "0", "more than 0"]),
    ("pytorch_DP", 1, "--dtype float64", ["--dtype", "float64", "bfloat16"]),
    ("pytorch_FSDP", 1, "--dtype bfloat16 --double", ["--double", "bfloat16"]),
    ("pytorch_FSDP", 1, "--resume {0}/nowhere", ["--resume {0}/nowhere", "no such folder"]),
    ("pytorch_FSDP", 1, "--resume {0}/run", ["{0}/run", "pytorch_SingleGPU.py", "--weights"]),
    ("pytorch_Muon", 1, "--optimizer sgd", ["--optimizer sgd", "needs AdamW"]),
    ("pytorch_float8", 1, "--double", ["--double", "bfloat16"]),
    ("pytorch_float8", 1, "--model gpt-2x2x20", ["--model gpt-2x2x20", "no linear layer"]),
    ("pytorch_float8", 1, "--context 9 --batch-size 4", ["--context 9", "36 tokens"]),
    ("pytorch_checkpoint", 1, "--resume {0}/run", ["--resume {0}/run", "no complete DCP"]),
    ("pytorch_checkpoint", 1, "--output-dir s3://a/b", ["--output-dir s3://a/b", "local folder"]),
    ("pytorch_DDP_ZeRO", 1, "--use_zero --optimizer lbfgs", ["--optimizer", "lbfgs", "adamw"]),
    ("pytorch_gradient_accumulation", 1, "--accumulate 25", ["--accumulate 25", "24 images"]),
    ("pytorch_gradient_accumulation", 1, "--accumulate 24", ["resnet18", "1 images", "larger"]),
    ("pytorch_comm_hooks", 1, "--comm-hook int8", ["--comm-hook", "int8", "powersgd"]),
    # the same on two or three ranks
    ("pytorch_torchrun_DDP", 3, "--batch-size 32", ["--batch-size 32", "3 ranks", "30"]),
    ("pytorch_DDP", 3, "--batch-size 32", ["--batch-size 32", "3 ranks", "30"]),
    ("pytorch_DDP", 2, "--model resnet19", ["--model resnet19", "resnet18"]),
    ("pytorch_torchrun_DDP", 2, "--dataset folder --data-dir {0}/broken", ["red/000.jpg"]),
    ("pytorch_torchrun_DDP", 2, "--output-dir {0}/a_file/run", ["{0}/a_file/run"]),
    ("pytorch_torchrun_DDP", 2, "--dataset cifar10", ["--dataset cifar10", "synthetic"]),
    ("pytorch_torchrun_DDP", 2, "--resume {0}/run --norm group", ["--norm batch"]),
    # a mixture of experts
    ("pytorch_gradient_accumulation", 2, f"{NANO} --experts 2", ["--balance is not for"]),
    ("pytorch_TP", 2, "--experts 2", ["--experts 2: pytorch_TP.py has no mixture"]),
    ("pytorch_EP", 3, "--experts 8", ["--experts 8 are not divisible by 3 ranks; use 6"]),
    ("pytorch_EP", 2, "--model resnet18", ["--model resnet18"]),
    # a mesh
    ("pytorch_ND_parallel", 2, "--tp 3", ["--tp 3 x", "does not divide 2 ranks; use 3 ranks"]),
    ("pytorch_ND_parallel", 2, "--dp-shard 4", ["makes 4 ranks", "use --dp-shard 2"]),
    ("pytorch_ND_parallel", 4, "--tp 4 --model gpt-2x2x16", ["2 heads are not divisible by --tp"]),
    ("pytorch_ND_parallel", 2, "--batch-size 7", ["--batch-size 7 is the global batch", "use"]),
    ("pytorch_ND_parallel", 2, "--accumulate 5", ["not divisible by 10", "use --batch-size 20"]),
    ("pytorch_ND_parallel", 2, "--microbatches 2", ["--microbatches 2 is for a pipeline"]),
    ("pytorch_ND_parallel", 2, "--cp 2 --context 15", ["--context 15", "use --context 12"]),
    ("pytorch_ND_parallel", 4, "--pp 4 --model gpt-2x2x16", ["has 2 layers", "4 stages"]),
    (
        "pytorch_ND_parallel",
        2,
        "--pp 2 --pipeline-schedule zbv --ac selective",
        ["use --ac full or"],
    ),
    ("pytorch_ND_parallel", 2, "--pp 2 --pipeline-schedule dualpipev --tie", ["--tie", "another"]),
    ("pytorch_PP", 2, "--pipeline-schedule dualpipev --microbatches 2", ["use 4 or"]),
    ("pytorch_ND_parallel", 2, "--reshard-after-forward 3", ["forward 3 does not divide 2 shards"]),
    ("pytorch_ND_parallel", 2, "--attention pytorch --cp 2", ["--attention pytorch needs a GPU"]),
    # a Llama
    ("pytorch_SingleGPU", 1, "--model llama-2x4", ["--model llama-2x4 is no decoder"]),
    ("pytorch_SingleGPU", 1, "--model llama", ["takes its shape from --weights"]),
    ("pytorch_SingleGPU", 1, "--model llama-2x4x16 --kv-heads 3", ["--kv-heads 3 do not divide 4"]),
    ("pytorch_SingleGPU", 1, "--model llama-2x4x16 --dropout 0.1", ["a Llama has none"]),
    (
        "pytorch_SingleGPU",
        1,
        f"{NANO} --kv-heads 2",
        ["--kv-heads and --mlp-width need a Llama"],
    ),
    ("pytorch_TP", 2, "--model llama-2x4x16 --mlp-width 65", ["--mlp-width 65 is not divisible"]),
    # tensor, context and pipeline parallelism
    ("pytorch_TP", 2, "--model gpt-2x3x12", ["3 heads are not divisible by 2 ranks"]),
    ("pytorch_TP", 2, "--sequence-parallel --context 15", ["--context 15", "2 ranks"]),
    ("pytorch_TP", 2, "--dataset cifar10", ["--dataset cifar10 is not for --model gpt"]),
    ("pytorch_FSDP_TP", 2, "--tp 3", ["--tp 3 does not divide 2 ranks"]),
    ("pytorch_FSDP_TP", 3, "--tp 3 --model gpt-2x4x12", ["4 heads are not divisible by --tp 3"]),
    ("pytorch_FSDP_TP", 4, "--tp 2 --batch-size 25", ["--batch-size 25 is the global batch"]),
    ("pytorch_CP", 3, "--context 16", ["--context 16", "by 6, two chunks", "use --context 12"]),
    ("pytorch_CP", 4, "--context 2", ["use --context 8"]),
    ("pytorch_CP", 1, "--context 15", ["use --context 14"]),
    (
        "pytorch_CP",
        3,
        "--model gpt-2x4x32 --context 24 --attention ulysses",
        ["4 heads of gpt-2x4x32 cannot be"],
    ),
    ("pytorch_CP", 2, "--attention pytorch", ["--attention pytorch needs a GPU"]),
    ("pytorch_CP", 2, "--attention flash", ["invalid choice: 'flash'"]),
    ("pytorch_CP", 2, "--model resnet18", ["pytorch_CP.py supports only decoders"]),
    ("pytorch_CP", 2, "--batch-size 2000", ["--batch-size 2000 is more than", "windows"]),
    ("pytorch_PP", 2, "--microbatches 5", ["use 2 or 3 or 4 or 6 or 8 or 12 or 24 or another"]),
    ("pytorch_PP", 2, "--microbatches 1", ["use 2 or 3 or 4 or 6 or 8 or 12 or 24 or another"]),
    (
        "pytorch_PP",
        2,
        f"{INTERLEAVED} --batch-size 10 --microbatches 5",
        ["use 1 or 2 or 10 or another --batch-size"],
    ),
    ("pytorch_PP", 2, "--batch-size 1", ["--batch-size 1 on 2 ranks; use another --batch-size"]),
    ("pytorch_PP", 2, "--model gpt-1x2x16", ["has 1 layers", "1f1b needs 2 stages"]),
    ("pytorch_PP", 2, "--model gpt-3x2x16 --pipeline-schedule zbv", ["zbv needs 4 stages"]),
    ("pytorch_PP", 2, f"--model gpt-3x2x16 {INTERLEAVED}", ["has 3 layers"]),
    ("pytorch_PP", 2, "--microbatches 0", ["it must be 1 or more"]),
    # local SGD, DeepSpeed and Lightning
    ("pytorch_LocalSGD", 1, "--sync-every 0", ["--sync-every", "out of range"]),
    ("pytorch_LocalSGD", 1, "--outer-lr 0", ["--outer-lr", "out of range"]),
    ("pytorch_LocalSGD", 1, "--outer-momentum 1", ["--outer-momentum", "out of range"]),
    ("pytorch_LocalSGD", 1, "--outer-momentum=-0.1", ["--outer-momentum", "out of range"]),
    ("pytorch_DeepSpeed", 1, "--double", ["--double"]),
    ("pytorch_DeepSpeed", 1, "--deepspeed_config no_such.json", ["no_such.json"]),
    ("pytorch_DeepSpeed", 1, "--deepspeed_config {0}/no_json.json", ["not a readable JSON file"]),
    ("pytorch_DeepSpeed", 1, "--deepspeed_config {0}/a_list.json", ["a_list.json", "list"]),
    ("pytorch_DeepSpeed", 1, "--deepspeed_config {0}/batch.json", ["64", "--batch-size 24"]),
    ("pytorch_DeepSpeed", 1, "--deepspeed_config {0}/micro_batch.json", ["7", "--batch-size 24"]),
    ("pytorch_DeepSpeed", 1, "--deepspeed_config {0}/accumulation.json", ["2", "1 ranks"]),
    ("pytorch_DeepSpeed", 1, "--deepspeed_config {0}/stage.json", ["stage.json", "7"]),
    ("lightning_Trainer", 1, "--strategy zero", ["invalid choice: 'zero' (choose from "]),
    ("lightning_Trainer", 1, "--strategy deepspeed_stage_2 --double", ["--double: DeepSpeed"]),
]
SCRIPTS = list(dict.fromkeys(script for script, *_ in MISTAKES))


def command_of(script, ranks, flags, output):
    job = f"{SMALL} {A_GPT}" if script in ONLY_GPT else SMALL
    return f"{launcher(script, ranks)} {job} --output-dir {output} {flags}"


@pytest.mark.parametrize(
    "script",  # a library is a server's import
    cases([(s,) for s in SCRIPTS], lambda s: s not in ("pytorch_DeepSpeed", "lightning_Trainer")),
)
def test_a_mistake_ends_in_one_line(script, places, tmp_path):
    """All rows of a script, some at a time: its first rank reports it, and nothing is written."""
    rows = [row for row in MISTAKES if row[0] == script]
    for few in range(0, len(rows), AT_ONCE):
        with contextlib.ExitStack() as stack:
            running = []
            for number, (_, ranks, flags, words) in enumerate(rows[few : few + AT_ONCE], few):
                folder = tmp_path / str(number)
                command = command_of(script, ranks, flags.format(places), folder / "run")
                process = started(command, forked=True, TORCH_HOME=str(tmp_path))
                running.append((stack.enter_context(process), folder, words))
            for process, folder, words in running:
                finished = process.end(60)
                check_line(finished, [word.format(places) for word in words])
                assert not list(folder.glob("run/*"))


def test_a_process_of_its_own(places, tmp_path):
    """As it is typed, without a fork."""
    script, _, flags, words = MISTAKES[0]
    finished = launch(command_of(script, 1, flags, tmp_path / "run"), timeout=60)
    check_line(finished, words)


def check_line(finished, words):
    assert finished.code == 2 and "Traceback" not in finished.stderr, str(finished)
    assert len(finished.errors) == 1, str(finished)
    [line] = finished.errors
    for word in words:
        assert word in line, str(finished)


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
    assert "Tesla P40 lacks it; use --dtype float16" in capsys.readouterr().err


def check_report(finished, words):
    """Of a launcher, which adds its own to the line of ours."""
    assert finished.code != 0
    [line] = finished.errors
    for word in words:
        assert word in line
    ours = r'(common|pytorch_\w+|(harness|jobs)/\w+)\.py", line'
    assert not re.search(ours, finished.stderr), "a traceback of ours"
    assert "exitcode  : 2 " in finished.stderr, "the code with which the worker ended"


def test_several_ranks_of_a_launcher(tmp_path):
    command = command_of("pytorch_torchrun_DDP", 3, "--batch-size 32", tmp_path)
    check_report(launch(command, timeout=60), ["--batch-size 32", "3 ranks", "30"])


def test_a_mistake_that_one_rank_alone_makes_is_reported_too(tmp_path):
    """Local rank 0 does not speak for it, so it speaks itself before long."""
    script = tmp_path / "alone.py"
    script.write_text(
        "import time, common\n"
        "common.fail('only here') if common.world().rank == 1 else time.sleep(50)\n"
    )
    command = f"torchrun --standalone --nproc_per_node=2 {script}"
    finished = launch(command, timeout=60, PYTHONPATH=str(ROOT))
    check_report(finished, ["only here"])


def test_single_process_script_under_a_launcher(tmp_path):
    command = "torchrun --standalone --nproc_per_node=2 pytorch_SingleGPU.py"
    finished = launch(f"{command} {SMALL} --output-dir {tmp_path}", timeout=60, forked=True)
    check_line(finished, ["pytorch_SingleGPU.py", "2 ranks", "python pytorch_SingleGPU.py"])


@pytest.mark.parametrize("local_rank", [0, 1])
def test_more_ranks_than_gpus(local_rank, monkeypatch, capsys, become):
    """Found by every rank at once, before any waits for another."""
    become(size=2)
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


LIBRARIES = {"accelerate_": "accelerate", "lightning_": "lightning"}
LIBRARIES |= {"transformers_": "transformers", "pytorch_DeepSpeed": "deepspeed"}


@pytest.mark.parametrize(
    "script",
    cases(
        [(path.stem,) for start in LIBRARIES for path in sorted(ROOT.glob(f"{start}*.py"))],
        lambda script: script == "lightning_Fabric",
    ),
)
def test_a_library_that_cannot_be_imported(script, tmp_path):
    library = next(name for start, name in LIBRARIES.items() if script.startswith(start))
    (tmp_path / f"{library}.py").write_text("raise ImportError('not here')\n")
    finished = launch(f"python {script}.py", timeout=60, PYTHONPATH=str(tmp_path))
    check_line(finished, [script, library, "(not here)", "pip install"])


@contextlib.contextmanager
def unusable_proxy(silent: bool):
    """A port that refuses connections, or accepts them and never answers. It is taken as long as
    the test runs: a port that was only free a moment ago may belong to another test by now."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        if silent:
            held.listen()
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.mark.parametrize("silent", [False, True], ids=["refused", "silent"])
def test_cifar10_without_data_or_network(silent, tmp_path):
    """One line, whether the network refuses at once or never answers."""
    with unusable_proxy(silent) as proxy:
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
