"""A script's own training step, run by this process as one rank, on fake tensors: they have a shape
and a size in memory, but no data. Nothing is computed, sent or written.

The script is the one that trains. It gets a data set with only shapes, and a ``common.Run`` that
ends after two steps: the first allocates persistent memory, the second is counted.
"""

import contextlib
import dataclasses
import gc
import io
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import harness.world
from estimator import fakes, gpu_rules
from estimator.live_bytes import LiveBytes, storages_of
from estimator.places import own_traceback, place_of
from estimator.sent import Message
from harness.data import TaskData
from jobs.sizes import is_decoder

STEPS = 2
ROOT = Path(__file__).resolve().parents[1]
NEEDS_NUMBERS = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)


def why_numbers(error: Exception) -> str:
    """What a user can do about one of ``NEEDS_NUMBERS``."""
    if isinstance(error, fake_tensor.UnsupportedOperatorException):
        return f"{error.func} has no rule for fake tensors; call another operation there"
    if isinstance(error, fake_tensor.DynamicOutputShapeException):
        what = "the shape of a result depends on"
        use = "use a fixed shape (torch.where with zeros)"
    else:
        what = "the model branches on"
        use = "use torch.where or torch.cond"
    what = f"{what} the values of a tensor ({error.func}), which fake tensors do not have"
    return f"{what}; {use}"


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """What a rank takes and sends, or why that is not known."""

    kinds: dict[str, int] = dataclasses.field(default_factory=dict)  # bytes at the peak, by kind
    host: int = 0  # bytes in CPU memory
    messages: Sequence[Message] = ()  # communication of a step
    inputs: str = ""  # of this rank
    mistake: str = ""  # why there is no prediction, in one line
    error: str = ""  # the traceback, if that was an error of the user's or a bug

    @property
    def peak(self) -> int:
        return sum(self.kinds.values())

    @property
    def sent(self) -> float:
        """Bytes that a rank sends per step."""
        return sum(message.sent for message in self.messages)


@contextlib.contextmanager
def explaining(found: Outcome, of_exit: Callable[[SystemExit, str], str]) -> Iterator[None]:
    """Print nothing; what ends the run is the mistake of ``found``. ``of_exit``: gets what a script
    that exits printed on stderr, and returns the mistake."""
    complaint = io.StringIO()
    try:
        with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(complaint):
            with contextlib.redirect_stdout(nothing):
                yield
    except NEEDS_NUMBERS as error:
        found.mistake = f"{place_of(error)}{why_numbers(error)}"
    except SystemExit as error:
        found.mistake = of_exit(error, complaint.getvalue())
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        found.mistake = place_of(error) + said
        found.error = own_traceback(error)


class Finished(BaseException):
    """Raised after the last step."""


