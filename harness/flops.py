"""Model FLOP/s of a run, and its share of the GPU's peak: model FLOPs utilization (MFU)."""

import json
import re
from pathlib import Path

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.world import world

GPUS = json.loads(Path(__file__).with_name("gpus.json").read_text())["gpus"]
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
WEIGHTS = ("mm", "addmm", "convolution")  # operations with weights; attention has others


def count_flops(args, data, model: nn.Module, device: torch.device) -> float | None:
    """FLOPs of a training step for one sample, as PaLM counts them (Chowdhery et al. 2022,
    arXiv:2204.02311, appendix B): those of matrix products, convolutions and attention in one
    forward, by PyTorch's ``FlopCounterMode``, and twice as many for backward, but only as many of
    products with frozen weights. ``None`` if it cannot be counted, and on all ranks but 0."""
    if world().rank:
        return None
    from torch.utils.flop_counter import FlopCounterMode  # slow, and needed only once

    try:
        with torch.device("meta"):
            counted = args.task.models.make_model(args, data.classes)
            inputs = data.example(1).to("meta")
        counter = FlopCounterMode(display=False)
        eager = torch.compiler.set_stance("force_eager")
        kernels = [SDPBackend.MATH]
        if device.type == "cuda":  # FlopCounterMode does not know the fused kernel of CPUs
            kernels += FUSED
        with torch.no_grad(), eager, sdpa_kernel(kernels), counter:
            counted.eval()(inputs)
    except Exception:  # an operation that the meta device lacks raises one of several types
        return None
    by_kind = {str(kind): n for kind, n in counter.get_flop_counts()["Global"].items()}
    total = sum(by_kind.values())
    products = sum(by_kind.get(f"aten.{name}", 0) for name in WEIGHTS)
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    frozen = sum(n for n, trained in sizes if not trained) / max(1, sum(n for n, _ in sizes))
    return 3 * total - frozen * products


def utilization(flops: float | None, result: dict) -> dict:
    """The model TFLOP/s of each device, and the MFU, for ``result.json``."""
    if flops is None:
        return {"model_tflops": None, "mfu": None}
    a_second = flops * result["global_batch_size"] / result["step_ms"]["p50"] * 1e3
    each = a_second / result["devices"]
    peak = peak_flops(result["device"], result["precision"], any(result["tf32"].values()))
    return {"model_tflops": each / 1e12, "mfu": peak and each / peak}


def peak_flops(device: str, precision: str, tf32: bool) -> float | None:
    """Peak FLOP/s of a GPU, by its name; ``None`` for one that is not in gpus.json, and a CPU."""
    kinds = {"float16": "half", "bfloat16": "half", "float32": "tf32" if tf32 else "fp32"}
    found = (gpu for gpu in GPUS.values() if re.fullmatch(gpu["torch"], device))
    peak = next(found, {}).get(kinds.get(precision))
    return peak and 1e12 * peak
