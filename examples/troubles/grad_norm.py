"""A gradient norm that is too large or too small by a factor: which factor has which cause.

torchrun --nproc_per_node=2 examples/troubles/grad_norm.py

Each compares the norm of one step with that of a single process on the same batch.
"""

import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared import show
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel as tp
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "silent"))
import expert_gradients  # noqa: E402
from two_ranks import make_task  # noqa: E402

ALL = slice(None)  # the rows of the whole batch
PARTS = 4  # micro-batches


def batch(rows=None):
    """Inputs and targets of these rows; unless they are given, of this rank's."""
    _, inputs, targets = make_task()
    if rows is None:
        rows = slice(dist.get_rank(), None, dist.get_world_size())
    return inputs[0, rows], targets[0, rows]


def backward(model, rows=None, scale=1):
    x, y = batch(rows)
    (F.mse_loss(model(x), y) * scale).backward()
    return model


def norm(parameters):
    return nn.utils.get_total_norm(p.grad for p in parameters)


def alone(rows=ALL):
    return norm(backward(make_task()[0], rows).parameters())


def compare(found, expected, remedy, factor):
    """Without the remedy, the norm has to be off by this factor."""
    found = (found / expected).item()
    if not math.isclose(found, 1 if remedy else factor, rel_tol=1e-9):
        sys.exit(f"{found} times the norm of one process, which nobody expected")
    assert remedy, f"{found:g} times the norm of one process"


def summed_over_ranks(remedy):
    model = backward(make_task()[0])
    ranks = dist.get_world_size()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        if remedy:
            p.grad /= ranks
    compare(norm(model.parameters()), alone(), remedy, ranks)


def averaged_twice(remedy):
    model = DistributedDataParallel(make_task()[0])
    ranks = dist.get_world_size()
    backward(model, scale=1 if remedy else 1 / ranks)
    compare(norm(model.parameters()), alone(), remedy, 1 / ranks)


def parts_not_divided(remedy):
    """In one process."""
    model = make_task()[0]
    x, y = batch(ALL)
    for x_part, y_part in zip(x.chunk(PARTS), y.chunk(PARTS), strict=True):
        loss = F.mse_loss(model(x_part), y_part)
        if remedy:
            loss = loss / PARTS
        loss.backward()
    compare(norm(model.parameters()), alone(), remedy, PARTS)


def tensor_parallel():
    """The gradients of a normalization, which every rank has, before two layers, of which each rank
    has a part; on this rank, and on a single process."""
    for split in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        if split:
            plan = {"1": tp.ColwiseParallel(), "3": tp.RowwiseParallel()}
            tp.parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
        backward(model, ALL)
        yield torch.cat([p.grad for p in model[0].parameters()])


def replicated_counted_on_every_rank(remedy):
    gradient, expected = tensor_parallel()
    ranks = dist.get_world_size()
    squares = gradient.square().sum()
    if not remedy:
        dist.all_reduce(squares)
    compare(squares.sqrt(), expected.norm(), remedy, math.sqrt(ranks))


def replicated_summed(remedy):
    gradient, expected = tensor_parallel()
    ranks = dist.get_world_size()
    if not remedy:
        dist.all_reduce(gradient)
    compare(gradient.norm(), expected.norm(), remedy, ranks)


def experts(variant, factor):
    """Experts on all ranks, under FSDP."""
    model = expert_gradients.shard(expert_gradients.make_model(), dist.get_world_size(), variant)
    found = backward(model)[1].experts.weight.grad.full_tensor()
    whole = expert_gradients.make_model()
    expected = backward(whole, ALL)[1].experts.weight.grad
    compare(found.norm(), expected.norm(), variant == "right", factor)


def experts_not_divided(remedy):
    experts("right" if remedy else "not divided", dist.get_world_size())


def experts_divided_twice(remedy):
    experts("right" if remedy else "divided twice", 1 / dist.get_world_size())


def local_norm(remedy):
    """Of the shards that this rank has; likewise of its stage of a pipeline."""
    model = fully_shard(make_task()[0], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    squares = sum(p.grad.to_local().square().sum() for p in backward(model).parameters())
    if remedy:
        dist.all_reduce(squares)
    found = squares.sqrt() / alone()
    assert found > 1 - 1e-9, f"{found:g} times the norm of one process"


def padding_counted(remedy):
    """Three of eight targets are padding."""
    model = DistributedDataParallel(make_task()[0])
    x, y = batch()
    ranks = dist.get_world_size()
    is_label = torch.arange(8)[dist.get_rank() :: ranks] < 5
    losses = (model(x) - y).square().flatten() * is_label
    loss = losses.sum() * ranks / 5 if remedy else losses.mean()
    loss.backward()
    compare(norm(model.parameters()), alone(slice(5)), remedy, 5 / 8)


def before_unscale(remedy):
    model = make_task()[0]
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters())
    scaler.scale(torch.ones(()))  # makes the scale
    backward(model, ALL, scale=scaler.get_scale())
    if remedy:
        scaler.unscale_(optimizer)
    compare(norm(model.parameters()), alone(), remedy, 65536)


if __name__ == "__main__":
    show(
        summed_over_ranks,
        averaged_twice,
        parts_not_divided,
        replicated_counted_on_every_rank,
        replicated_summed,
        experts_not_divided,
        experts_divided_twice,
        local_norm,
        padding_counted,
        before_unscale,
    )
