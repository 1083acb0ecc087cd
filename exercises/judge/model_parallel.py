"""Checks of exercises in which ranks divide the model or the sequence. Each yields findings, on
every rank; the reference is computed there, too. Nothing may end early: ranks would wait."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from exercises.judge.verdict import Finding, compare

WIDTH = 7


def random(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def own_width(up: Tensor, down: Tensor) -> list[Tensor]:
    """This rank's part of the width, of both matrices of an MLP."""
    n = dist.get_world_size()
    rank = dist.get_rank()
    return [up.tensor_split(n)[rank], down.tensor_split(n, 1)[rank]]


def tensor_parallel(answer) -> Iterator[Finding]:
    n = dist.get_world_size()
    rank = dist.get_rank()
    shapes = (5, 4), (WIDTH, 4), (WIDTH,), (4, WIDTH), (4,)
    x, up, up_bias, down, down_bias = random(*shapes)
    weights = torch.randn(5, 4)  # of the outputs in the loss
    output = F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)
    (output * weights).sum().backward()
    own_up, own_down = map(leaf, own_width(up, down))
    own_up_bias = leaf(up_bias.tensor_split(n)[rank])
    bias = leaf(down_bias)
    again = leaf(x)
    term = F.linear(F.gelu(F.linear(again, own_up, own_up_bias)), own_down)
    [of_x] = torch.autograd.grad((term * weights).sum(), again)
    found = answer.mlp(again, own_up, own_up_bias, own_down, bias)
    guesses = {
        "is this rank's term only": term + bias,
        "has the bias of each rank: it belongs behind the sum": output + (n - 1) * down_bias,
        "lacks the bias": output - down_bias,
    }
    yield compare("the output", found, output, guesses)
    (found * weights).sum().backward()
    why = "is the one through this rank's columns only: other ranks have terms of it, too"
    yield compare("the gradient of x", again.grad, x.grad, {why: of_x})
    of_up, of_down = own_width(up.grad, down.grad)
    yield compare("the gradient of up", own_up.grad, of_up)
    yield compare("the gradient of up_bias", own_up_bias.grad, up_bias.grad.tensor_split(n)[rank])
    yield compare("the gradient of down", own_down.grad, of_down)
    yield compare("the gradient of down_bias", bias.grad, down_bias.grad)


def sequence_parallel(answer) -> Iterator[Finding]:
    n = dist.get_world_size()
    rank = dist.get_rank()
    x, up, down = random((12, 4), (WIDTH, 4), (4, WIDTH))
    weights = torch.randn(12, 4)
    norm = nn.LayerNorm(4)
    output = x + F.linear(F.gelu(F.linear(norm(x), up)), down)
    (output * weights).sum().backward()
    own_up, own_down = map(leaf, own_width(up, down))
    again = leaf(x)
    term = again + F.linear(F.gelu(F.linear(norm(again), own_up)), own_down)
    [of_x] = torch.autograd.grad((term * weights).sum(), again)
    expected = [p.grad for p in norm.parameters()]
    norm.zero_grad()
    tokens = leaf(x.chunk(n)[rank])
    found = answer.block(tokens, norm, own_up, own_down)
    yield compare("the output", found, output.chunk(n)[rank])
    (found * weights.chunk(n)[rank]).sum().backward()
    of_up, of_down = own_width(up.grad, down.grad)
    yield compare("the gradient of down", own_down.grad, of_down)
    yield compare("the gradient of up", own_up.grad, of_up)
    why = "is the one through this rank's columns only: other ranks used its tokens, too"
    mine = of_x.chunk(n)[rank]
    yield compare("the gradient of x", tokens.grad, x.grad.chunk(n)[rank], {why: mine})
    own = [p.grad.clone() for p in norm.parameters()]
    answer.finish(norm)
    names = ("weight", "bias")
    why = "is that of this rank's tokens only"
    for name, p, right, mine in zip(names, norm.parameters(), expected, own, strict=True):
        yield compare(f"the gradient of the norm's {name}", p.grad, right, {why: mine})


def pipeline(answer) -> Iterator[Finding]:
    for stages, parts in ((2, 4), (4, 8), (4, 2), (3, 3), (1, 3)):
        orders = [list(answer.order(stage, stages, parts)) for stage in range(stages)]
        yield judge_schedule(orders, parts)


