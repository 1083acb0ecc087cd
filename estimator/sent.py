"""Messages: which collective an operation is, how large, and how much of it a rank sends.

Of the bytes that a collective is given, the algorithms in use let a rank of N send so much, in the
mean over the ranks (Thakur et al. 2005, doi:10.1177/1094342005051521):

    all-reduce       2 * bytes * (N - 1) / N     a reduce-scatter and an all-gather
    reduce-scatter   bytes * (N - 1) / N         of the whole that goes in
    all-gather       bytes * (N - 1) / N         of the whole that comes out
    broadcast        bytes * (N - 1) / N
    reduce           bytes * (N - 1) / N
"""

import dataclasses

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

# In units of (N - 1) / N; the first that is in the operation's name.
SHARES = {"allreduce": 2, "reduce_scatter": 1, "allgather": 1, "broadcast": 1, "reduce": 1}


@dataclasses.dataclass(frozen=True)
class Message:
    """Args:
    kind: one of ``SHARES``.
    size: bytes of the whole.
    ranks: of its group.
    phase: of the step, as :class:`LiveBytes` has kinds: what is made then.
    """

    kind: str
    size: int
    ranks: int
    phase: str = ""

    @property
    def sent(self) -> float:
        """Bytes that a rank sends."""
        return SHARES[self.kind] * self.size * (self.ranks - 1) / self.ranks


def size_of(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(tensors) if torch.is_tensor(t))


def message_of(func, args, phase: str = "") -> Message | None:
    """The message of an operation, if it is a collective.

    Args:
        func, args: as a TorchDispatchMode gets them.
    """
    if func.namespace != "c10d" or "barrier" in func.__name__:
        return None
    kind = next((kind for kind in SHARES if kind in func.__name__), None)
    if not kind:
        raise NotImplementedError(f"{func}: what a rank sends in it is not known here")
    [group] = (arg for arg in args if isinstance(arg, torch.ScriptObject) and is_group(arg))
    tensors = args[1] if kind == "reduce_scatter" else args[0]
    return Message(kind, size_of(tensors), dist.ProcessGroup.unbox(group).size(), phase)


def is_group(value: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(value._type())
