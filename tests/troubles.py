"""The problems that docs/troubleshooting.md lists, in its order. With its remedy, each function
ends well; without it, in the error that the page quotes, or in an assertion where PyTorch reports
nothing.

    torchrun --nproc_per_node=2 tests/troubles.py uneven_batches unused_parameter
"""

import os
import re
import socket
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DistributedSampler

PAGE = Path(__file__).resolve().parents[1] / "docs/troubleshooting.md"
HANGS = ("uneven_batches", "one_rank_saves", "compiled_late")
PATIENCE = 4  # seconds
WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x).sin()


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.used = [0, 1]

    def forward(self, x):
        for i in self.used:
            x = self.blocks[i](x)
        return x


class Checkpointed(Model):
    """The last block is used twice."""

    def forward(self, x, use_reentrant):
        for i in (0, 1, 1):
            x = checkpoint(self.blocks[i], x, use_reentrant=use_reentrant)
        return x


def backward(model, *args, width=4):
    model(torch.ones(2, width, requires_grad=True), *args).sum().backward()


def sharded(root=True):
    model, mesh = Model(), init_device_mesh("cpu", (2,))
    fully_shard(model.blocks[0], mesh=mesh)
    return fully_shard(model, mesh=mesh) if root else model


def port_in_use(remedy):
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    with socket.create_server(("", 0)) as other:
        port = 0 if remedy else other.getsockname()[1]
        dist.TCPStore("127.0.0.1", port, 1, is_master=True)


def join_store(host, port=None):
    options = {"world_size": 2, "wait_for_workers": False, "timeout": timedelta(seconds=1)}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, **options)
    dist.TCPStore(host, port or store.port, is_master=False, **options)


def unknown_host(remedy):
    join_store("127.0.0.1" if remedy else "no-such-host.invalid")


def nobody_listens(remedy):
    join_store("127.0.0.1", None if remedy else 9)


def wrong_card(remedy):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if remedy else "eth9"
    dist.new_group()


def uneven_batches(remedy):
    """Rank 0 has three batches, rank 1 two."""
    model = DistributedDataParallel(Block())
    with Join([model], enable=remedy):
        for _ in range(3 - dist.get_rank()):
            backward(model)
    dist.barrier()


def uneven_then_a_sum(remedy):
    """Rank 1 adds its numbers to the gradients of rank 0."""
    model = DistributedDataParallel(Block())
    sampler = DistributedSampler(range(5), drop_last=True)
    for _ in sampler if remedy else range(3 - dist.get_rank()):
        backward(model)
    sums = torch.zeros(sum(p.numel() for p in model.parameters()))
    dist.all_reduce(sums)
    assert not sums.any(), sums


def unused_parameter(remedy):
    model = DistributedDataParallel(Model(), find_unused_parameters=remedy)
    model.module.used = [0]
    for _ in range(2):
        backward(model)


def marked_twice(remedy):
    backward(DistributedDataParallel(Checkpointed()), not remedy)
    backward(DistributedDataParallel(Checkpointed(), static_graph=True), True)


def two_forwards(remedy):
    model = DistributedDataParallel(nn.Sequential(Block(), nn.BatchNorm1d(4)))
    model.broadcast_buffers = not remedy
    x = torch.randn(3, 4)
    (model(x) * model(x + 1)).sum().backward()


def sync_batch_norm(remedy):
    DistributedDataParallel(nn.BatchNorm1d(4) if remedy else nn.SyncBatchNorm(4))


def mixed_tensors(remedy):
    """Without the root, the second block keeps plain parameters."""
    model = sharded(root=remedy)
    backward(model)
    clip_grad_norm_(model.parameters(), 1.0)


def one_rank_saves(remedy):
    model = sharded()
    if remedy or dist.get_rank() == 0:
        dcp.get_model_state_dict(model, options=WHOLE)
    dist.barrier()


def saved_sharded(remedy):
    model = sharded()
    weights = dcp.get_model_state_dict(model, options=WHOLE) if remedy else model.state_dict()
    if dist.get_rank() == 0 or not remedy:  # others get an empty dict
        Model().load_state_dict(weights)


def early_optimizer(remedy):
    model = Model()
    early = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.blocks[0].linear.bias.detach().clone()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    backward(model)
    (torch.optim.SGD(model.parameters(), lr=1.0) if remedy else early).step()
    assert not model.blocks[0].linear.bias.full_tensor().equal(before), "nothing is trained"


