"""pytorch_QLoRA.py: its bytes against their definition and bitsandbytes; its products; and that
ranks with shards of unequal size read and quantize what one process would."""

import pytest
import torch
from conftest import launch, launcher, succeed
from test_llama import JOB, logits_of, make_folder, read_in_float64

from pytorch_QLoRA import NF4, Product, dequantize, quantize


def some_weights(rows=12, columns=192):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) ** 3
    weight[1, :64] = 0  # a block without a largest value
    weight[2, 64:128] = NF4.repeat(4)  # exact, and the values between two
    weight[3, :16] = (NF4 + NF4.roll(1)) / 2
    weight[3, 16] = 1
    return weight


def test_values_are_quantiles_of_a_normal_distribution():
    """As in the paper: seven below zero, zero, and eight above, divided by the largest."""
    positive = torch.linspace(0.9677083, 0.5, 9, dtype=torch.float64)[:-1]
    negative = 1 - torch.linspace(0.9677083, 0.5, 8, dtype=torch.float64)[:-1]
    values = torch.special.ndtri(torch.cat([negative, positive, torch.tensor([0.5])]))
    values = values.sort().values / values.max()
    torch.testing.assert_close(NF4.double(), values, rtol=0, atol=1e-6)


def test_each_weight_becomes_the_nearest_value_times_its_scale():
    weight = some_weights()
    packed = quantize(weight, 64)
    assert packed.shape == (12, 192 // 2 + 4 * 192 // 64) and packed.dtype == torch.uint8
    found = dequantize(packed, 64, torch.float64).unflatten(1, (-1, 64))
    blocks = weight.double().unflatten(1, (-1, 64))
    values = NF4.double() * blocks.abs().amax(2, keepdim=True)  # [rows, blocks, 16]
    nearest = (blocks.unsqueeze(3) - values.unsqueeze(2)).abs().amin(3)
    torch.testing.assert_close((found - blocks).abs(), nearest, rtol=1e-5, atol=1e-6)
    again = quantize(found.flatten(1), 64)
    assert torch.equal(again, packed), "rounding twice is not rounding once"


@pytest.mark.full
def test_bytes_and_products_are_those_of_bitsandbytes():
    """Its rows of codes and scales, and the matrix that it makes of them, bit for bit."""
    library = pytest.importorskip("bitsandbytes.functional")
    weight = some_weights()
    packed = quantize(weight, 64)
    codes, state = library.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    assert torch.equal(packed[:, :96], codes.view(12, 96))
    scales = packed[:, 96:].contiguous().view(torch.float32)
    assert torch.equal(scales, state.absmax.view(12, 3))
    for dtype in (torch.float32, torch.bfloat16):
        state.dtype = dtype
        expected = library.dequantize_4bit(codes, state)
        assert torch.equal(dequantize(packed, 64, dtype), expected), dtype


def test_shards_of_rows_are_quantized_alone():
    weight = some_weights()
    shards = [quantize(shard, 64) for shard in [*weight.tensor_split(5), weight[:0]]]
    assert torch.equal(torch.cat(shards), quantize(weight, 64))


def test_backward_has_the_gradient_of_the_matrix_and_keeps_only_its_bytes():
    packed = quantize(some_weights().double(), 64)
    x = torch.randn(2, 3, 192, dtype=torch.float64, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        product = Product.apply(x, packed, 64)
    assert [t.dtype for t in kept] == [torch.uint8]
    product.square().sum().backward()
    plain = x.detach().requires_grad_()
    (plain @ dequantize(packed, 64, torch.float64).T).square().sum().backward()
    assert torch.equal(x.grad, plain.grad)


def test_bytes_that_were_gathered_in_bfloat16_are_the_same():
    """As FSDP does before PyTorch 2.13."""
    packed = quantize(some_weights(), 64)
    bytes_of_all = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(bytes_of_all.to(torch.bfloat16).to(torch.uint8), bytes_of_all)
    expected = dequantize(packed, 64, torch.float32)
    assert torch.equal(dequantize(packed.to(torch.bfloat16), 64, torch.float32), expected)


@torch.no_grad()
def test_ranks_with_unequal_shards_quantize_what_they_read_of_a_folder(tmp_path):
    """80 rows on three ranks, and layers with a bias."""
    model = make_folder(tmp_path / "base", "qwen2", shards="40KB")
    command = f"{launcher('pytorch_QLoRA', 3)} {JOB} --merge --lr 1e-30 --max-steps 1 --block 16"
    succeed(f"{command} --weights {tmp_path}/base --output-dir {tmp_path}/run", forked=True)
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            layer.weight.copy_(dequantize(quantize(layer.weight, 16), 16, torch.float64))
    merged = read_in_float64("qwen2", tmp_path / "run")
    torch.testing.assert_close(logits_of(merged), logits_of(model), rtol=1e-10, atol=1e-12)


def test_a_block_that_does_not_divide_the_inputs_is_refused(tmp_path):
    flags = f"--context 8 --dataset synthetic --output-dir {tmp_path}"
    refused = {
        "--model gpt-1x2x24 --block 64": "--block 64 is no even divisor of the 24 inputs of",
        "--model gpt-1x2x24 --block 3": "--block 3 is no even divisor of the 24 inputs",
        "--model gpt-1x3x21": "--block 1 is no even divisor of the 21 inputs",
    }
    for wrong, words in refused.items():
        command = f"{launcher('pytorch_QLoRA', 1)} {flags} {wrong}"
        assert words in launch(command, forked=True).refusal
