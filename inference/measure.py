"""Measure every runtime and precision, interleaved, each in its own process."""

import contextlib
import dataclasses
import importlib.metadata
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from harness.cli import fail
from harness.measure import (
    device_name,
    git_commit,
    hardware,
    launch_command,
    peak_memory_gib,
    versions,
)
from inference.classifier import DTYPES, load_classifier
from inference.export import write_onnx
from inference.runtimes import OnnxRunner, Runner, TorchRunner, make_session
from inference.trained import Trained

RUNTIMES = ["torch", "compile", "onnxruntime"]
PRECISIONS = [*DTYPES, "int8"]


def measure(args) -> dict:
    """Measure every runtime and precision that runs here, for ``inference.json``.

    Each has its own process, to measure its peak memory, and they take turns, so that the load of
    the machine affects all of them. A call begins with uint8 images in CPU memory and ends with
    float32 logits there. The first calls of a batch size (compilation, allocation) are not counted;
    the time of the first one is reported separately.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # empty, to measure compilation
        workers = start_workers(args, Path(folder))
        if not workers:
            fail("nothing to measure: this machine supports none of these runtimes and precisions")
        sizes = args.batch_sizes
        turns = [(size, w) for size in sizes for _ in range(args.rounds) for w in workers]
        for batch_size, worker in tqdm(turns, "measuring", disable=None):
            worker.turns.setdefault(batch_size, []).append(worker.ask(batch_size))
        rows = [row for worker in workers for row in make_rows(worker, sizes)]
    packages = versions()
    for package in ("onnxruntime-gpu", "onnxruntime"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[package] = importlib.metadata.version(package)
    return {
        "command": launch_command(), "model": args.model, "image_size": args.image_size,
        "device": device_name(torch.device(args.device)), "threads": torch.get_num_threads(),
        "rounds": args.rounds, "rows": rows,
        "hardware": hardware(), "versions": packages, "git_commit": git_commit(),
    }  # fmt: skip


class Worker:
    """The main process's handle of a process that runs one runtime and precision."""

    def __init__(self, args: Trained, runtime: str, precision: str, path: Path | None):
        self.runtime, self.precision = runtime, precision
        self.turns = {}  # by batch size, what it answered each time
        context = multiprocessing.get_context("spawn")  # CUDA does not support fork
        self.pipe, theirs = context.Pipe()
        job = (theirs, args, runtime, precision, path)
        self.process = context.Process(target=run_worker, args=job, daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, batch_size: int | None):
        """The worker's result for a batch size, or why there is none; ``None`` ends the worker."""
        with contextlib.suppress(OSError):  # it has already ended
            self.pipe.send(batch_size)
        return self.receive()

    def receive(self):
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            return "its process ended, see above"


def start_workers(args, folder: Path) -> list[Worker]:
    """Start a worker for each runtime and precision that runs here; report why others do not."""
    trained = {field.name: getattr(args, field.name) for field in dataclasses.fields(Trained)}
    trained = Trained(**trained | {"batch_size": args.batch_sizes[0]})  # without other flags
    wanted = [
        (runtime, precision)
        for runtime in ([args.runtime] if args.runtime else RUNTIMES)
        for precision in ([args.precision] if args.precision else PRECISIONS)
        if is_worth_it(args, runtime, precision)
    ]
    workers = []
    for runtime, precision in tqdm(wanted, "preparing", leave=False, disable=None):
        path = folder / f"{precision}.onnx" if runtime == "onnxruntime" else None
        if path:
            try:  # here: its memory must not count as the runtime's
                write_onnx(args, precision, path)
            except Exception as error:  # no onnx, no kernel, no conversion, ...
                print(f"{runtime} {precision}: left out ({in_short(error)})", file=sys.stderr)
                continue
        worker = Worker(trained, runtime, precision, path)
        answer = worker.receive()  # one after the other, so that loading does not interfere
        if isinstance(answer, str):
            print(f"{runtime} {precision}: left out ({answer})", file=sys.stderr)
        else:
            workers.append(worker)
    return workers


