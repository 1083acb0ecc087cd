"""Local SGD and DiLoCo: what they compute, when they sync, what they send, who may resume them.
That they resume with the same bits: test_contract.py."""

import itertools
import re
import signal
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from conftest import cases, hooked, launch, read_run, relative_difference, snapshots, succeed
from test_text import settled
from torch.utils.data import DataLoader, DistributedSampler

import common
from libraries.weights import load
from pytorch_LocalSGD import CommonWeights

DATA = "--dataset synthetic --train-samples 150 --eval-samples 20 --batch-size 24 --print-freq 1"
JOB = f"{DATA} --epochs 9 --double"  # six steps an epoch
RESNET = "--model small_resnet --norm group --max-steps 12"
GPT = "--model gpt-2x4x32 --context 16 --max-steps 12"
SGD = "--optimizer sgd"
ADAMW = "--optimizer adamw"
DILOCO = "--outer-lr 0.7 --outer-momentum 0.9"
INNER = {"sgd": SGD, "adamw": f"{ADAMW} --lr 0.01 --clip-grad 0.5"}
OUTER = {"average": "", "DiLoCo": DILOCO, "half the way": "--outer-lr 0.5"}
LOCAL = "pytorch_LocalSGD"
EVERY = f"{LOCAL} --sync-every 1"
DDP = "pytorch_torchrun_DDP"
ONE = "pytorch_SingleGPU"


# ----------------------------------------------------------------------------- what is computed
SAME = [  # flags, ranks, the script it is equal to, its ranks, and how close
    (f"{GPT} {SGD} --sync-every 1", 2, ONE, 1, 1e-12),
    # alone, whenever it syncs, and to the last bit: an average of one changes nothing
    (f"{GPT} {ADAMW} --dropout 0.2 --sync-every 4", 1, ONE, 1, 0),
    (f"{RESNET} --sync-every 4", 1, ONE, 1, 0),
    (f"{GPT} {SGD} --sync-every 1", 3, ONE, 1, 1e-12),
    (f"{GPT} {SGD} --sync-every 1", 4, ONE, 1, 1e-12),
    # of BatchNorm the statistics are of each rank's images, too, and rank 0's are judged
    (f"{RESNET} --norm batch --sync-every 1", 2, DDP, 2, 1e-9),
]


@cases("flags, n, other, ranks, close", SAME, lambda *row: row in SAME[:2])
def test_where_it_is_exact(flags, n, other, ranks, close, train):
    """With SGD, whose momentum and weight decay are linear in the gradient, as the mean is."""
    flags, _, every = flags.partition(" --sync-every ")
    expected, expected_result = train(other, ranks, flags)
    weights, result = train(f"{LOCAL} --sync-every {every}", n, flags)
    assert relative_difference(weights, expected) <= close
    assert result["steps"] == 12
    for name in ("train_loss", "eval_loss", "eval_accuracy"):
        assert result[name] == pytest.approx(expected_result[name], rel=1e-9)


PLAYED = [(inner, outer, parts) for parts in (1, 2) for inner in INNER for outer in OUTER]
USUAL = [("sgd", "average", 1), ("adamw", "DiLoCo", 1), ("adamw", "DiLoCo", 2)]


@cases("inner, outer, parts", PLAYED, lambda *row: row in USUAL)
def test_against_ranks_played_one_after_the_other(inner, outer, parts, train, double):
    """Three ranks with a sync after steps 4, 6 (an epoch's end), 8 and 12. Of two fragments, the
    first half of the weights after steps 4, 8 and 12, the second after 2 and 10; both at the end of
    an epoch. Here the outer step is that of torch.optim.SGD, as the paper has it."""
    flags = f"{GPT} {INNER[inner]}"
    fragments = f"--fragments {parts}" if parts > 1 else ""
    weights, result = train(f"{LOCAL} --sync-every 4 {fragments} {OUTER[outer]}", 3, flags)
    numbers = re.findall(r"[\d.]+", OUTER[outer])
    found = play_ranks(settled(f"{JOB} {flags}"), 3, *numbers, halves=parts == 2)
    assert relative_difference(weights, found) < 1e-10
    assert result["steps"] == 12


