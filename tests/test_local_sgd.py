"""Local SGD and DiLoCo: what they compute, when they sync, what they send, how they go on."""

import argparse
import json
import re
import shlex
import signal

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    ROOT,
    cases,
    distance,
    flat,
    launch,
    launcher,
    read_run,
    snapshots,
    state,
    succeed,
)
from test_parity import relative_difference
from torch.utils.data import DistributedSampler

import common

THROUGH = "tests/small_resnet.py"
DATA = "--dataset synthetic --train-samples 150 --eval-samples 20 --batch-size 24 --print-freq 1"
JOB = f"{DATA} --epochs 9 --double"  # six steps an epoch
RESNET = "--model small_resnet --norm group --max-steps 12"
GPT = "--model gpt-2x4x32 --context 16 --max-steps 12"
SGD, ADAMW = "--optimizer sgd", "--optimizer adamw"
DILOCO = "--outer-lr 0.7 --outer-momentum 0.9"
OUTER = {"average": "", "DiLoCo": DILOCO, "half the way": "--outer-lr 0.5"}
LOCAL = "pytorch_LocalSGD"


def doubles(weights):
    return {name: tensor.double() for name, tensor in weights.items()}


def run(script, n, flags, **options):
    """A script on n ranks, to its end."""
    return succeed(f"{launcher(script, n, THROUGH)} {flags}", forked=True, **options)


def program(folder, text):
    """A file that a launcher starts in a script's place: our folders first, then some lines."""
    path = folder / "program.py"
    path.write_text(f'import sys\nsys.path[:0] = ["{ROOT}", "{ROOT}/tests"]\n{text}')
    return path


# ----------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("model", [RESNET, f"{GPT} {SGD}"], ids=["resnet", "gpt"])
@pytest.mark.parametrize("n", cases([(2,), (3,), (4,)], lambda n: n == 2))
def test_a_sync_at_every_step_is_exact_with_sgd(n, model, train, measured):
    """Its momentum and its weight decay are linear in the gradient, and the mean is, too."""
    expected, expected_result = train("pytorch_SingleGPU", 1, model)
    weights, result = train(f"{LOCAL} --sync-every 1", n, model)
    difference = relative_difference(doubles(weights), doubles(expected))
    if model != RESNET:
        script = f"{LOCAL} --sync-every 1"
        measured("parity_shared", script=script, ranks=n, optimizer="sgd", value=difference)
    assert difference < 1e-12
    assert result["steps"] == 12
    for name in ("train_loss", "eval_loss", "eval_accuracy"):
        assert result[name] == pytest.approx(expected_result[name], rel=1e-9)


def test_with_batch_norm_it_is_ddp(train):
    """Whose statistics are of each rank's images, too, and rank 0's are those that are judged."""
    flags = "--model small_resnet --norm batch --max-steps 12"
    expected, expected_result = train("pytorch_torchrun_DDP", 2, flags)
    weights, result = train(f"{LOCAL} --sync-every 1", 2, flags)
    assert any("running_var" in name for name in weights)
    assert relative_difference(doubles(weights), doubles(expected)) < 1e-9
    assert result["eval_loss"] == pytest.approx(expected_result["eval_loss"], rel=1e-9)


@pytest.mark.parametrize(
    "flags, least, most",
    [(f"{GPT} {ADAMW}", 1e-4, 0.1), (f"{GPT} {SGD} --clip-grad 0.5", 1e-6, 1e-2)],
    ids=["adamw", "clip-grad"],
)
def test_what_is_not_linear_is_close_and_not_equal(flags, least, most, train):
    expected, expected_result = train("pytorch_torchrun_DDP", 2, flags)
    weights, result = train(f"{LOCAL} --sync-every 1", 2, flags)
    assert least < distance(weights, expected) < most
    assert result["eval_loss"] == pytest.approx(expected_result["eval_loss"], rel=0.01)


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("inner", [SGD, f"{ADAMW} --lr 0.01 --clip-grad 0.5"], ids=["sgd", "adamw"])
def test_against_ranks_played_one_after_the_other(inner, outer, train):
    """Three ranks with a sync after steps 4, 6 (an epoch's end), 8 and 12. Here the outer step is
    that of torch.optim.SGD, as the paper has it."""
    flags = f"{GPT} {inner}"
    weights, result = train(f"{LOCAL} --sync-every 4 {OUTER[outer]}", 3, flags)
    args = common.argument_parser("").parse_args(shlex.split(f"{JOB} {flags}"))
    args.device = "cpu"
    common.jobs.choice.fill_defaults(args)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = play_ranks(args, 3, 4, *re.findall(r"[\d.]+", OUTER[outer]))
    finally:
        torch.set_default_dtype(default)
    assert relative_difference(doubles(weights), doubles(found)) < 1e-10
    assert result["steps"] == 12


