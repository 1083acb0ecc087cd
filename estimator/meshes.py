"""Meshes of GPUs, and what the fullest and the busiest rank of each take: see mesh_step.py."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from functools import partial

from estimator import techniques
from estimator.techniques import Prediction, Technique


@dataclasses.dataclass(frozen=True)
class Mesh:
    """How many GPUs there are along each dimension: those of the batch (dp), of a matrix (tp), of
    the stages (pp), and of a sequence (cp)."""

    dp: int
    tp: int
    pp: int
    cp: int

    def __str__(self) -> str:
        return ",".join(map(str, dataclasses.astuple(self)))

    @property
    def gpus(self) -> int:
        return math.prod(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class OnMesh(Technique):
    """Of one stage, the rank with the last shard of the first sequences."""

    mesh: Mesh = Mesh(1, 1, 1, 1)


def mesh_of(text: str) -> Mesh:
    """A word of ``--meshes``."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*){3}", text):
        raise ValueError(f"--meshes {text} is not DP,TP,PP,CP, such as 2,2,2,1")
    return Mesh(*map(int, text.split(",")))


def meshes_of(gpus: int) -> list[Mesh]:
    """All of so many."""
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    found = [Mesh(*numbers) for numbers in itertools.product(divisors, repeat=4)]
    return sorted((mesh for mesh in found if mesh.gpus == gpus), key=dataclasses.astuple)[::-1]


def stages_of(layers: int, stages: int) -> list[int]:
    """Those of which one is the fullest, and one sends most: the first, with most micro-batches
    under way; the last, with the logits; of those between, which send both ways, the first, and
    the first of those with a block more than others."""
    blocks = [layers * (n + 1) // stages - layers * n // stages for n in range(stages)]
    return sorted({0, min(1, stages - 1), blocks.index(max(blocks)), stages - 1})


def rank_of(mesh: Mesh, stage: int) -> OnMesh:
    sizes = dataclasses.asdict(mesh).items()
    words = [word for name, size in sizes for word in (f"--{name}", str(size))]
    rank = stage * mesh.gpus // mesh.pp + (mesh.cp - 1) * mesh.tp
    command = ("estimator/mesh_step.py", *words)
    # One step, as the optimizer is ready: a second one would take the same bytes, and as long.
    return OnMesh(f"mesh {mesh}", command, mesh.gpus, rank=rank, steps=1, mesh=mesh)


def predict_all(
    chosen: list[Mesh], layers: int, batch_size: int, flags: list[str], classes, at_once: int
) -> Iterator[Prediction]:
    """One for each mesh, in their order."""
    ranks = {mesh: [rank_of(mesh, n) for n in stages_of(layers, mesh.pp)] for mesh in chosen}
    tasks = [
        partial(techniques.predict, rank, batch_size, flags, classes, None)
        for mesh in chosen
        for rank in ranks[mesh]
    ]
    found = techniques.side_by_side(tasks, at_once)
    for mesh in chosen:
        yield worst(list(itertools.islice(found, len(ranks[mesh]))))


def worst(found: Iterable[Prediction]) -> Prediction:
    """Of the ranks of a mesh: the memory of the fullest, and the messages of the busiest."""
    fullest = max(found, key=lambda one: (bool(one.error or one.mistake), one.peak))
    busiest = max(found, key=lambda one: one.sent)
    return dataclasses.replace(fullest, messages=busiest.messages)
