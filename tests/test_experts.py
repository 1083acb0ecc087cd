"""Mixture of experts: unit tests. Parity is in test_contract.py."""

import torch
from test_inference import infer

from jobs.experts import MixtureOfExperts, grouped
from jobs.gpt import MLP

JOB = "--model gpt-2x2x16 --context 12 --dataset synthetic --train-samples 150 --eval-samples 20"
JOB += " --batch-size 24 --epochs 9 --print-freq 1 --clip-grad 0.5 --double"


def test_each_token_gets_its_experts_outputs():
    torch.manual_seed(0)
    mixture = MixtureOfExperts(lambda: torch.nn.Linear(6, 6), 5, 6, top_k=2).double()
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    probabilities = mixture.router(x).softmax(-1)
    expected = torch.zeros_like(x)
    for row in range(2):
        for time in range(7):
            best = probabilities[row, time].topk(2)
            for gate, expert in zip(*best, strict=True):
                output = mixture.experts[str(expert.item())](x[row, time])
                expected[row, time] += gate * output
    assert torch.allclose(mixture(x), expected, rtol=0, atol=1e-14)


def test_an_expert_without_tokens():
    """It has a gradient, of zeros: an optimizer and an all-reduce need one."""
    mixture = MixtureOfExperts(lambda: torch.nn.Linear(4, 4), 3, 4)
    with torch.no_grad():
        mixture.router.weight.copy_(torch.tensor([[9.0], [0.0], [-9.0]]).expand(3, 4))
    mixture(torch.ones(1, 5, 4)).sum().backward()
    assert mixture.experts["0"].weight.grad.any()
    assert not mixture.experts["2"].weight.grad.any()


def test_all_experts_at_once():
    """As one after the other, where one of them has no tokens."""
    torch.manual_seed(0)
    experts = [MLP(16, 0.0).bfloat16() for _ in range(4)]
    counts, x = torch.tensor([5, 0, 9, 2]), torch.randn(16, 16, dtype=torch.bfloat16)
    at_once, apart = (x.clone().requires_grad_() for _ in range(2))
    outputs = grouped(experts, at_once, counts)
    parts = apart.split(counts.tolist())
    expected = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
    torch.testing.assert_close(outputs, expected)
    gradient = torch.randn_like(outputs)
    for out in (outputs, expected):
        out.backward(gradient)
    torch.testing.assert_close(at_once.grad, apart.grad, rtol=0.05, atol=0.01)


def test_a_rank_without_tokens(train, tmp_path):
    """All are routed to rank 0's first expert: nothing hangs, and the weights are those of one
    process, with clipping and an optimizer that has a state for each. Inference knows no experts.
    """
    flags = "--experts 4 --max-steps 6 --optimizer adamw"
    expected, _ = train("pytorch_SingleGPU", 1, flags, hooks="all_to_one")
    weights, _ = train("pytorch_EP", 2, flags, hooks="all_to_one")
    torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-11)
    torch.save(weights, tmp_path / "model.pt")
    finished = infer(f"--model gpt-2x2x16 --weights {tmp_path}/model.pt --prompt a")
    assert finished.code == 2 and "is a mixture of experts" in finished.errors[0], str(finished)


def test_balance_has_the_router_use_all_experts():
    torch.manual_seed(0)
    mixture = MixtureOfExperts(lambda: torch.nn.Linear(8, 8), 4, 8, balance=1.0)
    with torch.no_grad():
        mixture.router.weight[0] += 1
    x = torch.randn(4, 50, 8) + 0.5

    def most_used():
        chosen = mixture.router(x).argmax(-1).flatten()
        return torch.bincount(chosen, minlength=4).max().item() / chosen.numel()

    before, optimizer = most_used(), torch.optim.Adam(mixture.router.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        (0 * mixture(x)).sum().backward()  # the balance alone
        optimizer.step()
    assert before > 0.9 and most_used() < 0.5