def test_fragments_are_all_parameters_once():
    for sizes, number in (([5, 1, 1, 5], 2), ([100, 1, 1], 3), ([1] * 7, 3), ([3], 1)):
        outer = CommonWeights([torch.nn.Parameter(torch.zeros(n)) for n in sizes], 1, 0)
        parts = outer.fragments(number)
        assert sum((sizes[part] for part in parts), []) == sizes and len(parts) <= number


class Rank(NamedTuple):
    """A rank that is played: what it has of its own."""

    sampler: DistributedSampler
    loader: DataLoader
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler


def make_rank(args, train_set, number, n):
    sampler = DistributedSampler(train_set, n, number, seed=args.seed, drop_last=True)
    loader = common.make_loader(args, train_set, args.batch_size // n, sampler, drop_last=True)
    torch.manual_seed(args.seed)
    model = common.make_model(args, train_set.classes)
    optimizer = common.make_optimizer(args, model, fused=False)
    scheduler = common.make_scheduler(args, optimizer, len(loader))
    return Rank(sampler, loader, model, optimizer, scheduler)


def play_ranks(args, n, lr="1", momentum="0", halves=False) -> dict:
    """Local SGD with all ranks in this process."""
    train_set, _ = common.make_datasets(args)
    ranks = [make_rank(args, train_set, number, n) for number in range(n)]
    shared = [p.detach().clone().requires_grad_() for p in ranks[0].model.parameters()]
    nesterov = float(momentum) > 0
    outer = torch.optim.SGD(shared, lr=float(lr), momentum=float(momentum), nesterov=nesterov)
    step = 0
    for epoch in range(2):
        for rank in ranks:
            rank.sampler.set_epoch(epoch)
        for index, batches in enumerate(zip(*(rank.loader for rank in ranks), strict=True)):
            for number, batch in enumerate(batches):
                place = args.seed, epoch, index
                inputs = train_set.prepare(batch, "cpu", *place, share=(number, n))
                take_step(ranks[number], args, *inputs)
            step += 1
            synchronize(ranks, shared, outer, due_after(step, shared, halves))
    return ranks[0].model.state_dict()


def take_step(rank, args, tokens, labels):
    rank.optimizer.zero_grad()
    F.cross_entropy(rank.model(tokens).flatten(0, 1), labels.flatten()).backward()
    if args.clip_grad:
        torch.nn.utils.clip_grad_norm_(rank.model.parameters(), args.clip_grad)
    rank.optimizer.step()
    rank.scheduler.step()


def due_after(step, shared, halves):
    """Which parameters are averaged after a step: all, or those that begin in a half of them."""
    sizes = [p.numel() for p in shared]
    begins = [end - size for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
    first_half = step in (4, 6, 8, 12)
    second_half = step in (2, 6, 10, 12) if halves else first_half
    return [first_half if begin < sum(sizes) / 2 else second_half for begin in begins]


def synchronize(ranks, shared, outer, due):
    everyones = list(zip(*(rank.model.parameters() for rank in ranks), strict=True))
    with torch.no_grad():
        for p, theirs, now in zip(shared, everyones, due, strict=True):
            p.grad = p - sum(theirs) / len(ranks) if now else None
        outer.step()
        for p, theirs, now in zip(shared, everyones, due, strict=True):
            for own in theirs if now else ():
                own.copy_(p)


# ------------------------------------------------------------------------ what is sent and kept
MESSAGES = {"--sync-every 4": 1, "--sync-every 4 --max-steps 11": 0, f"--sync-every 2 {DILOCO}": 1}


@cases("flags", MESSAGES, lambda flags: DILOCO not in flags)
def test_a_sync_every_h_steps_is_one_message(flags, run_once):
    """Of all weights; here the last step is looked at."""
    messages = MESSAGES[flags]
    _, folder = run_once(LOCAL, 2, f"{JOB} {GPT} {SGD} {flags}", "sent")
    _, result = read_run(folder)
    assert result["calls"] == {"allreduce": 1} if messages else not result["calls"]
    assert sum(result["sent"].values()) == messages * result["state_bytes"]["parameters"]


# ------------------------------------------------------------------------------------- going on
def test_between_two_syncs_only_the_same_ranks_go_on(tmp_path):
    job = f"{JOB} {GPT} {SGD} --output-dir {tmp_path}/run"
    command = hooked(LOCAL, 2, f"--sync-every 4 {job}")
    assert launch(command, forked=True, HOOKS="stop_at:3").code == 128 + signal.SIGTERM
    [snapshot] = snapshots(tmp_path / "run")
    ranks = "rank-00000.pt", "rank-00001.pt"
    assert {file.name for file in snapshot.iterdir()} == {"SHA256SUMS", "state.pt", *ranks}
    for script, n in [(LOCAL, 3), (DDP, 2)]:
        line = launch(hooked(script, n, f"{job} --resume auto"), forked=True).refusal
        assert f"--resume {snapshot} was written between two synchronizations, when" in line
        assert "resume with pytorch_LocalSGD.py on 2 ranks" in line
    first, second = (torch.load(snapshot / file, weights_only=True)["model"] for file in ranks)
    mean = {name: (first[name] + second[name]) / 2 for name in first}
    assert relative_difference(load(snapshot), mean) < 1e-15 < relative_difference(first, mean)
    # Another way to sync is no hindrance: what was common is not known, and so the average is.
    flags = f"{job} --resume auto {DILOCO} --sync-every 2"
    finished = succeed(hooked(LOCAL, 2, flags), forked=True)
    assert "at epoch 1, step 4" in finished.stdout


SHORT = [(EVERY, 3, 2), (ONE, 1, 12)]
LONG = [(EVERY, 3, 2), (EVERY, 2, 4), (DDP, 2, 7), (EVERY, 4, 9), (ONE, 1, 10), (EVERY, 3, 12)]


@pytest.mark.parametrize("turns", [SHORT, pytest.param(LONG, marks=pytest.mark.full)])
def test_after_a_sync_any_ranks_and_scripts_go_on(turns, tmp_path):
    """Within an epoch, and where that is exact: with the mean of what the ranks' momentum was."""
    flags = f"{JOB} {GPT} {SGD} --warmup-steps 20"
    succeed(hooked(ONE, 1, f"{flags} --output-dir {tmp_path}/whole"), forked=True)
    job = f"{flags} --output-dir {tmp_path}/parts --resume auto"
    for script, n, steps in turns:
        finished = succeed(hooked(script, n, f"{job} --max-steps {steps}"), forked=True)
        assert ("resumed from" in finished.stdout) == (steps > 2)
    expected, found = (read_run(tmp_path / name)[0] for name in ("whole", "parts"))
    assert relative_difference(found, expected) < 1e-12


@pytest.mark.full
def test_diloco_goes_on_from_ddp(tmp_path):
    """It sets out from DDP's weights, not from those that this run was made with, of which the
    first sync would bring a part back."""
    job = f"{JOB} --model gpt-2x4x32 --context 16 {ADAMW} --schedule none"
    job += f" --output-dir {tmp_path} --resume auto"
    weights = []
    for script, steps in [(DDP, 1), (DDP, 30), (f"{LOCAL} {DILOCO}", 31)]:
        succeed(hooked(script, 2, f"{job} --max-steps {steps}"), forked=True)
        weights.append(read_run(tmp_path)[0])
    first, before, after = weights
    assert relative_difference(after, before) < 0.1 * relative_difference(before, first)
