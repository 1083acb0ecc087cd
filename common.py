"""What every training script shares, in the order in which a script calls it.

A script contains one technique and this file the training task, so two scripts differ only by their
technique:

    command line            flags, their defaults, what runs where
    device and seeds        which one, how many threads, which precision
    datasets and loader     images, a text or reviews, one loader
    model                   any torchvision classifier, a GPT, or an encoder
    optimizer and schedule  SGD or AdamW, warm-up and cosine
    evaluation              every sample counted once
    model.pt                plain, whatever the technique

What the data and the models are made of is in jobs/; what every run needs, whatever it trains, is
in harness/: Run (progress, record, snapshots) in harness/run.py.
"""

import argparse
import atexit
import math
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, SequentialSampler

import jobs.choice
from harness import command_line, hangs, loaders, process, ranks, remote
from harness.command_line import ArgumentParser, check_writable, fail, import_optional, number
from harness.files import load_file, save_file
from harness.measure import device_name, whole
from harness.ranks import (
    LAUNCHED,
    LOCAL_WORLD_SIZE,
    RANK,
    SCRIPT,
    WORLD_SIZE,
    make_store,
    print0,
)
from harness.remote import local_folder
from harness.rows import gather_state, shard_state_on_load
from harness.run import Run, stop_if_asked, total_steps
from harness.task_data import TaskData
from jobs import attention
from jobs.choice import init_weights
from jobs.classifiers import batch_norms, blocks_of
from jobs.decoder import check_tensor_parallel, size_of
from jobs.images import UnreadableImage
from libraries.accelerate_launch import check_launch

# What scripts use, in the order in which they do; some of it comes from below.
# fmt: off
__all__ = [
    "import_optional", "argument_parser", "number", "parse_args", "prepare_process",
    "check_launch", "fail", "announce", "print0", "get_device", "get_dtype", "seed_everything",
    "make_store", "LOCAL_WORLD_SIZE", "size_of", "check_tensor_parallel", "make_datasets",
    "make_loader", "make_model", "init_weights", "batch_norms", "blocks_of", "attention",
    "make_optimizer", "optimizer_class", "parameter_groups", "make_scheduler",
    "shard_state_on_load", "Run", "gather_state", "evaluate", "save_model", "load_file",
    "save_file", "stop_if_asked", "local_folder",  # pytorch_checkpoint.py, transformers_Trainer.py
    "ArgumentParser", "check_writable", "UnreadableImage",  # model_inference.py
]
# fmt: on

# -------------------------------------------------------------------------------- command line

HALF = {"cuda": "float16", "cpu": "bfloat16"}  # what most GPUs, and what CPUs, are fast in


def argument_parser(doc: str, only_gpt: bool = False, experts=False) -> ArgumentParser:
    """The flags that all training scripts share; a script adds those of its technique.

    Args:
        doc: the script's docstring, shown by ``--help``.
        only_gpt: the technique works on the blocks of a GPT, and on no other model.
        experts: the help shows the flags of a mixture of experts.
    """
    parser = command_line.make_parser(doc)
    command_line.add_training_flags(parser)
    jobs.choice.add_flags(parser, only_gpt, experts)
    command_line.add_run_flags(parser)
    parser.set_defaults(model="gpt" if only_gpt else None)
    return parser