def play_ranks(args: argparse.Namespace, n: int, every: int, lr="1", momentum="0") -> dict:
    """Local SGD with all ranks in this process."""
    ranks = []
    for rank in range(n):
        train_set, _ = common.make_datasets(args)
        sampler = DistributedSampler(train_set, n, rank, seed=args.seed, drop_last=True)
        size = args.batch_size // n
        loader = common.make_loader(args, train_set, size, sampler, drop_last=True)
        torch.manual_seed(args.seed)
        model = common.make_model(args, train_set.classes)
        optimizer = common.make_optimizer(args, model, fused=False)
        scheduler = common.make_scheduler(args, optimizer, len(loader))
        ranks.append((train_set, sampler, loader, model, optimizer, scheduler))
    shared = [p.detach().clone().requires_grad_() for p in ranks[0][3].parameters()]
    nesterov = float(momentum) > 0
    outer = torch.optim.SGD(shared, lr=float(lr), momentum=float(momentum), nesterov=nesterov)
    step = 0
    for epoch in range(2):
        for _, sampler, *_ in ranks:
            sampler.set_epoch(epoch)
        for index, batches in enumerate(zip(*(rank[2] for rank in ranks), strict=True)):
            for rank, batch in enumerate(batches):
                train_set, *_, model, optimizer, scheduler = ranks[rank]
                place = args.seed, epoch, index
                tokens, labels = train_set.prepare(batch, "cpu", *place, share=(rank, n))
                optimizer.zero_grad()
                F.cross_entropy(model(tokens), labels).backward()
                if args.clip_grad:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
                optimizer.step()
                scheduler.step()
            step += 1
            if step not in (4, 6, 8, 12):
                continue
            with torch.no_grad():
                for p, *theirs in zip(
                    shared, *(rank[3].parameters() for rank in ranks), strict=True
                ):
                    p.grad = p - sum(theirs) / n
                outer.step()
                for p, *theirs in zip(
                    shared, *(rank[3].parameters() for rank in ranks), strict=True
                ):
                    for own in theirs:
                        own.copy_(p)
    return ranks[0][3].state_dict()


@pytest.mark.parametrize("flags", [RESNET, f"{GPT} {ADAMW} --dropout 0.2"], ids=["resnet", "gpt"])
def test_one_rank_alone_is_the_single_process(flags, train):
    """Whenever it syncs, and to the last bit: an average of one changes nothing."""
    expected, _ = train("pytorch_SingleGPU", 1, flags)
    weights, _ = train(f"{LOCAL} --sync-every 4", 1, flags)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_an_outer_step_all_the_way_is_the_average(tmp_path):
    """The last common weights drop out: they are kept here only because a test asks for it. Each
    rank's own are as far from them as may be."""
    path = program(
        tmp_path,
        """
import json, torch, torch.distributed as dist
from pytorch_LocalSGD import CommonWeights
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
common = [torch.linspace(-1, 1, 7), torch.ones(2, 3)]
own = [torch.randn_like(tensor) for tensor in common]
plain, outer = ([torch.nn.Parameter(tensor.clone()) for tensor in own] for _ in range(2))
CommonWeights(plain, 1, 0).sync()
full = CommonWeights(outer, 1, 0)
row = torch.cat([tensor.flatten() for tensor in common])
full.kept = {"weights": row, "momentum": torch.zeros_like(row)}
full.sync()
found = [torch.cat([p.detach().flatten() for p in group]).tolist() for group in (plain, outer)]
print(json.dumps([dist.get_rank(), *found]) + "\\n", end="", flush=True)
dist.destroy_process_group()
""",
    )
    finished = succeed(f"torchrun --standalone --nproc_per_node=3 {path}", forked=True)
    lines = [json.loads(line) for line in re.findall(r"^\[\d.*\]$", finished.stdout, re.MULTILINE)]
    own = []
    for rank in range(3):
        torch.manual_seed(rank)
        own.append(torch.cat([torch.randn(7), torch.randn(2, 3).flatten()]))
    mean = torch.stack(own).mean(0)
    for _, plain, outer in sorted(lines):
        torch.testing.assert_close(torch.tensor(plain), mean)
        torch.testing.assert_close(torch.tensor(outer), mean)
    assert len({str(plain) for _, plain, _ in lines}) == 1 and len(lines) == 3


