"""``result.json`` and TensorBoard's HPARAMS: what a run was, and what it measured."""

import json
import shlex
import statistics
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from harness.breakdown import break_down
from harness.clock import StepClock
from harness.command_line import settings
from harness.measure import (
    count_bytes,
    device_name,
    git_commit,
    gpu_uuids,
    launch_command,
    optimizer_tensors,
    versions,
)
from harness.ranks import SCRIPT, WORLD_SIZE, gather_objects, max_over_ranks
from harness.remote import local_folder


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


def peak_memory(clock: StepClock) -> dict[str, float]:
    """GiB of the training steps, the largest of all ranks; they all call it."""
    clock.pause()  # which reads it, where there was no step
    memory = dict(clock.peak_memory)
    if clock.on_gpu:
        memory["dataset"] = clock.data_gib  # no part of the others
    return dict(zip(memory, max_over_ranks(list(memory.values())), strict=True))


def uuids_of_all(devices: list[torch.device]) -> list[str]:
    """The GPUs of all ranks; they all call it."""
    return [uuid for uuids in gather_objects(gpu_uuids(devices)) for uuid in uuids]


def precision_of(args, model: nn.Module) -> str:
    """Of the computation, or else of the parameters."""
    if getattr(args, "dtype", "float32") != "float32":
        return args.dtype
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def used_tf32(precision: str, device: torch.device) -> dict[str, bool]:
    """Whether fp32 was computed in TF32, which GPUs have since Ampere: apart, as PyTorch has a
    setting for each."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    able = able and precision == "float32" and torch.version.cuda is not None
    return {
        "convolutions": able and torch.backends.cudnn.conv.fp32_precision == "tf32",
        "matrix_products": able and torch.get_float32_matmul_precision() != "highest",
    }


def gather_figures(run, model: nn.Module, optimizer, held: dict[str, Iterable[Tensor]]) -> dict:
    """What result.json says of all ranks; they all call it."""
    return {
        "gpu_uuids": uuids_of_all(run.clock.devices),
        "peak_memory_gib": {"allocated": None, "reserved": None} | peak_memory(run.clock),
        "state_bytes": count_state_bytes(model, optimizer, **held),
        "breakdown": break_down(run.clock),
    }


def write_result(run, model: nn.Module, figures: dict) -> dict:
    """Write ``result.json`` into ``--output-dir``, and return what it says. Rank 0 does.

    Args:
        figures: of :func:`gather_figures`.
    """
    args, seconds = run.args, run.clock.settled()
    precision = precision_of(args, model)
    result = {
        "technique": SCRIPT,
        "command": launch_command(),
        "settings": shlex.join(settings(args)),
        "world_size": WORLD_SIZE,
        "devices": WORLD_SIZE * len(run.clock.devices),
        "device": device_name(run.device),
        "threads": torch.get_num_threads(),
        "model": args.model,
        "norm": args.norm,
        "dataset": args.dataset,
        **run.train_set.describe(),
        "precision": precision,
        "tf32": used_tf32(precision, run.device),
        "global_batch_size": args.batch_size,
        "optimizer": args.optimizer,
        "epochs": run.epochs,
        "steps": run.step,
        "seed": args.seed,
        "seconds_total": run.clock.read_wall_clock(),
        "seconds_train": sum(run.history["seconds"]),
        "trained_between": run.clock.spans,
        **run.train_set.rates(args.batch_size / statistics.median(seconds)),
        "first_step_seconds": run.clock.first_step,
        "step_ms": {f"p{p}": 1e3 * float(np.percentile(seconds, p)) for p in (50, 95)},
        **figures,
        **run.history,
        "eval_samples": run.eval_samples,
        "versions": versions(),
        "git_commit": git_commit(),
    }
    (local_folder(args.output_dir) / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def rate_of(result: dict) -> str:
    """The entry that says how fast it was: tokens_per_second, if it has one."""
    names = ("tokens_per_second", "images_per_second", "reviews_per_second")
    return next(name for name in names if name in result)


def in_a_line(result: dict) -> str:
    """What is said when a run ends."""
    memory = [f"{gib:.2f} GiB {kind}" for kind, gib in result["peak_memory_gib"].items() if gib]
    unit, loss = rate_of(result).removesuffix("_per_second"), ""
    if unit == "tokens":
        loss = f"loss {result['eval_loss'][-1]:.4f}, "
    return (
        f"done: {loss}accuracy {result['eval_accuracy'][-1]:.2%} of {result['eval_samples']:,}, "
        f"median {result[rate_of(result)]:,.0f} {unit}/s, peak memory {', '.join(memory)}"
    )


def add_hparams(writer, args, result: dict) -> None:
    """One entry a run, so that TensorBoard compares runs side by side."""
    hparams = {k: v for k, v in vars(args).items() if isinstance(v, (bool, int, float, str))}
    hparams |= {"technique": SCRIPT, "world_size": WORLD_SIZE}
    hparams.pop("local_rank", None)
    metrics = {
        "final/accuracy": result["eval_accuracy"][-1],
        f"final/{rate_of(result)}": result[rate_of(result)],
        "final/memory": result["peak_memory_gib"]["process"],
    }
    writer.add_hparams(hparams, metrics, run_name=".")
