"""pytorch_GRPO.py: its weights are those of one process that learns from the same completions,
which are the same on any number of ranks; and what ratios say of older weights."""

import copy
import re

import psutil
import pytest
import torch
from conftest import cases, launcher, relative_difference, started, succeed, wait_for

import common
import pytorch_GRPO as script

JOB = "--model gpt-2x2x20 --prompts 3 --group-size 4 --length 5 --max-steps 5 --print-freq 1"
JOB += " --device cpu --lr 0.01 --clip 0.05"
SHOWN = r"reward (\S+), completions (\d) steps off-policy, mean ratio \S+, at most (\S+) from 1"


@pytest.fixture
def read_flags(monkeypatch, double):
    """A function that reads flags as the script does, for models in float64."""

    def read(flags):
        monkeypatch.setattr("sys.argv", ["pytorch_GRPO.py", *flags.split()])
        return script.read_flags()

    return read


def loss_by_definition(new, old, prompts, tokens, args):
    """A completion at a time; and the rewards."""
    rewards = []
    for prompt, completion in zip(prompts.tolist(), tokens.tolist(), strict=True):
        row = prompt[-1:] + completion
        pairs = zip(row[:-1], completion, strict=True)
        follows = [later == (before + 1) % 16 for before, later in pairs]
        rewards.append(sum(follows) / len(follows))
    rewards = torch.tensor(rewards)
    total = 0
    for sample, reward in enumerate(rewards):
        first = sample - sample % args.group_size
        group = rewards[first : first + args.group_size]
        advantage = (reward - group.mean()) / (group.std() + 1e-4)
        for ratio in (new[sample] - old[sample]).exp():
            clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
            total += torch.minimum(ratio * advantage, clipped * advantage)
    return -total / new.numel(), rewards.mean()


def train_alone(args):
    """The weights of one process, and for each step the reward, how old the completions' weights
    are, and how far a ratio is from 1."""
    model = common.make_model(args, script.LETTERS)
    optimizer = common.make_optimizer(args, model)
    generator = copy.deepcopy(model)
    shown = []
    for step in range(args.max_steps):
        age = step % args.sync_every
        if not age:
            generator.load_state_dict(model.state_dict())
        prompts = script.draw_prompts(args, step)
        uniform = script.draw_uniform(args, step, range(len(prompts)))
        tokens, old = script.generate(generator, prompts, uniform, args.temperature)
        new = script.logprobs_of(model, prompts, tokens, args.temperature)
        loss, reward = loss_by_definition(new, old, prompts, tokens, args)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown.append((reward.item(), age, ((new - old).exp() - 1).abs().max().item()))
    return model.state_dict(), shown


RANKS = [  # trainers, generators
    (2, 2, "--sync-every 2 --group-size 3"),  # five and four completions
    (1, 1, "--temperature 0.7"),
    (3, 1, "--model llama-2x2x20 --sync-every 3"),
    (5, 2, "--tie --clip-grad 1000"),
]


@cases("trainers, generators, flags", RANKS, lambda *row: row == RANKS[0])
def test_weights_are_those_of_one_process(trainers, generators, flags, read_flags, tmp_path):
    """On uneven shards. By newest weights the ratio is 1 but for rounding, by older ones it is
    not: it is clipped here."""
    job = f"{JOB} {flags} --double --generators {generators}"
    expected, shown = train_alone(read_flags(job))
    start = launcher("pytorch_GRPO", trainers + generators)
    finished = succeed(f"{start} {job} --output-dir {tmp_path}", forked=True)
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert relative_difference(weights, expected) < 1e-11
    found = re.findall(SHOWN, finished.stdout)
    assert len(found) == len(shown) == 5
    for (reward, age, far), (right_reward, right_age, right_far) in zip(found, shown, strict=True):
        assert float(reward) == pytest.approx(right_reward, abs=1e-4)
        assert int(age) == right_age
        if right_age == 0:
            assert max(float(far), right_far) < 1e-12
        else:
            assert right_far > 0.05
            assert float(far) == pytest.approx(right_far, 0.06)


@pytest.mark.full
def test_in_bfloat16(tmp_path):
    """Generators get the weights as trainers gather them, so ratios are near 1."""
    job = f"{JOB} --dtype bfloat16 --output-dir {tmp_path}"
    finished = succeed(f"{launcher('pytorch_GRPO', 3)} {job}", forked=True)
    found = re.findall(SHOWN, finished.stdout)
    assert len(found) == 5 and all(float(far) < 0.05 for *_, far in found)


def test_a_sample_is_the_same_in_any_share(read_flags):
    args = read_flags(JOB)
    model = common.make_model(args, script.LETTERS)
    prompts = script.draw_prompts(args, step=3)
    assert prompts.shape == (12, 4) and torch.equal(prompts[0], prompts[3])
    samples = range(len(prompts))
    uniform = script.draw_uniform(args, 3, samples)
    whole = script.generate(model, prompts, uniform, 1.0)
    for generator in range(5):
        share = slice(generator, None, 5)
        drawn = script.draw_uniform(args, 3, samples[share])
        tokens, logprobs = script.generate(model, prompts[share], drawn, 1.0)
        assert torch.equal(tokens, whole[0][share])
        torch.testing.assert_close(logprobs, whole[1][share], rtol=1e-12, atol=0)
    assert not torch.equal(uniform, script.draw_uniform(args, 4, samples))


def test_tokens_are_drawn_by_their_probabilities(read_flags):
    args = read_flags(f"{JOB} --length 1")
    model = common.make_model(args, script.LETTERS)
    prompt = script.draw_prompts(args, 0)[:1]
    even = (torch.arange(4000)[:, None] + 0.5) / 4000
    tokens, logprobs = script.generate(model, prompt.expand(4000, -1), even, 0.1)
    expected = (model(prompt)[0, -1] / 0.1).softmax(-1)
    assert expected.max() > 2 * expected.min()
    torch.testing.assert_close(tokens.flatten().bincount() / 4000, expected, atol=3e-4, rtol=0)
    torch.testing.assert_close(logprobs.exp().flatten(), expected[tokens.flatten()])


@pytest.mark.full
def test_nobody_waits_for_a_generator_that_has_died(tmp_path):
    """As typed: it is torchrun that ends the others."""
    command = f"{launcher('pytorch_GRPO', 3)} {JOB} --output-dir {tmp_path} --max-steps 100000"
    with started(command) as run:
        wait_for(lambda: "step 2:" in run.output[0])
        ranks = psutil.Process(run.process.pid).children()
        [generator] = [rank for rank in ranks if rank.environ().get("RANK") == "2"]
        generator.kill()
        assert run.end().code == 1