def is_worth_it(args, runtime: str, precision: str) -> bool:
    """Whether this combination runs, and is not a hundred times slower than the others, unless the
    precision was asked for."""
    if runtime == "onnxruntime":
        return precision != "bf16"
    slow = (args.device, precision) == ("cpu", "fp16")  # no such convolutions
    return precision != "int8" and (not slow or args.precision == "fp16")


def make_rows(worker: Worker, batch_sizes: list[int]) -> list[dict]:
    """End a worker, and summarize its results: a row per batch size that worked."""
    rows = []
    memory = worker.ask(None)
    worker.process.join()
    for batch_size in batch_sizes:
        turns = worker.turns[batch_size]
        row = {"runtime": worker.runtime, "precision": worker.precision, "batch_size": batch_size}
        failed = next((turn for turn in [*turns, memory] if isinstance(turn, str)), None)
        if failed:
            about = f"{worker.runtime} {worker.precision} at batch {batch_size}"
            print(f"{about}: left out ({failed})", file=sys.stderr)
            continue
        row["first_call_s"] = turns[0]["first"]
        for kind in ("host_to_host", "on_device"):
            times = np.array([t for turn in turns for t in turn[kind]])
            if len(times):
                p50, p95 = np.percentile(1e3 * times, [50, 95]).tolist()
                row[kind] = {"images_per_second": 1e3 * batch_size / p50}
                row[kind] |= {"latency_ms": {"p50": p50, "p95": p95}, "calls": len(times)}
        rows.append(row | {"peak_memory_gib": memory})
    return rows


# ------------------------------------------------------------------------- in a worker's process


def run_worker(pipe, args: Trained, runtime: str, precision: str, path: Path | None) -> None:
    """Load the model, and call it with a first batch, or report why it fails; then measure each
    requested batch size."""

    def images_of(batch_size: int) -> Tensor:
        shape = (batch_size, 3, args.image_size, args.image_size)
        return torch.randint(0, 256, shape, dtype=torch.uint8)

    free = free_memory(args.device)
    try:
        if runtime == "onnxruntime":
            runner = OnnxRunner(make_session(path, args.provider), args.device)
        else:
            classifier = load_classifier(args, precision)
            runner = TorchRunner(classifier, args.device, compiled=runtime == "compile")
        first = {args.batch_size: time_call(runner, runner, images_of(args.batch_size))}
    except SystemExit:
        return
    except Exception as error:  # no kernel for this precision, no compiler, ...
        pipe.send(in_short(error))
        return
    pipe.send(True)
    taken = free - free_memory(args.device)
    with contextlib.suppress(EOFError):  # the other end is closed
        while (batch_size := pipe.recv()) is not None:
            free, images = free_memory(args.device), images_of(batch_size)
            try:
                first.setdefault(batch_size, time_call(runner, runner, images))
                times = {"first": first[batch_size], "on_device": []}
                times["host_to_host"] = time_calls(runner, runner, images)
                if args.device == "cuda":
                    times["on_device"] = time_calls(runner, runner.run, runner.put(images))
            except Exception as error:  # not enough memory for this batch size
                times = in_short(error)
            taken += free - free_memory(args.device)
            pipe.send(times)
        process = peak_memory_gib(torch.device("cpu"))["process"]
        pipe.send({"device": taken / 2**30 if args.device == "cuda" else None, "process": process})


def in_short(error: Exception) -> str:
    first, *_ = [*str(error).strip().splitlines(), ""]
    return f"{type(error).__name__}: {first[:150]}"


def free_memory(device: str) -> int:
    """Free bytes on the GPU; 0 on a CPU. Other workers are idle during a measurement."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


def time_calls(runner: Runner, call, images) -> list[float]:
    """Seconds of each call, for about a second, at least two calls."""
    times = []
    while len(times) < 2 or sum(times) < 1:
        times.append(time_call(runner, call, images))
    return times


def time_call(runner: Runner, call, images) -> float:
    runner.synchronize()
    started = time.perf_counter()
    call(images)
    runner.synchronize()
    return time.perf_counter() - started
