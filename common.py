"""What every training script shares, in the order in which a script calls it.

A script contains one technique, and this file the training task, so two scripts differ only in
their technique. Data sets and models are in jobs/; progress, logs and snapshots in harness/run.py.
"""

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
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, SequentialSampler

# Some of these names are for the scripts alone, which use them as common.make_store().
import hangs
import harness.world
from harness import cli, data
from harness.cli import ArgumentParser, check_writable, fail, import_optional, need_compiler, number
from harness.data import TaskData, Unreadable, compare_flags
from harness.measure import device_name, whole
from harness.run import Run, total_steps
from harness.settings import check_flags, fill, read_flags, replace
from harness.snapshots import delivery
from harness.state import load_file, save_file
from harness.storage import local_folder
from harness.world import (
    count_cores,
    make_store,
    print0,
    this_script,
    together,
    wait_for_gloo,
    world,
)  # fmt: skip
from jobs import choice
from jobs.choice import Settings, init_weights

# PyTorch 2.14 renamed two collectives; 2.11 has the old names only, and both have them.
warnings.filterwarnings("ignore", r"`torch.distributed.\w+` is deprecated.*_single`", FutureWarning)

# -------------------------------------------------------------------------------- command line


def argument_parser(
    doc: str, only_gpt=False, experts=False, only: list[str] | None = None
) -> ArgumentParser:
    """A parser with the flags that all training scripts share; a script adds its own flags.

    Args:
        doc: the script's docstring, shown by ``--help``.
        only_gpt: the technique supports only GPTs and Llamas.
        experts: the help shows the flags of a mixture of experts.
        only: names of the shared flags that have a meaning in the script (default: all), for one
            that does not train on a data set, such as pytorch_GRPO.py.
    """
    parser = cli.make_parser(doc)
    choice.add_all_flags(parser, only_gpt, experts, only)
    parser.only_gpt = only_gpt
    parser.experts = experts or not only_gpt
    return parser


def parse_args(parser: ArgumentParser) -> Settings:
    """Read the command line, fill in defaults that depend on device, model and data, and check all
    flags. Nobody changes the settings that this returns."""
    args = given = check_flags(read_flags(parser, Settings))
    if parser.only_gpt:
        choice.check_is_gpt(args)
    args = choice.resolve(args)
    if args.experts and not parser.experts:
        named = f"--experts {args.experts}" if given.experts else f"--model {args.model}"
        if args.model == "llama":
            named = f"--weights {args.weights}, a {choice.kind_of(args)}"
        fail(f"{named}: {this_script()}.py has no mixture; use pytorch_EP.py")
    return args


def prepare_process(args: Settings, several_launchers: bool = False) -> None:
    """Set up the process: end with the launcher, listen on loopback if all ranks share a machine,
    explain timeouts, report Ctrl-C in one line, check that output can be written, and set the
    default dtype.

    Args:
        several_launchers: whether it connects to processes of other launchers, too, which may be
            on other machines.
    """
    harness.world.die_with_launcher()
    one_machine = world().size == world().local_size and not several_launchers
    folder = local_folder(args.output_dir)
    if one_machine:
        harness.world.listen_on_loopback()
    script = Path(sys.argv[0]).absolute()
    records = folder / "flight_recorder"
    hangs.prepare(script, records, world().rank, world().size, one_machine)
    harness.world.report_interrupts()
    if args.profile_memory and args.device == "cpu":
        harness.world.keep_no_free_memory()
    if harness.world.is_first_here():
        cli.check_output_url(args.output_dir)
    if world().rank == 0:
        cli.check_writable(folder, f"--output-dir {folder}")
        cli.lock(folder, f"--output-dir {folder}")
    if args.double:
        torch.set_default_dtype(torch.float64)


