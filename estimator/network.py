"""Communication time: latency and bandwidth of each hop, and how long a step waits.

The model is the usual one (for collectives Thakur et al. 2005, doi:10.1177/1094342005051521). In a
ring each of N ranks sends parts of 1/N to its neighbour, N - 1 times for an all-gather or a
reduce-scatter, twice as often for an all-reduce: each link carries little, but with many ranks the
latencies add up. In a tree a message takes log2(N) hops, each with all of its bytes. NCCL takes the
faster of the two for an all-reduce, and a ring for the others. All hops are assumed identical.
"""

import argparse
import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from estimator.sent import SHARES, Message

MACHINE = 8  # GPUs; tensor parallelism stays within one


@dataclasses.dataclass(frozen=True)
class Link:
    """The connection of two ranks."""

    latency: float  # seconds of a hop
    bandwidth: float  # bytes per second that a rank sends, in one direction


# Line rates, which are upper limits: NVLink 4 has 18 links of 25 GB/s (H100's data sheet);
# PCIe 4.0 16 lanes; the others as named. Latencies of a hop in a ring are those that
# NCCL plans with (src/graph/tuning.cc, hwLat, protocol Simple); of Ethernet that of a TCP message.
FOUND = json.loads(Path(__file__).with_name("links.json").read_text())
LINKS = {name: Link(**values) for name, values in FOUND.items()}


def link_of(text: str) -> dict[str, Link]:
    """``--link``: a name, latency and bandwidth, or what pytorch_collectives.py --sweep wrote; by
    kind of message."""
    if text in LINKS:
        return dict.fromkeys(SHARES, LINKS[text])
    if text.endswith(".json"):
        return measured_links(Path(text))
    try:
        microseconds, gigabytes = map(float, text.split(","))
        if microseconds >= 0 and gigabytes > 0:
            return dict.fromkeys(SHARES, Link(1e-6 * microseconds, 1e9 * gigabytes))
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"{text} is neither one of {', '.join(LINKS)} nor MICROSECONDS,GB_PER_SECOND, such as 5,300"
    )


def measured_links(path: Path) -> dict[str, Link]:
    """The latency per hop of each measured collective, and its bandwidth."""
    try:
        found = json.loads(path.read_text())
        n = found["ranks"]
        links = {}
        for name, operation in found["operations"].items():
            kind = name if name in SHARES else name.replace("_", "")
            if kind in SHARES:
                hops = SHARES[kind] * (n - 1)
                links[kind] = Link(operation["latency"] / hops, operation["bandwidth"])
        links["reduce"] = links["scatter"] = links["broadcast"]
        links["send"] = links.setdefault("alltoall", links["allgather"])
        return {kind: links[kind] for kind in SHARES}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise argparse.ArgumentTypeError(
            f"{path} is not what pytorch_collectives.py --sweep writes ({error})"
        ) from None


def mean_link(near: int, inside: Link, between: Link) -> Link:
    """The mean hop of a ring with ``near`` ranks on each machine, each with a link of its own to
    others, over all of which NCCL sends at once: of 8 x 25 GB/s it reached 192 (NVIDIA/nccl#812).
    """
    latency = (between.latency + (near - 1) * inside.latency) / near
    return Link(latency, min(inside.bandwidth, near * between.bandwidth))


def seconds(message: Message, links: dict[str, Link]) -> float:
    """The time of one message, if nothing else is sent."""
    n = message.ranks
    link = links[message.kind]
    rounds = SHARES[message.kind]
    if message.kind == "send":
        return link.latency + message.size / link.bandwidth
    if n == 1:
        return 0.0
    ring = rounds * (n - 1) * link.latency + message.sent / link.bandwidth
    if message.kind != "allreduce" or n == 2:
        return ring
    depth = math.ceil(math.log2(n))
    return min(ring, rounds * (depth * link.latency + message.size / link.bandwidth))


def between(few: list[Message], many: list[Message], n: int) -> list[Message]:
    """The messages of ``n`` ranks, from those of fewer and of more ranks: the same, but for the
    rows that pad a tensor to a multiple of the ranks, which grow about linearly; or one message for
    each rank, with a part of the same bytes."""
    found = []
    for kind, phase in dict.fromkeys((m.kind, m.phase) for m in few):
        a = [m for m in few if m.kind == kind and m.phase == phase]
        b = [m for m in many if m.kind == kind and m.phase == phase]
        part = (n - a[0].ranks) / (b[0].ranks - a[0].ranks)
        pairs = zip(a, b, strict=False)
        sizes = [one.size + part * (other.size - one.size) for one, other in pairs]
        if len(a) != len(b):
            count = round(len(a) + part * (len(b) - len(a)))
            sizes = count * [sum(m.size for m in a) / count]
        found += [dataclasses.replace(a[0], size=round(size), ranks=n) for size in sizes]
    return found


def extrapolate(small: list[Message], large: Sequence[Message] = (), times=0) -> list[Message]:
    """Add the messages that a larger model has, ``times`` times."""
    more = Counter(large) - Counter(small)
    return small + times * [*more.elements()]


def waiting(
    messages: Iterable[Message], compute: float, links: dict[str, Link]
) -> tuple[float, float]:
    """Seconds of a step that a rank waits for communication: the minimum, if communication overlaps
    with all compute of its phase, and the maximum, if it does not overlap. ``compute``: seconds of
    a step without communication, 1/3 of it forward, 2/3 backward."""
    spent = {"activations": 0.0, "temporary": 0.0, "update": 0.0}
    for message in messages:
        spent[message.phase] += seconds(message, links)
    hides = {"activations": compute / 3, "temporary": 2 * compute / 3, "update": 0.0}
    least = sum(max(0.0, spent[phase] - hides[phase]) for phase in spent)
    return least, sum(spent.values())
