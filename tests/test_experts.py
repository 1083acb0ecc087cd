"""A mixture of experts: its parts. Parity is in test_contract.py."""

import torch
from conftest import launch

from jobs.experts import Mixture

JOB = (
    "--model gpt-2x2x16 --context 12 --dataset synthetic --train-samples 150 --eval-samples 20 "
    "--batch-size 24 --epochs 9 --print-freq 1 --clip-grad 0.5 --double"
)


def test_each_token_gets_its_experts_answers():
    torch.manual_seed(0)
    mixture = Mixture(lambda: torch.nn.Linear(6, 6), 5, 6, top_k=2).double()
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    chances = mixture.router(x).softmax(-1)
    expected = torch.zeros_like(x)
    for text in range(2):
        for time in range(7):
            best = chances[text, time].topk(2)
            for chance, expert in zip(*best, strict=True):
                answer = mixture.experts[str(expert.item())](x[text, time])
                expected[text, time] += chance * answer
    assert torch.allclose(mixture(x), expected, rtol=0, atol=1e-14)


def test_an_expert_without_tokens():
    """It has a gradient, of zeros: an optimizer and an all-reduce need one."""
    mixture = Mixture(lambda: torch.nn.Linear(4, 4), 3, 4)
    with torch.no_grad():
        mixture.router.weight.copy_(torch.tensor([[9.0], [0.0], [-9.0]]).expand(3, 4))
    mixture(torch.ones(1, 5, 4)).sum().backward()
    assert mixture.experts["0"].weight.grad.any()
    assert not mixture.experts["2"].weight.grad.any()


def test_balance_has_the_router_use_all_experts():
    torch.manual_seed(0)
    mixture = Mixture(lambda: torch.nn.Linear(8, 8), 4, 8, balance=1.0)
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


def test_inference_knows_no_experts(train, tmp_path):
    weights, _ = train("pytorch_SingleGPU --experts 4 --balance 0", 1, "--max-steps 12")
    torch.save(weights, tmp_path / "model.pt")
    command = (
        f"python model_inference.py --model gpt-2x2x16 --weights {tmp_path}/model.pt --prompt a"
    )
    finished = launch(command, forked=True)
    assert finished.code == 2 and "is a mixture of experts" in finished.errors[0], str(finished)
