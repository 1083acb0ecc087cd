"""Mixture of experts: unit tests. Parity is in test_contract.py."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import cases, read_run, run_program, same_bits
from test_inference import infer
from test_text import settled
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from jobs import experts, language_models, llama, sizes
from jobs.experts import MixtureOfExperts, balance_at_steps
from jobs.text import Documents

JOB = "--model gpt-2x2x16 --context 12 --dataset synthetic --train-samples 150 --eval-samples 20"
JOB += " --batch-size 24 --epochs 9 --print-freq 1 --clip-grad 0.5 --double"


def make(*sizes, **options):
    """A mixture whose experts are initialized."""
    torch.manual_seed(0)
    mixture = MixtureOfExperts(*sizes, **options)
    for stack in mixture.experts.parameters():
        torch.nn.init.normal_(stack, std=0.5)
    return mixture


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_each_token_gets_its_experts_outputs(gated, normalize):
    mixture = make(6, 10, 5, top_k=2, gated=gated, normalize=normalize).double()
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    stacks = mixture.experts
    probabilities = mixture.router(x).softmax(-1)
    expected = torch.zeros_like(x)
    for row in range(2):
        for time in range(7):
            gates, best = probabilities[row, time].topk(2)
            gates = gates / gates.sum() if normalize else gates
            for gate, expert in zip(gates, best, strict=True):
                up = x[row, time] @ stacks.up[expert]
                up = F.silu(x[row, time] @ stacks.gate[expert]) * up if gated else F.gelu(up)
                expected[row, time] += gate * (up @ stacks.down[expert])
    assert torch.allclose(mixture(x), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("gated", [False, True])
def test_all_experts_at_once(gated, monkeypatch):
    """As one after the other. One of them has no tokens: its gradient is zero, but not missing, as
    an optimizer and a reduce-scatter need one; also where the kernel leaves NaN there."""
    grouped_mm = F.grouped_mm

    def as_on_blackwell(x, weight, offs):
        of_none = (counts == 0)[:, None, None]
        weight.register_hook(lambda gradient: gradient.masked_fill(of_none, torch.nan))
        return grouped_mm(x, weight, offs=offs)

    monkeypatch.setattr(F, "grouped_mm", as_on_blackwell)
    layer = make(16, 32, 4, gated=gated).experts.bfloat16()
    counts = torch.tensor([5, 0, 9, 2])
    x = torch.randn(16, 16, dtype=torch.bfloat16)
    gradient = torch.randn_like(x)
    found = []
    for at_once in (False, True):
        monkeypatch.setattr(experts, "can_group", lambda _, at_once=at_once: at_once)
        inputs = x.clone().requires_grad_()
        outputs = layer(inputs, counts)
        gradients = torch.autograd.grad(outputs, [inputs, *layer.parameters()], gradient)
        assert not any(of_weight[1].any() for of_weight in gradients[1:])
        found.append([outputs, *gradients])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0.05, atol=0.05)


GPUS = {9: True, 10: True, 8: False, 12: False}  # compute capability, has a grouped kernel


@pytest.mark.parametrize("major", GPUS)
@pytest.mark.parametrize("width, inner", [(40, 64), (36, 64), (40, 100)])
def test_which_products_are_grouped(major, width, inner, monkeypatch):
    """Those that PyTorch has a kernel for: of Hopper and Blackwell, and of rows of 16 bytes. All
    others are products of one expert after the other, for sizes that the CPU knows."""
    grouped_mm = F.grouped_mm
    called = []
    monkeypatch.setattr(FakeTensorMode, "avoid_device_init", True)
    gpu = SimpleNamespace(major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(F, "grouped_mm", lambda *x, **y: called.append(x) or grouped_mm(*x, **y))
    with FakeTensorMode(), torch.device("cuda"):
        layer = experts.Experts(4, width, inner, gated=True)
        x = torch.empty(16, width, dtype=torch.bfloat16)
        layer.own = lambda weight: weight.bfloat16()
        outputs = layer(x, torch.ones(4, dtype=torch.int64), [4, 0, 10, 2])
    assert outputs.shape == x.shape
    assert len(called) == 3 * (GPUS[major] and (width, inner) == (40, 64))


SAVED = [("cpu", torch.float32, 0), ("cpu", torch.bfloat16, 128), ("cuda", torch.bfloat16, 140)]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("device, dtype, each", SAVED)
def test_a_forward_saves_parameters_and_no_copy(device, dtype, each, gated, monkeypatch):
    """What it saves besides grows, per expert, by the probability of each token, in bfloat16 also
    by a row of the router in fp32, and on a (faked) GPU by an offset and a count: not by matrices.
    """
    monkeypatch.setattr(FakeTensorMode, "avoid_device_init", True)
    hopper = SimpleNamespace(major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    few, many = (bytes_saved(n, device, dtype, gated) for n in (4, 64))
    assert many - few == 60 * (40 * 4 + each)


def bytes_saved(experts, device, dtype, gated):
    """By a forward of 40 tokens, each to 2 experts, without the parameters themselves."""
    saved = {}
    mode = FakeTensorMode() if device == "cuda" else nullcontext()
    note = saved_tensors_hooks(lambda t: saved.update({t.untyped_storage()._cdata: t}), id)
    torch.set_default_dtype(dtype)
    try:
        with mode, torch.device(device), note:
            mixture = MixtureOfExperts(32, 64, experts, top_k=2, gated=gated)
            mixture(torch.zeros(2, 20, 32, requires_grad=True))
    finally:
        torch.set_default_dtype(torch.float32)
    storages = {name: p.untyped_storage()._cdata for name, p in mixture.named_parameters()}
    own = set(storages.values())
    assert own - {storages["router.weight"]} <= saved.keys()
    return sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in own)


def test_the_bias_follows_the_load():
    """A step lowers that of an expert with more than the mean of the tokens since the last step, by
    0.001, and raises the others'. Evaluation counts none. The gates do not have it."""
    mixture = make(4, 8, 4, balance="bias")
    optimizer = torch.optim.SGD([torch.zeros(1)])
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.ModuleDict({"mlp": mixture})])
    balance_at_steps(model)
    with torch.no_grad():
        mixture.router.weight[:] = torch.eye(4)
    tokens = torch.eye(4)[None, [0, 0, 0, 1, 1, 2]]  # 1.5 for each is the mean
    mixture.eval()(tokens)
    optimizer.step()
    assert not mixture.bias.any()
    for micro_batch in tokens.split(2, dim=1):
        mixture.train()(micro_batch)
    optimizer.step()
    torch.testing.assert_close(mixture.bias, 0.001 * torch.tensor([-1.0, -1.0, 1.0, 1.0]))
    assert not mixture.load.any() and "load" not in mixture.state_dict()
    before = mixture(tokens)
    mixture.bias += 7  # the same experts
    torch.testing.assert_close(mixture(tokens), before)
    mixture.bias[3] += 7
    mixture(tokens[:, :1])
    assert mixture.load.tolist() == [6.0, 4.0, 2.0, 1.0]


