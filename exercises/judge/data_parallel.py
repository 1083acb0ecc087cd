"""Checks of exercises in which ranks divide the batch. Each yields findings, on every rank; the
reference is computed there, too, from the whole batch. None ends early: other ranks would wait."""

import inspect
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from exercises.judge.one_gpu import kept_numbers, saved_tensors
from exercises.judge.verdict import Finding, compare, expect

OWN = "is this rank's own gradient: nothing was averaged"
SHARE = "is this rank's own gradient, divided: nothing was summed"


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def make_batch(size: int = 12) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(size, 4), torch.randn(size, 3)


def own(batch: Tensor) -> Tensor:
    """The samples of this rank: as many as any other has."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Of a mean loss; ``p.grad`` stays as it is."""
    return torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def set_gradients(model: nn.Module, found: Iterable[Tensor]) -> None:
    for p, gradient in zip(model.parameters(), found, strict=True):
        p.grad = gradient.clone()


def mean(answer) -> Iterator[Finding]:
    model = make_model()
    x, y = make_batch()
    alone = gradients(model, own(x), own(y))
    frozen = nn.Parameter(torch.ones(2))
    set_gradients(model, alone)
    answer.average_gradients([frozen, *model.parameters()])
    rows = zip(model.named_parameters(), gradients(model, x, y), alone, strict=True)
    for (name, p), expected, mine in rows:
        guesses = {OWN: mine, SHARE: mine / dist.get_world_size()}
        yield compare(f"the gradient of {name}", p.grad, expected, guesses)
    yield expect("the gradient of a frozen parameter", frozen.grad is None, "is not None any more")


class Noted:
    """The work of an all-reduce, which remembers whether somebody waits for it."""

    def __init__(self, work: dist.Work):
        self.work = work
        self.is_awaited = False

    def __getattr__(self, name: str):
        return getattr(self.work, name)

    def wait(self, *args) -> bool:
        self.is_awaited = True
        work = self.work  # a work among a frame's variables is what an account of a hang looks for
        return work.wait(*args)


def buckets(answer) -> Iterator[Finding]:
    model = nn.Sequential(make_model(), nn.Tanh(), nn.Linear(3, 3))
    parameters = list(model.parameters())
    names = {p: name for name, p in model.named_parameters()}
    filled = answer.fill_buckets(parameters, 160)  # bytes
    found = []
    for bucket in filled:
        found.append([names[p] for p in bucket])
    expected = [["2.bias", "2.weight", "0.2.bias", "0.2.weight"], ["0.0.bias", "0.0.weight"]]
    why = "begins with the first parameter, whose gradient backward computes last"
    yield expect("the first bucket", found[0][0] != "0.0.weight", why)
    yield expect("fill_buckets()", found == expected, f"returns {found} instead of {expected}")
    begun = []
    all_reduce = dist.all_reduce
    signature = inspect.signature(all_reduce)

    def note(*args, **options):
        is_async = signature.bind(*args, **options).arguments.get("async_op")
        work = all_reduce(*args, **options)
        begun.append(Noted(work) if is_async else None)
        return begun[-1]

    own_names = {name: note for name, value in vars(answer).items() if value is all_reduce}
    with mock.patch.object(dist, "all_reduce", note), mock.patch.dict(vars(answer), own_names):
        wait = answer.attach([parameters[4:][::-1], parameters[:4][::-1]])
        for step in ("first", "second"):
            x, y = make_batch()
            x = x if step == "first" else x.flip(1)
            right = gradients(model, x, y)
            alone = gradients(model, own(x), own(y))
            begun.clear()
            F.mse_loss(model(own(x)), own(y)).backward()
            what = f"the number of all-reduces when backward of the {step} step returns"
            yield expect(what, len(begun) == 2, f"is {len(begun)}, and there are 2 buckets")
            why = "blocks backward until it is done: async_op=True"
            yield expect("an all-reduce", None not in begun, why)
            is_awaited = any(work and work.is_awaited for work in begun)
            yield expect("an all-reduce", not is_awaited, "is waited for inside of backward")
            wait()
            why = "is this rank's own gradient: the mean stays in the flat tensor"
            for p, gradient, mine in zip(parameters, right, alone, strict=True):
                what = f"the gradient of {names[p]} in the {step} step"
                yield compare(what, p.grad, gradient, {why: mine})
                p.grad = None


