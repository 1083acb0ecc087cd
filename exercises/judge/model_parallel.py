"""Checks of exercises in which ranks divide the model or the sequence. Each yields findings, on
every rank; the reference is computed there, too. Nothing may end early: ranks would wait."""

import itertools
from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from exercises.judge.verdict import Finding, compare

WIDTH = 7  # of an MLP, which no number of ranks divides
SPLIT = {"up": 0, "up_bias": 0, "down": 1}  # dimensions that are the width


def random(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def own(tensor: Tensor, dim: int = 0) -> Tensor:
    """This rank's part."""
    part = tensor.tensor_split(dist.get_world_size(), dim)[dist.get_rank()]
    return part.detach().clone().requires_grad_()


def own_columns(
    block, x: Tensor, weights: Tensor, parts: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """This rank's term of an output, and the gradient of x through it."""
    x = x.detach().requires_grad_()
    term = block(x, **parts)
    return term, *torch.autograd.grad((term * weights).sum(), x)


def mlp(x: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up, up_bias)), down)


def tensor_parallel(answer) -> Iterator[Finding]:
    x, up, up_bias, down, bias = random((5, 4), (WIDTH, 4), (WIDTH,), (4, WIDTH), (4,))
    tensors = {"up": up, "up_bias": up_bias, "down": down}
    weights = torch.randn(5, 4)  # of the outputs in the loss
    output = mlp(x, **tensors) + bias
    (output * weights).sum().backward()
    parts = {name: own(tensor, SPLIT[name]) for name, tensor in tensors.items()}
    term, of_x = own_columns(mlp, x, weights, parts)
    again, own_bias = (tensor.detach().clone().requires_grad_() for tensor in (x, bias))
    found = answer.mlp(again, *parts.values(), own_bias)
    excess = (dist.get_world_size() - 1) * bias
    guesses = {
        "is this rank's term only": term + bias,
        "has the bias of each rank: it belongs behind the sum": output + excess,
    }
    yield compare("the output", found, output, guesses)
    (found * weights).sum().backward()
    why = "is the one through this rank's columns only: other ranks have terms of it, too"
    yield compare("the gradient of x", again.grad, x.grad, {why: of_x})
    for name, part in parts.items():
        expected = own(tensors[name].grad, SPLIT[name])
        yield compare(f"the gradient of {name}", part.grad, expected)
    yield compare("the gradient of down_bias", own_bias.grad, bias.grad)


def sequence_parallel(answer) -> Iterator[Finding]:
    norm = nn.LayerNorm(4)

    def block(x, up, down):
        return x + mlp(norm(x), up, None, down)

    x, up, down = random((12, 4), (WIDTH, 4), (4, WIDTH))
    weights = torch.randn(12, 4)
    output = block(x, up, down)
    (output * weights).sum().backward()
    parts = {"up": own(up), "down": own(down, 1)}
    _, of_x = own_columns(block, x, weights, parts)
    whole = {name: p.grad for name, p in norm.named_parameters()}
    norm.zero_grad()
    tokens = own(x)
    found = answer.block(tokens, norm, *parts.values())
    (found * own(weights)).sum().backward()
    yield compare("the output", found, own(output))
    yield compare("the gradient of down", parts["down"].grad, own(down.grad, 1))
    yield compare("the gradient of up", parts["up"].grad, own(up.grad))
    why = "is the one through this rank's columns only: other ranks used its tokens, too"
    yield compare("the gradient of x", tokens.grad, own(x.grad), {why: own(of_x)})
    mine = {name: p.grad.clone() for name, p in norm.named_parameters()}
    answer.finish(norm)
    for name, p in norm.named_parameters():
        guess = {"is that of this rank's tokens only": mine[name]}
        yield compare(f"the gradient of the norm's {name}", p.grad, whole[name], guess)


def pipeline(answer) -> Iterator[Finding]:
    for stages, parts in ((2, 4), (4, 8), (4, 2), (3, 3), (1, 3)):
        orders = [list(map(tuple, answer.order(stage, stages, parts))) for stage in range(stages)]
        yield judge_schedule(orders, parts)