def lora(remedy):
    """The page's example in float64, on two ranks and on one."""
    mesh = init_device_mesh("cpu", (2,))
    if not remedy:
        model = Model()
        model.blocks[0].requires_grad_(False)
        FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    code = re.search(r"class LoRA.*?(?=```)", PAGE.read_text(), re.DOTALL)[0]
    x, adapters = torch.randn(8, 4, dtype=torch.float64), []
    dist.broadcast(x, 0)
    for shard, rows in (fully_shard, x.chunk(2)[dist.get_rank()]), (lambda *_, **__: None, x):
        torch.manual_seed(0)
        given = {"torch": torch, "nn": nn, "fully_shard": shard, "mesh": mesh}
        torch.set_default_dtype(torch.float64)
        exec(code, given | {"model": (model := Model())}, given := {})
        torch.set_default_dtype(torch.float32)
        for _ in range(5):
            model(rows).square().mean().backward()
            given["optimizer"].step()
            given["optimizer"].zero_grad()
        options = dcp.StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
        adapters.append(dcp.get_model_state_dict(model, options=options))
    assert len(adapters[1]) == 4
    for name, tensor in adapters[0].items():
        torch.testing.assert_close(tensor, adapters[1][name], rtol=1e-11, atol=0)


def compiled_alone(remedy):
    """Inside DDP a graph ends where a bucket does: its all-reduce need not wait for the others."""
    graphs, model = [], Model(width=600)

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
    model, patient = Model(), dist.new_group(timeout=timedelta(minutes=1))

    def backend(graph, _):
        time.sleep((PATIENCE + 1) * dist.get_rank())
        return graph.forward

    model.blocks[0].compile(backend=backend)
    if remedy:
        backward(model)  # compiles on each rank, without a collective
        model.zero_grad()
        dist.barrier(patient)
    backward(DistributedDataParallel(model))


def half_parameters(remedy):
    model, scaler = Block(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dtype = torch.float32 if remedy else torch.float16
    with torch.autocast("cpu", torch.float16, enabled=remedy):
        loss = model.to(dtype)(torch.ones(2, 4, dtype=dtype)).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)


def whole_module(remedy):
    with tempfile.TemporaryFile() as file:
        torch.save(Block().state_dict() if remedy else Block(), file)
        file.seek(0)
        torch.load(file)


def wrapper_prefix(remedy):
    model, wrapped = Block(), torch.compile(Block(), backend="eager")
    if remedy:
        model.compile(backend="eager")
        wrapped = model
    wrapped = DistributedDataParallel(wrapped)
    Block().load_state_dict((wrapped.module if remedy else wrapped).state_dict())


def not_consolidated(remedy):
    model = DistributedDataParallel(Block())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    if remedy:
        optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        optimizer.state_dict()
    dist.barrier()


def resumed_order(remedy):
    """Half of epoch 1 is trained, then the run resumes in its middle."""
    sampler = DistributedSampler(range(64), seed=3)
    sampler.set_epoch(1)
    seen = list(sampler)[:16]
    sampler = DistributedSampler(range(64), seed=3)
    if remedy:
        sampler.set_epoch(1)
    seen += list(sampler)[16:]
    assert len(set(seen)) == 32, f"{len(set(seen))} of 32 samples"


def padded_evaluation(remedy):
    sampler = DistributedSampler(range(5), shuffle=False)
    numbers = dist.get_rank() + 2 * torch.arange(len(sampler))
    count = (numbers < 5).sum() if remedy else torch.tensor(len(sampler))
    dist.all_reduce(count)
    assert count == 5, f"{count} of 5 samples"


def provoke(name, store):
    """With its remedy, and without; what that ends in goes to stderr, in one piece."""
    patience = PATIENCE if name in HANGS else 60
    store = dist.PrefixStore(name, store)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    variables, said = dict(os.environ), [f"== {name}, rank {rank}"]
    for remedy in (True, False):
        group = dist.PrefixStore(str(remedy), store)
        options = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=patience)}
        dist.init_process_group("gloo", store=group, **options)
        dist.barrier()  # or one may leave before the other has connected
        torch.manual_seed(0)
        try:
            globals()[name](remedy=remedy)
            said.append("remedied" if remedy else "nothing happened")
        except Exception:
            said.append(traceback.format_exc())
        dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(variables)
    sys.stderr.write("\n".join([*said, "== end\n"]))
    sys.stderr.flush()


if __name__ == "__main__":
    launcher, _, _ = next(dist.rendezvous("env://"))
    for trouble in sys.argv[1:]:
        provoke(trouble, launcher)
