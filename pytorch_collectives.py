"""The collectives that all other scripts build on, each shown with four numbers per rank.

A process group is a set of processes, numbered by rank, that can send each other tensors. All ranks
must call the same collectives, in the same order, with tensors of the same size.

Command:    torchrun --standalone --nproc_per_node=2 pytorch_collectives.py
            torchrun --standalone --nproc_per_node=2 pytorch_collectives.py --sweep
            torchrun --standalone --nproc_per_node=2 pytorch_collectives.py --break order
Shows       what every rank has before and after each collective; with --sweep, their time for
            messages of 4 KiB to 64 MiB; with --break, what goes wrong when the ranks differ.
"""

import argparse
import contextlib
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

import common

# --------------------------------------------------------------------------------- the collectives


def broadcast(numbers: Tensor) -> Tensor:
    """Rank 0's numbers go to all ranks. DDP sends the initial weights this way."""
    dist.broadcast(numbers, src=0)
    return numbers


def reduce(numbers: Tensor) -> Tensor | None:
    """The sum over all ranks goes to rank 0. This is enough for a loss that rank 0 prints."""
    dist.reduce(numbers, dst=0)  # op=dist.ReduceOp.SUM, or MAX, MIN, PRODUCT
    return numbers if dist.get_rank() == 0 else None


def all_reduce(numbers: Tensor) -> Tensor:
    """The sum over all ranks goes to all ranks. DDP divides it by N to average gradients."""
    dist.all_reduce(numbers)
    return numbers


def gather(numbers: Tensor) -> Tensor | None:
    """The numbers of all ranks go to rank 0, concatenated."""
    if dist.get_rank() != 0:
        dist.gather(numbers, dst=0)
        return None
    parts = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
    dist.gather(numbers, parts, dst=0)
    return torch.cat(parts)


def scatter(numbers: Tensor) -> Tensor:
    """Rank 0's numbers are split, and each rank gets its part."""
    part = torch.empty_like(numbers.chunk(dist.get_world_size())[0])
    parts = list(numbers.chunk(dist.get_world_size())) if dist.get_rank() == 0 else None
    dist.scatter(part, parts, src=0)
    return part


def all_gather(numbers: Tensor) -> Tensor:
    """The numbers of all ranks go to all ranks, concatenated. FSDP gathers a layer this way, and
    frees it after use."""
    whole = numbers.new_empty(dist.get_world_size() * len(numbers))
    dist.all_gather_into_tensor(whole, numbers)
    return whole


