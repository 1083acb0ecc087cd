"""estimate.py --module: what a user's function may return. Predictions: test_architectures.py."""

import math

import pytest
import torch
from conftest import refused
from torch import nn

from estimator.own_model import OwnModel, load_function


def linear(*others):
    return nn.Sequential(nn.Linear(3, 3), *others)


ROWS = torch.ones(2, 3)
IDS = torch.zeros(2, 2, dtype=torch.int64)
WRONG = {  # what the function returns, or what is wrong with it
    "returned None": lambda: None,
    "returned dict {'module': 3}": lambda: {"module": 3},
    "returned tuple (Linear(": lambda: (linear()[0], ROWS, None, 4),
    "returned ReLU, which has no parameters": nn.ReLU,
    "returned a batch without a tensor, str hi": lambda: (linear(), "hi"),
    "does not take (missing a required argument: 'input')": lambda: (linear(), {"x": ROWS[0]}),
    "returned int 5 as the loss": lambda: (linear(), ROWS, 5),
    "loss function that returns float 2.0": lambda: (linear(), ROWS, lambda out, _: 2.0),
    "a module that returns a tensor of [6]": lambda: (linear(nn.Flatten(0)), (ROWS, IDS)),
    "make needs arguments (missing a required argument: 'size')": lambda size: linear(),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_a_function_returns_wrongly_is_one_line(words, tmp_path):
    given = f"{tmp_path}/mine.py:make"
    program = f"from test_own_model import WRONG\nmake = WRONG[{words!r}]\n"
    (tmp_path / "mine.py").write_text(program)
    with refused(f"error: --module {given}", words):
        own = OwnModel(load_function(given), given)
        model = own.build(torch.zeros(2, 3))
        model(own.make_batch(2, lambda n, dtype: torch.zeros(n, 3)))


def mean_square(out, batch):
    return out.square().mean()


ENTROPY = math.log(3)  # the cross-entropy of three equal logits
TAKEN = {  # what the function returns, and the loss if all weights are zeros
    "images": (lambda: linear(), ENTROPY),
    "a tuple with labels": (lambda: (linear(), (ROWS, IDS[:, 0])), ENTROPY),
    "a dict with labels": (lambda: (linear(), {"input": ROWS, "labels": IDS[:, 0]}), ENTROPY),
    "a loss": (lambda: (linear(), ROWS, mean_square), 0.0),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_a_micro_batch_has_some_of_the_samples(kind):
    make, expected = TAKEN[kind]
    own = OwnModel(make, "mine.py:make")
    model = own.build(torch.zeros(2, 3))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    numbers = own.make_batch(4, lambda n, dtype: torch.zeros(n, 3))
    seen = []
    model.module.register_forward_hook(lambda _, args, out: seen.append(len(out)))
    for part in (numbers, *numbers.tensor_split(2)):
        assert model(part).item() == pytest.approx(expected)
    assert seen == [4, 2, 2]