def judge_schedule(orders: list[list], parts: int) -> Finding:
    """A schedule of all stages: complete, without a deadlock, and with 1F1B's memory and time."""
    stages = len(orders)
    what = f"the schedule of {stages} stages and {parts} micro-batches:"
    everything = Counter((kind, i) for kind in "FB" for i in range(parts))
    for stage, actions in enumerate(orders):
        excess = Counter(actions) - everything
        missing = everything - Counter(actions)
        wrong = sorted(excess | missing, key=str)  # may be of types that have no order
        if wrong:
            word = "should not have"
            if wrong[0] in everything:
                word = "repeats" if wrong[0] in excess else "lacks"
            return Finding(what, f"stage {stage} {word} {wrong[0]}")
    ends = finish_times(orders)
    for stage, actions in enumerate(orders):
        kept = list(itertools.accumulate(1 if kind == "F" else -1 for kind, _ in actions))
        limit = min(stages - stage, parts)
        stuck = [action for action in actions if (stage, action) not in ends]
        if stuck:
            return Finding(what, f"stage {stage} waits forever to compute {stuck[0]}")
        if max(kept) > limit:
            kept = f"keeps the activations of {max(kept)} micro-batches"
            return Finding(what, f"stage {stage} {kept}, 1F1B of {limit}")
    time = max(ends.values())
    best = 3 * (parts + stages - 1)
    late = f"takes the time of {time} forwards, and 1F1B that of {best}: stages are idle"
    return Finding(what, late if time > best else "")


def finish_times(orders: list[list]) -> dict[tuple[int, tuple], int]:
    """When each stage ends each action, if a forward takes 1 and a backward 2; of a deadlock,
    without the actions that never begin."""
    ends = {}
    clocks = [0] * len(orders)
    left = [list(actions) for actions in orders]
    known = -1
    while known < len(ends):
        known = len(ends)
        for stage, actions in enumerate(left):
            while actions:
                kind, i = actions[0]
                before = stage - 1 if kind == "F" else stage + 1
                needs = [(before, (kind, i))] if 0 <= before < len(orders) else []
                needs += [(stage, ("F", i))] if kind == "B" else []
                if not all(need in ends for need in needs):
                    break
                begin = max([clocks[stage], *(ends[need] for need in needs)])
                clocks[stage] = begin + (1 if kind == "F" else 2)
                ends[stage, actions.pop(0)] = clocks[stage]
    return ends


def ring(answer) -> Iterator[Finding]:
    attend = answer.attend  # which is given
    q, k, v = (tensor.detach() for tensor in random((2, 6, 4), (2, 6, 4), (2, 6, 4)))
    for size, scores in ((1, "moderate scores"), (3000, "scores around 1,000")):
        first = attend(q * size, k[:, :2], v[:, :2])
        second = attend(q * size, k[:, 2:], v[:, 2:])
        out, log = answer.merge(*first, *second)
        expected, sums = attend(q * size, k, v)
        guesses = {
            "is the mean of both: their shares of the sum differ": (first[0] + second[0]) / 2,
            "is the sum of both: divide each by the new sum": first[0] + second[0],
        }
        yield compare(f"the output of merge() of {scores}", out, expected, guesses)
        yield compare(f"the log of merge() of {scores}", log, sums)
    nothing = torch.zeros_like(first[0]), torch.full_like(first[1], -torch.inf)
    for place, blocks in (("first", (nothing, second)), ("second", (second, nothing))):
        out, log = answer.merge(*blocks[0], *blocks[1])
        of = f"of merge() with a {place} block that no query sees"
        yield compare(f"the output {of}", out, second[0])
        yield compare(f"the log {of}", log, second[1])
    mine = [own(tensor, 1).detach() for tensor in (q, k, v)]
    found = answer.ring_attention(*mine)
    twice = torch.cat([k, mine[1]], 1), torch.cat([v, mine[2]], 1)
    guesses = {
        "is attention to this rank's keys only": attend(*mine)[0],
        "counts this rank's own keys twice: one turn too many": attend(mine[0], *twice)[0],
    }
    expected = own(F.scaled_dot_product_attention(q, k, v), 1)
    yield compare("the output of ring_attention()", found, expected, guesses)


def experts(answer) -> Iterator[Finding]:
    n = dist.get_world_size()
    rank = dist.get_rank()
    torch.manual_seed(0)
    tokens = [torch.randn(4 + source, 3) for source in range(n)]
    chosen = [torch.randint(max(1, n - 1), (4 + source,)) for source in range(n)]  # not the last
    mine = tokens[rank].clone().requires_grad_()
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
