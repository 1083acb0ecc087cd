"""Measure every runtime and precision, interleaved, each in its own process."""

import contextlib
import dataclasses
import importlib.metadata
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
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
from inference.runtimes import OnnxRunner, TorchRunner, make_session
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
        rounds = itertools.product(args.batch_sizes, range(args.rounds), workers)
        for batch_size, _, worker in tqdm([*rounds], "measuring", disable=None):
            worker.turns.setdefault(batch_size, []).append(worker.ask(measure_batch, batch_size))
        for worker in workers:
            worker.pool.shutdown()
    packages = versions()
    for package in ("onnxruntime-gpu", "onnxruntime"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[package] = importlib.metadata.version(package)
    return {
        "command": launch_command(), "model": args.model, "image_size": args.image_size,
        "device": device_name(torch.device(args.device)), "threads": torch.get_num_threads(),
        "rounds": args.rounds, "rows": [row for worker in workers for row in make_rows(worker)],
        "hardware": hardware(), "versions": packages, "git_commit": git_commit(),
    }  # fmt: skip


class Worker:
    """One runtime and precision, and the process that runs it."""

    def __init__(self, runtime: str, precision: str):
        self.runtime, self.precision = runtime, precision
        self.turns = {}  # by batch size, what the process answered each time
        spawn = multiprocessing.get_context("spawn")  # CUDA does not support fork
        self.pool = ProcessPoolExecutor(1, spawn)

    def ask(self, task: Callable, *args):
        """What a task returns in that process, or, as a string, why it fails."""
        try:
            return self.pool.submit(attempt, task, *args).result()
        except (BrokenExecutor, SystemExit):
            return "its process ended, see above"

    def leave_out(self, what: str, why: str) -> None:
        print(f"{self.runtime} {self.precision}{what}: left out ({why})", file=sys.stderr)


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
        worker, path = Worker(runtime, precision), folder / f"{precision}.onnx"
        # Exported here, as its memory must not count as the runtime's.
        why = attempt(write_onnx, args, precision, path) if runtime == "onnxruntime" else None
        if why := why or worker.ask(load, trained, runtime, precision, path):
            worker.leave_out("", why)
            worker.pool.shutdown()
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


def make_rows(worker: Worker) -> list[dict]:
    """Summarize a worker's results: a row per batch size that worked."""
    rows, name = [], {"runtime": worker.runtime, "precision": worker.precision}
    for batch_size, turns in worker.turns.items():
        if why := next((turn for turn in turns if isinstance(turn, str)), None):
            worker.leave_out(f" at batch {batch_size}", why)
            continue
        row = name | {"batch_size": batch_size, "first_call_s": turns[0]["first"]}
        for kind in ("host_to_host", "on_device"):
            times = np.array([t for turn in turns for t in turn[kind]])
            if len(times):
                p50, p95 = np.percentile(1e3 * times, [50, 95]).tolist()
                row[kind] = {"images_per_second": 1e3 * batch_size / p50}
                row[kind] |= {"latency_ms": {"p50": p50, "p95": p95}, "calls": len(times)}
        rows.append(row | {"peak_memory_gib": turns[-1]["memory"]})
    return [row | {"peak_memory_gib": rows[-1]["peak_memory_gib"]} for row in rows]


# ------------------------------------------------------------------------- in a worker's process


def attempt(task: Callable, *args):
    """What a task returns; or, as a string, why it fails: no kernel for this precision, no
    compiler, not enough memory for this batch size, ..."""
    try:
        return task(*args)
    except Exception as error:
        first, *_ = [*str(error).strip().splitlines(), ""]
        return f"{type(error).__name__}: {first[:150]}"


def load(*args) -> None:
    global bench
    bench = Bench(*args)


def measure_batch(batch_size: int) -> dict:
    return bench.measure(batch_size)


class Bench:
    """A model that has been called with a first batch.

    Args:
        path: of the ONNX file, for ONNX Runtime.
    """

    def __init__(self, args: Trained, runtime: str, precision: str, path: Path):
        self.args, self.first, free = args, {}, free_memory(args.device)
        if runtime == "onnxruntime":
            self.runner = OnnxRunner(make_session(path, args.provider), args.device)
        else:
            classifier = load_classifier(args, precision)
            self.runner = TorchRunner(classifier, args.device, compiled=runtime == "compile")
        self.make_images(args.batch_size)
        self.taken = free - free_memory(args.device)

    def make_images(self, batch_size: int) -> Tensor:
        """Noise; the first batch of a size is also the model's first call with this size."""
        shape = (batch_size, 3, self.args.image_size, self.args.image_size)
        images = torch.randint(0, 256, shape, dtype=torch.uint8)
        if batch_size not in self.first:
            [self.first[batch_size]] = self.time_calls(self.runner, images, at_least=1, seconds=0)
        return images

    def measure(self, batch_size: int) -> dict:
        """Seconds of the first call and of others, and the process's peak memory in GiB."""
        on_gpu, free = self.args.device == "cuda", free_memory(self.args.device)
        images, runner = self.make_images(batch_size), self.runner
        times = {"first": self.first[batch_size], "on_device": []}
        times["host_to_host"] = self.time_calls(runner, images)
        if on_gpu:
            times["on_device"] = self.time_calls(runner.run, runner.put(images))
        self.taken += free - free_memory(self.args.device)
        process = peak_memory_gib(torch.device("cpu"))["process"]
        memory = {"device": self.taken / 2**30 if on_gpu else None, "process": process}
        return times | {"memory": memory}

    def time_calls(self, call: Callable, images, at_least=2, seconds=1) -> list[float]:
        """Seconds of each call, until there are enough."""
        times = []
        while len(times) < at_least or sum(times) < seconds:
            self.runner.synchronize()
            started = time.perf_counter()
            call(images)
            self.runner.synchronize()
            times.append(time.perf_counter() - started)
        return times


def free_memory(device: str) -> int:
    """Free bytes on the GPU; 0 on a CPU. Other workers are idle during a measurement."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0