def announce(
    args: Settings, device: torch.device, readers: int | None = None, replicas: int = 1
) -> None:
    """Compare the flags of all ranks; print script, device and settings; check the model's name,
    before loading data. All ranks call it, before they make groups that depend on flags.

    Args:
        readers: parts of the global batch; if there are more ranks, several process the same one.
        replicas: groups of ranks like these, between which the batch is divided, maybe unevenly.
    """
    hangs.listen(args.timeout)
    compare_flags(args)
    ranks = world().size
    readers = readers or world().size
    if replicas == 1 and args.batch_size % readers:
        near = max(args.batch_size // readers, 1) * readers
        batch = f"--batch-size {args.batch_size} is the global batch"
        fail(f"{batch} and is not divisible by {readers} ranks; use --batch-size {near}")
    if ranks > 1 and not dist.is_initialized():
        instead = f"start it with python {this_script()}.py, or use pytorch_torchrun_DDP.py"
        fail(f"{this_script()}.py is one process but was started as {ranks} ranks; {instead}")
    backend = f" ({dist.get_backend()})" if dist.is_initialized() else ""
    each = "per rank" if readers == ranks else f"for {ranks // readers} ranks together"
    batch = f"global batch {args.batch_size} = {readers} x {args.batch_size // readers} {each}"
    if replicas > 1:
        batch = f"global batch {args.batch_size} for {replicas} replicas of {ranks} ranks"
    task = f"{args.task.data.describe(args)}, dataset {args.dataset}"
    where = f"{ranks} x {device_name(device)}{backend}"
    print0(f"{this_script()}: {where}, {choice.kind_of(args)} {task}, {batch}")
    print0(f"settings: {cli.given_flags() or 'defaults'}{choice.describe_defaults(args)}")
    if not args.task.has_decoder:  # which has been checked
        args.task.models.check_model_name(args.model)


# ---------------------------------------------------------------------------- device and seeds


def get_device(args: Settings, local_rank: int | None = 0) -> torch.device:
    """GPU ``local_rank``, or the CPU; the ranks of a machine split its cores equally.

    Args:
        local_rank: ``None`` if it was not passed as a flag: launchers also set LOCAL_RANK.
    """
    if local_rank is None and not world().launched:
        launcher = "python -m torch.distributed.launch --nproc_per_node=2 --nnodes=1"
        fail(f"started without its launcher; use {launcher} {this_script()}.py")
    local_rank = int(os.environ["LOCAL_RANK"]) if local_rank is None else local_rank
    # Launchers set OMP_NUM_THREADS=1 for several ranks. Any other value is the user's own.
    if world().local_size > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, count_cores() // world().local_size))
    if args.device == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    ranks = world().local_size
    if max(local_rank + 1, 1 if harness.world.sees_one_gpu() else ranks) > gpus:
        why = f"{ranks} ranks need as many GPUs, and this machine has {gpus}"
        fail(f"{why}; use --nproc_per_node={gpus}, or --device cpu")
    torch.set_float32_matmul_precision("high")  # TF32, as in cuDNN's convolutions
    return torch.device("cuda", local_rank)


def get_dtype(args: Settings, device: torch.device) -> torch.dtype:
    """``--dtype``, if the device supports training in it."""
    dtype = getattr(torch, args.dtype)
    other = "float16" if args.dtype == "bfloat16" else "bfloat16"
    if device.type == "cuda" and dtype == torch.bfloat16:
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            fail(f"--dtype bfloat16: {device_name(device)} lacks it; use --dtype {other}")
    try:
        ones = torch.ones(1, 1, 1, 1, device=device, dtype=dtype, requires_grad=True)
        F.conv2d(ones, ones).sum().backward()
    except RuntimeError as error:
        fail(f"--dtype {args.dtype}: {device_name(device)} fails ({error}); use --dtype {other}")
    if device.type == "cpu" and dtype == torch.float16:
        print0("float16: many CPUs have no fast convolution for it; use --dtype bfloat16")
    return dtype


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seed weights and dropout. Data order and augmentation have their own generators."""
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = not deterministic  # pays off, as batches have one shape
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


# ----------------------------------------------------------------- datasets, loader and model


def make_datasets(args: Settings) -> tuple[TaskData, TaskData]:
    """The training and the evaluation set, of the same classes, the same on every rank. Resolves
    ``auto``. All ranks call it."""
    train_set, eval_set = args.task.data.make_datasets(args)
    data.compare_data(args, train_set, eval_set)
    return train_set, eval_set


def make_loader(
    args: Settings, dataset: TaskData, batch_size: int, sampler=None, drop_last: bool = False
) -> DataLoader:
    """A loader of batches, for :meth:`Run.batches` and :func:`evaluate`: uint8 images
    ``[batch_size, 3, side, side]`` and int64 labels; or, for text and for images that are on the
    GPU, only the indices of samples.

    Args:
        batch_size: of one rank.
        sampler: a ``Sampler``; ``None``: in the order of the dataset.
        drop_last: drop an incomplete last batch, as in training.
    """
    if drop_last and len(dataset) < args.batch_size:
        few = f"{len(dataset)} training {dataset.units}"
        fail(f"--batch-size {args.batch_size} is more than the {few}; use a smaller one")
    workers = dataset.workers if args.workers is None else args.workers
    if workers:
        atexit.register(data.kill_loaders)
    elif args.device == "cuda":
        dataset.keep_on_gpu()
    return DataLoader(
        dataset,
        batch_sampler=data.Batches(sampler or SequentialSampler(dataset), batch_size, drop_last),
        collate_fn=tuple,  # the dataset returns whole batches
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=args.device == "cuda",
        worker_init_fn=data.ignore_signals,
        generator=torch.Generator(),  # draws a seed per epoch, without affecting dropout
    )


def make_model(args: Settings, classes: list[str], channels_last: bool = True) -> nn.Module:
    """``--model`` with ``--weights``, on the CPU.

    Args:
        classes: class names, or the vocabulary.
        channels_last: on a GPU, use channels-last weights, like the input: see :func:`to_input`.
            On a CPU this would slow down DDP's backward and the fused optimizers.
    """
    model = args.task.models.make_model(args, classes)
    if args.deterministic and args.device == "cuda" and args.task is choice.IMAGES:
        args.task.models.check_deterministic(args.model, model)
    if channels_last and args.device == "cuda":
        return model.to(memory_format=torch.channels_last)
    # DDP warns about 1x1 convolutions, for which both memory formats are the same.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    return model


# ---------------------------------------------------------------------- optimizer and schedule


def make_optimizer(args: Settings, model: nn.Module, fused: bool = True) -> Optimizer:
    """Create ``--optimizer`` for a plain, wrapped or sharded model.

    Args:
        fused: use the fused kernel, also on a CPU; PyTorch has none for SGD on DTensors. Such a
            step a GradScaler can skip without synchronizing, and without a copy of all gradients.
    """
    kind, options = optimizer_class(args)
    groups = []
    old = torch.__version__ < "2.14"  # fused SGD of 16 bits is wrong on CPUs (pytorch#191763)
    for group in parameter_groups(args, model):
        for sharded in (False, True):  # TP has both, and a fused step takes only one of them
            if some := [p for p in group["params"] if isinstance(p, DTensor) == sharded]:
                groups.append(group | {"params": some})
                wrong = old and any(p.itemsize < 4 and not p.is_cuda for p in some)
                fused &= args.optimizer == "adamw" or not (sharded or wrong)
    optimizer = kind(groups, **options | {"fused": fused or None})  # None: foreach, on a GPU
    if fused and options.get("momentum"):  # uninitialized, if GradScaler skips the first step
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def optimizer_class(args: Settings) -> tuple[type[Optimizer], dict]:
    """The class and the options for :func:`make_optimizer`."""
    options = {"lr": args.lr, "weight_decay": args.weight_decay, "fused": True}
    if args.optimizer == "adamw":
        return torch.optim.AdamW, options
    return torch.optim.SGD, options | {"momentum": args.momentum}


def parameter_groups(args: Settings, model: nn.Module) -> list[dict]:
    """Parameter groups: for a GPT, norms and embeddings are separate, without weight decay."""
    return args.task.models.parameter_groups(model)


class Plateau(ReduceLROnPlateau):
    """Divides the learning rate by ten after two evaluations without improvement.
    ``step()`` without a loss does nothing; :meth:`Run.report` passes the loss over all ranks."""

    def step(self, loss: float | None = None) -> None:
        if loss is not None:
            super().step(loss)


def make_scheduler(args: Settings, optimizer: Optimizer, steps_per_epoch: int) -> LRScheduler:
    """``--schedule``, stepped after every step. By default: linear warm-up (Goyal et al. 2017,
    arXiv:1706.02677), then half a cosine down to 0 (Loshchilov and Hutter, arXiv:1608.03983)."""
    if args.schedule == "plateau":
        return Plateau(optimizer, factor=0.1, patience=1)
    total = total_steps(args, steps_per_epoch)
    warmup = choice.warmup_steps(args, total)

    def factor(step: int) -> float:
        if args.schedule == "none":
            return 1.0
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, total - warmup))

    return LambdaLR(optimizer, factor)


# ------------------------------------------------------------------------ evaluation, model.pt


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: DataLoader, device: torch.device, cut=lambda labels: labels,
    head=lambda out: out,
) -> dict[str, float]:  # fmt: skip
    """Loss and accuracy over the whole set, every sample counted once at any world size.

    For equally many forwards on all ranks, ``DistributedSampler`` repeats samples. The k-th of part
    s of n has index ``s + k * n`` and counts up to the end of the set. Returns on every rank: mean
    cross-entropy ``loss``, ``accuracy`` (0 to 1), number of ``samples``, or of predicted tokens.

    Args:
        model: plain or wrapped. Returns ``None`` on ranks of a pipeline that have no logits.
        loader: in order; on several ranks with ``DistributedSampler(shuffle=False)``.
        cut: a batch's labels to those for which this rank has logits, if ranks share sequences.
        head: makes logits of outputs ``[tokens, width]``.
    """
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct answers, labels
    seen = 0
    share, of = data.share_of(loader)
    dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
    for batch in data.batches_of(loader):
        images, labels = loader.dataset.prepare_evaluation(batch, device, dtype)
        numbers = share + of * torch.arange(seen, seen + len(labels), device=device)
        real = (numbers < len(loader.dataset)).view(-1, *[1] * (labels.ndim - 1)) & (labels >= 0)
        seen += len(labels)
        if (out := model(images)) is None:
            continue
        # Some labels at a time, of up to half a GiB of logits, as a vocabulary may be large
        parts = 1 + labels.numel() * len(loader.dataset.classes) // 2**27
        flat = out.flatten(0, -2), cut(labels).flatten(), cut(real).flatten()
        for some, answers, counted in zip(*(t.chunk(parts) for t in flat), strict=True):
            some = whole(head(some)).to(torch.get_default_dtype())
            losses = F.cross_entropy(some, answers, reduction="none") * counted
            correct = (some.argmax(1) == answers) & counted
            sums += torch.stack([losses, correct, counted]).sum(1, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(sums)
    loss, correct, samples = sums.tolist()
    copies, rest = divmod(samples, loader.dataset.count_labels())  # ranks may have the same batch
    if rest or not copies:
        raise RuntimeError(f"evaluated {samples:.0f} of {loader.dataset.count_labels()} samples")
    return {"loss": loss / samples, "accuracy": correct / samples, "samples": int(samples / copies)}


def save_model(args: Settings, state: dict[str, Tensor]) -> None:
    """Write ``model.pt``, in fp32 (float64 with ``--double``), and further files of a Llama."""
    dtype = torch.get_default_dtype()
    kept = {k: v.to("cpu", dtype if v.is_floating_point() else None) for k, v in state.items()}
    kept = {name: tensor.contiguous() for name, tensor in kept.items()}
    path = local_folder(args.output_dir) / "model.pt"
    with delivery(path):
        save_file(kept, path)
        if args.task.has_decoder:
            args.task.models.write_folder(args, kept, path.parent)
