"""What all scripts take from common.py and jobs/, against loops that are written out here: model,
order of the samples, optimizer, weight decay, schedule and clipping. From common.py they take data
set and initial weights alone. The contract compares every script with pytorch_SingleGPU.py, which
has the mistakes of these files, too."""

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import read_run, relative_difference, state
from small_resnet import SmallResNet
from test_text import settled

import common
from jobs import classifiers, encoder, language_models

pytestmark = pytest.mark.usefixtures("double")
GPT = "--model gpt-2x2x16 --context 8 --dataset synthetic --train-samples 20 --eval-samples 4"
GPT += " --batch-size 8 --epochs 3 --seed 3 --double"  # two steps an epoch
IMAGES = GPT.replace("gpt-2x2x16 --context 8", "small_resnet").replace("--seed 3", "--seed 4")
WARM = [1 / 3, 2 / 3, 1, 0.75, 0.25]  # two steps of warm-up, then half a cosine over three
HALF_COSINE = [1, (5 + math.sqrt(5)) / 8, (3 + math.sqrt(5)) / 8]
HALF_COSINE += [(5 - math.sqrt(5)) / 8, (3 - math.sqrt(5)) / 8]  # over five
GIVEN = "--lr 0.3 --weight-decay 0.2"
NAMES = ("adamw", "sgd", "adamw-clipped", "sgd-defaults")
RUNS = [  # flags, the optimizer that they mean, what decays, what each step's rate is multiplied by
    (f"{GIVEN} --optimizer adamw --warmup-steps 2", "AdamW", {"lr": 0.3}, 0.2, WARM),
    (f"{GIVEN} --optimizer sgd --momentum 0.7 --schedule none", "SGD",
     {"lr": 0.3, "momentum": 0.7}, 0.2, [1] * 5),
    ("--clip-grad 0.05", "AdamW", {"lr": 0.001}, 0.1, HALF_COSINE),
    ("--optimizer sgd", "SGD", {"lr": 0.1, "momentum": 0.9}, 0.0005, HALF_COSINE),
]  # fmt: skip
OF_IMAGES = [
    ("", "SGD", {"lr": 0.01, "momentum": 0.9}, 0.0005, HALF_COSINE),
    ("--optimizer adamw", "AdamW", {"lr": 0.001}, 0.01, HALF_COSINE),
]


def gpt(weights, tokens):
    """The logits of a GPT with two blocks of two heads, from its weights."""
    positions = torch.arange(tokens.shape[1])
    x = weights["token.weight"][tokens] + weights["position.weight"][positions]
    future = torch.ones(len(positions), len(positions)).triu(1).bool()

    def norm(x, name):
        return F.layer_norm(x, [16], weights[f"{name}.weight"], weights[f"{name}.bias"])

    for block in ("blocks.0", "blocks.1"):
        y = norm(x, f"{block}.attention_norm")
        heads = []
        for name in ("query", "key", "value"):
            projected = y @ weights[f"{block}.attention.{name}.weight"].T
            heads.append(projected.unflatten(2, (2, 8)).transpose(1, 2))
        query, key, value = heads
        scores = query @ key.transpose(2, 3) / math.sqrt(8)
        seen = scores.masked_fill(future, -math.inf).softmax(3) @ value
        x = x + seen.transpose(1, 2).flatten(2) @ weights[f"{block}.attention.out.weight"].T
        y = norm(x, f"{block}.mlp_norm") @ weights[f"{block}.mlp.up.weight"].T
        x = x + F.gelu(y) @ weights[f"{block}.mlp.down.weight"].T
    return norm(x, "norm") @ weights["head.weight"].T


def order_of_samples(n, seed):
    """The eight samples of each of five steps, of which an epoch has two: epoch, step, samples."""
    for epoch in (0, 1, 2):
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))
        for step in (0, 1):
            if (epoch, step) != (2, 1):
                yield epoch, step, order[8 * step : 8 * step + 8]


def batches_of_text(args, data):
    """Windows of eight tokens that begin up to seven later than those of the evaluation."""
    for epoch, step, samples in order_of_samples(len(data), args.seed):
        later = np.random.default_rng((args.seed, epoch, step)).integers(8, size=8)
        starts = (8 * samples + torch.from_numpy(later)).clamp(max=len(data.tokens) - 9)
        rows = data.tokens[starts[:, None] + torch.arange(9)].long()
        yield rows[:, :8], rows[:, 1:]