def test_weights_have_the_routers_bias(tmp_path):
    """Without it, a run that starts with them would route otherwise."""
    flags = "--model gpt-2x1x8 --context 8 --experts 4 --balance bias --dataset synthetic"
    model = language_models.make_model(settled(flags), ["a", "b"])
    for block in model.blocks:
        block.mlp.bias.uniform_()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    again = settled(f"{flags} --weights {tmp_path}/model.pt")
    loaded = language_models.make_model(again, ["a", "b"])
    assert same_bits(loaded.state_dict(), model.state_dict())


def test_a_rank_without_tokens(train, tmp_path):
    """All are routed to rank 0's first expert: nothing hangs, and the weights are those of one
    process, with clipping and an optimizer that has a state for each. Inference knows no experts.
    """
    flags = "--experts 4 --max-steps 6 --optimizer adamw"
    expected, _ = train("pytorch_SingleGPU", 1, flags, hooks="route:0")
    weights, _ = train("pytorch_EP", 2, flags, hooks="route:0")
    torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-11)
    torch.save(weights, tmp_path / "model.pt")
    refusal = infer(f"--model gpt-2x2x16 --weights {tmp_path}/model.pt --prompt a").refusal
    assert "is a mixture of experts" in refusal


def test_the_balancing_loss_is_that_of_switch_transformers():
    """Equation 4 of arXiv:2101.03961: weight * experts * sum of load * mean probability."""
    mixture = make(8, 16, 4, balance=0.3).double()
    x = torch.randn(2, 25, 8, dtype=torch.float64)
    (0 * mixture(x)).sum().backward()
    found, mixture.router.weight.grad = mixture.router.weight.grad, None
    probabilities = mixture.router(x).flatten(0, 1).softmax(1)
    load = probabilities.argmax(1).bincount(minlength=4) / 50
    (0.3 * 4 * (load * probabilities.mean(0)).sum()).backward()
    torch.testing.assert_close(found, mixture.router.weight.grad)