def token_weights(answer) -> Iterator[Finding]:
    n = dist.get_world_size()
    rank = dist.get_rank()
    parts = 3  # micro-batches of a rank
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    tokens = torch.randint(7, (n, parts, 2, 9))
    lengths = torch.randint(1, 9, (n, parts, 2, 1))
    lengths[-1, 1] = 0
    labels = torch.where(torch.arange(9) < lengths, tokens.roll(-1, 3), -100)
    counts = (labels >= 0).sum((2, 3)).double()

    def weighed(weights: Tensor) -> tuple[Tensor, ...]:
        """All gradients if losses of rank and micro-batch have these weights."""
        logits = model(tokens).flatten(0, 3)
        losses = F.cross_entropy(logits, labels.flatten(), reduction="none").view_as(labels)
        loss = (losses.sum((2, 3)) * weights).sum()
        return torch.autograd.grad(loss, list(model.parameters()))

    of_rank = counts.sum(1, keepdim=True)
    means = (1 / counts).nan_to_num(posinf=0)
    guesses = {
        "is the mean of the ranks' means: a label counts less where its rank has more of them":
            1 / n / of_rank,
        "is the mean of the micro-batches' means": means / n / parts,
        "is divided twice: cross_entropy() took the mean of each micro-batch":
            means / counts.sum(),
        "is the sum of the ranks' means": 1 / of_rank,
        "is divided by this rank's number of labels, not by that of all ranks": 1 / of_rank[rank],
    }  # fmt: skip
    answer.accumulate(model, list(zip(tokens[rank], labels[rank], strict=True)))
    guesses = {why: weighed(weights) for why, weights in guesses.items()}
    expected = weighed(1 / counts.sum())
    for number, (name, p) in enumerate(model.named_parameters()):
        of_mistakes = {why: gradients[number] for why, gradients in guesses.items()}
        yield compare(f"the gradient of {name}", p.grad, expected[number], of_mistakes)


def contrastive(answer) -> Iterator[Finding]:
    n = dist.get_world_size()
    model = make_model()
    x, _ = make_batch()
    views = torch.stack([x, x.roll(1, 1)])
    queries, keys = F.normalize(model(views), dim=-1)
    constants = keys.detach()
    size = len(x) // n
    owner = torch.arange(len(x))[:, None] // size

    def averaged(keys_of, is_shifted: bool = True) -> Tensor:
        """The mean of all ranks' gradients if a rank compares its queries with these keys."""
        loss = 0
        for rank, own_queries in enumerate(queries.split(size)):
            logits = own_queries @ keys_of(rank).T / 0.2
            first = rank * size if is_shifted else 0
            loss += F.cross_entropy(logits, first + torch.arange(size)) / n
        return flat(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))

    expected = averaged(lambda rank: keys)
    guesses = {
        "is that of negatives of one rank: compare with the keys of all ranks":
            averaged(lambda rank: keys[rank * size :][:size], is_shifted=False),
        "is that of other targets: query i belongs to key i of its own rank, not of rank 0":
            averaged(lambda rank: keys, is_shifted=False),
        "lacks the part of the keys: what dist.all_gather returns is a constant":
            averaged(lambda rank: constants),
        "lacks what the other ranks' losses say about a rank's keys: backward has to add it up":
            averaged(lambda rank: keys.where(owner == rank, constants)),
        "has 1/N of the keys' gradient: backward adds up, and DDP divides":
            averaged(lambda rank: constants + (keys - constants) / n),
        "is 1/N of the reference: DDP divides, so multiply a loss of all samples by N":
            expected / n,
        "is that of the sum over a rank's samples: DDP divides by N only": expected * size,
    }  # fmt: skip
    mine, others = F.normalize(model(torch.stack([own(x), own(x).roll(1, 1)])), dim=-1)
    gathered = answer.gather(others)
    why = "has the rows of this rank only"
    yield compare("what gather() returns", gathered, constants, {why: others})
    why = "has no gradient: dist.all_gather has no backward, so write one"
    yield expect("what gather() returns", gathered.requires_grad, why)
    if gathered.requires_grad:  # backward() is to be written before loss_of()
        torch.autograd.grad((gathered**2).sum(), others)
    answer.loss_of(mine, others).backward()
    found = flat(p.grad for p in model.parameters())
    dist.all_reduce(found)
    yield compare("the mean of the ranks' gradients", found / n, expected, guesses)