def train(parameters, kind, options, decay, factors, batches, loss_of, clip=None):
    """Five steps, with a rate that is set for each. ``parameters``: each, and whether it decays.
    Returns the losses, and the norm of the last gradient if it is clipped."""
    decaying = [p for p, decays in parameters if decays]
    others = [p for p, decays in parameters if not decays]
    groups = [{"params": decaying, "weight_decay": decay}]
    groups += [{"params": others, "weight_decay": 0}] if others else []
    optimizer = getattr(torch.optim, kind)(groups, **options)
    losses = []
    norm = None
    for factor, batch in zip(factors, batches, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = options["lr"] * factor
        optimizer.zero_grad()
        loss = loss_of(*batch)
        loss.backward()
        if clip:
            everything = torch.cat([p.grad.flatten() for p in decaying + others])
            norm = everything.norm().item()
            assert norm > clip, "there is something to clip"
            for p in decaying + others:
                p.grad *= clip / (norm + 1e-6)
        optimizer.step()
        losses.append(loss.item())
    return losses, norm


@pytest.mark.parametrize("flags, kind, options, decay, factors", RUNS, ids=NAMES)
def test_a_gpt_is_trained_as_written_out_here(flags, kind, options, decay, factors, run_once):
    """Norms and embeddings do not decay, matrices do. And what it reports."""
    _, folder = run_once("pytorch_SingleGPU", 1, f"{GPT} {flags} --max-steps 5")
    found, result = read_run(folder)
    args = settled(f"{GPT} {flags}")
    data, eval_set = common.make_datasets(args)
    weights = common.make_model(args, data.classes).state_dict()
    weights = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()
               if name != "vocabulary"}  # fmt: skip
    matrices = ("query", "key", "value", "out", "up", "down", "head")
    decays = [(p, name.split(".")[-2] in matrices) for name, p in weights.items()]
    assert sum(decaying for _, decaying in decays) == 13 and len(decays) == 25

    def loss_of(tokens, labels):
        return F.cross_entropy(gpt(weights, tokens).flatten(0, 1), labels.flatten())

    batches = batches_of_text(args, data)
    losses, norm = train(decays, kind, options, decay, factors, batches, loss_of, args.clip_grad)
    del found["vocabulary"]
    assert relative_difference(found, weights) < 1e-10
    means = [sum(losses[:2]) / 2, sum(losses[2:4]) / 2, losses[4]]  # of epochs
    assert result["train_loss"] == pytest.approx(means, rel=1e-9)
    assert result["gradient_norm"] == (norm and pytest.approx(norm, rel=1e-9))
    tokens = eval_set.tokens[: 4 * 8 + 1].long()
    rows = tokens[:-1].view(4, 8)
    labels = tokens[1:].view(4, 8)
    assert result["eval_loss"][-1] == pytest.approx(loss_of(rows, labels).item(), rel=1e-9)
    right = (gpt(weights, rows).argmax(2) == labels).double().mean().item()
    assert result["eval_accuracy"][-1] == right and result["eval_samples"] == 32
    [sums] = state(folder)["ranks"]  # since the second epoch
    assert sums["samples"] == 8 and sums["loss_sum"] == pytest.approx(8 * losses[4], rel=1e-9)


@pytest.mark.parametrize("flags, kind, options, decay, factors", OF_IMAGES, ids=("sgd", "adamw"))
def test_a_resnet_is_trained_as_written_out_here(flags, kind, options, decay, factors, run_once):
    """All of it decays. How images are cropped and normalized: test_data.py."""
    _, folder = run_once("pytorch_SingleGPU", 1, f"{IMAGES} {flags} --max-steps 5")
    found = torch.load(folder / "model.pt", weights_only=True)
    args = settled(f"{IMAGES} {flags}")
    data, _ = common.make_datasets(args)
    torch.manual_seed(4)
    model = SmallResNet(num_classes=10)
    batches = []
    for epoch, step, samples in order_of_samples(20, 4):
        rows = data.images[samples], data.labels[samples]
        batches.append(data.prepare(rows, "cpu", 4, epoch, step))
    everything = [(p, True) for p in model.parameters()]
    loss_of = lambda images, labels: F.cross_entropy(model(images), labels)  # noqa: E731
    train(everything, kind, options, decay, factors, batches, loss_of)
    assert relative_difference(found, model.state_dict()) < 1e-8


@pytest.mark.parametrize("model", ["gpt-8x2x128", "llama-8x2x128"])
def test_initial_weights(model):
    """GPT-2's: normal with a deviation of 0.02, and of 0.02 / sqrt(2 * layers) for matrices that
    add to the residual. All differ, by name and by --seed."""
    settings = [settled(f"--model {model} --seed {seed}") for seed in (0, 1)]
    made = [language_models.make_model(args, ["a"] * 65) for args in settings]
    first, second = draws = [model.state_dict() for model in made]
    for draw in draws:
        del draw["vocabulary"]
    adds = {name for name in first if name.endswith(("out.weight", "down.weight"))}
    assert len(adds) == 16
    for name, tensor in first.items():
        if "norm" in name:
            assert (tensor == float(name.endswith("weight"))).all()
            continue
        std = 0.02 / math.sqrt(2 * 8) if name in adds else 0.02
        assert tensor.std().item() == pytest.approx(std, rel=0.05), name
        assert abs(tensor.mean().item()) < 0.1 * std, name
    drawn = [t for draw in draws for name, t in draw.items() if "norm" not in name]
    assert len({tensor.flatten()[0].item() for tensor in drawn}) == len(drawn)


def test_what_decays():
    """Of an encoder matrices alone, also those of embeddings; of a model for images all."""
    pytest.importorskip("transformers")
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    size = DistilBertConfig(n_layers=1, n_heads=2, dim=8, hidden_dim=8, vocab_size=9)
    model = DistilBertForSequenceClassification(size)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decaying, others = encoder.parameter_groups(model)
    assert "weight_decay" not in decaying and others["weight_decay"] == 0
    spared = {names[parameter] for parameter in others["params"]}
    assert spared == {n for n in names.values() if re.search(r"bias$|(?i:layer_?norm)", n)}
    assert len(spared) + len(decaying["params"]) == len(names) and len(spared) == 14
    [group] = classifiers.parameter_groups(SmallResNet(num_classes=10))
    assert group.keys() == {"params"} and len(group["params"]) == 38


def test_a_plateau_is_two_evaluations_without_improvement():
    [weight] = parameters = [torch.nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD(parameters, lr=1)
    scheduler = common.make_scheduler(settled(f"{GPT} --schedule plateau"), optimizer, 2)
    rates = []
    for loss in (3.0, None, 2.0, None, 2.5, 2.5, 1.0, 1.5, 0.5, 0.6, 0.6):
        scheduler.step(loss)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([1] * 5 + [0.1] * 5 + [0.01])
