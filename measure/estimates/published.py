"""Compare predictions with published and measured figures: results/estimate.json.

The published figures are of https://github.com/Vincent-Yu-83/pytorch_train: decimal GB of
``torch.cuda.max_memory_allocated()``, ResNet-50 on images of 224x224, batch 128, on Tesla P40 with
PyTorch 2.0.1. Its loop differs from ours in what matters for memory: a head of 1,000 classes, SGD
without momentum, gradients cleared between forward and backward, and FSDP1 around every
convolution. So it is reimplemented as :func:`published_loop`.
"""

import json
import os
import re
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
SUITES = ("gpt", "cpu", "gpu")  # whose rows are predicted
GPUS = 4  # for a row that uses all GPUs
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
    ranks = gpus if "wrapper" in options else 0
    count(live, ranks, partial(published_loop, gpus=gpus, **options))
    peak = sum(live.peak().values())
    whole = 128 * 3 * 224 * 224 * 4  # DataParallel's first GPU holds the whole batch, too
    return peak + whole * (gpus - 1) // gpus if name == "DP" else peak


# ---------------------------------------------------------------------------- rows of the suites


def technique_of(command: str, name: str, gpus: int) -> tuple[techniques.Technique, int]:
    """The technique of a suite's command, on so many GPUs, and its batch."""
    launched = re.search(r"--nproc_per_node=(\d+)", command)
    script, *flags = re.search(r"\S+\.py .*", command)[0].split()
    technique = techniques.Technique(
        name,
        (script, *flags),
        ranks=int(launched[1]) if launched else 0,
        gpus=gpus if script == "pytorch_DP.py" else 1,
        on_host=techniques.ALL_ON_HOST if "FSDP_offload" in script else techniques.ON_HOST,
    )
    return technique, int(flags[flags.index("--batch-size") + 1])


def rows_of(suite: str) -> list[tuple[techniques.Technique, int]]:
    """The rows of its front table, or of the table with its name; with as many GPUs as the row has
    ranks, or ``GPUS`` if it uses all."""
    given = json.loads((trial.ROOT / "config" / f"suite_{suite}.json").read_text())
    rows = []
    for row in given["rows"]:
        counts = row.get("ranks", [None])
        for n in [1, GPUS] if counts == "gpus" else counts:
            name = row["name"] if n is None else f"{row['name']} x{n}"
            command = f"{row['command']} {given['job']}".replace("{ranks}", str(n))
            shown = name in given["front"] if "front" in given else "table" not in row
            if shown and "pytorch_compile" not in command:  # the compiler chooses what to save
                rows.append(technique_of(command, name, GPUS if suite == "gpu" else 1))
    return rows


def check(row: techniques.Prediction) -> None:
    if row.mistake or row.error:
        raise RuntimeError(f"{row.technique.name}: {row.mistake or row.error}")


def messages_of_steps() -> dict[str, dict[int, float]]:
    """Communication seconds per step, by technique and number of ranks, on the link measured in
    results/collectives.json; with the model of the suite ``scaling``."""
    links = network.measured_links(trial.ROOT / "results" / "collectives.json")
    predict = partial(techniques.predict, flags=["--model", "resnet18"], classes=None, own=None)
    chosen = [techniques.make_technique(name, n) for name in SCALED for n in RANKS]
    tasks = [partial(predict, technique, 32 * technique.ranks) for technique in chosen]
    found = {name: {} for name in SCALED}
    for row in techniques.side_by_side(tasks, os.cpu_count()):
        check(row)
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
    at_once = os.cpu_count()
    tasks = [partial(predict_published, name) for name in PUBLISHED]
    theirs = zip(GIVEN["resnet50"], techniques.side_by_side(tasks, at_once), strict=True)
    found = {"published": [row | {"predicted": predicted} for row, predicted in theirs]}
    found |= {"suites": {}, "messages": messages_of_steps()}
    for suite in SUITES:
        rows = rows_of(suite)
        tasks = [partial(techniques.predict, *row, (), None, None) for row in rows]
        found["suites"][suite] = {}
        for row in techniques.side_by_side(tasks, at_once):
            if "offload_config" not in " ".join(row.technique.command):  # which reads numbers
                check(row)
            found["suites"][suite][row.technique.name] = row.peak or None
    args.output_dir.mkdir(parents=True, exist_ok=True)
    (args.output_dir / "predictions.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
