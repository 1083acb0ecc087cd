"""``result.json`` and TensorBoard's HPARAMS: what a run was, and what it measured."""

import json
import shlex
import statistics
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from harness.command_line import settings
from harness.measure import (
    count_bytes,
    device_name,
    git_commit,
    launch_command,
    optimizer_tensors,
    peak_memory_gib,
    versions,
)
from harness.ranks import SCRIPT, WORLD_SIZE, max_over_ranks


def count_state_bytes(model: nn.Module, optimizer, **held: Iterable[Tensor]) -> dict[str, int]:
    """Bytes that this technique keeps on a rank, the largest of all ranks; they all call it.

    Args:
        held: tensors to count besides, by name; or in place of ``parameters``, ``gradients`` or
            ``optimizer``, where a library keeps them elsewhere.
    """
    parameters = list(model.parameters())
    tensors = {
        "parameters": parameters,
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer": optimizer_tensors(optimizer),
    }
    kept = {name: count_bytes(theirs) for name, theirs in (tensors | held).items()}
    return dict(zip(kept, map(int, max_over_ranks(list(kept.values()))), strict=True))


def peak_memory(device: torch.device) -> dict[str, float]:
    """GiB, the largest of all ranks; they all call it."""
    memory = peak_memory_gib(device)
    return dict(zip(memory, max_over_ranks(list(memory.values())), strict=True))


def precision_of(args, model: nn.Module) -> str:
    """Of the computation, or else of the parameters."""
    if getattr(args, "dtype", "float32") != "float32":
        return args.dtype
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def write_result(run, precision: str, state_bytes: dict, memory: dict) -> dict:
    """Write ``result.json`` into ``--output-dir``, and return what it says. Rank 0 does."""
    args, seconds = run.args, run.clock.settled()
    result = {
        "technique": SCRIPT,
        "command": launch_command(),
        "settings": shlex.join(settings(args)),
        "world_size": WORLD_SIZE,
        "device": device_name(run.device),
        "threads": torch.get_num_threads(),
        "model": args.model,
        "norm": args.norm,
        "dataset": args.dataset,
        **run.train_set.describe(),
        "precision": precision,
        "tf32": run.device.type == "cuda" and torch.backends.cudnn.allow_tf32,
        "global_batch_size": args.batch_size,
        "optimizer": args.optimizer,
        "epochs": run.epochs,
        "steps": run.step,
        "seed": args.seed,
        "seconds_total": run.read_wall_clock(),
        "seconds_train": sum(run.history["seconds"]),
        "images_per_second": args.batch_size / statistics.median(seconds),
        "step_ms": {f"p{p}": 1e3 * float(np.percentile(seconds, p)) for p in (50, 95)},
        "peak_memory_gib": {"allocated": None, "reserved": None} | memory,
        "state_bytes": state_bytes,
        **run.history,
        "eval_samples": run.eval_samples,
        "versions": versions(),
        "git_commit": git_commit(),
    }
    (args.output_dir / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def add_hparams(writer, args, result: dict) -> None:
    """One entry a run, so that TensorBoard compares runs side by side."""
    hparams = {k: v for k, v in vars(args).items() if isinstance(v, (bool, int, float, str))}
    hparams |= {"technique": SCRIPT, "world_size": WORLD_SIZE}
    hparams.pop("local_rank", None)
    metrics = {
        "final/accuracy": result["eval_accuracy"][-1],
        "final/images_per_second": result["images_per_second"],
        "final/memory": result["peak_memory_gib"]["process"],
    }
    writer.add_hparams(hparams, metrics, run_name=".")
