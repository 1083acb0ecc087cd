"""What the DeepSpeed scripts need: configuration, import, and checkpoints of its engine."""

import contextlib
import io
import json
import os
import pydoc
import sys
from pathlib import Path
from pickle import UnpicklingError
from unittest import mock

import torch
from torch.optim.lr_scheduler import LRScheduler

from harness.cli import fail, import_optional
from harness.world import print0, world

IN_CHECKPOINTS = {  # DeepSpeed's own classes in its pickles
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
REPLACED = {  # an entry of the file, and the flags that it replaces
    "optimizer": "--optimizer, --lr, --momentum and --weight-decay",
    "scheduler": "--lr, --schedule and --warmup-steps",
}


def read_config(args) -> dict:
    """Read the JSON file and add the batch size. Print which flags the file replaces."""
    given = f"--deepspeed_config {args.deepspeed_config}"
    try:
        config = json.loads(Path(args.deepspeed_config).read_text())
    except (OSError, ValueError) as error:  # ValueError: not JSON, or not even text
        fail(f"{given} is not a readable JSON file ({error})")
    if not isinstance(config, dict):
        fail(f"{given} contains a {type(config).__name__}, not an object")
    sizes = {
        "train_batch_size": args.batch_size,
        "train_micro_batch_size_per_gpu": args.batch_size // world().size,
        "gradient_accumulation_steps": 1,
    }
    for name, ours in sizes.items():
        if config.get(name, "auto") not in ("auto", ours):
            batch = f"--batch-size {args.batch_size} on {world().size} ranks makes it {ours}"
            fail(f"{given} has {name} {config[name]}, and {batch}; leave it out of the file")
    for entry, flags in REPLACED.items():
        if entry in config:
            print0(f"{args.deepspeed_config} has its own {entry}, which replaces {flags}")
    if args.clip_grad:
        config["gradient_clipping"] = args.clip_grad
    return {"log_level": "error"} | config | sizes


def import_deepspeed(args, device: torch.device, config: dict):
    """Import DeepSpeed, which selects its device on import, for the device of this run."""
    os.environ["DS_ACCELERATOR"] = device.type
    deepspeed = import_optional("deepspeed")
    if device.type == "cpu":
        # Otherwise it would compile an all-reduce for half a minute, which only inference uses.
        deepspeed.ops.__compatible_ops__ = {}
    if (3, 11) <= sys.version_info < (3, 11, 4):  # they pickle enums as calls, which are refused
        stage = deepspeed.runtime.zero.config.ZeroStageEnum
        stage.__reduce_ex__ = lambda member, protocol: (stage, (member.value,))
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)  # uses the existing group
    try:
        deepspeed.DeepSpeedConfig(config)
    except Exception as error:  # DeepSpeed's, pydantic's or an assertion
        fail(f"--deepspeed_config {args.deepspeed_config}: {error}")
    return deepspeed


def check_pickles(folder: Path) -> None:
    """Refuse files with classes that DeepSpeed does not use: to load one could run code."""
    for file in folder.glob("*.pt"):
        strange = set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - IN_CHECKPOINTS
        if names := ", ".join(sorted(strange)):
            raise UnpicklingError(f"{file.name} contains {names}, which DeepSpeed does not use")


def resume_or_exit(run, engine) -> None:
    """Resume from the snapshot that ``--resume`` selects, or start; and tell the run of the
    engine's steps."""

    def read(path: Path, snapshot: dict) -> bool:
        try:
            check_pickles(path / "zero")
            found, _ = engine.load_checkpoint(path, "zero")
        except Exception as error:  # untrusted, or of another format, stage or number of ranks
            why = f"{type(error).__name__}: {error}"[:200]
            fail(f"--resume {path} cannot be loaded ({why}); give another, or none")
        if found is None:
            fail(f"--resume {path} contains no DeepSpeed checkpoint; give another, or none")
        return True

    clear_padding(engine)
    ours = engine.lr_scheduler  # unless the file configures one, which the checkpoint contains
    ours = ours if isinstance(ours, LRScheduler) else None
    run.resume_or_exit(engine.module, engine.basic_optimizer, ours, read=read, engine=engine)
    watch_steps(run, engine)


@torch.no_grad()
def clear_padding(engine) -> None:
    """Set the padding of stage 3 to zero, in the shards and in their fp32 copy. DeepSpeed pads each
    parameter to equal shards but does not initialize the padding, which may then contain NaN."""
    if not hasattr(next(engine.parameters()), "ds_tensor"):
        return
    optimizer = engine.optimizer
    groups = zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    for parameters, fp32_copy in groups:
        start = 0
        for parameter in parameters:
            size = parameter.partition_numel()
            real = max(0, parameter.ds_numel - world().rank * size)  # numbers that this rank has
            copy = fp32_copy[start : start + size]
            copy[real:].zero_()
            parameter.ds_tensor[real:].zero_()
            start += size


def watch_steps(run, engine) -> None:
    """The engine calls the optimizer, or skips it, by itself: clock and guard learn it here."""
    step = engine.step
    run.guard.overflow_is_normal = engine.fp16_enabled()

    def watched_step(*args, **kwargs) -> None:
        skipped_before = engine.skipped_steps
        run.clock.mark("optimizer")
        step(*args, **kwargs)
        run.clock.mark("rest")
        run.grad_norm = engine.get_global_grad_norm() if engine.gradient_clipping() else None
        run.guard.library_stepped(engine.skipped_steps > skipped_before)

    engine.step = watched_step


def save_then_exit_if_asked(run, engine) -> None:
    """Write a snapshot: DeepSpeed's checkpoint, and the state of the run."""
    save_file = engine.checkpoint_engine.save
    failures = []

    def save_or_remember(*args, **kwargs):  # an error now would let the other ranks wait forever
        try:
            return save_file(*args, **kwargs)
        except (OSError, RuntimeError) as error:
            failures.append(error)

    def write(folder: Path) -> None:
        with mock.patch.object(engine.checkpoint_engine, "save", save_or_remember):
            engine.save_checkpoint(folder, "zero", save_latest=False)
        if failures:
            raise failures[0]
        if world().rank == 0:
            (folder / "latest").write_text("zero")  # for zero_to_fp32.py

    run.save_then_exit_if_asked(None, None, engine.lr_scheduler, write=write)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The fp32 weights in a snapshot of any stage, without its ranks, on the CPU."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    library = import_optional("deepspeed.utils.zero_to_fp32")
    check_pickles(folder / "zero")
    first = min((folder / "zero").glob("*model_states.pt"))
    with torch.serialization.safe_globals([pydoc.locate(name) for name in IN_CHECKPOINTS]):
        weights = torch.load(first, "cpu", weights_only=True)["module"]  # stage 3: only the buffers
    if any((folder / "zero").glob("*optim_states.pt")):  # not in stage 0
        quiet = io.StringIO()
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            fp32 = library.get_fp32_state_dict_from_zero_checkpoint(folder, "zero")  # integers, too
        weights |= {n: t for n, t in fp32.items() if weights[n].is_floating_point()}
    return weights


def gather_weights(engine) -> dict[str, torch.Tensor]:
    """Gather a plain state dict of the fp32 weights on rank 0. All ranks call it."""
    from deepspeed.utils import safe_get_full_fp32_param

    weights = engine.module.state_dict()  # complete, except in stage 3 and bfloat16
    for name, parameter in engine.module.named_parameters():
        # gathers the fp32 copy, one tensor at a time; stage 0 has none
        whole = safe_get_full_fp32_param(parameter)
        if whole is not None and world().rank == 0:
            weights[name] = whole.cpu()
    return weights