def judge_schedule(orders: list[list], parts: int) -> Finding:
    """A schedule of all stages: complete, without a deadlock, and with 1F1B's memory and time."""
    stages = len(orders)
    what = f"the schedule of {stages} stages and {parts} micro-batches:"
    everything = sorted((kind, i) for kind in "FB" for i in range(parts))
    for stage, actions in enumerate(orders):
        odd = set(actions).symmetric_difference(everything) or actions[len(everything) :]
        if odd:
            word = "lacks" if set(odd) <= set(everything) - set(actions) else "should not have"
            return Finding(what, f"stage {stage} {word} {sorted(odd)[0]}")
    ends = finish_times(orders)
    for stage, actions in enumerate(orders):
        for action in actions:
            if (stage, action) not in ends:
                return Finding(what, f"stage {stage} waits forever to compute {action}")
    for stage, actions in enumerate(orders):
        kept = 0
        most = 0
        for kind, _ in actions:
            kept += 1 if kind == "F" else -1
            most = max(most, kept)
        limit = min(stages - stage, parts)
        if most > limit:
            why = f"stage {stage} keeps the activations of {most} micro-batches, 1F1B of {limit}"
            return Finding(what, why)
    time = max(ends.values())
    best = 3 * (parts + stages - 1)
    late = f"takes the time of {time} forwards, and 1F1B that of {best}: stages are idle"
    return Finding(what, late if time > best else "")


def finish_times(orders: list[list]) -> dict[tuple[int, tuple], int]:
    """When each stage ends each action, if a forward takes 1 and a backward 2; of a deadlock,
    without the actions that never begin."""
    ends = {}
    clocks = [0] * len(orders)
    at = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(orders):
            if at[stage] == len(actions):
                continue
            kind, i = actions[at[stage]]
            before = stage - 1 if kind == "F" else stage + 1
            needs = [(before, (kind, i))] if 0 <= before < len(orders) else []
            needs += [(stage, ("F", i))] if kind == "B" else []
            if all(need in ends for need in needs):
                begin = max([clocks[stage], *(ends[need] for need in needs)])
                clocks[stage] = begin + (1 if kind == "F" else 2)
                ends[stage, (kind, i)] = clocks[stage]
                at[stage] += 1
                moved = True
    return ends


def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.transpose(1, 2) / q.shape[2] ** 0.5
    return scores.softmax(2) @ v, scores.logsumexp(2)


def ring(answer) -> Iterator[Finding]:
    n = dist.get_world_size()
    rank = dist.get_rank()
    q, k, v = (t.detach() for t in random((2, 6, 4), (2, 6, 4), (2, 6, 4)))
    for size in (1, 3000):
        what = "of moderate scores" if size == 1 else "of scores around 1,000"
        first = attend(q * size, k[:, :2], v[:, :2])
        second = attend(q * size, k[:, 2:], v[:, 2:])
        out, log = answer.merge(*first, *second)
        expected = attend(q * size, k, v)
        equal = {"is the mean of both: their shares of the sum differ": (first[0] + second[0]) / 2}
        equal["is the sum of both: divide each by the new sum"] = first[0] + second[0]
        yield compare(f"the output of merge() {what}", out, expected[0], equal)
        yield compare(f"the log of merge() {what}", log, expected[1])
    nothing = torch.zeros_like(first[0]), torch.full_like(first[1], -torch.inf)
    out, _ = answer.merge(*nothing, *second)
    yield compare("the output of merge() with a block that no query sees", out, second[0])
    mine = [t.chunk(n, 1)[rank] for t in (q, k, v)]
    found = answer.ring_attention(*mine)
    expected = attend(q, k, v)[0].chunk(n, 1)[rank]
    twice = torch.cat([k, mine[1]], 1), torch.cat([v, mine[2]], 1)
    guesses = {
        "is attention to this rank's keys only": attend(*mine)[0],
        "counts this rank's own keys twice: one turn too many": attend(mine[0], *twice)[0],
    }
    yield compare("the output of ring_attention()", found, expected, guesses)


def experts(answer) -> Iterator[Finding]:
    n = dist.get_world_size()
    rank = dist.get_rank()
    torch.manual_seed(0)
    tokens = [torch.randn(4 + source, 3) for source in range(n)]
    chosen = [torch.randint(max(1, n - 1), (4 + source,)) for source in range(n)]  # not the last
    mine = leaf(tokens[rank])
    received, plan = answer.dispatch(mine, chosen[rank])
    pairs = list(zip(tokens, chosen, strict=True))
    expected = torch.cat([t[e == rank] for t, e in pairs])
    unsorted = torch.cat([t.split(e.bincount(minlength=n).tolist())[rank] for t, e in pairs])
    why = "is not what was meant for it: sort tokens by expert before they are sent"
    what = "what the expert of a rank gets"
    yield compare(what, received, expected, {why: unsorted})
    found = answer.combine((received * (rank + 2)).tanh(), plan)
    factor = chosen[rank][:, None] + 2
    right = (tokens[rank] * factor).tanh()
    order = chosen[rank].argsort(stable=True)
    why = "is in the order of the experts, not in that of the tokens"
    yield compare("what combine() returns", found, right, {why: right[order]})
    found.sum().backward()
    yield compare("the gradient of the tokens", mine.grad, (1 - right.square()) * factor)
