"""What a rank sends in a collective.

Of the bytes that a collective is given, the algorithms in use let a rank of N send so much, in the
mean over the ranks (Thakur et al. 2005, doi:10.1177/1094342005051521):

    all-reduce       2 * bytes * (N - 1) / N     a reduce-scatter and an all-gather
    reduce-scatter   bytes * (N - 1) / N         of the whole that goes in
    all-gather       bytes * (N - 1) / N         of the whole that comes out
    broadcast        bytes * (N - 1) / N
    reduce           bytes * (N - 1) / N
"""

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

# In units of (N - 1) / N; the first that is in the operation's name.
SHARES = {"allreduce": 2, "reduce_scatter": 1, "allgather": 1, "broadcast": 1, "reduce": 1}


def share_of(kind: str, tensors, ranks: int) -> float:
    """Bytes that a rank sends.

    Args:
        kind: one of ``SHARES``.
        tensors: what a reduce-scatter is given; of others, what comes out.
    """
    size = sum(t.numel() * t.element_size() for t in tree_leaves(tensors) if torch.is_tensor(t))
    return SHARES[kind] * size * (ranks - 1) / ranks


def bytes_sent(func, args) -> tuple[str, float] | None:
    """Which collective an operation is, and the bytes that a rank sends; ``None`` if it is none.

    Args:
        func, args: as a TorchDispatchMode gets them.
    """
    if func.namespace != "c10d" or "barrier" in func.__name__:
        return None
    kind = next(kind for kind in SHARES if kind in func.__name__)
    [group] = (arg for arg in args if isinstance(arg, torch.ScriptObject) and is_group(arg))
    tensors = args[1] if kind == "reduce_scatter" else args[0]
    return kind, share_of(kind, tensors, dist.ProcessGroup.unbox(group).size())


def is_group(value: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(value._type())