def zero(answer) -> Iterator[Finding]:
    n = dist.get_world_size()
    rank = dist.get_rank()
    model = make_model()
    parameters = list(model.parameters())
    whole = flat(parameters)  # 43 numbers
    padded = F.pad(whole, (0, -len(whole) % n))
    found = answer.flatten([p.detach() for p in parameters])
    yield compare("what flatten() returns", found, padded, {"lacks the padding": whole})
    shard = nn.Parameter(padded.chunk(n)[rank].clone())
    optimizer = torch.optim.SGD([shard], lr=0.1)
    is_here = torch.zeros(n, len(padded) // n)
    is_here[rank] = 1
    x, y = make_batch()
    for number in (1, 2):
        before = flat(parameters)
        expected = -0.1 * flat(gradients(model, x, y))
        mine = gradients(model, own(x), own(y))
        set_gradients(model, mine)
        shard.grad = None
        answer.step(parameters, shard, optimizer)
        guesses = {
            "is 0: the updated shards never come back": torch.zeros_like(whole),
            "is 0 outside of this rank's shard: gather the others'":
                expected * is_here.flatten()[: len(whole)],
            "is that of this rank's gradient: nothing was averaged": -0.1 * flat(mine),
        }  # fmt: skip
        change = flat(parameters) - before
        yield compare(f"the change of the weights in step {number}", change, expected, guesses)


def fsdp(answer) -> Iterator[Finding]:
    n = dist.get_world_size()
    torch.manual_seed(0)
    weight = torch.randn(5, 3)
    batch = torch.randn(8, 3)
    targets = torch.randn(8, 5)  # the loss is the sum of output * targets

    def shard_of(whole: Tensor) -> Tensor:
        return F.pad(whole, (0, 0, 0, -5 % n)).chunk(n)[dist.get_rank()]

    shard = shard_of(weight).clone().requires_grad_()
    padded = {"still has the padding": F.pad(weight, (0, 0, 0, -5 % n))}
    yield compare("what gather() returns", answer.gather(shard.detach(), 5), weight, padded)
    x = own(batch).clone().requires_grad_()
    with saved_tensors() as saved:
        output = answer.Layer.apply(x, shard, 5)
    yield compare("the output", output, own(batch) @ weight.T)
    most = x.numel() + shard.numel()
    kept = kept_numbers(output, saved)
    why = f"keeps {kept} numbers, x and shard have {most}: gather again in backward"
    yield expect("forward()", kept <= most, why)
    (output * own(targets)).sum().backward()
    yield compare("the gradient of the input", x.grad, own(targets) @ weight)
    mine = shard_of(own(targets).T @ own(batch))
    expected = shard_of(targets.T @ batch / n)
    yield compare("the gradient of the shard", shard.grad, expected, {OWN: mine, SHARE: mine / n})


def loss_scaling(answer) -> Iterator[Finding]:
    rank = dist.get_rank()
    last = dist.get_world_size() - 1
    shard = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([shard], lr=0.1)
    scale = 1024.0
    good = 0
    state = {"scale": scale, "good": good}
    for number in range(1, 11):
        gradient = torch.arange(1.0, 4.0) * number + rank
        overflow = number in (2, 10)
        shard.grad = gradient * state["scale"]
        if overflow and rank == last:
            shard.grad[1] = float("nan" if number == 2 else "inf")
        before = shard.detach().clone()
        answer.step([shard], optimizer, state)
        change = shard.detach() - before
        why = "is an update, although a gradient of the last rank overflowed: ranks have to agree"
        expected = torch.zeros(3) if overflow else -0.1 * gradient
        yield compare(f"the change of step {number}", change, expected, {why: -0.1 * gradient})
        good = 0 if overflow else good + 1
        after = "an overflow" if overflow else f"{good} good steps since it changed"
        scale /= 1 + overflow
        if good == 3:
            good = 0
            scale *= 2
        why = f"is {state['scale']:g} instead of {scale:g}, after {after}"
        yield expect(f"the scale of step {number + 1}", state["scale"] == scale, why)


CLIP = "nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)"
SOLUTION = (Path(__file__).parents[1] / "solutions/three_mistakes.py").read_text()
MISTAKES = {  # of the hunt: what shows, and words of the solution with what stands in their place
    "in an epoch, some samples are seen twice and some never": {
        "100 * epoch": "100 * epoch + rank"
    },
    "what is clipped is not the gradient of the global batch": {
        CLIP: "pass",
        "loss.backward()": f"loss.backward(); {CLIP}",
    },
    "where a rank has fewer samples of a batch, each of them counts more": {
        " * len(own) * ranks / len(batch)": ""
    },
}


def three_mistakes(answer) -> Iterator[Finding]:
    inputs, targets = make_batch(14)
    found = make_model()
    answer.train(found, inputs, targets, 2)

    def trained(text: str) -> Tensor:
        """The weights after the loop of a text."""
        variant = {}
        exec(text, variant)
        model = make_model()
        variant["train"](model, inputs, targets, 2)
        return flat(model.parameters())

    weights = []
    for kept in sorted(itertools.product((False, True), repeat=3), key=sum):
        seen = list(itertools.compress(MISTAKES, kept))
        text = SOLUTION
        for right, wrong in itertools.chain(*(MISTAKES[name].items() for name in seen)):
            text = text.replace(right, wrong)
        left = f"{len(seen)} mistake{'s' if len(seen) > 1 else ''} left"
        why = f"has {left} that can be seen here; one: {''.join(seen[:1])}"
        weights.append((why, trained(text)))
    why = "has seen another order than the loop has on one rank: keep 100 * epoch"
    weights.append((why, trained(SOLUTION.replace("100 * epoch", "epoch"))))
    (_, expected), *guesses = weights  # the first is without a mistake
    yield compare("the trained model", flat(found.parameters()), expected, guesses)
