"""The theory of techniques: bytes per parameter of the model that a rank keeps and sends.

A formula takes the number of ranks and the options of a script, and returns bytes by kind, or by
collective, in fp32 unless ``dtype`` says otherwise:

    sharded(4, {"optimizer": "adamw"})
        -> {"parameters": 1.0, "gradients": 1.0, "optimizer": 2.0}
    gathered(4, {}) -> {"allgather": 6.0, "reduce_scatter": 3.0}

techniques.py says which formulas a technique has. They are the mean over the ranks of what is sent,
and the rank that keeps most, where blocks and the vocabulary are divided evenly.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent
K = {"sgd": 4, "adamw": 8}  # bytes per fp32 parameter that the optimizer keeps
IN_A_V = ("zbv", "dualpipev")  # schedules that put the first and the last stage on one rank
Options = Mapping[str, Any]
Bytes = dict[str, float]


class Decoder(NamedTuple):
    """Sizes of a GPT or a Llama, and of its batch, that theory needs: numbers, not bytes."""

    layers: int
    matrices: float  # weights of the matrices in all blocks
    experts: int  # those of them that are in experts
    norms: int  # the other weights in blocks: norms, routers
    first: int  # embeddings
    last_norm: int  # after the last block
    head: int  # the last matrix
    hidden: int  # activations between two blocks, of the global batch
    kv: float = 1.0  # heads of keys and values, as a fraction of all heads
    heads: float = 1.0  # width of all heads, as a fraction of the model's
    top_k: int = 1  # experts per token
    tied: bool = False  # the head is the token embedding
    width: int = 0  # of the model

    @property
    def ends(self) -> int:
        """Weights in no block."""
        return self.first + self.last_norm + (0 if self.tied else self.head)

    @property
    def end_units(self) -> int:
        """Weights of the token embedding and the head, which are units of FSDP unless tied."""
        return 0 if self.tied else 2 * self.head

    @property
    def whole(self) -> float:
        return self.matrices + self.norms + self.ends


def decoder(
    layers, width, tokens, context, batch, *, kv=1, heads=1, mlp=0, llama=False, experts=0, **more
) -> Decoder:
    """A decoder of these sizes: a GPT, or with ``llama`` RMSNorm and no learned positions.
    ``tokens`` are those of the vocabulary; the global ``batch`` is in sequences; ``heads``: their
    number * width / ``width``; ``mlp``: weights of an MLP, or of an expert (default: a GPT's)."""
    of_norm = width if llama else 2 * width
    mlp = mlp or 8 * width**2
    matrices = layers * (2 * width**2 * heads * (1 + kv) + max(1, experts) * mlp)
    norms = layers * (2 * of_norm + experts * width)
    positions = 0 if llama else context
    ends = width * (tokens + positions), of_norm, width * tokens
    more |= {"kv": kv, "heads": heads, "hidden": batch * context * width, "width": width}
    return Decoder(layers, matrices, layers * experts * mlp, norms, *ends, **more)


def others(n: float) -> float:
    """The share of a buffer that a rank of n does not have itself."""
    return (n - 1) / n


def divide(found: Bytes, by: float) -> Bytes:
    return {kind: size / by for kind, size in found.items()}


def in_half(o: Options, size: float = 2) -> float:
    """Bytes of an activation, or of a gathered weight; ``size`` in bfloat16."""
    return size if o.get("dtype") == "bfloat16" else 4


def nothing(n: int, o: Options) -> Bytes:
    return {}


def replicated(n: int, o: Options) -> Bytes:
    return {"parameters": 4, "gradients": 4, "optimizer": K[o["optimizer"]]}


def averaged(n: int, o: Options) -> Bytes:
    return {"allreduce": 8 * others(n)}


def sharded(n: int, o: Options) -> Bytes:
    return divide(replicated(n, o), o.get("shard", n))


def gathered(n: int, o: Options, ends: float = 1) -> Bytes:
    """FSDP gathers blocks for forward and again for backward; of embedding and head the part
    ``ends`` again, unless they are tied; other parameters once. With ``shard``, gradients of shards
    are also averaged across the rows of the mesh."""
    model = o.get("decoder")
    shards = o.get("shard", n)
    size = in_half(o)
    again = 1
    if model:
        again -= (model.ends - ends * model.end_units) / model.whole
    sent = {"allgather": size * (1 + again) * others(shards), "reduce_scatter": 4 * others(shards)}
    return sent | ({"allreduce": 8 / shards * others(n / shards)} if n > shards else {})


def by_autograd(n: int, o: Options) -> Bytes:
    """Each parameter is gathered when it is read, and again if backward needs its values: those of
    embeddings are not needed. A tied one is read twice."""
    model = o.get("decoder")
    tied = model.head / model.whole if model and model.tied else 0
    again = 1 - (model.first / model.whole - tied if model else 0)
    gathers = 4 * (1 + tied + again) * others(n)
    return {"allgather": gathers, "reduce_scatter": 4 * (1 + tied) * others(n)}


def half_precision(n: int, o: Options) -> Bytes:
    more = {"optimizer": K[o["optimizer"]], "master_weights": 4} if o["master_weights"] else {}
    return divide(replicated(n, o), 2) | more


def zero(n: int, o: Options) -> tuple[Bytes, Bytes]:
    if not o["use_zero"]:
        return replicated(n, o), averaged(n, o)
    kept = replicated(n, o) | {"optimizer": K[o["optimizer"]] / n}
    return kept, averaged(n, o) | {"broadcast": 4 * others(n)}


def zero_by_hand(n: int, o: Options) -> tuple[Bytes, Bytes]:
    kept = replicated(n, o) | {"optimizer": K[o["optimizer"]] / n}
    sent = 4 * others(n)
    if o["stage"] == 1:
        return kept, averaged(n, o) | {"allgather": sent}
    return kept | {"gradients": 4 / n}, {"reduce_scatter": sent, "allgather": sent}


def deepspeed(n: int, o: Options) -> tuple[Bytes, Bytes]:
    """Stage 3 gathers only once what a small model has: see the script."""
    config = json.loads((ROOT / o["deepspeed_config"]).read_text())
    kept = replicated(n, o)
    sent = averaged(n, o)
    stage = config["zero_optimization"]["stage"]
    if stage:
        kept |= {"gradients": 4 / n, "optimizer": K[o["optimizer"]] / n, "fp32_copy": 4 / n}
        sent |= {"allgather": 4 * others(n)}
    if stage == 3:
        kept |= {"parameters": 4 / n, "gradient_buffer": 4 / n}
        sent = {"allgather": 4 * others(n), "reduce_scatter": 4 * others(n)}
    return kept, sent


def lightning(n: int, o: Options) -> tuple[Bytes, Bytes]:
    if o["strategy"] == "fsdp":
        return sharded(n, o), gathered(n, o)
    stage = {"ddp": 0, "deepspeed_stage_2": 2}[o["strategy"]]
    return deepspeed(n, {**o, "deepspeed_config": f"config/zero_stage{stage}_config.json"})


def muon(n: int, o: Options) -> tuple[Bytes, Bytes]:
    """One momentum of matrices, AdamW's two of all other parameters."""
    matrices = o["decoder"].matrices / o["decoder"].whole
    kept = {"parameters": 4, "gradients": 4, "optimizer": 8 - 4 * matrices}
    return divide(kept, n), gathered(n, o) | {"alltoall": 8 * matrices / n * others(n)}


def lora(n: int, o: Options) -> tuple[Bytes, Bytes]:
    """Adapters of layers of the attention; all else is gathered as by FSDP, and never reduced. With
    ``block``, matrices have 4 bits and a scale in fp32 for so many weights; if all other numbers
    are ``double``, these are not."""
    d = o["decoder"]
    size = in_half(o)
    kv = ("key", "value")
    widths = [1 + d.heads * (d.kv if name in kv else 1) for name in o["targets"].split(",")]
    share = d.layers * o["rank"] * d.width * sum(widths) / d.whole
    bits = (0.5 + 4 / o["block"]) / (1 + o.get("double", False)) if "block" in o else size
    saved = (size - bits) * d.matrices / d.whole
    kept = {"parameters": size + 4 * share - saved, "gradients": 4 * share}
    gathers = gathered(n, o)["allgather"] + 2 * (size * share - saved) * others(n)
    sent = {"allgather": gathers, "reduce_scatter": 4 * share * others(n)}
    return divide(kept | {"optimizer": K[o["optimizer"]] * share}, n), sent


def low_bit(n: int, o: Options) -> tuple[Bytes, Bytes]:
    """Moments of matrices have a byte and a share of a scale, ``double`` or not; those of norms are
    in fp32."""
    d = o["decoder"]
    vectors = (d.norms + d.last_norm) / d.whole
    moments = 2 * (1 + 4 / o["block"]) * (1 - vectors) + 8 * vectors
    size = 2 if o["bf16_weights"] else 4
    kept = {"parameters": size, "gradients": size, "optimizer": moments / (1 + o.get("double", 0))}
    return divide(kept, n), gathered(n, o)


def local(n: int, o: Options) -> tuple[Bytes, Bytes]:
    """An outer optimizer keeps the last common weights, and their momentum."""
    outer = {"outer": 8 * (o["outer_lr"] != 1 or o["outer_momentum"] > 0)}
    return replicated(n, o) | outer, divide(averaged(n, o), o["sync_every"])


def context_parallel(n: int, o: Options) -> tuple[Bytes, Bytes]:
    return replicated(n, o), dict(Counter(averaged(n, o)) + by_dimension({**o, "cp": n})["cp"])


def mesh(n: int, o: Options) -> tuple[Bytes, Bytes]:
    """Every dimension of pytorch_ND_parallel.py; its flags, or 1. ``by_vocabulary``: the ends."""
    d = o["decoder"]
    tp = o.get("tp", 1)
    pp = o.get("pp", 1)
    split = tp if o.get("sequence_parallel") else 1
    ends = (d.ends - d.last_norm) / split + d.last_norm
    ends -= (d.ends - d.last_norm - d.first + d.head) * others(tp) * o.get("by_vocabulary", 0)
    if pp > 1 and o["pipeline_schedule"] not in IN_A_V:
        ends = max(d.first / split, d.head / split + d.last_norm)
    kept = ((d.matrices / tp + d.norms) / pp + ends) / o.get("dp_shard", 1) / o.get("cp", 1)
    return divide(replicated(n, o), d.whole / kept), dict(sum(by_dimension(o).values(), Counter()))


def by_dimension(o: Options) -> dict[str, Counter]:
    """What a rank sends per parameter of the whole model, by dimension of the mesh (tp, cp, ep, pp,
    shard, replicate), and by collective. The ranks of ep are among those of shard and cp."""
    d = o["decoder"]
    tp = o.get("tp", 1)
    pp = o.get("pp", 1)
    cp = o.get("cp", 1)
    size = o.get("size") or in_half(o)
    replicate = o.get("dp_replicate", 1)
    shards = o.get("dp_shard", 1) * cp
    ep = o.get("ep") or 1
    sequence = o.get("sequence_parallel")
    ac = o.get("ac") or "none"
    again = 2 * (ac == "full")  # times that collectives are repeated in backward
    moved = 2 * (ac != "none")  # times that messages, also to experts, are
    split = tp if sequence else 1
    parts = o.get("accumulate", 1)
    layers = d.layers / pp
    hidden = size * d.hidden / replicate / shards  # of this rank's positions, all micro-batches
    found = defaultdict(Counter)
    each = (8 + 2 * again) * layers + 4 * o.get("by_vocabulary", 0)
    found["tp"] = Counter(allreduce=each * hidden * others(tp))
    if sequence:  # forward and backward of two regions per block, and of both ends
        each = ((4 + again) * layers + 2 / pp) * hidden * others(tp)
        norms = 8 * (d.norms + d.last_norm) / pp * others(tp)
        found["tp"] = Counter(allgather=each, reduce_scatter=each, allreduce=norms)
    exchanged = {
        "allgather": {"allgather": (2 + again) * d.kv, "reduce_scatter": 2 * d.kv},
        "ulysses": {"alltoall": (4 + again) * (1 + d.kv) / cp},
    }.get(o.get("attention"), {"send": (4 + moved + 8 / size) * d.kv})  # gradients in fp32
    each = layers * hidden * d.heads / tp * (cp - 1)
    found["cp"] = Counter({kind: times * each for kind, times in exchanged.items()})
    # Tokens go to their experts and back, in forward and backward; with tp, from each of its ranks.
    found["ep"] = Counter(alltoall=(4 + moved) * layers * d.top_k * hidden * others(ep))
    cuts = {"interleaved": 2 * pp - 1, "zbv": 2 * pp - 2, "dualpipev": 2 * pp - 2}
    cuts = cuts.get(o.get("pipeline_schedule"), pp - 1) if pp > 1 else 0
    found["pp"] = Counter(send=2 * hidden / split * cuts / pp)
    if d.tied and pp > 1 and o["pipeline_schedule"] not in IN_A_V:  # two ranks have the matrix
        found["pp"]["allreduce"] = 8 * d.head / shards / pp
    # FSDP gathers units again for backward if they were freed, what is in none of them once. Of the
    # experts, a rank gathers those that it has, from fewer ranks.
    blocks = (d.matrices / tp + d.norms) / pp
    experts = d.experts / tp / pp
    ends = ((d.ends - d.last_norm) / split + d.last_norm) / pp
    free = o.get("reshard_after_forward", pp == 1)
    held = o.get("keep_last", 0) / d.layers
    for units, once, n in ((blocks - experts, ends, shards), (experts / ep, 0, shards / ep)):
        end_units = d.end_units / (2 if o.get("loss_chunks") else 1)  # its head is not freed
        freed = units * (1 - held) + (end_units / split / pp if once else 0)
        gathers = (units + once) * others(n) + freed * others(n if free is True else free or 1)
        gathers *= size * (1 if pp > 1 else parts)
        scatters = 4 * (units + once) * others(n) * parts
        found["shard"] += Counter(allgather=gathers, reduce_scatter=scatters)
    found["replicate"] = Counter(allreduce=8 * (blocks + ends) / shards * others(replicate) * parts)
    per_parameter = {}
    for name, values in found.items():
        per_parameter[name] = Counter({key: v / d.whole for key, v in values.items() if v})
    return per_parameter


def both(formula: Callable, dimensions: Callable = lambda n, o: {}) -> tuple[Callable, Callable]:
    """``keeps`` and ``sends`` of a formula of both; ``dimensions``: of a mesh without flags."""
    return tuple(lambda n, o, i=i: formula(n, {**o, **dimensions(n, o)})[i] for i in (0, 1))
