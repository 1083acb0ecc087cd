"""Compare, without a GPU, what operations return and save for backward on a GPU, and on a CPU that
follows a GPU's rules (estimator/gpu_rules.py).

The GPU is simulated by fake tensors of device ``cuda``, which take the branches of PyTorch's own
code for it. Only the choice of the attention kernel needs a driver: there the kernel is named.
Prints JSON: by case, what each of the two returned and saved.
"""

import json
import sys
import warnings
from functools import partial
from itertools import product
from operator import methodcaller
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch._subclasses import fake_tensor

from estimator import fakes, gpu_rules
from jobs.gpt import GPT
from jobs.llama import Llama
from jobs.sizes import LlamaSize, Size


class OnFakes(fake_tensor.FakeTensorMode):
    avoid_device_init = True


def on_gpu_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **_):
    if torch.is_autocast_enabled("cuda"):
        q, k, v = (t.to(torch.get_autocast_dtype("cuda")) for t in (q, k, v))
    if q.dtype == torch.float32:
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        return kernel(q, k, v, attn_mask, True, dropout_p, is_causal)[0]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    return kernel(q, k, v, dropout_p, is_causal)[0]


class UNet(nn.Sequential):
    """Of n channels, with what such networks are made of; and of half the size what is inner."""

    def __init__(self, n, *inner):
        down = nn.MaxPool2d(2), nn.Conv2d(n, 2 * n, 3, padding=1), nn.GroupNorm(4, 2 * n), nn.SiLU()
        super().__init__(*down, *inner, nn.Upsample(scale_factor=2.0, mode="bilinear"))
        self.conv = nn.Conv2d(3 * n, n, 3, padding=1)

    def forward(self, x):
        *below, conv = self
        return F.relu(conv(torch.cat([x, nn.Sequential(*below)(x)], 1)))


def unet():
    return nn.Sequential(nn.Conv2d(3, 8, 1), UNet(8, UNet(16)), nn.Conv2d(8, 5, 1), nn.Dropout2d())


def encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


TOKENS = torch.zeros(2, 16, dtype=torch.int64)
IMAGES = torch.zeros(2, 3, 32, 32)
VOLUME = torch.zeros(2, 3, 8, 8, 8)
VECTORS = torch.zeros(4, 16)
MODELS = {
    "resnet18": (torchvision.models.resnet18, IMAGES),
    "vit": (lambda: torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 64, 0.1, 0.1), IMAGES),
    "llama": (lambda: Llama(range(65), LlamaSize(2, 4, 32, kv_heads=2, mlp_width=64)), TOKENS),
    "gpt": (lambda: GPT(range(65), Size(2, 2, 32), 16, 0.1), TOKENS),
    "encoder": (encoder, torch.zeros(2, 16, 32)),
    "unet": (unet, IMAGES),
}
OPERATIONS = {
    "norm of rows": (lambda x: x.norm(dim=1), VECTORS),
    "pow": (lambda x: x.pow(x), VECTORS),
    "dist": (lambda x: torch.dist(x, x), VECTORS),
    "softmax": (lambda x: x.softmax(1), VECTORS),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.zeros_like(x[:, 0], dtype=int)), VECTORS),
    "binary_cross_entropy": (lambda x: F.binary_cross_entropy_with_logits(x, x), VECTORS),
    "prelu": (lambda x: F.prelu(x, x[0, :1]), VECTORS),
    "rms_norm": (lambda x: F.rms_norm(x, (16,)), VECTORS),
    "grid_sample": (lambda x: F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1)), IMAGES),
    "dropout": (lambda x: F.dropout(x, 0.1), VECTORS),
    "normalize": (F.normalize, VECTORS),
}
for name, *dims in ["norm"], ["log1p"], ["expm1"], *product(("logsumexp", "cumprod", "sum"), [1]):
    OPERATIONS[name] = methodcaller(name, *dims), VECTORS
for pool in (F.max_pool3d, F.avg_pool3d, F.adaptive_avg_pool3d):
    OPERATIONS[pool.__name__] = (lambda x, pool=pool: pool(x, 2)), VOLUME
for mode in ("reflect", "replicate"):
    OPERATIONS[f"{mode} pad"] = partial(F.pad, pad=[1] * 4, mode=mode), IMAGES
for mode in ("nearest", "bilinear", "bicubic", "trilinear"):
    example = VOLUME if mode == "trilinear" else IMAGES
    OPERATIONS[mode] = partial(F.interpolate, scale_factor=2, mode=mode), example


def run(make, example, device: str, dtype: torch.dtype, autocast: bool):
    """What a model or an operation returns, and the tensors that it keeps for backward."""
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage._cdata] = tensor, storage.nbytes()
        return tensor

    with torch.device(device):
        model = make() if make in [made for made, _ in MODELS.values()] else None
    if model and not autocast:
        model = model.to(dtype)
    own = {p.untyped_storage()._cdata for p in model.parameters()} if model else set()
    x = torch.empty_like(example, device=device, requires_grad=example.is_floating_point())
    if example.is_floating_point() and not (model and autocast):
        x = x.to(dtype)
    torch.set_autocast_enabled(device, autocast)  # torch.autocast does not without a GPU
    torch.set_autocast_dtype(device, dtype)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = (model or make)(x)
    torch.set_autocast_enabled(device, False)
    torch.clear_autocast_cache()
    kept = [
        [str(tensor.dtype), size]
        for address, (tensor, size) in kept.items()
        if address not in own and tensor.ndim > 1 and tensor.shape[-1] > 1  # seeds, statistics
    ]
    return [str(out.dtype), list(out.shape), sorted(kept)]


def main():
    warnings.simplefilter("ignore")
    fakes.stand_in_for_numbers()
    fake_tensor.init_gpu_context = lambda device: None
    cases = [
        (f"{name} {dtype} {'autocast' * autocast}", make, example, dtype, autocast)
        for name, (make, example) in (MODELS | OPERATIONS).items()
        for autocast in (False, True)
        for dtype in [torch.bfloat16, torch.float16] + [torch.float32] * (not autocast)
    ]
    found = {name: {} for name, *_ in cases}
    plain, F.scaled_dot_product_attention = F.scaled_dot_product_attention, on_gpu_attention
    for side, device in (("gpu", "cuda"), ("told", "cpu")):
        if side == "told":
            F.scaled_dot_product_attention = plain
            gpu_rules.stand_in_for_a_gpu()
        with OnFakes(allow_non_fake_inputs=True):
            for name, make, example, *how in cases:
                found[name][side] = run(make, example, device, *how)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
