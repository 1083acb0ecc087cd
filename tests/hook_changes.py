"""Hooks of hooks.py that change what a run computes: other models and optimizers for the single
process, another routing, faults.
"""

import os
import signal
import sys
import time
import zlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

RANK = int(os.environ.get("RANK", 0))


def around_batches(change):
    """Have ``change(run, batches)`` between a run and its loop: it yields each batch."""
    from harness.run import Run

    batches = Run.batches
    Run.batches = lambda run, *args: change(run, batches(run, *args))


def change_model(change):
    """Have ``change(model)`` as soon as a script has made its model."""
    import common

    make = common.make_model

    def make_model(*args, **options):
        model = make(*args, **options)
        change(model)
        return model

    common.make_model = make_model


# ------------------------------------------------------------ models of the single process
def muon():
    """PyTorch's own: see torch_muon.py."""
    import torch_muon  # noqa: F401


class Adapted(nn.Module):
    """A frozen matrix plus the product of two thin ones, the first drawn as by pytorch_LoRA.py."""

    def __init__(self, name, weight):
        super().__init__()
        seed = zlib.crc32(f"{name}.lora_A".encode(), int(sys.argv[sys.argv.index("--seed") + 1]))
        draw = torch.Generator().manual_seed(seed)
        a = torch.empty(8, weight.shape[1])
        bound = weight.shape[1] ** -0.5
        self.a = nn.Parameter(a.uniform_(-bound, bound, generator=draw))
        self.b = nn.Parameter(torch.zeros(len(weight), 8))

    def forward(self, weight):
        return weight + 2 * self.b @ self.a


def lora():
    """The single process trains such matrices instead of those of queries and values, by PyTorch's
    parametrization, and saves the sums."""
    import common

    save = common.save_model
    models = []

    def adapt(model):
        models.append(model.requires_grad_(False))
        for name, layer in list(model.named_modules()):
            if name.endswith(("query", "value")):
                parametrize.register_parametrization(layer, "weight", Adapted(name, layer.weight))

    def save_model(args, state):
        for layer in list(filter(parametrize.is_parametrized, models[0].modules())):
            parametrize.remove_parametrizations(layer, "weight")
        save(args, models[0].state_dict())

    change_model(adapt)
    common.save_model = save_model


def qlora(block):
    """And what is frozen in blocks is rounded to 4 bits and back, by whole matrices."""
    import pytorch_QLoRA

    def round_blocks(model):
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and name != "head":
                packed = pytorch_QLoRA.quantize(layer.weight.data, int(block))
                dtype = layer.weight.dtype
                layer.weight.data = pytorch_QLoRA.dequantize(packed, int(block), dtype)

    change_model(round_blocks)
    lora()


def low_bit(block):
    """The single process has the optimizer of pytorch_low_bit_optimizer.py."""
    import common
    import pytorch_low_bit_optimizer as lesson

    def make_optimizer(args, model):
        groups = common.parameter_groups(args, model)
        return lesson.AdamW8bit(groups, int(block), True, args.lr, args.weight_decay)

    common.make_optimizer = make_optimizer


def frozen():
    """Every fifth parameter is not trained: of a GPT embedding, values, experts."""

    def freeze(model):
        for parameter in list(model.parameters())[::5]:
            parameter.requires_grad_(False)

    change_model(freeze)


# ------------------------------------------------------------------------- routes, faults
def route(step):
    """The router sends the first token to the first experts, and each following one to experts that
    are ``step`` further: with 0 all to the same, with 1 equally to all."""

    def topk(scores, k):
        first = int(step) * torch.arange(len(scores))[:, None]
        return SimpleNamespace(indices=(first + torch.arange(k)) % scores.shape[1])

    torch.Tensor.topk = topk


def swapped():
    """Two groups are asked for a sum at once in each step, by rank 1 in another order, which gloo
    allows."""

    def ask(run, batches):
        groups = [dist.new_group() for _ in range(2)]
        for batch in batches:
            mine = groups[::-1] if RANK == 1 else groups
            sums = [dist.all_reduce(torch.zeros(1), group=g, async_op=True) for g in mine]
            for work in sums:
                work.wait()
            yield batch

    around_batches(ask)


def no_gradient():
    """The layers of an MLP have none in training."""
    from jobs import gpt

    forward = gpt.MLP.forward
    gpt.MLP.forward = lambda mlp, x: 0 * x if mlp.training else forward(mlp, x)


def poison(what, first, last, rank):
    """NaN or Inf from one step to another, on a rank.

    input      the batch is NaN, and with it the model's output and the loss
    loss       the loss is NaN, though the output is unchanged
    gradient   the gradient of the loss is infinite, though the loss is unchanged
    """
    cross_entropy = F.cross_entropy
    poisoned = False  # the present step

    def poison_batches(run, batches):
        nonlocal poisoned
        for images, labels in batches:
            poisoned = int(first) <= run.step <= int(last) and RANK == int(rank)
            yield images * float("nan") if poisoned and what == "input" else images, labels
            poisoned = False

    def poisoned_cross_entropy(logits, *args, **kwargs):
        if poisoned and what == "gradient":
            logits.register_hook(lambda gradient: gradient * float("inf"))
        loss = cross_entropy(logits, *args, **kwargs)
        return loss * float("nan") if poisoned and what == "loss" else loss

    around_batches(poison_batches)
    F.cross_entropy = poisoned_cross_entropy


def unwritable(rank, *words):
    """A rank cannot write files with all these words in their paths."""
    from torch.distributed.checkpoint import filesystem

    def refuse(write, position):
        def write_or_fail(*args, **kwargs):
            if RANK == int(rank) and all(word in str(args[position]) for word in words):
                raise OSError(122, "Disk quota exceeded")
            return write(*args, **kwargs)

        return write_or_fail

    kind = filesystem.FileSystem
    torch.save = refuse(torch.save, 1)
    kind.create_stream = refuse(kind.create_stream, 1)


def stop_at(step):
    """All ranks agree to stop in a step, as if SIGTERM had come."""
    from harness.stop import StopRequest

    def vote(request, now):
        request.agreed = signal.SIGTERM if now == int(step) else 0

    StopRequest.vote = vote


def late_vote(step):
    """Of rank 1, by a second. There is one in each step."""
    from harness import stop

    vote = stop.StopRequest.vote
    stop.VOTE_EVERY = 0

    def vote_late(request, now):
        time.sleep(RANK * (now == int(step)))
        vote(request, now)

    stop.StopRequest.vote = vote_late


def send(name, rank, step):
    """A signal to itself, on a rank, when a step begins; to all ranks if RANK is "all"."""

    def signal_in_step(run, batches):
        for batch in batches:
            if run.step == int(step) and rank in ("all", str(RANK)):
                os.kill(os.getpid(), getattr(signal, name))
            yield batch

    around_batches(signal_in_step)
