"""Checks of exercises in which ranks divide the batch. Each yields findings, on every rank; the
reference is computed there, too, from the whole batch. Nothing may end early: ranks would wait."""

import copy
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from exercises.judge.verdict import Finding, compare, expect

OWN = "is this rank's own gradient: nothing was averaged"


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Of a mean loss, which is left out of ``p.grad``."""
    return list(torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters())))


def own(batch: Tensor) -> Tensor:
    """The samples of this rank: as many as any other has."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def make_batch(size: int = 12) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(size, 4), torch.randn(size, 3)


def mean(answer) -> Iterator[Finding]:
    model = make_model()
    x, y = make_batch()
    expected = gradients(model, x, y)
    alone = gradients(model, own(x), own(y))
    frozen = nn.Parameter(torch.ones(2))
    parameters = [frozen, *model.parameters()]
    for p, gradient in zip(model.parameters(), alone, strict=True):
        p.grad = gradient.clone()
    answer.average_gradients(parameters)
    n = dist.get_world_size()
    for name, p in model.named_parameters():
        what = f"the gradient of {name}"
        own_share = "is this rank's own gradient, divided: nothing was summed"
        mine = alone.pop(0)
        yield compare(what, p.grad, expected.pop(0), {OWN: mine, own_share: mine / n})
    yield expect("the gradient of a frozen parameter", frozen.grad is None, "is not None any more")


def buckets(answer) -> Iterator[Finding]:
    model = nn.Sequential(make_model(), nn.Tanh(), nn.Linear(3, 3))
    parameters = list(model.parameters())
    filled = answer.fill_buckets(parameters, 160)  # bytes; the parameters have 160, 40, ...
    names = {p: name for name, p in model.named_parameters()}
    found = [[names[p] for p in bucket] for bucket in filled]
    expected = [["2.bias", "2.weight", "0.2.bias", "0.2.weight"], ["0.0.bias", "0.0.weight"]]
    forward = found and found[0][:1] == ["0.0.weight"]
    why = "begins with the first parameter, whose gradient backward computes last"
    yield expect("the first bucket", not forward, why)
    yield expect("fill_buckets()", found == expected, f"returns {found} instead of {expected}")
    begun = []

    def all_reduce(tensor, *args, async_op=False, **options):
        begun.append(async_op)
        return dist_all_reduce(tensor, *args, async_op=async_op, **options)

    dist_all_reduce = dist.all_reduce
    with mock.patch.object(dist, "all_reduce", all_reduce):
        wait = answer.attach([parameters[4:][::-1], parameters[:4][::-1]])
        for step in ("first", "second"):
            x, y = make_batch()
            x = x if step == "first" else x.flip(1)
            expected = gradients(model, x, y)
            alone = gradients(model, own(x), own(y))
            begun.clear()
            F.mse_loss(model(own(x)), own(y)).backward()
            what = f"the number of all-reduces when backward of the {step} step returns"
            yield expect(what, len(begun) == 2, f"is {len(begun)}, and there are 2 buckets")
            why = "blocks backward until it is done: async_op=True"
            yield expect("an all-reduce", all(begun), why)
            wait()
            guess = "is this rank's own gradient: the mean stays in the flat tensor"
            for p, gradient, mine in zip(parameters, expected, alone, strict=True):
                what = f"the gradient of {names[p]} in the {step} step"
                yield compare(what, p.grad, gradient, {guess: mine})
                p.grad = None


def token_weights(answer) -> Iterator[Finding]:
    n = dist.get_world_size()
    parts = 3  # micro-batches of a rank
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    tokens = torch.randint(7, (n, parts, 2, 9))
    lengths = torch.randint(1, 9, (n, parts, 2, 1))
    lengths[-1, 1] = 0
    labels = torch.where(torch.arange(9) < lengths, tokens.roll(-1, 3), -100)
    counts = (labels >= 0).sum((2, 3)).double()

    def weighed(weights: Tensor) -> Tensor:
        """The gradient of the head if losses of rank and micro-batch have these weights."""
        logits = model(tokens).flatten(0, 3)
        losses = F.cross_entropy(logits, labels.flatten(), reduction="none").view_as(labels)
        loss = (losses.sum((2, 3)) * weights).sum()
        return torch.autograd.grad(loss, model[1].weight)[0]

    of_rank = counts.sum(1, keepdim=True)
    expected = weighed((1 / counts.sum()).expand_as(counts))
    means = (1 / counts).nan_to_num(posinf=0)
    guesses = {
        "is the mean of the ranks' means: a label counts less where its rank has more of them":
            weighed((1 / n / of_rank).expand_as(counts)),
        "is the mean of the micro-batches' means": weighed(means / n / parts),
        "is divided twice: cross_entropy() took the mean of each micro-batch":
            weighed(means / counts.sum()),
        "is the sum of the ranks' means": weighed((1 / of_rank).expand_as(counts)),
        "is divided by this rank's number of labels, not by that of all ranks":
            weighed((1 / of_rank[dist.get_rank()]).expand_as(counts)),
    }  # fmt: skip
    rank = dist.get_rank()
    answer.accumulate(model, list(zip(tokens[rank], labels[rank], strict=True)))
    yield compare("the gradient", model[1].weight.grad, expected, guesses)


def _later(answer):
    raise NotImplementedError


zero = fsdp = loss_scaling = three_mistakes = copy.copy(_later)
