"""``result.json`` and TensorBoard's HPARAMS: a run's settings, and its measurements."""

import dataclasses
import math
import shlex
import statistics
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from harness import measure
from harness.clock import StepClock, break_down, spread
from harness.data import TaskData
from harness.progress import RunState
from harness.settings import as_words, values_of
from harness.world import gather_objects, max_over_ranks, this_script, world


def count_state_bytes(model: nn.Module, optimizer, **held: Iterable[Tensor]) -> dict[str, int]:
    """Persistent bytes per rank: parameters, gradients, optimizer state; the maximum over ranks,
    which all call it. A library's own tensors, in ``held``, are added or replace those so named.
    Empty without an ``optimizer``: DeepSpeed's buffers aren't counted."""
    if optimizer is None:
        return {}
    parameters = list(model.parameters())
    tensors = {
        "parameters": parameters,
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer": measure.optimizer_tensors(optimizer),
    }
    return max_over_ranks({n: measure.count_bytes(own) for n, own in (tensors | held).items()})


def used_tf32(precision: str, device: torch.device) -> dict[str, bool]:
    """Whether fp32 was computed in TF32, which GPUs since Ampere support, by PyTorch's settings."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    able = able and precision == "float32" and torch.version.cuda is not None
    return {
        "convolutions": able and torch.backends.cudnn.conv.fp32_precision == "tf32",
        "matrix_products": able and torch.get_float32_matmul_precision() != "highest",
    }


def gather_figures(clock: StepClock, model, optimizer, held: dict[str, Iterable[Tensor]]) -> dict:
    """The measurements over all ranks, which all call it. Peak memory, in GiB, is the maximum over
    ranks, of training steps, without a dataset that is on the GPU."""
    clock.pause()  # reads the memory, if there was no step
    memory = clock.peak_memory | ({"dataset": clock.data_gib} if clock.on_gpu else {})
    return {
        "gpu_uuids": sum(gather_objects(measure.gpu_uuids(clock.devices)), []),
        "peak_memory_gib": {"allocated": None, "reserved": None} | max_over_ranks(memory),
        "state_bytes": count_state_bytes(model, optimizer, **held),
        "breakdown": break_down(clock),
    }


def describe(args, data: TaskData, state: RunState, clock: StepClock, model: nn.Module) -> dict:
    """The description of the run for result.json, on rank 0."""
    device = clock.devices[0]
    seconds = clock.settled()
    rates = data.rates(args.batch_size / statistics.median(seconds))
    parameters = str(next(model.parameters()).dtype).removeprefix("torch.")
    precision = parameters if args.dtype == "float32" else args.dtype
    identity = values_of(args, "identity")
    return {
        "technique": this_script(),
        "options": values_of(args, "own"),
        "command": measure.launch_command(),
        "settings": shlex.join(as_words(dataclasses.replace(args, dataset=data.name))),
        "world_size": world().size,
        "devices": world().size * len(clock.devices),
        "device": measure.device_name(device),
        "threads": torch.get_num_threads(),
        "model": args.model,
        **{flag: value for flag, value in identity.items() if flag in args.task.flags},
        **data.describe(),
        "precision": precision,
        "tf32": used_tf32(precision, device),
        "global_batch_size": args.batch_size,
        "optimizer": args.optimizer,
        "steps": state.step,
        "seed": args.seed,
        "seconds_total": clock.wall_clock(),
        "seconds_train": sum(state.history["seconds"]),
        "trained_between": clock.spans,
        **rates,
        "rate": list(rates)[-1],
        "first_step_seconds": clock.seconds[0] if clock.seconds else None,
        "step_ms": spread(seconds),
        **state.history,
        "eval_samples": state.eval_samples,
        "versions": measure.versions(),
        "git_commit": measure.git_commit(),
    }


def describe_end(result: dict) -> str:
    """The last line that a run prints."""
    memory = [f"{gib:.2f} GiB {kind}" for kind, gib in result["peak_memory_gib"].items() if gib]
    rate = result["rate"]
    took = result["step_ms"]
    speed = f"median {result[rate]:,.0f} {rate.removesuffix('_per_second')}/s"
    if not math.isclose(took["mean"], took["p50"], rel_tol=0.1):
        speed += f" ({result[rate] * took['p50'] / took['mean']:,.0f} by the mean step)"
    if each := result["model_tflops"]:
        share = f" (MFU {result['mfu']:.1%})" if result["mfu"] else ""
        each = f"{each:.3g} T" if each > 1 else f"{1e3 * each:.3g} G"
        speed += f", {each}FLOP/s per device{share}"
    at = result["eval_step"].index(result["model_step"])
    loss = f"loss {result['eval_loss'][at]:.4f}"
    accuracy = f"accuracy {result['eval_accuracy'][at]:.2%} of {result['eval_samples']:,}"
    state = [f"{kind} {size / 1e6:.1f} MB" for kind, size in result["state_bytes"].items()]
    state = f", state per rank between steps: {', '.join(state)}" if state else ""
    return f"done: {loss}, {accuracy}, {speed}, peak memory {', '.join(memory)}{state}"


def hparams(args, result: dict) -> tuple[dict, dict]:
    """One entry per run, with its metrics, so that TensorBoard can compare runs."""
    flags = {k: v for k, v in vars(args).items() if isinstance(v, (bool, int, float, str))}
    flags |= {"technique": this_script(), "world_size": world().size, "dataset": result["dataset"]}
    flags.pop("local_rank", None)
    metrics = {
        "final/accuracy": result["eval_accuracy"][result["eval_step"].index(result["model_step"])],
        f"final/{result['rate']}": result[result["rate"]],
        "final/memory": result["peak_memory_gib"]["process"],
    }
    return flags, {name: value for name, value in metrics.items() if value is not None}
