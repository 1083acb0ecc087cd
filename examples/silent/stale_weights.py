"""Log-probabilities of completions are those by which the generator drew them.

In reinforcement learning a generator may have missed a sync of the weights, and it may sample at a
temperature. The ratio of probabilities corrects both, if the generator returns the logarithm of the
probability by which it has drawn each token. If the trainer computes it again with its own weights,
the ratio is always 1; if the generator returns it without the temperature, it is another ratio. The
gradient is then not that of the expected reward. It is computed here over all completions that
there are, each as often as the generator draws it, so nothing of the difference is chance.
"""

import itertools

import torch
import torch.distributed as dist
from torch import nn
from two_ranks import show

LETTERS = 3
TOKENS = torch.tensor(list(itertools.product(range(LETTERS), repeat=4)))  # all completions
BEFORE = torch.cat([torch.full((len(TOKENS), 1), LETTERS), TOKENS[:, :-1]], 1)  # a letter, or none
REWARDS = (TOKENS[:, 1:] == (TOKENS[:, :-1] + 1) % LETTERS).double().mean(1)


def logprobs_of(model, temperature=1.0):
    """Of all completions: the sum over their tokens."""
    found = (model(BEFORE) / temperature).log_softmax(-1)
    return found.gather(-1, TOKENS[..., None]).sum((1, 2))


def gradient_of(model, loss):
    return torch.autograd.grad(loss, model.weight)[0]


def off_by(variant):
    torch.manual_seed(0)
    model = nn.Embedding(LETTERS + 1, LETTERS)  # logits of the next letter
    reward = (logprobs_of(model).exp() * REWARDS).sum()
    if dist.get_rank() == 0:  # the trainer; the generator misses its step
        model.weight.data += 5 * gradient_of(model, reward)
    drawn = logprobs_of(model, temperature=0.7).detach()
    plain = logprobs_of(model).detach()
    dist.broadcast(drawn, src=1)
    dist.broadcast(plain, src=1)

    new = logprobs_of(model)
    old = drawn  # right
    if variant == "ratio of 1":
        old = new.detach()  # wrong: by the weights of the trainer
    if variant == "without temperature":
        old = plain  # wrong: not what the generator sampled from
    found = gradient_of(model, (drawn.exp() * (new - old).exp() * REWARDS).sum())
    expected = gradient_of(model, (logprobs_of(model).exp() * REWARDS).sum())
    return ((found - expected).norm() / expected.norm()).item()


if __name__ == "__main__":
    show(off_by, "gradients", "ratio of 1", "without temperature")
