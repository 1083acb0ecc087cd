"""Communication: the collective that an operation is, its size, and the bytes that a rank sends.

With the usual algorithms, each of N ranks sends this many bytes per collective, averaged over the
ranks (Thakur et al. 2005, doi:10.1177/1094342005051521):

    all-reduce       2 * bytes * (N - 1) / N     a reduce-scatter and an all-gather
    reduce-scatter   bytes * (N - 1) / N         of the full input
    all-gather       bytes * (N - 1) / N         of the full output
    all-to-all       bytes * (N - 1) / N         of a rank's input, in equal parts
    broadcast, reduce: bytes * (N - 1) / N
    scatter          bytes * (N - 1) / N         of a rank's output, in equal parts
    send             bytes
"""

import dataclasses

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_leaves

# In units of (N - 1) / N; the first that is in the operation's name. A send goes to one rank.
KINDS = ("reduce_scatter", "allgather", "alltoall", "broadcast", "reduce", "scatter", "send")
SHARES = {"allreduce": 2, **dict.fromkeys(KINDS, 1)}
SILENT = ("barrier", "recv", "waittensor", "wraptensor")


@dataclasses.dataclass(frozen=True)
class Message:
    """A collective of a group of ranks, or a send."""

    kind: str  # one of ``SHARES``
    size: int  # bytes of the full tensor
    ranks: int  # size of its group; for a send 1, the receiver
    phase: str = ""  # of the step, by the kinds of :class:`LiveBytes`

    @property
    def sent(self) -> float:
        """Bytes that a rank sends."""
        if self.kind == "send":
            return self.size
        return SHARES[self.kind] * self.size * (self.ranks - 1) / self.ranks


def size_of(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(tensors) if torch.is_tensor(t))


def message_of(func, args, phase: str = "") -> Message | None:
    """The message of an operation, as a TorchDispatchMode gets it, if it is a collective or a send:
    of ``torch.distributed``, or one of the functions behind DTensor, which return their results."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = func.__name__.replace("_", "")
    if any(word in name for word in SILENT):
        return None
    kind = next((kind for kind in SHARES if kind.replace("_", "") in name), None)
    if not kind:
        raise NotImplementedError(f"{func}: unknown collective; add what a rank sends")
    ranks = group_of(func, args).size()
    functional = func.namespace == "_c10d_functional"
    if kind == "send":
        return Message(kind, size_of(args[0]), 1, phase)
    second = kind in ("alltoall", "reduce_scatter") and not functional  # after the output
    size = size_of(args[1] if second else args[0])
    if kind == "allgather" and functional:  # has no output tensor yet
        size *= ranks
    return Message(kind, size, ranks, phase)


def group_of(func, args) -> dist.ProcessGroup:
    """The process group among the arguments: an object, or in functions behind DTensor a name."""
    if func.namespace == "c10d":
        objects = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
        [group] = (one for one in objects if "ProcessGroup" in str(one._type()))
        return dist.ProcessGroup.unbox(group)
    return _resolve_process_group(args[-1]) if isinstance(args[-1], str) else args[-1]
