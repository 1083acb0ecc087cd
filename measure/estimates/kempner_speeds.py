"""Predict how KempnerForge scales: tokens/s of meshes of FSDP and tensor parallelism.

    python -m measure.estimates.kempner_speeds

A step computes as long as its share of one GPU's step, and waits for what the run of
:mod:`measure.estimates.kempner` sends. Tensor parallelism's messages never overlap with compute;
FSDP's overlap with all of it, or not at all. Machines have four GPUs.
"""

import dataclasses
import os
from functools import partial

from estimator import live_bytes, network, techniques
from estimator.sent import Message, message_of
from measure.estimates import count, kempner

ONE_GPU = 10_471  # tokens/s
RUNS = {  # fsdp, tp: sequences, micro-batches, published tokens/s
    (2, 1): (2, 4, 18_728), (1, 2): (4, 2, 13_163), (4, 1): (4, 2, 38_983), (1, 4): (4, 2, 25_135),
    (2, 2): (4, 2, 25_980), (2, 4): (4, 2, 44_299), (4, 4): (4, 2, 82_988), (8, 4): (4, 2, 155_917),
}  # fmt: skip
SMALLER = (4, 8)  # layers
BLOCKS = 32


@dataclasses.dataclass(frozen=True)
class OfFSDP(Message):
    """Those of tensor parallelism are functional collectives."""


def tell(func, args, phase=""):
    message = message_of(func, args, phase)
    if message and func.namespace == "c10d":
        return OfFSDP(**dataclasses.asdict(message))
    return message


def send(fsdp: int, tp: int, layers: int) -> list[Message]:
    """The messages of a step. The process cannot be used for anything else afterwards."""
    live_bytes.message_of = tell
    live = live_bytes.LiveBytes()
    batch, accumulate, _ = RUNS[fsdp, tp]
    options = {"model": "7B", "batch": batch, "accumulate": accumulate, "fsdp": fsdp, "tp": tp}
    count(live, fsdp * tp, partial(kempner.forge, layers=layers, **options))
    return live.messages


def main() -> None:
    tasks = [partial(send, *mesh, n) for mesh in RUNS for n in SMALLER]
    found = techniques.side_by_side(tasks, os.cpu_count())
    for (fsdp, tp), (batch, accumulate, published) in RUNS.items():
        few = next(found)
        more = next(found)
        times = (BLOCKS - SMALLER[0]) // (SMALLER[1] - SMALLER[0])
        messages = network.extrapolate(few, more, times)
        around = "nvlink4" if fsdp * tp <= 4 else "ib400"
        spent = {OfFSDP: 0.0, Message: 0.0}
        for message in messages:
            link = around if isinstance(message, OfFSDP) else "nvlink4"
            spent[type(message)] += network.seconds(message, network.link_of(link))
        tokens = batch * accumulate * kempner.CONTEXT * fsdp
        compute = tokens / (fsdp * tp) / ONE_GPU
        no_overlap = compute + sum(spent.values())
        overlap = max(compute, spent[OfFSDP]) + spent[Message]
        speeds = [round(tokens / seconds) for seconds in (no_overlap, overlap)]
        print(fsdp, tp, published, *speeds, *(f"{s / published - 1:+.1%}" for s in speeds))


if __name__ == "__main__":
    main()
