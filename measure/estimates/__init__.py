"""Predictions compared with published figures."""

import json
from collections.abc import Callable

import torch.distributed as dist

from estimator import trial
from estimator.live_bytes import LiveBytes

GIVEN = json.loads((trial.ROOT / "measure" / "published.json").read_text())


def count(live: LiveBytes, ranks: int, train: Callable[[LiveBytes], None]) -> None:
    """Train on fake tensors as rank 0 of so many, 0 without a process group. The process cannot be
    used for anything else afterwards."""
    trial.prepare(ranks)
    if ranks:
        dist.init_process_group("fake", rank=0, world_size=ranks)
    with trial.counting(live, ranks):
        train(live)
