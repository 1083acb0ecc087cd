"""Checks of exercises in which ranks divide the batch. Each yields findings, on every rank; the
reference is computed there, too, from the whole batch. Nothing may end early: ranks would wait."""

import itertools
from collections.abc import Iterable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from exercises.judge.one_gpu import Kept
from exercises.judge.verdict import Finding, compare, expect

OWN = "is this rank's own gradient: nothing was averaged"


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Of a mean loss, which is left out of ``p.grad``."""
    return list(torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters())))


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


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


def zero(answer) -> Iterator[Finding]:
    n = dist.get_world_size()
    rank = dist.get_rank()
    model = make_model()
    alone = make_model()
    parameters = list(model.parameters())
    whole = flat(parameters)  # 43 numbers
    padding = -len(whole) % n
    padded = F.pad(whole, (0, padding))
    found = answer.flatten([p.detach() for p in parameters])
    yield compare("what flatten() returns", found, padded, {"lacks the padding": whole})
    shard = nn.Parameter(padded.chunk(n)[rank].clone())
    optimizer = torch.optim.SGD([shard], lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    x, y = make_batch()
    for number in (1, 2, 3):
        before = flat(alone.parameters())
        for p, gradient in zip(alone.parameters(), gradients(alone, x, y), strict=True):
            p.grad = gradient
        reference.step()
        expected = flat(alone.parameters()) - before
        before = flat(parameters)
        for p, gradient in zip(parameters, gradients(model, own(x), own(y)), strict=True):
            p.grad = gradient
        mine = flat([p.grad for p in parameters])
        shard.grad = None
        answer.step(parameters, shard, optimizer)
        is_here = torch.zeros(n, len(padded) // n)
        is_here[rank] = 1
        guesses = {
            "is 0: the updated shards never come back": torch.zeros_like(whole),
            "ends with this rank's shard: all ranks have to gather the others'":
                expected * is_here.flatten()[: len(whole)],
        }  # fmt: skip
        if number == 1:
            guesses["is that of this rank's gradient: nothing was averaged"] = -0.1 * mine
        yield compare(f"the change in step {number}", flat(parameters) - before, expected, guesses)


def fsdp(answer) -> Iterator[Finding]:
    n = dist.get_world_size()
    rank = dist.get_rank()
    torch.manual_seed(0)
    weight = torch.randn(5, 3)
    padded = F.pad(weight, (0, 0, 0, -5 % n))
    shard = padded.chunk(n)[rank].clone().requires_grad_()
    yield compare(
        "what gather() returns",
        answer.gather(shard.detach(), 5),
        weight,
        {"still has the padding": padded},
    )
    torch.manual_seed(1)
    batch = torch.randn(8, 3)
    targets = torch.randn(8, 5)
    x = own(batch).clone().requires_grad_()
    with Kept() as kept:
        output = answer.Layer.apply(x, shard, 5)
    yield compare("the output", output, own(batch) @ weight.T)
    most = x.numel() + shard.numel()
    why = f"keeps {sum(kept.sizes)} numbers, x and shard have {most}: gather again in backward"
    yield expect("forward()", n == 1 or sum(kept.sizes) <= most, why)
    output.backward(own(targets))  # of a loss that is the sum of output * targets
    yield compare("the gradient of the input", x.grad, own(targets) @ weight)
    mine = F.pad(own(targets).T @ own(batch), (0, 0, 0, -5 % n)).chunk(n)[rank]
    expected = F.pad(targets.T @ batch / n, (0, 0, 0, -5 % n)).chunk(n)[rank]
    guesses = {OWN: mine, "is this rank's own, divided: nothing was summed": mine / n}
    yield compare("the gradient of the shard", shard.grad, expected, guesses)


def loss_scaling(answer) -> Iterator[Finding]:
    rank = dist.get_rank()
    last = rank == dist.get_world_size() - 1
    shard = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([shard], lr=0.1)
    state = {"scale": 1024.0, "good": 0}
    scale = 1024.0
    good = 0
    for number in range(1, 11):
        gradient = torch.arange(1.0, 4.0) * number + rank
        overflow = number in (2, 10)
        shard.grad = gradient * state["scale"]
        if overflow and last:
            shard.grad[1] = float("nan" if number == 2 else "inf")
        before = shard.detach().clone()
        answer.step([shard], optimizer, state)
        change = torch.zeros(3) if overflow else -0.1 * gradient
        wrong = "updates this rank although the last one overflowed: ranks have to agree"
        guesses = {wrong: -0.1 * gradient} if overflow else {"is 0": torch.zeros(3)}
        yield compare(f"step {number}", shard.detach() - before, change, guesses)
        good = 0 if overflow else good + 1
        scale = scale / 2 if overflow else scale
        if good == 3:
            good = 0
            scale *= 2
        after = "an overflow" if overflow else f"{good or 3} good steps since it changed"
        why = f"is {state['scale']:g} instead of {scale:g}, after {after}"
        yield expect(f"the scale of step {number + 1}", state["scale"] == scale, why)


SYMPTOMS = (  # of the three mistakes of the hunt
    "in an epoch, some samples are seen twice and some never",
    "what is clipped is not the gradient of the global batch",
    "where a rank has fewer samples of a batch, each of them counts more",
)


def train_with(mistakes: tuple[bool, ...], inputs: Tensor, targets: Tensor, ranks: int) -> Tensor:
    """The weights of the hunt's loop with some of its mistakes, of all ranks in one process."""
    own_order, clipped_first, unweighted = mistakes
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(2):
        orders = []
        for rank in range(ranks):
            generator = torch.Generator().manual_seed(100 * epoch + rank * own_order)
            orders.append(torch.randperm(len(inputs), generator=generator).split(10))
        for batches in zip(*orders, strict=True):
            total = [torch.zeros_like(p) for p in model.parameters()]
            for rank, batch in enumerate(batches):
                mine = batch[rank::ranks]
                weight = 1 / ranks if unweighted else len(mine) / len(batch)
                optimizer.zero_grad()
                F.mse_loss(model(inputs[mine]), targets[mine]).backward()
                if clipped_first:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                for sum_, p in zip(total, model.parameters(), strict=True):
                    sum_ += p.grad * weight
            for sum_, p in zip(total, model.parameters(), strict=True):
                p.grad = sum_
            if not clipped_first:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    return flat(model.parameters())


def three_mistakes(answer) -> Iterator[Finding]:
    ranks = dist.get_world_size()
    inputs, targets = make_batch(14)
    model = make_model()
    answer.train(model, inputs, targets, 2)
    guesses = {}
    for mistakes in sorted(itertools.product((False, True), repeat=3), key=sum):
        seen = [symptom for symptom, has in zip(SYMPTOMS, mistakes, strict=True) if has]
        left = f"{len(seen)} mistake{'s' if len(seen) > 1 else ''} left"
        why = f"has {left} that can be seen here; one: {''.join(seen[:1])}"
        guesses[why] = train_with(mistakes, inputs, targets, ranks)
    right = next(iter(guesses))  # without a mistake
    yield compare("the trained model", flat(model.parameters()), guesses.pop(right), guesses)