@pytest.mark.full
def test_it_learns_with_few_syncs(train):
    """Averages nearly as DDP does. DiLoCo is for longer runs: with a momentum of 0.9 and a rate of
    0.7 its steps become seven times as long, once there were ten of them."""
    job = "--model gpt-2x4x32 --context 16 --epochs 20 --lr 0.005 --optimizer adamw"
    _, ddp = train("pytorch_torchrun_DDP", 2, job)
    _, local = train(f"{LOCAL} --sync-every 8", 2, job)
    _, diloco = train(f"{LOCAL} --sync-every 8 {DILOCO}", 2, job)
    first, last = ddp["eval_loss"][0], ddp["eval_loss"][-1]
    assert last < first - 0.3
    assert local["eval_loss"][-1] == pytest.approx(last, rel=0.05)
    assert diloco["eval_loss"][-1] < first - 0.1


# ------------------------------------------------------------------------ what is sent and kept

COUNT = """
import collections, json, os, runpy
import torch.distributed as dist
import small_resnet
sys.argv = sys.argv[1:]
from torch.utils._python_dispatch import TorchDispatchMode
from estimator.sent import message_of

class Count(TorchDispatchMode):
    sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        message = message_of(func, args)
        if message and message.kind == "allreduce" and message.size > 1000:  # no loss, no vote
            self.sizes.append(message.sent)
        return func(*args, **(kwargs or {}))

with Count():
    runpy.run_path(sys.argv[0], run_name="__main__")
if os.environ["RANK"] == "0":
    print("counted", json.dumps(Count.sizes), flush=True)
"""


@pytest.mark.full
def test_a_sync_every_h_steps_sends_one_hth_of_ddp(tmp_path):
    """Of all 16 steps, which are two epochs."""
    path = program(tmp_path, COUNT)
    job = "--model gpt-4x4x128 --context 16 --dataset synthetic --train-samples 64 "
    job += f"--eval-samples 8 --batch-size 8 --epochs 2 --output-dir {tmp_path}/run"
    sent = {}
    for name, script in {
        "DDP": "pytorch_torchrun_DDP.py",
        1: f"{LOCAL}.py --sync-every 1",
        4: f"{LOCAL}.py --sync-every 4",
        8: f"{LOCAL}.py --sync-every 8",
        "end of an epoch": f"{LOCAL}.py --sync-every 1000",
        "not a divisor": f"{LOCAL}.py --sync-every 5",  # after 5, 8, 10, 15 and 16
        "DiLoCo": f"{LOCAL}.py --sync-every 8 {DILOCO}",
    }.items():
        command = f"torchrun --standalone --nproc_per_node=2 {path} {script} {job}"
        [line] = re.findall(r"^counted (.*)$", succeed(command, forked=True).stdout, re.MULTILINE)
        sent[name] = json.loads(line)
    _, result = read_run(tmp_path / "run")
    whole = result["state_bytes"]["parameters"]  # 2 * 4 * (N - 1) / N bytes of each: at two, 4
    assert sum(sent["DDP"]) == pytest.approx(16 * whole, rel=0.02)
    for every in (1, 4, 8):
        assert len(sent[every]) == 16 / every
        assert sum(sent[every]) == pytest.approx(sum(sent["DDP"]) / every, rel=0.02)
    assert len(sent["end of an epoch"]) == 2 and len(sent["not a divisor"]) == 5
    assert len(sent["DiLoCo"]) == 3, "and once to begin with"
    for messages in sent.values():
        if messages is not sent["DDP"]:
            assert set(messages) == {whole}, "all weights in one"


