"""DTensor, which FSDP and TP are made of: eight operations on four ranks, and what each one sends.

Of a DTensor, each rank of a device mesh has a local tensor. The placement says how these make up
the whole tensor: Shard(d), they are its parts along dimension d; Replicate(), each is the whole;
Partial(), their sum is the whole. Operations compute with local tensors. Where that would be wrong,
DTensor communicates first, without being asked.

Command:    torchrun --standalone --nproc_per_node=4 pytorch_DTensor.py
Shows       placements and local shapes before and after each operation, and the collectives that
            CommDebugMode saw; at last a two-layer MLP, which is all of tensor parallelism. All
            values are compared with those of the same operations on plain tensors.
"""

import argparse
import inspect
import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement

import common


def replicate(x: Tensor) -> Tensor:
    """Every rank gets all parts. FSDP does this to a layer before it computes."""
    return placed(x, Replicate())


def shard(x: Tensor) -> Tensor:
    """Every rank has the whole, and keeps a part of it."""
    return placed(x, Shard(0))


def transpose_shards(x: Tensor) -> Tensor:
    """Parts along one dimension become parts along another: an all-to-all. On CPUs, DTensor
    gathers the whole instead, and each rank keeps its part."""
    return placed(x, Shard(1))


def multiply_by_columns(x: Tensor, weight: Tensor) -> Tensor:
    """A product with some of the columns is some of its columns. TP: the first matrix of an MLP."""
    return x @ weight


def multiply_by_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Some columns, times the same rows of the other matrix, are a term of the product. TP: the
    second matrix of an MLP."""
    return x @ weight


def sum_up(x: Tensor) -> Tensor:
    """Every rank gets the sum. TP does this after the second matrix."""
    return placed(x, Replicate())


def sum_and_shard(x: Tensor) -> Tensor:
    """Each rank gets a part of the sum. FSDP does this to gradients; TP with --sequence-parallel
    does it after the second matrix."""
    return placed(x, Shard(0))


def not_linear(x: Tensor) -> Tensor:
    """The ReLU of a sum is not the sum of ReLUs, so DTensor adds up first, by an all-reduce that is
    not in the code."""
    return F.relu(x)


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """All of tensor parallelism: the first matrix by columns, the second by rows. Forward adds up
    the output. In backward, matrices get the gradients of their shards, and the layer before gets
    the sum of the input's: a second all-reduce."""
    hidden = F.relu(x @ up)  # TP: complete columns, so ReLU needs no communication
    return placed(hidden @ down, Replicate())


OPERATIONS = {  # and the placements of their inputs
    replicate: [Shard(0)],
    shard: [Replicate()],
    transpose_shards: [Shard(0)],
    multiply_by_columns: [Replicate(), Shard(1)],
    multiply_by_rows: [Shard(1), Shard(0)],
    sum_up: [Partial()],
    sum_and_shard: [Partial()],
    not_linear: [Partial()],
    mlp: [Replicate(), Shard(1), Shard(0)],
}


class Watch(CommDebugMode):
    """PyTorch's CommDebugMode counts collectives. This also notes their names and sizes: the bytes
    of the larger of input and output."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        count = self.get_total_counts()
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if self.get_total_counts() > count:
            size = max(args[0].nbytes, output.nbytes)
            self.seen.append(f"{func.__name__.partition('.')[0]} of {size} bytes")
        return output

    def __str__(self):
        return ", ".join(self.seen) or "nothing"


def placed(x: Tensor, placement: Placement) -> Tensor:
    """``x.redistribute``; a plain tensor as it is, to compare with."""
    return x.redistribute(placements=[placement]) if isinstance(x, DTensor) else x


def distribute(whole: Tensor, placement: Placement, mesh: DeviceMesh) -> DTensor:
    """A DTensor with the values of a tensor that all ranks have."""
    if isinstance(placement, Partial):  # the values times the rank, and on the last one the rest
        rank = mesh.get_local_rank()
        last = mesh.size() - 1
        factor = rank if rank < last else 1 - sum(range(last))
        return DTensor.from_local(factor * whole.detach(), mesh, [placement])
    return distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None).requires_grad_()


def describe(name: str, x: DTensor, expected: Tensor) -> None:
    """Compare with the values that it should have, and print what each rank has."""
    if not torch.equal(x.full_tensor(), expected):
        raise RuntimeError(f"{name} is {x.full_tensor()}, and not {expected}")
    whole, local = (str(list(shape)) for shape in (x.shape, x.to_local().shape))
    common.print0(f"    {name:9}  {whole:9} {x.placements[0]!r:13}  local {local}")


def show(operation: Callable, wholes: list[Tensor], mesh: DeviceMesh) -> None:
    """Run an operation, and print what goes in, what comes out and what is sent; in backward, too,
    if it has matrices to train."""
    common.print0(f"\n{operation.__name__}: {' '.join(operation.__doc__.split())}")
    inputs = [distribute(*pair, mesh) for pair in zip(wholes, OPERATIONS[operation], strict=False)]
    with Watch() as sent:
        output = operation(*inputs)
    pairs = list(zip(inspect.signature(operation).parameters, inputs, wholes, strict=False))
    expected = operation(*wholes[: len(inputs)])
    for name, x, whole in pairs:
        describe(name, x, whole)
    describe("output", output, expected)
    common.print0(f"    sent       {sent}")
    if operation is mlp:
        with Watch() as sent:
            output.sum().backward()
            placed(inputs[0].grad, Replicate())
        expected.sum().backward()
        for name, x, whole in pairs:
            describe(f"{name}.grad", x.grad, whole.grad)
        common.print0(f"    sent       {sent}")


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    as_is = argparse.RawDescriptionHelpFormatter
    parser = common.ArgumentParser(description=__doc__, formatter_class=as_is)
    about = "device (default: a GPU if there is one)"
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=auto, help=about)
    args = argparse.Namespace(**vars(parser.parse_args()), timeout=60)  # seconds
    if "RANK" not in os.environ:  # torchrun: sets it
        common.fail("started without its launcher; use torchrun --nproc_per_node=4")
    device = common.get_device(args, int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)  # DDP: otherwise every rank also allocates memory on GPU 0
    dist.init_process_group(  # DDP: returns once all ranks have joined
        backend="nccl" if device.type == "cuda" else "gloo",
        store=common.make_store(args),  # torchrun: a restart must not find dead ranks' addresses
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=args.timeout),  # DDP: how long ranks wait for each other
        device_id=device if device.type == "cuda" else None,
    )
    mesh = init_device_mesh(device.type, (n := dist.get_world_size(),))
    common.print0(f"pytorch_DTensor: {n} x {device.type} ({dist.get_backend()}), {mesh}")
    if n == 1:
        common.print0("A single rank sends nothing; use torchrun --nproc_per_node=4")

    # 2. Show the operations
    torch.manual_seed(0)  # the same whole numbers on all ranks, so that sums are exact
    shapes = (2 * n, 3 * n), (3 * n, 4 * n), (4 * n, 3 * n)
    wholes = [torch.randint(-3, 4, s, device=device).float().requires_grad_() for s in shapes]
    for operation in OPERATIONS:
        show(operation, wholes, mesh)
    common.print0("\ndone: all values are those of the same operations on plain tensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