def reduce_scatter(numbers: Tensor) -> Tensor:
    """The sum over all ranks is split, and each rank gets its part. FSDP averages gradients this
    way. Followed by an all-gather, it is an all-reduce."""
    part = numbers.new_empty(len(numbers) // dist.get_world_size())
    dist.reduce_scatter_tensor(part, numbers)
    return part


def all_to_all(numbers: Tensor) -> Tensor:
    """Every rank splits its numbers: rank r gets the r-th part of each. This sends tokens to their
    experts, and transposes a sharded matrix."""
    parts = torch.empty_like(numbers)
    dist.all_to_all_single(parts, numbers)
    return parts


def send_and_receive(numbers: Tensor) -> Tensor:
    """One rank sends its numbers to another, here 0 to 1. Pipelines send activations this way."""
    if dist.get_rank() == 0:
        dist.send(numbers, dst=1)
    if dist.get_rank() == 1:
        dist.recv(numbers, src=0)
    return numbers


def asynchronous(numbers: Tensor) -> Tensor:
    """An all-reduce that returns at once, so other work can overlap with it. DDP averages the last
    layers' gradients while backward computes the earlier ones."""
    work = dist.all_reduce(numbers, async_op=True)
    # ... here ...
    work.wait()  # before wait(), the values are undefined
    return numbers


LESSONS = [
    broadcast, reduce, all_reduce, gather, scatter, all_gather, reduce_scatter, all_to_all,
    send_and_receive, asynchronous,
]  # fmt: skip


def show(lesson, device: torch.device) -> None:
    """Run a collective, and print every rank's numbers before and after."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    n = 4 if 4 % world_size == 0 else world_size  # so that they can be split evenly
    numbers = torch.arange(1, n + 1, device=device) + 10 * rank
    before = numbers.tolist()
    with explain_missing(lesson.__name__):
        after = lesson(numbers)
    lines = [None] * world_size
    dist.all_gather_object(lines, (before, after if after is None else after.tolist()))
    common.print0(f"\n{lesson.__name__}: {' '.join(lesson.__doc__.split())}")
    for rank, (before, after) in enumerate(lines):
        after = "nothing" if after is None else in_brackets(after)
        common.print0(f"    rank {rank}   {in_brackets(before)}  ->  {after}")


@contextlib.contextmanager
def explain_missing(name: str):
    """If the backend has no such collective, name a backend that does."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if "support" not in str(error) and "implement" not in str(error):
            raise
        backend = dist.get_backend()
        other, device = ("nccl", "cuda") if backend == "gloo" else ("gloo", "cpu")
        common.fail(f"{backend} has no {name} ({error}); use --device {device} ({other})")


def in_brackets(numbers: list[int]) -> str:
    return f"[{' '.join(f'{number:3}' for number in numbers)}]"


# ------------------------------------------------------------------------------ how long they take


def operations(whole: Tensor, part: Tensor) -> dict:
    """The timed operations, by name: a function, and the least that a rank must send, as a multiple
    of the message size. This is the factor from algorithm bandwidth to bus bandwidth
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).

    Args:
        whole: the message; ``part`` is one rank's part of it.
    """
    rank = dist.get_rank()
    n = dist.get_world_size()
    other = torch.empty_like(whole)

    def send_and_receive():
        if rank == 0:
            dist.send(whole, dst=1)
        if rank == 1:
            dist.recv(whole, src=0)

    return {
        "broadcast": (lambda: dist.broadcast(whole, src=0), 1),
        "all_reduce": (lambda: dist.all_reduce(whole), 2 * (n - 1) / n),
        "all_gather": (lambda: dist.all_gather_into_tensor(whole, part), (n - 1) / n),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part, whole), (n - 1) / n),
        "all_to_all": (lambda: dist.all_to_all_single(other, whole), (n - 1) / n),
        "send and receive": (send_and_receive, 1),
    }


def seconds_of(operation, repeats: int, device: torch.device) -> float:
    """Median over repeats of the time of the slowest rank. On a GPU that of one in a queue of
    calls, without the time to launch it and to wait for the GPU."""
    seconds = []
    calls = 20 if device.type == "cuda" else 1
    for _ in range(2 + repeats):
        dist.barrier()
        started = time.perf_counter()
        for _ in range(calls):
            operation()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - started) / calls)
    seconds = torch.tensor(seconds[2:], dtype=torch.float64, device=device)  # two to warm up
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.median().item()


def fit(sizes: list[float], seconds: list[float]) -> tuple[float, float]:
    """Fit seconds = latency + size / bandwidth (in seconds and bytes per second), by least squares
    of the relative errors. If one of them would be negative, the latency is 0."""
    sizes = np.array(sizes)
    seconds = np.array(seconds)
    rows = np.stack([1 / seconds, sizes / seconds], axis=1)
    ones = np.ones(len(rows))
    (latency, per_byte), *_ = np.linalg.lstsq(rows, ones, rcond=None)
    if min(latency, per_byte) <= 0:  # large messages leave the cache, or noise is larger than both
        latency = 0.0
        (per_byte,), *_ = np.linalg.lstsq(rows[:, 1:], ones, rcond=None)
    return latency, 1 / per_byte