def test_kept(train):
    """Bytes per parameter of a float64 run; the outer step's are two rows."""
    job = "--model gpt-4x4x64 --context 16 --max-steps 6 --optimizer adamw"
    for flags, outer in [("", 0), (DILOCO, 16)]:
        weights, result = train(f"{LOCAL} --sync-every 2 {flags}", 2, job)
        kept = {k: size / len(flat(weights)) for k, size in result["state_bytes"].items()}
        table = {"parameters": 8, "gradients": 8, "optimizer": 16, "outer": outer}
        assert kept == pytest.approx(table, rel=0.02)


# ------------------------------------------------------------------------------------- going on

STOP = """
import os, runpy, signal
import small_resnet
sys.argv = sys.argv[1:]
import common

log = common.Run.log

def log_and_stop(run, loss):
    if run.step == int(os.environ["STOP"]) and int(os.environ["RANK"]) == run.step % 2:
        os.kill(os.getpid(), signal.SIGTERM)
    log(run, loss)  # in which the ranks agree on it

common.Run.log = log_and_stop
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    "n, flags, steps",
    [  # six steps an epoch; a sync after 4, 6, 8 and 12
        (
            2,
            f"{GPT} {ADAMW} --dropout 0.2 --sync-every 4 {DILOCO}",
            [1, 4, 6, 7, 10],
        ),
        (3, f"{GPT} {ADAMW} --sync-every 4", [3, 9]),
        (3, "--model small_resnet --max-steps 12 --sync-every 5", [4, 6]),
    ],
    ids=["DiLoCo", "average", "batch-norm"],
)
def test_stopped_at_any_step_it_goes_on_with_the_same_bits(n, flags, steps, tmp_path):
    """In fp32. After each of these steps a rank is sent SIGTERM, and the next start goes on."""
    path = program(tmp_path, STOP)
    command = f"torchrun --standalone --nproc_per_node={n} {path} {LOCAL}.py {DATA} --epochs 9 "
    command += f"{flags} --resume auto --output-dir {tmp_path}"
    succeed(f"{command}/whole", forked=True, STOP="0")
    parts = tmp_path / "parts"
    for step in steps:
        finished = launch(f"{command}/parts", forked=True, STOP=str(step))
        assert finished.code == 128 + signal.SIGTERM, str(finished)
        assert f"stopped by SIGTERM after step {step} of 12" in finished.stdout
        assert state(parts)["step"] == step and not finished.our_warnings
    finished = succeed(f"{command}/parts", forked=True, STOP="0")
    assert "resumed from" in finished.stdout
    (expected, whole), (found, result) = read_run(tmp_path / "whole"), read_run(parts)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for name in ("train_loss", "eval_loss", "eval_accuracy", "steps", "epochs"):
        assert result[name] == whole[name]


def test_a_run_that_is_killed_goes_on_from_what_each_rank_wrote(tmp_path):
    """Its last snapshot is of step 5, and between two syncs no two ranks have the same weights."""
    job = f"{JOB} {GPT} {ADAMW} --sync-every 4 {DILOCO} --resume auto --output-dir {tmp_path}"
    run(LOCAL, 3, f"{job}/whole")
    path = program(tmp_path, STOP.replace("SIGTERM", "SIGKILL"))
    command = f"torchrun --standalone --nproc_per_node=3 {path} {LOCAL}.py {job}/parts"
    killed = launch(f"{command} --snapshot-every 5", forked=True, STOP="6")
    assert killed.code != 0
    [snapshot] = snapshots(tmp_path / "parts")
    files = {file.name for file in snapshot.iterdir()}
    assert files == {"SHA256SUMS", "state.pt", "rank-00001.pt", "rank-00002.pt"}
    others = [torch.load(snapshot / f"rank-0000{rank}.pt", weights_only=True) for rank in (1, 2)]
    weights = [flat(part["model"]) for part in (state(tmp_path / "parts"), *others)]
    assert not any(torch.equal(weights[a], weights[b]) for a, b in [(0, 1), (0, 2), (1, 2)])
    finished = run(LOCAL, 3, f"{job}/parts")
    assert "at epoch 1, step 6" in finished.stdout
    expected, found = (read_run(tmp_path / name)[0] for name in ("whole", "parts"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_between_two_syncs_only_the_same_ranks_go_on(tmp_path):
    path = program(tmp_path, STOP)
    job = f"{JOB} {GPT} {SGD} --output-dir {tmp_path}/run"
    command = f"torchrun --standalone --nproc_per_node=2 {path} {LOCAL}.py --sync-every 4 {job}"
    assert launch(command, forked=True, STOP="3").code == 128 + signal.SIGTERM
    [snapshot] = snapshots(tmp_path / "run")
    for script, n in [
        (LOCAL, 3),
        (LOCAL, 1),
        ("pytorch_torchrun_DDP", 2),
        ("pytorch_SingleGPU", 1),
    ]:
        finished = launch(f"{launcher(script, n)} {job} --resume auto", forked=True)
        assert finished.code == 2 and "Traceback" not in finished.stderr, str(finished)
        [line] = finished.errors
        assert f"--resume {snapshot} was written between two syncs, when each of 2 ranks" in line
        assert "go on with pytorch_LocalSGD.py on 2 ranks" in line
    # Another way to sync is no hindrance: what was common is not known, and so the average is.
    finished = run(LOCAL, 2, f"{job} --resume auto {DILOCO} --sync-every 2")
    assert "at epoch 1, step 4" in finished.stdout


def test_after_a_sync_any_ranks_and_scripts_go_on(tmp_path):
    """Within an epoch, and where that is exact: with the mean of what the ranks' momentum was."""
    flags = f"{JOB} {GPT} {SGD} --warmup-steps 20"
    flags = flags.replace("--max-steps 12", "")
    run("pytorch_SingleGPU", 1, f"{flags} --max-steps 12 --output-dir {tmp_path}/whole")
    job = f"{flags} --output-dir {tmp_path}/parts --resume auto"
    for script, n, steps in [
        (f"{LOCAL} --sync-every 1", 3, 2),
        (f"{LOCAL} --sync-every 1", 2, 4),
        ("pytorch_torchrun_DDP", 2, 7),
        (f"{LOCAL} --sync-every 1", 4, 9),
        ("pytorch_SingleGPU", 1, 10),
        (f"{LOCAL} --sync-every 1", 3, 12),
    ]:
        finished = run(script, n, f"{job} --max-steps {steps}")
        assert ("resumed from" in finished.stdout) == (steps > 2)
    expected, found = (read_run(tmp_path / name)[0] for name in ("whole", "parts"))
    assert relative_difference(doubles(found), doubles(expected)) < 1e-12


def test_diloco_goes_on_from_ddp(tmp_path):
    """It sets out from DDP's weights, not from those that this run was made with, of which the
    first sync would bring a part back."""
    job = f"{JOB} --model gpt-2x4x32 --context 16 {ADAMW} --schedule none"
    job += f" --output-dir {tmp_path} --resume auto"
    weights = []
    for script, steps in [
        ("pytorch_torchrun_DDP", 1),
        ("pytorch_torchrun_DDP", 30),
        (f"{LOCAL} {DILOCO}", 31),
    ]:
        run(script, 2, f"{job} --max-steps {steps}")
        weights.append(read_run(tmp_path)[0])
    first, before, after = weights
    assert distance(after, before) < 0.1 * distance(before, first)


# -------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "flags", ["--sync-every 0", "--outer-lr 0", "--outer-momentum 1", "--outer-momentum=-0.1"]
)
def test_flags_out_of_range(flags):
    finished = launch(f"python {LOCAL}.py {flags}", forked=True)
    assert finished.code == 2
    [line] = finished.errors
    assert flags.split("=")[0].split()[0] in line and "out of range" in line