def parse_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line, fill in what depends on the device, and check it all at once."""
    args = parser.parse_args()
    command_line.check_flags(args)
    remote.check_urls(args)
    if parser.get_default("model") == "gpt":
        jobs.choice.check_is_gpt(args)
    jobs.choice.fill_defaults(args)
    if getattr(args, "dtype", "") is None:
        args.dtype = HALF[args.device]
    if args.double and getattr(args, "dtype", "float32") != "float32":
        fail(f"--double computes in float64, this run in {args.dtype}; leave out one of the two")
    return args


def prepare_process(args: argparse.Namespace) -> None:
    """Settle what holds for the whole process: it ends with its launcher, listens on loopback when
    all ranks share a machine, explains timeouts, can write its files, and has a default dtype."""
    process.die_with_launcher()
    if WORLD_SIZE == LOCAL_WORLD_SIZE:
        process.listen_on_loopback()
    hangs.prepare(Path(sys.argv[0]).absolute(), local_folder(args.output_dir))
    if args.profile_memory and args.device == "cpu":
        process.keep_no_free_memory()
    if RANK == 0:
        folder = local_folder(args.output_dir)
        command_line.check_writable(folder, f"--output-dir {folder}")
        remote.check_output_url(args.output_dir)
    if args.double:
        torch.set_default_dtype(torch.float64)


def announce(args: argparse.Namespace, device: torch.device, readers: int = WORLD_SIZE) -> None:
    """Print what runs where, and all settings. Then check the model's name, before any data.

    Args:
        readers: how many shares the batch is divided into. Where they are fewer than the ranks,
            several ranks work on one.
    """
    if args.batch_size % readers:
        near = max(args.batch_size // readers, 1) * readers
        batch = f"--batch-size {args.batch_size} is the global batch"
        fail(f"{batch} and is not divisible by {readers} ranks; use --batch-size {near}")
    if WORLD_SIZE > 1 and not dist.is_initialized():
        fail(
            f"{SCRIPT}.py is one process but was started as {WORLD_SIZE} ranks; start it with "
            f"python {SCRIPT}.py, or use pytorch_torchrun_DDP.py"
        )
    backend = f" ({dist.get_backend()})" if dist.is_initialized() else ""
    each = "per rank" if readers == WORLD_SIZE else f"for {WORLD_SIZE // readers} ranks together"
    batch = f"global batch {args.batch_size} = {readers} x {args.batch_size // readers} {each}"
    print0(
        f"{SCRIPT}: {WORLD_SIZE} x {device_name(device)}{backend}, {args.model} "
        f"{jobs.choice.data_of(args).describe(args)}, dataset {args.dataset}, {batch}"
    )
    print0(f"settings: {command_line.given_flags() or 'defaults'}")
    jobs.choice.models_of(args).check_model_name(args.model)


# ---------------------------------------------------------------------------- device and seeds


def get_device(args: argparse.Namespace, local_rank: int | None = 0) -> torch.device:
    """GPU number ``local_rank``, or the CPU; the ranks of a machine share its cores equally.

    Args:
        local_rank: ``None`` if it was not passed as a flag: launchers also set LOCAL_RANK.
    """
    if local_rank is None and not LAUNCHED:
        fail(
            "started without its launcher; use "
            f"python -m torch.distributed.launch --nproc_per_node=2 --nnodes=1 {SCRIPT}.py"
        )
    local_rank = int(os.environ["LOCAL_RANK"]) if local_rank is None else local_rank
    # For several ranks launchers set OMP_NUM_THREADS=1. Any other number is the user's own.
    if LOCAL_WORLD_SIZE > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, cores // LOCAL_WORLD_SIZE))
    if args.device == "cpu":
        return torch.device("cpu")
    gpus, needed = torch.cuda.device_count(), 1 if ranks.sees_one_gpu() else LOCAL_WORLD_SIZE
    if max(local_rank + 1, needed) > gpus:
        fail(
            f"{LOCAL_WORLD_SIZE} ranks need as many GPUs, and this machine has {gpus}; "
            f"use --nproc_per_node={gpus}, or --device cpu"
        )
    torch.set_float32_matmul_precision("high")  # in TF32, as cuDNN's convolutions are
    return torch.device("cuda", local_rank)


def get_dtype(args: argparse.Namespace, device: torch.device) -> torch.dtype:
    """``--dtype``, if the device can train in it."""
    dtype = getattr(torch, args.dtype)
    other = "float16" if args.dtype == "bfloat16" else "bfloat16"
    if device.type == "cuda" and dtype == torch.bfloat16:
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            fail(f"--dtype bfloat16: {device_name(device)} has none; use --dtype {other}")
    try:
        ones = torch.ones(1, 1, 1, 1, device=device, dtype=dtype, requires_grad=True)
        F.conv2d(ones, ones).sum().backward()
    except RuntimeError as error:
        fail(f"--dtype {args.dtype}: {device_name(device)} cannot ({error}); use --dtype {other}")
    if device.type == "cpu" and dtype == torch.float16:
        print0("float16: many CPUs have no fast convolution in it; bfloat16 is the usual one")
    return dtype


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seed the weights and dropout. Order and crops of the data have generators of their own."""
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = not deterministic  # pays off, as all batches have one shape
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


