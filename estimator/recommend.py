"""Which device meshes of pytorch_ND_parallel.py fit the GPUs, ranked by their cost.

All combinations are ranked by their theoretical cost, the simplest of equal ones first. Those whose
persistent memory alone does not fit are dropped; the script's own step is predicted for the others,
until enough of them fit.
"""

import dataclasses
import functools
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

from estimator import network, techniques
from estimator.network import MACHINE
from estimator.techniques import Prediction, Setup
from harness.cli import fail
from parallel.pipelining import default_microbatches
from theory import Decoder, by_dimension, decoder

PCIE = 2.5e10  # bytes per second between a GPU and its host, of 32 GB/s of PCIe 4.0
ENOUGH = 5  # stop after this many combinations that fit
SECONDS = 45  # or after this time
PARTS = 3, 4  # of an accumulated batch, from which more are extrapolated
# Of a step's compute: as far as predicted ratios of published speeds of data parallelism were off
EQUAL = 0.06  # docs/reports/2026-11-published-models.md
STATE = {"adamw": 16, "sgd": 12}  # bytes per parameter: fp32 weights, gradients, optimizer


@dataclasses.dataclass(frozen=True)
class Way(Setup):
    """A combination: dimensions and flags of pytorch_ND_parallel.py."""

    replicate: int = 1
    shard: int = 1
    ac: str = "none"
    accumulate: int = 1
    offload: bool = False
    microbatches: int = 1
    parts: int = 0  # of the batch, if fewer are predicted

    @property
    def kind(self) -> tuple[int, ...]:
        """Only one of each kind is reported: others differ only in data parallelism."""
        return self.tp, self.pp, self.cp, self.shard > 1

    @property
    def compared(self) -> bool:
        """Whether predicted ratios of speeds were near published ones."""
        return self.tp == self.pp == self.cp == 1 and not self.offload

    def words(self) -> list[str]:
        given = {
            "--dp-replicate": self.replicate, "--dp-shard": self.shard, "--tp": self.tp,
            "--pp": self.pp, "--cp": self.cp, "--accumulate": self.accumulate,
        }  # fmt: skip
        words = [w for flag, n in given.items() if n > 1 for w in (flag, str(n))]
        words += ["--sequence-parallel"] if self.tp > 1 else []
        words += ["--microbatches", str(self.microbatches)] if self.pp > 1 else []
        words += ["--ac", self.ac] if self.ac != "none" else []
        return words + (["--offload"] if self.offload else [])

    def describe(self) -> str:
        """In words, from the dimension that sends least to the one that sends most."""
        replicas = "HSDP replicas" if self.shard * self.cp > 1 else "DDP"
        names = {replicas: self.replicate, "FSDP": self.shard, "TP": self.tp}
        names |= {"PP": self.pp, "CP": self.cp}
        said = [f"{name} {n}" for name, n in names.items() if n > 1] or ["one GPU"]
        said += [f"activation checkpointing {self.ac}"] if self.ac != "none" else []
        said += [f"gradient accumulation {self.accumulate}"] if self.accumulate > 1 else []
        return ", ".join(said + (["offload"] if self.offload else []))

    def launch(self, flags: Sequence[str], batch_size: int) -> str:
        """The command to run on each machine."""
        machines = max(1, self.ranks // MACHINE)
        each = self.ranks // machines
        nodes = "--standalone"
        if machines > 1:
            nodes = f"--nnodes={machines} --rdzv_backend=c10d --rdzv_endpoint=$HEAD:29500"
        words = [*flags, "--batch-size", str(batch_size), *self.words()]
        return f"torchrun {nodes} --nproc_per_node={each} {self.command[0]} {' '.join(words)}"


@dataclasses.dataclass(frozen=True)
class Job:
    """The training task: see :func:`techniques.predict`."""

    size: object  # of the decoder
    vocabulary: int  # number of tokens
    context: int
    batch_size: int
    optimizer: str
    bytes: int  # of a number in the compute dtype
    flops: float  # peak FLOP/s of the GPU in half precision
    mfu: tuple[float, float]  # shares of it that training reaches: lowest and highest
    flags: tuple[str, ...]

    @property
    def parameters(self) -> int:
        return int(self.decoder.whole)

    @property
    def flops_per_token(self) -> int:
        """Of forward and backward, as MFU is usually counted: 6 for each parameter but those of the
        embedding, and all pairs of tokens in attention, without recomputation."""
        lookup = self.vocabulary * self.size.width
        attention = self.size.layers * self.size.heads * self.size.head_width * self.context
        untied = self.size.count_parameters(self.vocabulary)
        return 6 * (untied - lookup) + 12 * attention

    def seconds(self, tokens: float, mfu: float) -> float:
        """Of forward and backward of so many tokens on a GPU."""
        return tokens * self.flops_per_token / (self.flops * mfu)

    @functools.cached_property
    def decoder(self) -> Decoder:
        """The sizes for theory."""
        size = self.size
        options = {
            "heads": size.heads * size.head_width / size.width,
            "kv": size.kv_heads / size.heads,
            "mlp": size.mlp_matrices * size.width * size.mlp_width,
            "llama": size.mlp_matrices == 3,
            "tied": getattr(size, "tie", False),
        }
        numbers = self.vocabulary, self.context, self.batch_size
        return decoder(size.layers, size.width, *numbers, **options)


def ways_of(job: Job, gpus: int) -> Iterator[Way]:
    """All combinations that the script accepts."""
    divisors = divisors_of(gpus)
    machines = max(1, gpus // MACHINE)
    for tp, pp, cp in itertools.product(divisors, repeat=3):
        if gpus % (tp * pp * cp) or tp > MACHINE or job.size.kv_heads % tp:
            continue
        if pp > job.size.layers or job.context % (tp * (2 * cp if cp > 1 else 1)):
            continue
        shares = gpus // tp // pp // cp  # of the batch
        copies = {shares, *(n for n in divisors if shares % n == 0 and machines % n == 0)}
        for replicate in copies:  # all, which is DDP, or the same number on each machine
            for accumulate in divisors_of(job.batch_size // shares):
                at_once, left = divmod(job.batch_size, shares * accumulate)
                microbatches = default_microbatches("1f1b", at_once, pp) if pp > 1 else 1
                if left or not at_once or not microbatches or (pp > 1 and accumulate > 1):
                    continue
                for ac, offload in itertools.product(("none", "selective", "full"), (False, True)):
                    way = Way(
                        "ND_parallel", ("pytorch_ND_parallel.py",), ranks=gpus, steps=1,
                        replicate=replicate, shard=shares // replicate, tp=tp, pp=pp, cp=cp, ac=ac,
                        accumulate=accumulate, offload=offload, microbatches=microbatches,
                        on_host=techniques.ALL_ON_HOST if offload else techniques.ON_HOST,
                    )  # fmt: skip
                    yield dataclasses.replace(way, command=(*way.command, *way.words()))


def divisors_of(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


# ------------------------------------------------------------------------------ by theory alone


def messages(job: Job, way: Way, link: dict) -> dict[str, float]:
    """Seconds that a rank sends per step, by dimension, from the bytes of the root's list; of large
    groups, which FSDP, its replicas and CP have, also the latencies. ``link``: see
    :func:`cost_of`."""
    options = {
        "decoder": job.decoder, "dtype": "bfloat16" if job.bytes == 2 else "float32",
        "dp_replicate": way.replicate, "dp_shard": way.shard, "tp": way.tp, "cp": way.cp,
        "pp": way.pp, "pipeline_schedule": "1f1b", "sequence_parallel": way.tp > 1,
        "ac": way.ac, "accumulate": way.accumulate,
    }  # fmt: skip
    shards = way.shard * way.cp
    units = way.accumulate * (job.size.layers / way.pp + 1)  # blocks, and what is in none
    hops = {"shard": 3 * units * (shards - 1), "replicate": 2 * units * math.log2(way.replicate)}
    hops["cp"] = 3 * units * (way.cp - 1)  # keys and values in forward, and again with gradients
    groups = {  # how many ranks, and how far apart they are
        "tp": (way.tp, 1), "cp": (way.cp, way.tp), "shard": (shards, way.tp),
        "replicate": (way.replicate, way.tp * shards), "pp": (way.pp, way.ranks // way.pp),
    }  # fmt: skip
    sent = by_dimension(options)
    found = {}
    for name, (ranks, apart) in groups.items():
        one = link["allreduce"]
        if way.ranks > MACHINE:
            inside = network.LINKS["nvlink4"]
            alone = ranks * apart <= MACHINE
            one = inside if alone else network.mean_link(max(1, MACHINE // apart), inside, one)
        size = sum(sent[name].values()) * job.decoder.whole
        found[name] = hops.get(name, 0) * one.latency + size / one.bandwidth
    return found


def kept_at_least(job: Job, way: Way) -> float:
    """Lower bound of the bytes on a GPU."""
    size = job.size
    local = job.parameters / way.tp / way.pp
    shards = way.shard * way.cp
    state = 0.0 if way.offload else STATE[job.optimizer] * local / shards
    kept = state
    if way.pp > 1 and shards > 1:
        kept += 2 * job.bytes * local  # gathered for a whole step, and gradients
    elif way.accumulate == 1 and not way.offload:
        kept -= 4 * local / shards  # gradients, which backward makes when activations are gone
    parts = way.accumulate * way.microbatches
    tokens = job.batch_size * job.context / way.replicate / shards / parts
    kv = size.head_width * size.kv_heads
    inner = (size.mlp_matrices - 1) * size.mlp_width  # before the last matrix
    # Of attention and MLP: gathered inputs, or outputs to reduce. Alone, every second is recomputed
    saves_whole = way.ac == "none" or (way.ac == "selective" and way.tp > 1)
    whole = 2 * size.width if saves_whole else 0
    split = {
        "full": size.width,
        "selective": 3 * size.width + kv + size.mlp_width,
        "none": 4 * size.width + 2 * inner,
    }[way.ac]
    of_block = split / way.tp + whole
    under_way = min(way.pp, way.microbatches)
    kept += under_way * tokens * size.layers / way.pp * of_block * job.bytes
    if way.pp == 1:
        kept += tokens * job.vocabulary * (job.bytes + 4) / way.tp
    return max(kept, state)


def cost_of(job: Job, way: Way, link: dict, mfu: float = 0.0) -> tuple[float, float]:
    """Seconds per step: the overhead, which is recomputation, idle time of a stage, and the
    communication that does not overlap with compute; and all communication, for equal overheads.
    ``link`` is between machines, or within the machine if there is only one. ``mfu``: the middle of
    the job's, if it is 0."""
    tokens = job.batch_size * job.context / way.ranks
    forward = job.seconds(tokens, mfu or sum(job.mfu) / 2) / 3
    again = {"none": 0.0, "selective": 0.4, "full": 1.0}[way.ac] * forward
    compute = 3 * forward + again
    idle = (way.pp - 1) / way.microbatches * compute
    sent = messages(job, way, link)
    overlaps = sent["shard"] + sent["replicate"]
    waiting = sent["tp"] + sent["cp"] + sent["pp"] + max(0.0, overlaps - compute)
    overhead = again + idle + waiting
    if way.offload:
        overhead += 3 * STATE[job.optimizer] * job.parameters / way.tp / way.pp / way.shard / PCIE
    return overhead, sum(sent.values())


def in_order(job: Job, ways: list[Way], link: dict) -> list[Way]:
    """What is ``compared`` first, then what has the lowest overhead, in steps of ``EQUAL``. Of
    equal ones what has the fewest techniques, then DDP, then what communicates least."""

    def place(way: Way) -> tuple:
        overhead, sent = cost_of(job, way, link)
        compute = job.seconds(job.batch_size * job.context / way.ranks, sum(job.mfu) / 2)
        hybrid = way.replicate > 1 and way.shard > 1  # HSDP is one technique, in two words
        many = way.describe().count(",") - hybrid
        level = overhead // (EQUAL * compute)
        return not way.compared, level, many, way.shard > 1, sent, way.words()

    return sorted(ways, key=place)


def speed_of(job: Job, way: Way, link: dict) -> list[float]:
    """Tokens per second and GPU: with the lowest and the highest MFU of the job, which says what
    compute takes, and the overhead besides; none if the combination is not ``compared``."""
    tokens = job.batch_size * job.context / way.ranks
    found = []
    for mfu in job.mfu if way.compared else ():
        overhead, _ = cost_of(job, way, link, mfu)
        found.append(tokens / (job.seconds(tokens, mfu) + overhead))
    return found


# ------------------------------------------------------------------------------------ predicted


def recommend(
    job: Job, gpus: int, room: int, link: dict, at_once: int, enough: int = ENOUGH
) -> list[Prediction]:
    """The combinations that fit ``room`` bytes, :func:`in_order`; if none fits, the closest; or one
    that has a mistake, if all have. Predicts until ``enough`` of them fit."""
    ways = [way for way in ways_of(job, gpus) if kept_at_least(job, way) <= room]
    ways = in_order(job, ways, link)
    print(f"predicting the best of {len(ways)} combinations, for {SECONDS} s", file=sys.stderr)
    place = {way.command: number for number, way in enumerate(ways)}
    deadline = time.monotonic() + SECONDS
    good = []
    others = []

    def try_out(chosen: list[Way]) -> None:
        for found in predict(job, chosen, at_once):
            fits = found.kinds and found.peak <= room
            (good if fits else others).append(found)

    while ways and time.monotonic() < deadline:
        done = {one.technique.kind for one in good}
        first = {}
        for way in ways:
            if way.kind not in done:
                first.setdefault(way.kind, way)
        # Alone, as it takes seconds, and a ring of many ranks beside it minutes
        compared = [way for way in first.values() if way.compared]
        chosen = (compared or list(first.values()))[:at_once]
        if not chosen:
            break
        ahead = [one for one in good if place[one.technique.command] < place[chosen[0].command]]
        if len(ahead) >= enough:
            break
        ways = [way for way in ways if way not in chosen]
        try_out(chosen)
    if not good:  # the time is over, or none fits by the bound
        try_out(likely(job, ways, room, others, at_once))
    if not good and not others:
        every = list(ways_of(job, gpus))
        if not every:
            fail(f"--gpus {gpus}: no mesh divides this batch, heads and context; change one")
        try_out([min(every, key=lambda way: kept_at_least(job, way))])
    good.sort(key=lambda one: place.get(one.technique.command, 0))
    others.sort(key=lambda one: (bool(one.mistake), one.peak))
    return good[:enough] or others[:1]


def likely(job: Job, ways: list[Way], room: int, others: list[Prediction], n: int) -> list[Way]:
    """The first ``n`` that would fit if they exceed their lower bound of memory by as much as the
    predictions so far, and the first with offload; if none would, those with the lowest bound."""
    over = min((o.peak / kept_at_least(job, o.technique) for o in others if o.kinds), default=1)
    found = [way for way in ways if over * kept_at_least(job, way) <= room]
    if not found:
        return sorted(ways, key=lambda way: kept_at_least(job, way))[:n]
    offloaded = [way for way in found[n:] if way.offload]
    return found[:n] + offloaded[:n]


def predict(job: Job, ways: list[Way], at_once: int) -> Iterator[Prediction]:
    """Predict each; one that accumulates in many parts from a few of them."""
    parts = []
    for way in ways:
        few = [in_parts(way, n) for n in PARTS]
        parts.append(few if way.accumulate > 2 * sum(PARTS) else [way])
    some = list(itertools.chain.from_iterable(parts))
    one = partial(predict_parts, job)
    predicted = techniques.predict_all(some, one, job.batch_size, job.size.layers, at_once)
    for way, few in zip(ways, parts, strict=True):
        found, *larger = [next(predicted) for _ in few]
        if larger:
            found = accumulated(way, found, *larger)
        if found.error:
            raise RuntimeError(found.error)
        if "(--help lists" in found.mistake:  # the script has no such flag, with any combination
            fail(found.mistake)
        yield found


def in_parts(way: Way, parts: int) -> Way:
    """The way with so many parts, each as large."""
    few = dataclasses.replace(way, accumulate=parts, parts=way.accumulate)
    return dataclasses.replace(few, command=(way.command[0], *few.words()))


def predict_parts(job: Job, way: Way, batch_size: int, **options) -> Prediction:
    """In this process, which cannot be used for anything else afterwards."""
    batch_size = batch_size * way.accumulate // (way.parts or way.accumulate)
    return techniques.predict(way, batch_size, job.flags, job.vocabulary, **options)


def accumulated(way: Way, few: Prediction, more: Prediction) -> Prediction:
    """Each part between the first and the last takes the same memory and sends the same."""
    technique = dataclasses.replace(way, rank=more.technique.rank)
    if few.mistake or more.mistake:
        return dataclasses.replace(more if more.mistake else few, technique=technique)
    times = way.accumulate - PARTS[0]
    kinds = {kind: size + times * (more.kinds[kind] - size) for kind, size in few.kinds.items()}
    messages = techniques.with_more(few.messages, more.messages, times)
    return dataclasses.replace(more, kinds=kinds, messages=messages, technique=technique)


def would_fit(job: Job, gpus: int, room: int) -> list[str]:
    """What to change if nothing fits: the smallest number of GPUs that may fit."""
    for more in (2 * gpus, 4 * gpus, 8 * gpus):
        larger = dataclasses.replace(job, batch_size=math.lcm(job.batch_size, more))
        if any(kept_at_least(larger, way) <= room for way in ways_of(larger, more)):
            return [f"--gpus {more}"]
    return []
