"""The task of ``--module``: the user's module, trained with the user's loss on the user's data."""

import contextlib
import functools
import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, default_collate

from harness.cli import fail
from harness.data import TaskData, Unreadable, batches_of, how_many, share_of
from harness.settings import fill, replace
from harness.state import check_weights
from harness.world import print0, world
from jobs.classifiers import blocks_of, decay_matrices
from jobs.contract import Contract, batched, load_function, to_floating
from libraries.weights import load

STEPS = 20  # of an epoch without a data set
parameter_groups = decay_matrices


def resolve(args):
    """Fill in defaults of the task, and check what needs no data."""
    if args.model not in (None, "gpt", args.module):
        fail(f"--module {args.module} replaces --model {args.model}; leave one of them out")
    args = fill(replace(args, model=args.module, dataset="own"), optimizer="adamw")
    adamw = args.optimizer == "adamw"
    return fill(args, lr=0.001 if adamw else 0.05, weight_decay=0.01 if adamw else 0.0005)


def describe(args) -> str:
    return f"with {args.optimizer}, lr {args.lr:g}, weight decay {args.weight_decay:g}"


@contextlib.contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seed the random numbers of NumPy, of Python, and until the end of PyTorch on the CPU."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        yield


@functools.cache
def contract_of(given: str, seed: int) -> Contract:
    """What the function returns, called once per process, with the same seed on every rank."""
    with torch.device("cpu"), seeded(seed):
        contract = Contract(load_function(given)(), given)
        found = {split: contract.data(split) for split in ("train", "eval")}
    contract.parts = contract.parts._replace(**found)
    if (train := found["train"]) is not None:
        try:
            contract.bind(OwnData(contract, train, 2, seed)[0, min(1, len(train) - 1)])
        except Unreadable as error:
            fail(error)
    elif contract.parts.batch is None:
        contract.refuse("returned neither a batch nor a data set")
    return contract


# ------------------------------------------------------------------------------------------- data
class Batch(OrderedDict):
    """What the module gets: ``inputs``, the user's batch; ``samples``, the global batch size; and
    ``labels``, int64 ``[n]``, the number of its labels, for each sample of this part.

    An OrderedDict, because DataParallel scatters it, FSDP casts its floating-point tensors, and
    libraries move it."""

    def __len__(self) -> int:
        return len(self["labels"])

    @property
    def device(self) -> torch.device:
        return self["labels"].device

    def to(self, device) -> "Batch":
        return Batch(pytree.tree_map_only(Tensor, lambda t: t.to(device), dict(self)))

    def some(self, index) -> "Batch":
        return Batch(some(dict(self), len(self), index))

    def tensor_split(self, parts: int) -> list["Batch"]:
        return [self.some(index) for index in torch.arange(len(self)).tensor_split(parts)]


def some(tree: Any, n: int, index) -> Any:
    """Some of n samples: of each tensor whose first dimension is n."""
    return pytree.tree_map_only(Tensor, lambda t: t[index] if t.shape[:1] == (n,) else t, tree)


class OwnData(TaskData):
    """The first n samples of the user's data set; without one, those of the example, repeated. What
    is random in them depends on the seed and on the indices of the batch, as a resumed run has."""

    name, classes = "own", []

    def __init__(self, contract: Contract, source: Any, n: int, seed: int):
        self.contract, self.source, self.n, self.seed = contract, source, n, seed

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, indices: list[int]) -> Any:
        """A collated batch."""
        if self.source is None:
            n = len(batched(self.contract.parts.batch)[0])
            return some(self.contract.parts.batch, n, torch.tensor(indices) % n)
        collate, get = self.contract.collate, getattr(self.source, "__getitems__", None)
        with seeded(self.seed, *indices):
            samples = get(indices) if get else [self.source[i] for i in indices]
            try:
                return collate(samples)
            except (RuntimeError, TypeError, KeyError) as error:
                if collate is not default_collate:
                    raise
                why = " ".join(str(error).split())[:200]
        why = f"its samples do not make a batch ({why})"
        use = "pad them to one shape, or return collate, a function of a list of samples"
        raise Unreadable(f"--module {self.contract.given}: {why}; {use}")

    def __getitems__(self, indices: list[int]) -> tuple[Any, Tensor]:
        return self[indices], torch.tensor(indices)

    def loss(self, logits: Tensor, labels: Batch) -> Tensor:
        """The module returns losses, not logits."""
        return logits.mean()

    def prepare_evaluation(self, batch, device, dtype=None) -> tuple[Batch, Batch]:
        """All tensors on the device, floating point in the default dtype."""
        n, inputs = len(batch[1]), to_floating(batch[0], device=device)
        batch = Batch(inputs=inputs, samples=n, labels=torch.full((n,), n, device=device))
        return batch, batch

    def prepare(self, batch, device, seed, epoch, step, dtype=None, share=(0, 1)):
        """The same. Ranks may have different numbers of labels, so these are summed: the mean over
        the ranks becomes the mean over all labels of the global batch."""
        batch, _ = self.prepare_evaluation(batch, device)
        if self.contract.counts:
            total = self.contract.count(batch["inputs"], len(batch)).clone()
            if share[1] > 1:
                dist.all_reduce(total)
            batch["samples"], batch["labels"] = len(batch) * share[1], total.expand(len(batch))
        return batch, batch

    def example(self, n: int) -> Batch:
        return self.prepare_evaluation(self.__getitems__([0] * n), "cpu")[0]

    @torch.no_grad()
    def evaluate(self, model: nn.Module, loader: DataLoader, device: torch.device) -> dict:
        """See :func:`common.evaluate`. The accuracy is ``None`` if the loss is not of logits."""
        model.eval()
        sums, seen = torch.zeros(3, dtype=torch.float64, device=device), 0
        share, of = share_of(loader)
        for batch in batches_of(loader):
            batch, _ = self.prepare_evaluation(batch, device)
            real = len(range(share + of * seen, min(self.n, share + of * (seen + len(batch))), of))
            seen += len(batch)
            sums += model(batch.some(slice(max(real, 1)))).sum(0) * bool(real)
        if dist.is_initialized():
            dist.all_reduce(sums)
        loss, correct, labels = sums.tolist()
        if not labels:
            self.contract.refuse("returned an evaluation set without labels that count")
        accuracy = None if correct != correct else correct / labels
        return {"loss": loss / labels, "accuracy": accuracy, "samples": round(labels)}