# ------------------------------------------------------------------------- datasets and loader


def make_datasets(args: argparse.Namespace) -> tuple[TaskData, TaskData]:
    """The training and the evaluation set, of the same classes. Settles what ``auto`` means."""
    job = jobs.choice.data_of(args)
    train_set, eval_set = job.make_datasets(args)
    train_set.identity = {name: getattr(args, name) for name in job.IDENTITY}
    return train_set, eval_set


def make_loader(
    args: argparse.Namespace,
    dataset: TaskData,
    batch_size: int,
    sampler: Sampler | None = None,
    drop_last: bool = False,
) -> DataLoader:
    """A loader of batches, for :meth:`Run.batches` and :func:`evaluate`: of uint8 images
    ``[batch_size, 3, side, side]`` and int64 labels; or of their numbers alone, of images that a
    GPU holds and of text.

    Args:
        batch_size: of one rank.
        sampler: the order; ``None`` takes the samples as they come.
        drop_last: leave out an incomplete last batch, as training does.
    """
    if drop_last and len(dataset) < args.batch_size:
        few = f"{len(dataset)} training {dataset.units}"
        fail(f"--batch-size {args.batch_size} is more than the {few}; use a smaller one")
    workers = dataset.workers if args.workers is None else args.workers
    if workers:
        atexit.register(loaders.kill_loaders)
    elif args.device == "cuda":
        dataset.keep_on_gpu()
    return DataLoader(
        dataset,
        batch_sampler=loaders.Batches(sampler or SequentialSampler(dataset), batch_size, drop_last),
        collate_fn=loaders.hand_on,  # the dataset hands out whole batches
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=args.device == "cuda",
        worker_init_fn=loaders.ignore_signals,
        generator=torch.Generator(),  # it draws a seed every epoch: not out of dropout's sequence
    )


# --------------------------------------------------------------------------------------- model


def make_model(
    args: argparse.Namespace, classes: list[str], channels_last: bool = True
) -> nn.Module:
    """``--model``: a torchvision classifier or an encoder with one output per class, or a GPT with
    one per character, on the CPU, with ``--weights``.

    Args:
        classes: or the vocabulary.
        channels_last: on a GPU its weights in memory as its input: see :func:`to_input`. On a CPU
            that makes DDP's backward and the fused optimizers slower.
    """
    models = jobs.choice.models_of(args)
    model = models.make_model(args, classes)
    if args.deterministic and args.device == "cuda":
        models.check_deterministic(args.model, model)
    if channels_last and args.device == "cuda":
        return model.to(memory_format=torch.channels_last)
    # DDP would say it of 1x1 convolutions, whose two orders are the same.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    return model


# ---------------------------------------------------------------------- optimizer and schedule


def make_optimizer(
    args: argparse.Namespace, model: nn.Module, fused: bool = True
) -> torch.optim.Optimizer:
    """``--optimizer``.

    Args:
        model: plain, wrapped or sharded.
        fused: in one kernel, on a CPU too. A GradScaler leaves a step of such an optimizer out
            without asking the device, and without its copies of all gradients.
    """
    kind, options = optimizer_class(args)
    optimizer = kind(parameter_groups(args, model), **options | {"fused": fused})
    if fused and options.get("momentum"):
        # A first step that GradScaler leaves out would keep momentum that was never written.
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def optimizer_class(args: argparse.Namespace) -> tuple[type[torch.optim.Optimizer], dict]:
    """What :func:`make_optimizer` makes, and with which options."""
    options = {"lr": args.lr, "weight_decay": args.weight_decay, "fused": True}
    if args.optimizer == "adamw":
        return torch.optim.AdamW, options
    return torch.optim.SGD, options | {"momentum": args.momentum}