def sweep(device: torch.device, largest: int, folder: Path) -> None:
    """Time each operation with messages of 4 KiB, four times that, and so on.

    Args:
        largest: bytes of a message.
        folder: where ``collectives.json`` goes.
    """
    n = dist.get_world_size()
    found = {}
    common.print0(f"{'':16} {'KiB':>7} {'us':>9} {'algorithm, GB/s':>16} {'bus, GB/s':>10}")
    for name in operations(*[torch.zeros(n, device=device)] * 2):
        rows = []
        size = 4096
        while size <= largest:
            part = torch.zeros(size // 4 // n, device=device)  # 4 bytes per element
            whole = torch.zeros(n * len(part), device=device)
            operation, factor = operations(whole, part)[name]
            with explain_missing(name):
                seconds = seconds_of(operation, max(10, min(100, 2**24 // size)), device)
            row = {"bytes": whole.nbytes, "seconds": seconds, "algorithm": whole.nbytes / seconds}
            row["bus"] = factor * row["algorithm"]
            rows.append(row)
            common.print0(
                f"{name:16} {size / 1024:7,.0f} {1e6 * seconds:9,.0f} "
                f"{row['algorithm'] / 1e9:16.3f} {row['bus'] / 1e9:10.3f}"
            )
            size *= 4
        sent = [factor * row["bytes"] for row in rows]
        latency, bandwidth = fit(sent, [row["seconds"] for row in rows])
        fitted = f"latency {1e6 * latency:,.0f} us, bandwidth {bandwidth / 1e9:.3f} GB/s"
        common.print0(f"{name:16} {fitted}\n")
        found[name] = {"latency": latency, "bandwidth": bandwidth, "rows": rows}
    if dist.get_rank() == 0:
        found = {"backend": dist.get_backend(), "ranks": n, "operations": found}
        (folder / "collectives.json").write_text(json.dumps(found, indent=1) + "\n")
        print(f"done: {folder / 'collectives.json'}")


# -------------------------------------------------------------------------------- what goes wrong


def alone(numbers: Tensor) -> None:
    """Only rank 0 calls the all-reduce, as under an `if rank == 0:`. It waits for the others until
    --timeout has passed. Nothing that communicates belongs under such an `if`: no forward of a
    model wrapped by DDP or FSDP, and no save that gathers."""
    if dist.get_rank() == 0:
        dist.all_reduce(numbers)


def order(numbers: Tensor) -> None:
    """Rank 0 all-reduces and then broadcasts, the others in reverse order. The first call of a rank
    is matched with the first call of the others, whatever it is: gloo waits for messages that never
    come. A loop over a set of strings, whose order differs by process, can cause this."""
    other = numbers + 100
    calls = [lambda: dist.all_reduce(numbers), lambda: dist.broadcast(other, src=0)]
    for call in calls if dist.get_rank() == 0 else reversed(calls):
        call()
    say(f"sum {numbers.tolist()}, broadcast {other.tolist()}")


def shape(numbers: Tensor) -> None:
    """Rank 0 all-reduces four numbers, the others two. Nothing compares the shapes, so one rank
    waits for more, and another gets wrong numbers. The last batch of an epoch is often smaller: pad
    it, or gather objects, whose sizes may differ."""
    numbers = numbers if dist.get_rank() == 0 else numbers[:2].clone()
    dist.all_reduce(numbers)
    say(f"sum {numbers.tolist()}")


def wait(numbers: Tensor) -> None:
    """The sum is read before work.wait(), while the all-reduce is still running. Always wait for
    calls with async_op=True, and for isend and irecv."""
    many = numbers.repeat(2**22)
    work = dist.all_reduce(many, async_op=True)
    say(f"before wait() the last four are {many[-4:].tolist()}")
    work.wait()
    say(f"after it {many[-4:].tolist()}")


MISTAKES = {mistake.__name__: mistake for mistake in (alone, order, shape, wait)}


def say(message: str) -> None:
    print(f"    rank {dist.get_rank()}   {message}\n", end="", flush=True)  # in one piece


def show_mistake(args, device: torch.device, store: dist.Store) -> NoReturn:
    """Run --break and print what happens. The process group is unusable afterwards, so all ranks
    exit without destroying it, once the last one has reported to the store that it is done."""
    mistake = MISTAKES[args.mistake]
    numbers = torch.arange(1, 5, device=device)
    numbers += 10 * dist.get_rank()
    common.print0(f"{mistake.__name__}: {' '.join(mistake.__doc__.split())}")
    started = time.monotonic()
    try:
        mistake(numbers)
        if device.type == "cuda":
            torch.cuda.synchronize()
    except RuntimeError as error:
        say(f"{type(error).__name__} after {time.monotonic() - started:.0f} s: {error}")
    rank = dist.get_rank()
    ranks = range(dist.get_world_size())
    store.set(f"rank {rank} is done", "")
    store.wait([f"rank {r} is done" for r in ranks], timedelta(seconds=args.timeout + 30))
    advice = "No debug setting of PyTorch detects this mistake."
    if mistake is not wait:
        advice = "With TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment, PyTorch first compares "
        advice += "collectives and shapes, which takes time, and reports which ranks differ."
    common.print0(advice)
    store.set(f"rank {rank} leaves", "")
    if rank == 0:  # last, because without torchrun it hosts the store
        store.wait([f"rank {r} leaves" for r in ranks], timedelta(seconds=args.timeout))
    os._exit(0)


# --------------------------------------------------------------------------------------------- main


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--sweep", action="store_true", help="measure the time of each collective by message size"
    )
    instead.add_argument(
        "--break", dest="mistake", choices=MISTAKES, help="make a mistake, and see what happens"
    )
    flag(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="device (default: auto, a GPU if there is one)",
    )
    flag("--largest", type=common.number(int, 64, 2**22), default=65536, metavar="KIB",
         help="largest message of --sweep in KiB (default: 65536, 64 MiB)")  # fmt: skip
    flag("--timeout", type=common.number(float, 0, above=0), metavar="SECONDS",
         help="longest wait for other ranks (default: 60; with --break 5)")  # fmt: skip
    flag("--output-dir", type=Path, default=Path("runs/pytorch_collectives"), metavar="DIR",
         help="folder for collectives.json, with --sweep (default: %(default)s)")  # fmt: skip
    given = parser.parse_args()
    timeout = given.timeout or (5 if given.mistake else 60)
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = auto if given.device == "auto" else given.device
    args = argparse.Namespace(**vars(given) | {"timeout": timeout, "device": device})
    if args.mistake:  # nccl: wait() then raises; otherwise PyTorch would end the process
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    store = common.make_store(args)  # before RANK is set, which a launcher does
    if "RANK" not in os.environ:  # torchrun: sets these; without it, there is one process
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = common.get_device(args, local_rank)  # DDP: one device per local rank
    if device.type == "cuda":
        torch.cuda.set_device(device)  # DDP: otherwise every rank also allocates memory on GPU 0
    dist.init_process_group(  # DDP: returns once all ranks have joined
        backend="nccl" if device.type == "cuda" else "gloo",
        store=store,  # torchrun: a restart must not find dead ranks' addresses
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=args.timeout),  # DDP: how long ranks wait for each other
        device_id=device if device.type == "cuda" else None,
    )
    rank = dist.get_rank()  # DDP: from 0 to world_size - 1
    world_size = dist.get_world_size()
    common.print0(f"pytorch_collectives: {world_size} x {device.type} ({dist.get_backend()})")

    # 2. Show, time or break the collectives
    if world_size == 1:
        start = "start torchrun --standalone --nproc_per_node=2 pytorch_collectives.py"
        if args.mistake or args.sweep:
            common.fail(f"--{'sweep' if args.sweep else 'break'} needs two ranks or more; {start}")
        common.print0(f"A single rank sends nothing, so nothing changes; {start}")
    if args.mistake:
        show_mistake(args, device, store)
    if args.sweep:
        if rank == 0:
            common.check_writable(args.output_dir, f"--output-dir {args.output_dir}")
        sweep(device, 1024 * args.largest, args.output_dir)
    else:
        for lesson in LESSONS:
            if world_size > 1 or lesson is not send_and_receive:
                show(lesson, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
