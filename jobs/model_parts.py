"""Parts of any model: its blocks, what FSDP gathers at a time, BatchNorms, parameter groups."""

import warnings
from collections import Counter
from collections.abc import Iterator

from torch import nn

BATCH_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)
LISTS = (nn.Sequential, nn.ModuleList)


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """The BatchNorm layers, whose statistics change by amounts that half precision rounds away."""
    return [module for module in model.modules() if isinstance(module, BATCH_NORMS)]


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """The children with parameters of every nn.Sequential or nn.ModuleList: residual blocks or
    layers in torchvision's models. A single BatchNorm is too small to count as a block."""
    if isinstance(model, LISTS):
        for part in model:
            if not isinstance(part, BATCH_NORMS) and any(True for _ in part.parameters()):
                yield part
    else:
        for child in model.children():
            yield from blocks_of(child)


def units_of(model: nn.Module) -> list[nn.Module]:
    """What FSDP gathers at a time: the blocks; and a decoder's embedding and head, which with a
    large vocabulary are larger than a block, unless they share a matrix. A block that shares a
    parameter with another module cannot be sharded alone."""
    # Of an embedding under sequence parallelism; no operation in place follows.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    children = dict(model.named_children()) if hasattr(model, "unembed") else {}
    ends = [children[name] for name in ("token", "head") if name in children]
    uses = count_uses(model)
    found = dict.fromkeys([*blocks_of(model), *ends])  # a block may be there more than once
    return [unit for unit in found if count_uses(unit).items() <= uses.items()]


def count_uses(module: nn.Module) -> Counter:
    """How many modules have each parameter."""
    return Counter(p for part in module.modules() for p in part.parameters(recurse=False))


def decay_matrices(model: nn.Module, spared: tuple[type, ...] = ()) -> list[dict]:
    """Parameter groups of what is trained: ``--weight-decay`` applies to matrices, not to biases
    and norms, nor to modules of the types ``spared``."""
    exempt = {p for m in model.modules() if isinstance(m, spared) for p in m.parameters()}
    decaying = []
    others = []
    for p in model.parameters():
        if p.requires_grad:
            group = others if p.ndim < 2 or p in exempt else decaying
            group.append(p)
    groups = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
