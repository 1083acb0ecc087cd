"""A script's own training step, run by this process as one rank, on fake tensors: they have a shape
and a size in memory, but no data. Nothing is computed, sent or written.

The script is the one that trains. It gets a data set of shapes, and instead of ``common.Run`` one
that ends it after two steps: the first allocates persistent memory, the second is counted.
"""

import contextlib
import dataclasses
import gc
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor

from estimator import fakes, gpu_rules
from estimator.live_bytes import LiveBytes
from estimator.own_model import OwnModel, let_losses_pass

STEPS = 2
ROOT = Path(__file__).resolve().parents[1]
NEEDS_NUMBERS = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)


class Finished(BaseException):
    """The last step has been taken."""


class Job:
    """Stands in for a data set: a length, classes, and batches of the right shape.

    Args:
        classes: how many, or tokens of a vocabulary.
        own: a model of the user's, in the place of ``--model``.
        order: of images and, where the script lets it be, of a model's weights in memory.
    """

    unit, units = "sample", "samples"

    def __init__(self, classes: int | None, own: OwnModel | None, order):
        self.n_classes, self.own, self.order = classes, own, order

    def make_datasets(self, args) -> tuple["Job", "Job"]:
        from jobs import decoder

        self.args, self.is_gpt = args, decoder.is_decoder(args.model)
        reviews = args.context is not None and not self.is_gpt
        # Shakespeare's characters; good and bad; CIFAR-10's
        n = self.n_classes or (65 if self.is_gpt else 2 if reviews else 10)
        if self.is_gpt and not self.n_classes:
            n = decoder.size_of(args).vocabulary or n
        self.classes = [chr(33 + i) for i in range(n)]
        return self, self

    def __len__(self) -> int:
        return 10 * self.args.batch_size

    def make_model(self, args, classes, channels_last: bool = True) -> nn.Module:
        """``--model``, its weights in the order that they have on a GPU; or the user's own, of
        which the answer to a batch of two tells what labels look like. Not on the meta device: a
        fake tensor has memory and no numbers already, which is what to_empty() would make."""
        if not self.own:
            import jobs.choice

            models = jobs.choice.models_of(args)
            make = getattr(models, "make_shapes", models.make_model)
            with torch.device("cpu"):
                model = make(args, classes)
            return model.to(memory_format=self.order) if channels_last else model
        with torch.device("cpu"), torch.no_grad():
            model = self.own.build()
            logits = model(self.inputs(2, None))
        self.label_shape = (*logits.shape[:1], *logits.shape[2:])
        return model

    def inputs(self, n: int, dtype: torch.dtype | None) -> Tensor:
        if self.own and self.own.batch is not None:
            return self.own.make_batch(n, dtype)
        if self.args.context is not None:
            return torch.zeros(n, self.args.context, dtype=torch.int64)
        images = torch.zeros(n, 3, self.args.image_size, self.args.image_size, dtype=dtype)
        return images.contiguous(memory_format=self.order)

    def batch(self, n: int, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        inputs = self.inputs(n, dtype)
        shape = (n, *inputs.shape[1:]) if self.is_gpt else (n,)
        if self.own:
            shape = (n, *self.label_shape[1:])
        return inputs, torch.zeros(shape, dtype=torch.int64)

    def describe(self) -> str:
        """What a sample is: of the sizes, also those that nobody gave."""
        if self.own and self.own.batch is not None:
            return f"inputs of {self.own.describe_sample()}"
        if self.args.context is not None:
            return f"{self.args.context} tokens"
        return f"images of {self.args.image_size}x{self.args.image_size}"


class Loader:
    def __init__(self, args, job: Job, batch_size: int, *_, **__):
        self.job, self.batch_size = job, batch_size

    def __len__(self) -> int:
        return STEPS


class ShortRun:
    """Stands in for :class:`harness.run.Run`, as far as a script uses it before it ends."""

    start_epoch, epochs = 0, 1
    total_steps: int
    live: LiveBytes

    def __init__(self, args, device, train_loader: Loader, gpus: int = 1):
        self.args, self.step, self.held = args, 0, {}

    def load_snapshot(self, model: nn.Module, optimizer, scheduler=None, **others) -> None:
        gc.collect()  # of blocks that are another stage's
        self.optimizer = getattr(optimizer, "optim", optimizer)  # of ZeroRedundancyOptimizer
        groups = [*optimizer.param_groups, *self.optimizer.param_groups]
        self.parameters = [*model.parameters(), *(p for group in groups for p in group["params"])]
        self.live.mark([*self.parameters, *model.buffers()], "parameters")
        # Of the outer one: ZeroRedundancyOptimizer sends after its inner one has stepped.
        optimizer.register_step_pre_hook(self.before_update)
        optimizer.register_step_post_hook(self.after_update)
        if self.total_steps == 1:  # what it keeps has to be there already
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()

    load_sharded_snapshot = load_snapshot

    def load_engine(self, engine) -> dict:
        """:meth:`load_snapshot` of DeepSpeed, which keeps things in places of its own."""
        from libraries import deepspeed_engine

        self.load_snapshot(engine.module, engine.basic_optimizer)
        self.held = deepspeed_engine.track_tensors(self, engine)
        return self.held

    def before_update(self, *_) -> None:
        for name, tensors in self.held.items():
            self.live.mark(tensors, "gradients" if "gradient" in name else "parameters")
        self.live.mark([p.grad for p in self.parameters if p.grad is not None], "gradients")
        self.live.kind = "update"
        self.live.begin_phase()

    def after_update(self, *_) -> None:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        self.live.mark(states, "optimizer")
        self.live.kind = "activations"

    def batches(self, loader: Loader, epoch: int, dtype: torch.dtype | None = None):
        while self.step < self.total_steps:
            self.step += 1
            if self.step == self.total_steps:
                self.live.begin_step()
            self.live.kind = "input"
            batch = loader.job.batch(loader.batch_size, dtype)
            self.live.kind = "activations"
            yield batch
        raise Finished

    def log(self, loss: Tensor) -> None:
        pass

    def snapshot_is_due(self) -> bool:
        return False


def run_script(
    words: list[str],
    ranks: int | None,
    classes: int | None = None,
    own: OwnModel | None = None,
    block: int = 512,
    steps: int = STEPS,
    as_on_a_gpu: bool = True,
    rank: int = 0,
    layers: int | None = None,
) -> tuple[LiveBytes, str]:
    """Take steps of a script and return what was counted in the last one, and what a sample was.

    Args:
        words: the script and its flags.
        ranks: see :func:`prepare`.
        classes: of the data, or tokens of the vocabulary.
        own: makes the model that takes the place of ``--model``.
        block: see :class:`LiveBytes`.
        steps: of which the last one counts. Of one, the optimizer has made what lasts before it.
        as_on_a_gpu: see :func:`prepare`; and images with their channels last.
        rank: see :func:`prepare`.
        layers: of a decoder, in the place of those that it has.

    Raises:
        SystemExit: the script reported a mistake.
        NEEDS_NUMBERS: the model has an operation for which tensors need numbers: ``error.func``.
    """
    prepare(ranks, as_on_a_gpu, rank)
    import common
    from harness import command_line
    from jobs import decoder
    from libraries import deepspeed_engine

    order = torch.channels_last if as_on_a_gpu else torch.contiguous_format
    job, live = Job(classes, own, order), LiveBytes(block)
    common.Run, ShortRun.live, ShortRun.total_steps = ShortRun, live, steps
    common.make_datasets, common.make_loader = job.make_datasets, Loader
    common.make_model = job.make_model
    nn.Module.to_empty = lambda module, **_: module
    common.init_weights = decoder.init_weights = lambda *_: None  # fake tensors have no data
    deepspeed_engine.load_snapshot = ShortRun.load_engine
    if layers:
        find = decoder.size_of_name
        decoder.size_of_name = lambda *name: dataclasses.replace(find(*name), layers=layers)
    if own:
        let_losses_pass()
    if ranks is not None:
        common.make_store = lambda args: None
        fakes.stand_in_for_deepspeed(deepspeed_engine)
    command_line.check_writable = lambda folder, flag: None  # nothing is written
    command_line.LOCAL_RANK = 0  # of processes side by side each is a run of its own
    sys.argv = [*words, "--device", "cpu"]
    with counting(live, ranks):
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    return live, job.describe()


def prepare(ranks: int | None, as_on_a_gpu: bool = True, rank: int = 0) -> None:
    """Put the stand-ins in their places. This process is of no other use afterwards: neither
    PyTorch nor our modules are as they were.

    Args:
        ranks: this process becomes one of so many, and of none started by a launcher if it is 0.
            ``None`` has real tensors and the real other ranks, and this process is one of them.
        as_on_a_gpu: optimizers and autocast do what they do there by default.
        rank: which one it becomes.
    """
    if as_on_a_gpu:
        gpu_rules.stand_in_for_a_gpu()
    if ranks is not None:
        become_rank(rank, ranks)
        fakes.stand_in_for_ranks()
        fakes.stand_in_for_numbers()


@contextlib.contextmanager
def counting(live: LiveBytes, ranks: int | None) -> Iterator[None]:
    """Count within, up to :class:`Finished`, what is made in forward and what in backward."""
    call_backward = torch.autograd.backward  # also of Tensor.backward, and of pipelines

    def backward(*args, **kwargs):
        before, live.kind = live.kind, "temporary"
        live.begin_phase()
        call_backward(*args, **kwargs)
        live.begin_phase()
        live.kind = before

    torch.autograd.backward = backward
    numberless = contextlib.nullcontext() if ranks is None else fake_tensor.FakeTensorMode()
    with numberless, live, contextlib.suppress(Finished):
        yield


def become_rank(rank: int, ranks: int) -> None:
    """Set what a launcher would, and have our modules read it."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    if ranks:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        os.environ["MASTER_PORT"] = "29500"
    ours = {"common", "harness", "jobs", "libraries"}
    for name in [name for name in sys.modules if name.split(".")[0] in ours]:
        del sys.modules[name]
