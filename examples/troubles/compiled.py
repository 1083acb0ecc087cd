"""torch.compile: compiled alone, DDP's all-reduce is late; compiled late, ranks time out; a cache
holds half a library.

torchrun --nproc_per_node=2 examples/troubles/compiled.py
"""

import os
import shutil
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from shared import PATIENCE, Model, backward, show
from torch._inductor.utils import clear_caches
from torch.nn.parallel import DistributedDataParallel


def compiled_alone(remedy):
    """Inside DDP a graph ends where a bucket does: its all-reduce need not wait for the others."""
    graphs = []
    model = Model(width=600)

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    model.compile(backend=backend)
    if not remedy:
        backward(model, width=600)
    backward(DistributedDataParallel(model, bucket_cap_mb=1), width=600)
    assert len(graphs) == 2, f"{len(graphs)} graph"


def compiled_late(remedy):
    """Rank 1 needs longer than the timeout."""
    model = Model()
    patient = dist.new_group(timeout=timedelta(minutes=1))

    def backend(graph, _):
        time.sleep((PATIENCE + 1) * dist.get_rank())
        return graph.forward

    model.blocks[0].compile(backend=backend)
    if remedy:
        backward(model)  # compiles on each rank, without a collective
        model.zero_grad()
        dist.barrier(patient)
    backward(DistributedDataParallel(model))


def half_a_library(remedy):
    """A run was killed while it compiled: the next one takes what it finds for a whole library."""
    with tempfile.TemporaryDirectory() as cache:
        for run in ("killed", "next"):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{cache}/{run}"
            torch.compiler.reset()
            clear_caches()  # those in memory
            torch.compile(torch.sin)(torch.ones(9))
            if run == "killed" and not remedy:
                shutil.copytree(f"{cache}/killed", f"{cache}/next")
                for library in Path(cache, "next").rglob("*.so"):
                    library.write_bytes(b"")


if __name__ == "__main__":
    show(compiled_alone, compiled_late, half_a_library, hang=(compiled_late,))
