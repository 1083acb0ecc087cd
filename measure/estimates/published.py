"""Compare predictions with the page that this repository began from.

    python -m measure.estimates.published [NAME]

The published figures are of https://github.com/Vincent-Yu-83/pytorch_train: decimal GB of
``torch.cuda.max_memory_allocated()``, ResNet-50 on images of 224x224, batch 128, on Tesla P40 with
PyTorch 2.0.1. Its loop differs from ours in what matters for memory: a head of 1,000 classes, SGD
without momentum, gradients cleared between forward and backward, and FSDP1 around every
convolution. So it is reimplemented as :func:`published_loop`.
"""

import os
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from functools import partial

import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from estimator import techniques, trial
from estimator.live_bytes import LiveBytes
from measure.estimates import GIVEN, count

PUBLISHED = {row["name"]: row for row in GIVEN["resnet50"]}  # by our technique


def published_loop(
    live, gpus, batch_size=128, dtype="float32", autocast=False, wrapper="", optimizer=""
):
    """Run two steps of the published loop, and measure the second."""
    dtype = getattr(torch, dtype)
    model = torchvision.models.resnet50(num_classes=1000).to(dtype)
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    if wrapper == "fsdp":
        options = {"auto_wrap_policy": ModuleWrapPolicy([nn.Conv2d, nn.Linear])}
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)
    options = {"lr": 0.001, "weight_decay": 5e-4, "foreach": True}
    if optimizer == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, **options)
    else:
        optimizer = torch.optim.SGD(model.parameters(), **options)
    for step in range(trial.STEPS):
        if step == trial.STEPS - 1:
            live.begin_step()
        images = torch.empty(batch_size // gpus, 3, 224, 224).to(dtype)
        labels = torch.zeros(batch_size // gpus, dtype=torch.int64)
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def predict(name: str) -> int:
    """Predicted bytes. The process cannot be used for anything else afterwards."""
    row = PUBLISHED[name]
    gpus = row["gpus"]
    live = LiveBytes()
    train = partial(published_loop, gpus=gpus, **row["options"])
    count(live, gpus * ("wrapper" in row["options"]), train)
    peak = sum(live.peak().values())
    whole = 128 * 3 * 224 * 224 * 4  # DataParallel's first GPU holds the whole batch, too
    return peak + whole * (gpus - 1) // gpus if name == "DP" else peak


def main() -> None:
    """Print published and predicted GB; or the bytes of one technique."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=PUBLISHED, help="print its bytes")
    name = parser.parse_args().name
    if name:
        return print(predict(name))
    tasks = [partial(predict, name) for name in PUBLISHED]
    found = techniques.side_by_side(tasks, os.cpu_count())
    for row, size in zip(GIVEN["resnet50"], found, strict=True):
        print(f"{row['name']:22} {row['published_gb']:5.2f} {size / 1e9:5.2f}")


if __name__ == "__main__":
    main()
