"""Compare predictions with published figures, and predict communication: results/estimate.json.

The published figures are of https://github.com/Vincent-Yu-83/pytorch_train: decimal GB of
``torch.cuda.max_memory_allocated()``, ResNet-50 on images of 224x224, batch 128, on Tesla P40 with
PyTorch 2.0.1. Its loop differs from ours in what matters for memory: a head of 1,000 classes, SGD
without momentum, gradients cleared between forward and backward, and FSDP1 around every
convolution. So it is reimplemented as :func:`published_loop`.
"""

import json
import os
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from estimator import network, techniques, trial
from estimator.live_bytes import LiveBytes
from measure.estimates import GIVEN, count

PUBLISHED = {row["name"]: row for row in GIVEN["resnet50"]}  # by our technique
SCALED = ("torchrun_DDP", "DDP_ZeRO --use_zero", "FSDP")
RANKS = tuple(2**k for k in range(1, 11))


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


def predict_published(name: str) -> int:
    """Predicted bytes. The process cannot be used for anything else afterwards."""
    gpus, options, live = PUBLISHED[name]["gpus"], PUBLISHED[name]["options"], LiveBytes()
    count(live, gpus * ("wrapper" in options), partial(published_loop, gpus=gpus, **options))
    peak = sum(live.peak().values())
    whole = 128 * 3 * 224 * 224 * 4  # DataParallel's first GPU holds the whole batch, too
    return peak + whole * (gpus - 1) // gpus if name == "DP" else peak


def messages_of_steps() -> dict[str, dict[int, float]]:
    """Communication seconds per step, by technique and number of ranks, on the link measured in
    results/collectives.json; with the model of the suite ``scaling``."""
    links = network.measured_links(trial.ROOT / "results" / "collectives.json")
    predict = partial(techniques.predict, flags=["--model", "resnet18"], classes=None, own=None)
    chosen = [techniques.make_technique(name, n) for name in SCALED for n in RANKS]
    tasks = [partial(predict, technique, 32 * technique.ranks) for technique in chosen]
    found = {name: {} for name in SCALED}
    for row in techniques.side_by_side(tasks, os.cpu_count()):
        if row.mistake:
            raise RuntimeError(f"{row.technique.name}: {row.mistake}")
        _, most = network.waiting(row.messages, 0.0, links)
        found[row.technique.name][row.technique.ranks] = most
    return found


def main() -> None:
    """Write predictions.json into ``--output-dir``, in bytes and seconds; or print the bytes of a
    published technique."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=PUBLISHED, help="print its bytes")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/published"), metavar="DIR")
    args = parser.parse_args()
    if args.name:
        return print(predict_published(args.name))
    tasks = [partial(predict_published, name) for name in PUBLISHED]
    theirs = zip(GIVEN["resnet50"], techniques.side_by_side(tasks, os.cpu_count()), strict=True)
    found = {"published": [row | {"predicted": predicted} for row, predicted in theirs]}
    found["messages"] = messages_of_steps()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    (args.output_dir / "predictions.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