class Job:
    """Stands in for a data set: a length, ``classes`` (or tokens of the vocabulary), and batches of
    the right shape. ``order`` is the memory format of images and, if the script allows it, of the
    model's weights."""

    def __init__(self, classes: int | None, order):
        self.n_classes = classes
        self.order = order
        self.density = 1.0

    def make_datasets(self, args) -> tuple["Job", "Job"]:
        self.args = args
        self.is_gpt = is_decoder(args.model)
        if self.n_classes:
            n = self.n_classes
        elif self.is_gpt:
            n = args.task.models.size_of(args).vocabulary or 65  # Shakespeare's characters
        elif args.context is not None:
            n = 2  # good and bad reviews
        else:
            n = 10  # CIFAR-10's
        self.classes = [chr(33 + i) for i in range(n)]
        return self, self

    def __len__(self) -> int:
        return 10 * self.args.batch_size

    def make_model(self, args, classes, channels_last: bool = True) -> nn.Module:
        """``--model``, with the memory format of a GPU. Not on the meta device: a fake tensor is
        already allocated without data, as to_empty() would do."""
        models = args.task.models
        make = models.make_shapes if self.is_gpt else models.make_model
        with torch.device("cpu"):
            model = make(args, classes)
        self.made = [*model.parameters()] if torch.get_default_device().type == "meta" else []
        return model.to(memory_format=self.order) if channels_last else model

    def to_empty(self, module: nn.Module) -> nn.Module:
        """Allocate nothing but the module: parameters that it had on the meta device take no
        memory, even if one is alive, such as the last one of a loop over them."""
        kept = storages_of([*module.parameters(), *module.buffers()])
        for storage in {*storages_of(self.made)}.difference(kept):
            storage.resize_(0)
        return module

    def batch(self, n: int, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        if self.args.context is None:
            images = torch.zeros(n, 3, self.args.image_size, self.args.image_size, dtype=dtype)
            images = images.contiguous(memory_format=self.order)
            return images, torch.zeros(n, dtype=torch.int64)
        shape = (n, self.args.context) if self.is_gpt else (n,)
        rows = torch.zeros(n, *self.args.row, dtype=torch.int64)
        return rows, torch.zeros(shape, dtype=torch.int64)

    loss = TaskData.loss

    def prepare_evaluation(self, n: int, device, dtype) -> tuple[Tensor, Tensor]:
        return self.batch(n, dtype)

    def describe(self) -> str:
        """Describe a sample, including sizes that are defaults."""
        if self.args.context is not None:
            return f"{self.args.context} tokens"
        return f"images of {self.args.image_size}x{self.args.image_size}"


class Loader:
    def __init__(self, args, job: Job, batch_size: int, sampler=None, drop_last: bool = False):
        self.dataset = job
        self.batch_size = batch_size
        self.batch_sampler = SimpleNamespace(sampler=sampler)

    def __iter__(self) -> Iterator[int]:
        """One batch of the evaluation."""
        yield self.batch_size
        raise Finished

    def __len__(self) -> int:
        return STEPS


class ShortRun:
    """Stands in for :class:`harness.run.Run`, as far as a script uses it before it ends."""

    epochs_left = staticmethod(lambda: [0])
    total_steps: int
    live: LiveBytes
    sent: int  # messages of the measured step
    report = None  # is looked up, but the evaluation does not end

    def __init__(self, args, device, train_loader: Loader, gpus: int = 1):
        self.args = args
        self.step = 0

    def resume_or_exit(self, model: nn.Module, optimizer, scheduler=None, **others) -> None:
        gc.collect()  # frees the blocks of other stages
        self.optimizer = getattr(optimizer, "optim", optimizer)  # of ZeroRedundancyOptimizer
        groups = [*optimizer.param_groups, *self.optimizer.param_groups]
        self.parameters = [*model.parameters(), *(p for group in groups for p in group["params"])]
        self.live.mark([*self.parameters, *model.buffers()], "parameters")
        # Of the outer one: ZeroRedundancyOptimizer broadcasts after the inner step.
        optimizer.register_step_pre_hook(self.before_update)
        optimizer.register_step_post_hook(lambda *_: self.live.end_update(self.optimizer))
        if any(getattr(self.args, name, None) for name in ("chunks", "loss_chunks")):
            model.blocks[-1].register_forward_hook(self.after_blocks)
        if self.total_steps == 1:  # its state must exist already
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()

    def after_blocks(self, block: nn.Module, given, out: Tensor) -> None:
        """Blocks and chunks of the loss are separate phases: with both in one, its middle would be
        in a block of a model with many blocks, and in a chunk of one with few."""
        if torch.is_grad_enabled():
            self.live.end_phase("forward")
            out.register_hook(lambda gradient: self.live.end_phase("backward"))

    def load_engine(self, engine) -> None:
        """:meth:`resume_or_exit` for DeepSpeed, which has made its shards before."""
        self.resume_or_exit(engine.module, engine.basic_optimizer)
        if hasattr(engine.optimizer, "grad_partitions_flat_buffer"):  # stage 3
            self.live.mark([engine.optimizer.grad_partitions_flat_buffer], "gradients")

    def before_update(self, *_) -> None:
        self.live.begin_update(self.parameters)
        if self.live.before == "temporary":  # a hook updates in backward
            self.live.name_phase("backward and optimizer")
        else:  # what follows backward, such as clipping, belongs to the optimizer
            self.live.name_phase("optimizer")
            self.live.begin_phase("optimizer")

    def batches(self, loader: Loader, epoch: int, dtype: torch.dtype | None = None):
        while self.step < self.total_steps:
            self.step += 1
            if self.step == self.total_steps:
                self.live.begin_step()
            self.live.kind = "input"
            batch = loader.dataset.batch(loader.batch_size, dtype)
            self.live.kind = "activations"
            yield batch
        type(self).sent = len(self.live.messages)
        self.live.begin_phase("evaluation")  # which may need more

    def log(self, loss: Tensor) -> None:
        pass

    def snapshot_is_due(self) -> bool:
        return False


def run_script(
    words: list[str],
    ranks: int | None,
    classes: int | None = None,
    block: int = 512,
    steps: int = STEPS,
    as_on_a_gpu: bool = True,
    rank: int = 0,
    layers: int | None = None,
    to_one: bool = False,
) -> tuple[LiveBytes, str]:
    """Run steps of a script; return the measurement of the last one, and a description of a sample.

    Args:
        words: the script and its flags.
        ranks, as_on_a_gpu, rank: see :func:`prepare`; images are also channels-last as on a GPU.
        classes: of the data, or tokens of the vocabulary.
        block: see :class:`LiveBytes`.
        steps: number of steps; the last is measured. If it is 1, the optimizer state exists before.
        layers: replaces the number of layers of a decoder.
        to_one: all tokens are routed to the experts of this rank; otherwise equally to all.

    Raises:
        SystemExit: the script reported an error.
        NEEDS_NUMBERS: the model has a data-dependent operation: ``error.func``.
    """
    prepare(ranks, as_on_a_gpu, rank)
    import common
    from harness import cli
    from jobs import language_models
    from libraries import deepspeed_engine

    job = Job(classes, torch.channels_last if as_on_a_gpu else torch.contiguous_format)
    live = LiveBytes(block)
    ShortRun.live = live
    ShortRun.total_steps = steps
    common.Run = ShortRun
    common.make_datasets = job.make_datasets
    common.make_loader = Loader
    common.make_model = job.make_model
    nn.Module.to_empty = lambda module, **_: job.to_empty(module)
    common.init_weights = lambda *_: None  # fake tensors have no data
    language_models.init_weights = lambda *_: None
    deepspeed_engine.resume_or_exit = ShortRun.load_engine
    if layers:
        find = language_models.size_of_name
        language_models.size_of_name = lambda *name: dataclasses.replace(find(*name), layers=layers)
    if ranks is not None:
        common.make_store = lambda args: None
        common.hangs.listen = lambda timeout: None
        common.compare_flags = lambda args: None
        fakes.stand_in_for_deepspeed(deepspeed_engine)
        fakes.stand_in_for_router(to_one)
    cli.check_writable = cli.lock = lambda folder, flag: None  # nothing is written
    sys.argv = [*words, "--device", "cpu"]
    with counting(live, ranks):
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    del live.messages[ShortRun.sent :]  # those of the evaluation
    return live, job.describe()


def prepare(ranks: int | None, as_on_a_gpu: bool = True, rank: int = 0) -> None:
    """Install the replacements. The process cannot be used for anything else afterwards, as PyTorch
    and our modules are patched.

    Args:
        ranks: world size of the fake process group; 0: without a launcher. ``None``: use real
            tensors and the real other ranks.
        as_on_a_gpu: optimizers and autocast behave as on a GPU.
        rank: rank of this process.
    """
    if as_on_a_gpu:
        gpu_rules.stand_in_for_a_gpu()
    if ranks is not None:
        become_rank(rank, ranks)
        fakes.stand_in_for_ranks()
        fakes.stand_in_for_numbers()


@contextlib.contextmanager
def counting(live: LiveBytes, ranks: int | None, numbers=None) -> Iterator[None]:
    """Measure until :class:`Finished`, separately for forward and backward. ``numbers``: a mode
    between those of fake tensors and of the measurement."""
    call_backward = torch.autograd.backward  # also used by Tensor.backward and pipelines
    make = saved_tensors_hooks.__init__  # what they make of activations is on the CPU

    def backward(*args, **kwargs):
        live.end_phase("forward")
        with live.of_kind("temporary"):
            call_backward(*args, **kwargs)
        live.end_phase("backward")  # then the next micro-batch's forward or the optimizer

    def make_hooks(hooks, pack, unpack):
        def pack_on_cpu(tensor):
            with live.of_kind("offloaded"):
                return pack(tensor)

        def copy_back(packed):
            return unpack(packed).clone()  # on one device, save_on_cpu's unpack copies nothing

        if type(hooks) is save_on_cpu:
            make(hooks, pack_on_cpu, copy_back)
        elif type(hooks) is saved_tensors_hooks:
            make(hooks, pack_on_cpu, unpack)
        else:  # those of torch.utils.checkpoint keep tensors on the GPU
            make(hooks, pack, unpack)

    torch.autograd.backward = backward
    saved_tensors_hooks.__init__ = make_hooks
    fake = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    numberless = contextlib.nullcontext() if ranks is None else fake
    with numberless, numbers or contextlib.nullcontext(), live, contextlib.suppress(Finished):
        yield


def become_rank(rank: int, ranks: int) -> None:
    """Set the launcher's environment variables, and let our modules read them anew: this process
    may be forked from one that has already read its own."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    if ranks:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        os.environ["MASTER_PORT"] = "29500"
    harness.world.parent.cache_clear()
    harness.world.world.cache_clear()