DROPPED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from jobs.experts import MixtureOfExperts
from parallel.experts import SplitExperts

rank, ranks = dist.get_rank(), dist.get_world_size()
for between in (Replicate(), Shard(1)):
    torch.manual_seed(0)
    mixture, x = MixtureOfExperts(8, 16, 4, dropout=0.5), torch.randn(4, 64, 8)
    for stack in mixture.experts.parameters():
        torch.nn.init.normal_(stack)
    torch.manual_seed(rank if between.is_shard() else 0)  # as pytorch_TP.py does
    own = x.chunk(ranks, 1)[rank] if between.is_shard() else x
    outputs = SplitExperts(between)._apply(mixture, init_device_mesh("cpu", (ranks,)))(own)
    share = (outputs == 0).double().mean()
    print(json.dumps([between.is_shard(), list(outputs.shape), share.item()]) + "\\n", end="")
"""


@cases("n", [2, 4], lambda n: n == 2)
def test_dropout_is_of_the_sum(n, tmp_path):
    """Each rank has a term of it. With sequence parallelism the ranks draw other masks, and of the
    terms' sum next to nothing would be dropped."""
    found = run_program(DROPPED, n, tmp_path).lists
    assert len(found) == 2 * n
    for sharded, shape, share in found:
        assert shape == [4, 64 // n if sharded else 64, 8]
        assert share == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("flags", ["", "--master-weights"])
def test_half_precision_balances_what_forward_counts(flags, run_once):
    """And keeps it in fp32: each step moves a bias by 0.001."""
    flags += " --model gpt-2x2x16 --context 12 --dataset synthetic --train-samples 96 --experts 4"
    flags += " --batch-size 24 --eval-samples 20 --balance bias --max-steps 4 --dtype bfloat16"
    state, _ = read_run(run_once("pytorch_half_precision", 1, flags)[1])
    thousandths = torch.stack([1000 * state[f"blocks.{i}.mlp.bias"] for i in range(2)])
    torch.testing.assert_close(thousandths, thousandths.round(), rtol=0, atol=1e-3)
    assert thousandths.abs().max() > 3.5


@pytest.mark.parametrize("balance", [1.0, "bias"])
@pytest.mark.parametrize("packed", [False, True])
def test_padding_counts_for_no_balance(balance, packed):
    """Rows with four times as much room end with the same gradients, and counts."""
    size = sizes.mixtral(2, 2, 16).complete("", None, None)
    options = {"experts": 4, "top_k": 2, "balance": balance}
    model = llama.Llama(list(range(64)), size, **options)
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=parameter.ndim == 1, std=0.3, generator=draw)
    text = torch.randint(64, (200,), generator=draw, dtype=torch.int32)
    lengths = np.array([9, 7, 16, 12, 11])
    places = np.stack([lengths.cumsum() - lengths, lengths, lengths], 1)
    found = []
    for context in (16, 64):
        rows = Documents(text, [""] * 64, context, places, packed)
        tokens, labels = rows.prepare_evaluation([torch.arange(len(rows))], torch.device("cpu"))
        model.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        mixtures = [block.mlp for block in model.blocks]
        found.append({name: p.grad for name, p in model.named_parameters()})
        if balance == "bias":
            found[-1] = {str(i): mixture.load.clone() for i, mixture in enumerate(mixtures)}
            assert [load.sum() for load in found[-1].values()] == 2 * [2 * lengths.sum()]
            for mixture in mixtures:
                mixture.load.zero_()
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_all_choices_of_a_token_are_balanced():
    """The first choices of these tokens are equally of three experts, the second is always the
    fourth, which has half of all choices: it is 1 only if all have as many."""
    mixture = make(6, 10, 4, top_k=2)
    probabilities = torch.tensor([[0.5, 0.1, 0.1, 0.3]] * 300)
    for expert in (1, 2):
        probabilities[expert::3, [0, expert]] = torch.tensor([0.1, 0.5])
    load = mixture.count_tokens(probabilities.topk(2).indices)
    assert load.tolist() == [100, 100, 100, 300]
    found = mixture.load_balancing_loss(probabilities, load)
    mean = probabilities.mean(0)
    assert found.item() == pytest.approx(4 * (mean[:3].sum() / 6 + mean[3] / 2).item())
    equal = mixture.load_balancing_loss(probabilities, torch.full((4,), 150))
    assert equal.item() == pytest.approx(1) and found > 1.05