def make_datasets(args) -> tuple[OwnData, OwnData]:
    """The training and the evaluation set."""
    contract = contract_of(args.module, args.seed)
    train, held_out, seed = contract.parts.train, contract.parts.eval, args.seed
    if train is None:
        n = len(batched(contract.parts.batch)[0])
        sizes = args.train_samples or STEPS * args.batch_size, n
        print0(f"data: no data set; {n} samples, those of the batch in {args.module}, are repeated")
    else:
        held_out = train if held_out is None else held_out
        sizes = how_many(args, "train", len(train)), how_many(args, "eval", len(held_out))
        same = " (the training set: no eval was returned)" if held_out is train else ""
        print0(f"data: own, {sizes[0]:,} training and {sizes[1]:,} evaluation samples{same}")
    return OwnData(contract, train, sizes[0], seed), OwnData(contract, held_out, sizes[1], seed)


# ------------------------------------------------------------------------------------------ module
def make_model(args, classes: list[str]) -> nn.Module:
    """The user's module, which takes a :class:`Batch`. On the meta device a module of the same
    shapes, whose values :func:`init_weights` sets."""
    contract = contract_of(args.module, args.seed)
    module = contract.prepare()
    if args.weights != "none":
        weights, flags = load(args.weights), f"--module {args.module}"
        check_weights(module, weights, f"--weights {args.weights} does not fit {flags}")
        module.load_state_dict(weights)
    print0(f"module: {contract.describe()}, {len([*blocks_of(module)])} blocks")
    accept_batches(contract)
    if torch.empty(0).device.type == "meta":
        weights = module.state_dict() if world().rank == 0 else {}
        contract.kept = weights, dict(module.named_buffers())
        move_to_meta(module)
    return module


def accept_batches(contract: Contract) -> None:
    """Let the module take a :class:`Batch` and return its losses ``[n, 1]``, whose mean is the
    loss; in evaluation the sums of losses, of correct answers and of labels ``[1, 3]``."""
    kind = contract.kind

    @functools.wraps(kind.forward)
    def forward(module, *args, **kwargs):
        if not (args and isinstance(args[0], Batch)):
            return kind.forward(module, *args, **kwargs)
        batch, inputs = args[0], args[0]["inputs"]
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
        args, kwargs = to_floating(contract.arguments(inputs), dtype)
        labels = contract.count(inputs, len(batch))
        if contract.divides:  # by this instead of its own count, which may be 0
            kwargs["num_items_in_batch"] = labels.clamp(min=1)
        loss, correct = contract.score(kind.forward(module, *args, **kwargs), inputs, labels)
        if module.training:
            losses = loss * batch["samples"] / len(batch) / batch["labels"].clamp(min=1)
            return losses[:, None]
        return torch.stack([loss.double(), correct.double(), labels.double()])[None]

    contract.parts.module.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def move_to_meta(module: nn.Module) -> None:
    """Replace the parameters by ones without data. Those that are tied stay tied."""
    own = [*module.parameters()]
    replaced = {p: nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in own}
    for part in module.modules():
        for name, p in [*part.named_parameters(recurse=False, remove_duplicate=False)]:
            setattr(part, name, replaced[p])


@torch.no_grad()
def init_weights(args, model: nn.Module, classes: list[str]) -> None:
    """See :func:`jobs.choice.init_weights`; buffers that are not in the state dict, too."""
    contract = contract_of(args.module, args.seed)
    weights, buffers = contract.kept
    options = {"full_state_dict": True, "cpu_offload": True, "broadcast_from_rank0": True}
    options = StateDictOptions(**options, strict=False)  # adapters are not in it
    set_model_state_dict(model, weights, options=options)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
        dist.broadcast(buffer, src=0)
    del contract.kept
