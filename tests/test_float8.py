"""pytorch_float8.py: its layers against a few lines that round the same way, which layers it
converts, and how it learns."""

import pytest
import torch
from conftest import distance, launcher, read_run, succeed
from torch import nn

float8 = pytest.importorskip("torchao.float8")
import pytorch_float8  # noqa: E402

JOB = "--model gpt-2x4x32 --context 16 --dataset synthetic --train-samples 400 --eval-samples 20"
JOB += " --batch-size 8 --epochs 2 --print-freq 100 --deterministic --dropout 0.1"
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


def rounded(x, dtype, dim):
    """To float8 and back: scaled, so that the largest is the largest in float8; along ``dim``, or
    of all. Along a dimension scales are powers of 2."""
    most = torch.finfo(dtype).max
    largest = x.abs().amax(dim, keepdim=True)
    scale = (most / largest.double()).float()
    scale = scale if dim is None else torch.exp2(torch.log2(scale).floor())
    return (x * scale).clamp(-most, most).to(dtype).float() / scale


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_products(scaling):
    torch.manual_seed(0)
    x = torch.randn(48, 32) ** 3
    weight = torch.randn(64, 32)
    grad = torch.randn(48, 64) / 1000
    config = float8.Float8LinearConfig.from_recipe_name(scaling)
    config = pytorch_float8.dataclasses.replace(config, emulate=True)
    model = nn.Sequential(nn.Linear(32, 64, bias=False))
    model[0].weight = nn.Parameter(weight)
    float8.convert_to_float8_training(model, config=config)
    given = x.clone().requires_grad_()
    output = model(given)
    output.backward(grad)
    along = (None, None) if scaling == "tensorwise" else (1, 0)  # rows, and columns
    of_grad = E5M2 if scaling == "tensorwise" else E4M3
    inputs, weights, grads = (
        [rounded(tensor, dtype, dim) for dim in along]
        for tensor, dtype in ((x, E4M3), (weight, E4M3), (grad, of_grad))
    )
    expected = inputs[0] @ weights[0].T, grads[0] @ weights[1], grads[1].T @ inputs[1]
    for ours, theirs in zip((output, given.grad, model[0].weight.grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6 * theirs.abs().max().item())
    exact = x @ weight.T
    assert 0.01 < ((output - exact).norm() / exact.norm()) < 0.05, "it rounds"


@pytest.mark.full
def test_compiled(tmp_path):
    for flags in ("", "--compile"):
        command = f"{launcher('pytorch_float8', 1)} {JOB} --max-steps 6 {flags}"
        finished = succeed(f"{command} --output-dir {tmp_path / f'run{flags}'}")
        assert "float8: 12 of 13 linear layers, tensorwise, emulated" in finished.stdout

    (expected, _) = read_run(tmp_path / "run")
    (found, _) = read_run(tmp_path / "run--compile")
    assert 0 < distance(found, expected) < 0.01  # it rounds elsewhere, and AdamW enlarges that
