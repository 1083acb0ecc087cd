"""Checks of exercises that need no other rank. Each yields findings."""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from exercises.judge.verdict import Finding, compare, expect


@contextlib.contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """The tensors that autograd keeps for backward."""
    saved = []

    def note(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved


def kept_numbers(output: Tensor, saved: list[Tensor]) -> int:
    """How many floating-point numbers a function of ours keeps for backward: in tensors that it has
    saved, and in attributes of its ctx. A tensor counts once."""
    sizes = {}
    for tensor in [*saved, *tree_leaves(list(vars(output.grad_fn).values()))]:
        if isinstance(tensor, Tensor) and tensor.is_floating_point():  # no state of a generator
            sizes[tensor.data_ptr(), tensor.numel()] = tensor.numel()
    return sum(sizes.values())


def recompute(answer) -> Iterator[Finding]:
    for dropout in (0.0, 0.5):
        what = " with dropout" if dropout else ""
        torch.manual_seed(0)
        layers = nn.Linear(4, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 4)
        block = nn.Sequential(*layers)
        x = torch.randn(6, 4, requires_grad=True)
        tensors = {"x": x} | dict(block.named_parameters())
        weights = torch.randn(6, 4)  # of the outputs in the loss
        torch.manual_seed(1)
        torch.rand(1)  # the state is no longer that of the seed
        output = block(x)
        summed = torch.autograd.grad(output.sum(), tensors.values(), retain_graph=True)
        expected = torch.autograd.grad((output * weights).sum(), tensors.values())
        torch.manual_seed(1)
        torch.rand(1)
        with saved_tensors() as saved:
            found = answer.Recompute.apply(block, *tensors.values())
        yield compare(f"the output{what}", found, output)
        most = sum(tensor.numel() for tensor in tensors.values())
        kept = kept_numbers(found, saved)
        why = f"keeps {kept} numbers for backward; input and parameters have {most}"
        yield expect(f"forward(){what}", kept <= most, why)
        drawn = torch.rand(3)  # as the next block's dropout would
        (found * weights).sum().backward()
        why = "is that of output.sum(): the gradient of the output is not used"
        other = "is wrong, but right without: the second forward draws another mask"
        for (name, p), right, of_sum in zip(tensors.items(), expected, summed, strict=True):
            finding = compare(f"the gradient of {name}{what}", p.grad, right, {why: of_sum})
            changed = dropout and not finding.is_right
            yield Finding(finding.what, other) if changed else finding
        why = "is one that was drawn before: backward has to leave the generator as it found it"
        is_new = not torch.isin(torch.rand(3), drawn).any()
        yield expect(f"the next random number{what}", is_new, why)


def lora(answer) -> Iterator[Finding]:
    a, b = answer.start(32, 24, 4)
    yield expect("b of start()", b.shape == (32, 4) and not b.any(), "is not [outputs, rank] zeros")
    is_random = a.shape == (4, 24) and torch.linalg.matrix_rank(a.double()) == 4
    why = "is not random [rank, inputs]: if it is 0, as b is, neither gets a gradient"
    yield expect("a of start()", is_random, why)
    torch.manual_seed(0)
    x = torch.randn(5, 24, requires_grad=True)
    weight = torch.randn(32, 24)
    a = torch.randn(4, 24, requires_grad=True)
    b = torch.randn(32, 4, requires_grad=True)
    with saved_tensors() as saved:
        output = answer.forward(x, weight, a, b, 0.5)
    plain = x @ weight.T
    change = x @ (b @ a).T
    guesses = {"lacks the scale": plain + change, "is that of the frozen layer": plain}
    guesses["lacks the frozen layer"] = change / 2
    yield compare("the output of forward()", output, plain + change / 2, guesses)
    why = "lets autograd keep a matrix as large as the weight: do not multiply b and a"
    large = [tensor for tensor in saved if tensor.numel() >= weight.numel()]
    kept = {tensor.untyped_storage().data_ptr() for tensor in large}
    yield expect("forward()", kept <= {weight.untyped_storage().data_ptr()}, why)
    tensors = {"a": a, "b": b, "x": x}
    right = torch.autograd.grad((plain + change / 2).sum(), tensors.values())
    output.sum().backward()
    for (name, tensor), expected in zip(tensors.items(), right, strict=True):
        yield compare(f"the gradient of {name}", tensor.grad, expected)
    frozen = weight.bfloat16()
    before = frozen.clone()
    a = a.detach().float() / 50
    b = b.detach().float()
    merged = answer.merge(frozen, a, b, 0.5)
    yield expect("merge()", torch.equal(frozen, before), "changes the frozen weight itself")
    expected = (before.float() + b @ a * 0.5).bfloat16()
    guesses = {
        "rounds the change before it is added": before + (b @ a * 0.5).bfloat16(),
        "lacks the scale": (before.float() + b @ a).bfloat16(),
    }
    is_half = merged.dtype == torch.bfloat16
    yield expect("what merge() returns", is_half, f"is {merged.dtype}, and the weight bfloat16")
    yield compare("what merge() returns", merged, expected, guesses)
    wide = F.linear(x, answer.merge(weight, a.double(), b.double(), 0.5))
    unmerged = answer.forward(x, weight, a.double(), b.double(), 0.5)
    yield compare("the output of the merged layer", wide, unmerged)
