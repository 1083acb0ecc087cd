"""The memory of all live tensors at every moment, by purpose."""

import collections
import contextlib
import sys
import weakref
from collections.abc import Iterable, Iterator
from unittest import mock

import torch
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from estimator.places import Place, find
from estimator.sent import Message, message_of

SENDS = ("c10d", "fsdp")  # namespaces of communication, whose tensors are temporary
KEPT = ("send", "recv")  # except between pipeline stages


class LiveBytes(TorchDispatchMode):
    """While active, it counts every storage that an operation creates, until it is freed. Tensors
    may be fake. A storage takes a multiple of ``block`` bytes: 512 in PyTorch's allocator for GPUs.

    The kind of a storage is first guessed from when it was created: ``kind``, which the caller
    sets, one of ``KINDS``. :meth:`mark` corrects it later, also for the time before. With
    ``finds_places``, the user's line that creates a storage is recorded.
    """

    KINDS = ("parameters", "gradients", "optimizer", "activations", "input", "temporary", "update")
    KINDS += ("offloaded",)

    def __init__(self, block: int = 512, finds_places: bool = False):
        super().__init__()
        self.block = block
        self.finds_places = finds_places
        self.kind = "parameters"
        self.before = ""  # the kind outside of the optimizer's step
        self.counts = True
        self.kinds: list[str] = []  # of each storage, by its number
        self.streams: list[int] = []  # likewise, of a GPU: FSDP communicates on its own
        self.places: list[Place] = []  # likewise
        self.moments: dict[int, Place] = {}  # of changes that resize a storage
        self.changes: list[tuple[int, int]] = []  # number of a storage, and change in bytes
        self.alive: dict[int, tuple[int, int]] = {}  # by address: number, and bytes
        self.messages: list[Message] = []
        self.begin = 0  # of the measured step: an index into changes
        self.phases = [(0, "")]  # likewise the start of each phase of the step, and its name

    def begin_step(self) -> None:
        """Start to measure the peak and to record communication."""
        self.begin = len(self.changes)
        self.phases = [(self.begin, "")]
        self.messages.clear()

    def begin_phase(self, name: str = "") -> None:
        self.phases.append((len(self.changes), name))

    def name_phase(self, name: str) -> None:
        """Name the current phase, unless it has a name."""
        begin, known = self.phases[-1]
        self.phases[-1] = begin, known or name

    def end_phase(self, name: str) -> None:
        """Name the current phase, and begin one that is named later."""
        self.name_phase(name)
        self.begin_phase()

    def mark(self, tensors, kind: str, only: str | None = None) -> None:
        """Set the kind of tensors, or of those that have been of the kind ``only``."""
        for tensor in inner_tensors_of([*tensors]):
            number = self.count(tensor.untyped_storage(), tensor)
            if only in (None, self.kinds[number]):
                self.kinds[number] = kind

    @contextlib.contextmanager
    def of_kind(self, kind: str) -> Iterator[None]:
        """What is created inside is of this kind."""
        before = self.kind
        self.kind = kind
        try:
            yield
        finally:
            self.kind = before

    def begin_update(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """The optimizer's step begins."""
        self.mark([p.grad for p in parameters if p.grad is not None], "gradients")
        self.before = self.kind
        self.kind = "update"

    def end_update(self, optimizer: torch.optim.Optimizer) -> None:
        states = [value for state in optimizer.state.values() for value in state.values()]
        self.mark(states, "optimizer")
        self.kind = self.before

    def count(self, storage: torch.UntypedStorage, tensor: torch.Tensor | None = None) -> int:
        """Record a storage that is new or resized, of this tensor. Returns its number."""
        size = -(-storage.nbytes() // self.block) * self.block
        address = storage._cdata
        if address not in self.alive:
            self.alive[address] = len(self.kinds), 0
            self.kinds.append(self.kind)
            self.streams.append(id(torch.cpu.current_stream()))
            if self.finds_places:
                self.places.append(find(sys._getframe(1), tensor))
            weakref.finalize(storage, self.forget, address).atexit = False
        number, before = self.alive[address]
        if size != before:
            self.changes.append((number, size - before))
            self.alive[address] = number, size
        return number

    def forget(self, address: int) -> None:
        number, size = self.alive.pop(address)
        self.changes.append((number, -size))

    def peak(self, without: tuple[str, ...] = ()) -> dict[str, int]:
        """Bytes by kind at the peak since :meth:`begin_step`. Kinds in ``without`` are not on the
        GPU, and are not counted."""
        return highest(self.peaks(without))

    def peaks(self, without: tuple[str, ...] = ()) -> list[dict[str, int]]:
        """The same of each half of each phase of the step, and of the whole evaluation, after which
        everything is freed. If all blocks are identical, each of these peaks grows by the same
        amount per block; the overall peak need not."""
        limits = []
        ends = [*self.phases[1:], (len(self.changes), "")]
        for (begin, name), (end, _) in zip(self.phases, ends, strict=True):
            limits += [end] if name == "evaluation" else [(begin + end) // 2, end]
        now = collections.Counter()
        total = 0
        found = [(0, {})]  # the highest total of each half, and its kinds
        for index, (number, size) in enumerate(self.changes):
            while len(found) < len(limits) and index >= limits[len(found) - 1]:
                found.append((total, dict(now)))
            kind = self.kinds[number]
            if kind in without:
                continue
            now[kind] += size
            total += size
            if index >= self.begin - 1 and total > found[-1][0]:
                found[-1] = total, dict(now)
        found += [(0, {})] * (len(limits) - len(found))
        none = dict.fromkeys(self.KINDS, 0)
        return [none | most for _, most in found]

    @property
    def allocated(self) -> int:
        """Bytes of all live tensors."""
        return sum(size for _, size in self.alive.values())

    def at_peak(
        self, without: tuple[str, ...] = (), stop: int | None = None
    ) -> tuple[Place | None, dict[int, int]]:
        """The peak since :meth:`begin_step`, within the first ``stop`` changes: the line that runs
        then, and the bytes of each storage, by its number."""
        totals = []  # after each change
        total = 0
        for number, size in self.changes[:stop]:
            total += 0 if self.kinds[number] in without else size
            totals.append(total)
        measured = range(max(0, self.begin - 1), len(totals))
        if not measured:
            return None, {}
        end = max(measured, key=totals.__getitem__)
        alive = collections.Counter()
        for number, size in self.changes[: end + 1]:
            alive[number] += size
        alive = {n: size for n, size in alive.items() if size and self.kinds[n] not in without}
        place = self.moments.get(end) or self.places[self.changes[end][0]]
        return place if alive else None, alive

    # -------------------------------------------------------------------------- as a mode

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # called again with the inner tensors
        if not self.counts:
            return func(*args, **(kwargs or {}))
        if message := message_of(func, args, self.kind):
            self.messages.append(message)
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages_of([args, kwargs])}
        for tensor in inner_tensors_of(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:  # also of to(), which copies or returns its argument
                self.count(storage, tensor)
        if func.namespace in SENDS and not any(word in func.__name__ for word in KEPT):
            self.mark([out, args], "temporary", only="activations")  # such as gathered parameters
        return out

    def __enter__(self):
        # DTensor infers the shape of each result with fake tensors of the full shape.
        self.ask = ShardingPropagator._propagate_tensor_meta_non_cached
        ShardingPropagator._propagate_tensor_meta_non_cached = lambda *args: self.uncounted(*args)
        self.resize = torch.UntypedStorage.resize_  # FSDP frees and allocates by it; no operation
        torch.UntypedStorage.resize_ = lambda storage, size: self.resized(storage, size)
        return super().__enter__()

    def uncounted(self, *args):
        with mock.patch.object(self, "counts", False):
            return self.ask(*args)

    def resized(self, storage: torch.UntypedStorage, size: int):
        result = self.resize(storage, size)
        if storage._cdata in self.alive:
            if self.finds_places:
                self.moments[len(self.changes)] = find(sys._getframe(1), None)
            self.kinds[self.count(storage)] = "temporary"
        return result

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self.resize
        ShardingPropagator._propagate_tensor_meta_non_cached = self.ask
        return super().__exit__(*error)


def highest(peaks: list[dict[str, int]]) -> dict[str, int]:
    return max(peaks, key=lambda kinds: sum(kinds.values()))


def storages_of(values) -> list[torch.UntypedStorage]:
    """Storages of all tensors in them: of a DTensor that of its shard; none of a meta tensor."""
    return [tensor.untyped_storage() for tensor in inner_tensors_of(values)]


def inner_tensors_of(values) -> list[torch.Tensor]:
    """The tensors that have a storage: of a DTensor its shard."""
    found = []
    for tensor in filter(torch.is_tensor, tree_leaves(values)):
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            found += inner_tensors_of([getattr(tensor, name) for name in names])
        elif tensor.device.type != "meta":
            found.append(tensor)
    return found
