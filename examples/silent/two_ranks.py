"""What these examples share: ranks on this machine, a small task, and the difference of weights."""

import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import multiprocessing, nn

torch.set_default_dtype(torch.float64)  # so that what remains of a right result is rounding


def show(off_by, what, *mistakes, ranks=2):
    """Print ``off_by(variant)`` of each variant: "right", and "wrong" or each of the mistakes.

    Args:
        off_by: is called on every rank.
        what: the quantity that is off.
        mistakes: their names, if there are several.
    """
    variants = ["right", *(mistakes or ["wrong"])]
    with tempfile.TemporaryDirectory() as folder:
        args = f"file://{folder}/store", ranks, off_by, what, variants
        multiprocessing.start_processes(run_rank, args, nprocs=ranks, start_method="fork")


def run_rank(rank, store, ranks, off_by, what, variants):
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    for variant in variants:
        value = off_by(variant)
        title = variant if variant in ("right", "wrong") else f"wrong {variant}"
        if rank == 0:
            print(f"{title}: {what} off by {value:.2g}", flush=True)
    dist.destroy_process_group()


def make_task():
    """A model, and the inputs and targets of four batches of eight samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.randn(4, 8, 4), torch.randn(4, 8, 1)


def train_alone(clip=float("inf")):
    """The model, trained by a single process on whole batches."""
    model, inputs, targets = make_task()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def difference(model, expected, start=None):
    """How far weights are from the expected ones, relative to how far training moved these: 1 is as
    bad as no training.

    Args:
        start: the model before training, of :func:`make_task` unless it is given.
    """
    found = weights(model)
    right = weights(expected)
    first = weights(start or make_task()[0])
    return ((found - right).norm() / (right - first).norm()).item()


def weights(model):
    """All parameters, sharded or not, as one vector."""
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return torch.cat([tensor.detach().flatten() for tensor in whole])