def parameter_groups(args: argparse.Namespace, model: nn.Module) -> list[dict]:
    """What an optimizer takes: of a GPT, norms and embeddings apart, which do not decay."""
    return jobs.choice.models_of(args).parameter_groups(model)


class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """Divides the learning rate by ten after two evaluations without improvement.
    After a step there is nothing to do; :meth:`Run.report` tells it the loss of all ranks."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        super().__init__(optimizer, factor=0.1, patience=1)

    def step(self, loss: float | None = None) -> None:
        if loss is not None:
            super().step(loss)


def make_scheduler(
    args: argparse.Namespace, optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """``--schedule``, stepped after every step. By default: linear warm-up (Goyal et al. 2017,
    arXiv:1706.02677), then half a cosine that reaches 0 after the last step (Loshchilov and Hutter
    2017, arXiv:1608.03983)."""
    total = total_steps(args, steps_per_epoch)
    warmup = total // 10 if args.warmup_steps is None else args.warmup_steps
    if args.schedule == "plateau":
        return Plateau(optimizer)

    def factor(step: int) -> float:
        if args.schedule == "none":
            return 1.0
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, total - warmup))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


# ---------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> dict[str, float]:
    """Loss and accuracy over the whole set, every sample counted once at any world size.

    Ranks must run equally many forwards, so ``DistributedSampler`` repeats some samples to make the
    shares equal. The k-th sample of share s of n is number ``s + k * n``: what lies beyond the end
    of the set is masked out of the sums. Several ranks may work on the same share.

    Args:
        model: the plain model. A wrapper whose forward communicates will do where all ranks
            call it, as all run equally many forwards. It gets images of its parameters' dtype.
        loader: in order; on several ranks with ``DistributedSampler(shuffle=False)``.

    Returns:
        ``loss`` (mean cross-entropy), ``accuracy`` (0 to 1) and ``samples``, equal on all ranks. Of
        text, a sample here is a character that was to be predicted.
    """
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct answers, labels
    seen, (share, of) = 0, loaders.share_of(loader)
    dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
    for batch in loaders.batches_of(loader):
        images, labels = loader.dataset.prepare_evaluation(batch, device, dtype)
        logits = whole(model(images)).double()
        numbers = share + of * torch.arange(seen, seen + len(labels), device=device)
        real = (numbers < len(loader.dataset)).view(-1, *[1] * (labels.ndim - 1)) & (labels >= 0)
        losses = F.cross_entropy(logits, labels, reduction="none")
        correct = logits.argmax(1) == labels
        sums += torch.stack([losses * real, correct & real, real]).flatten(1).sum(1)
        seen += len(labels)
    if dist.is_initialized():
        dist.all_reduce(sums)
        sums /= WORLD_SIZE // of  # ranks that work on one share
    loss, correct, samples = sums.tolist()
    expected = loader.dataset.count_labels()
    if samples != expected:
        raise RuntimeError(f"evaluated {samples:.0f} samples instead of {expected}")
    return {"loss": loss / samples, "accuracy": correct / samples, "samples": int(samples)}


# ------------------------------------------------------------------------------------ model.pt


def save_model(args: argparse.Namespace, state_dict: dict[str, Tensor]) -> None:
    """Write ``model.pt``, in fp32 (float64 under ``--double``), and what else a Llama has."""
    dtype = torch.get_default_dtype()
    state = {
        k: v.to("cpu", dtype if v.is_floating_point() else None).contiguous()
        for k, v in state_dict.items()
    }
    save_file(state, local_folder(args.output_dir) / "model.pt")
    if write_folder := getattr(jobs.choice.models_of(args), "write_folder", None):
        write_folder(args, state, local_folder(args.output_dir))
