"""pytorch_low_bit_optimizer.py: rounding that is right on average, whose noise depends on the
element alone; moments as bytes of rows; and steps that are AdamW's."""

import pytest
import torch

from pytorch_low_bit_optimizer import AdamW8bit, noise_of, pack, round_to, unpack

NEIGHBOURS = {torch.bfloat16: 2.0**-8, torch.float8_e4m3fn: 2.0**-4}  # half of the last digit of 1


@pytest.mark.parametrize("dtype", NEIGHBOURS, ids=str)
def test_stochastic_rounding_is_right_on_average(dtype):
    """Between two neighbours, for both signs; what a dtype has stays as it is."""
    digit = 2 * NEIGHBOURS[dtype]
    x = torch.tensor([1 + 0.25 * digit, -1 - 0.25 * digit, 1 + 0.75 * digit, 1.0, -1.5, 0.0])
    x = x.unsqueeze(1).expand(-1, 100_000).contiguous()
    found = round_to(dtype, x, noise_of(x, 0, "a name")).float()
    assert (found - x).abs().max() < digit
    assert set(found[0].tolist()) == {1.0, 1 + digit}
    assert set(found[1].tolist()) == {-1.0, -1 - digit}
    assert torch.equal(found[3:], x[3:])
    torch.testing.assert_close(found.mean(1), x.mean(1), rtol=0, atol=0.01 * digit)
    nearest = round_to(dtype, x, None).float()
    assert (nearest[0] == 1).all() and (nearest[2] == 1 + digit).all()


def test_noise_is_that_of_the_element_on_any_number_of_ranks():
    whole = torch.zeros(10, 6)
    noise = noise_of(whole, 0, "step 1")
    shards = [noise_of(whole[i : i + 4], 6 * i, "step 1") for i in (0, 4, 8)]
    assert torch.equal(torch.cat(shards), noise)
    assert not torch.equal(noise_of(whole, 0, "step 2"), noise)
    bits = noise_of(torch.zeros(100_000), 0, "step 1").unsqueeze(1) >> torch.arange(32) & 1
    assert ((bits.double().mean(0) - 0.5).abs() < 0.01).all()


def test_moments_come_back_from_bytes_of_their_rows():
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(0)) ** 3
    x[0] = 0
    packed = pack(x, 16, None)
    assert packed.dtype == torch.uint8 and packed.shape == (7, 32 + 4 * 2)
    found = unpack(packed, x.shape, 16)
    largest = x.unflatten(1, (-1, 16)).abs().amax(2).repeat_interleave(16, 1)
    assert ((found - x).abs() <= x.abs() / 16 + largest / 448 / 2**9).all()
    assert torch.equal(torch.cat([pack(shard, 16, None) for shard in x.split(3)]), packed)
    upwards = torch.full((1000, 32), 2**32 - 1)  # bits that round every number up
    many = torch.randn(1000, 32, generator=torch.Generator().manual_seed(0))
    assert unpack(pack(many, 16, upwards), many.shape, 16).isfinite().all()
    vector = x[1]
    assert torch.equal(unpack(pack(vector, 16, None), vector.shape, 16), vector)


def test_a_mean_decays_unless_it_is_rounded_to_the_nearest():
    """A step multiplies the root by 0.9995, and half of a float8's last digit is a thirtieth."""
    start = torch.linspace(0.5, 1, 64).repeat(64, 1)
    start = unpack(pack(start, 64, None), start.shape, 64)
    found = {}
    for stochastic in (True, False):
        root = start
        for step in range(300):
            root = root * 0.999**0.5
            root[:, -1] = 1  # the scale of its block stays
            noise = noise_of(root, 0, str(step)) if stochastic else None
            root = unpack(pack(root, 64, noise), root.shape, 64)
        found[stochastic] = root
    assert torch.equal(found[False], start)
    mean = (found[True] / start)[:, :-1].mean().item()
    assert mean == pytest.approx(0.999**150, abs=0.01)


@pytest.mark.parametrize("shape, steps", [((16,), 5), ((8, 16), 1)], ids=["vector", "matrix"])
def test_steps_are_those_of_adamw_while_moments_are_exact(shape, steps):
    """A vector's are in fp32; a matrix's are exact in the first step, before they are rounded."""
    start = torch.randn(shape)
    expected = start.clone().requires_grad_()
    found = start.clone().requires_grad_()
    theirs = torch.optim.AdamW([expected], lr=0.01, weight_decay=0.1)
    ours = AdamW8bit([{"params": [found]}], 16, True, 0.01, 0.1)
    for _ in range(steps):
        expected.grad = found.grad = torch.randn(shape)
        theirs.step()
        ours.step()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
