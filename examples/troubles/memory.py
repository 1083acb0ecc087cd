"""Memory that grows at every step: who keeps graphs, weights, outputs or pages.

torchrun --nproc_per_node=2 examples/troubles/memory.py
"""

import copy
import weakref

import torch
from shared import Block, show
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

STEPS = 8


class Allocated(TorchDispatchMode):
    """Bytes of the tensors that are alive: what torch.cuda.memory_allocated() says on a GPU."""

    size = 0
    known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage() not in self.known:
                self.add(leaf.untyped_storage())
        return found

    def add(self, storage):
        self.known.add(storage)
        self.size += storage.nbytes()
        weakref.finalize(storage, self.remove, storage.nbytes())

    def remove(self, size):
        self.size -= size


def check(step):
    with Allocated() as allocated:
        step()
        before = allocated.size
        for _ in range(STEPS):
            step()
        grown = (allocated.size - before) / STEPS
    assert grown < 2**16, f"{grown:,.0f} bytes more at each step"


def make_model():
    return torch.nn.Sequential(Block(512), Block(512))


def losses_with_graphs(remedy):
    model = make_model()
    losses = []

    def step():
        loss = model(torch.ones(256, 512)).sum()
        losses.append(loss.detach() if remedy else loss)

    check(step)


def evaluated_with_graphs(remedy):
    model = make_model().eval()
    means = []

    def step():
        with torch.set_grad_enabled(not remedy):
            means.append(model(torch.ones(256, 512)).mean())

    check(step)


def outputs_kept(remedy):
    """For a metric, which needs two numbers of each batch."""
    kept = []

    def step():
        logits = torch.rand(256, 512)
        right = (logits.argmax(1) == 0).sum()
        kept.append((right, len(logits)) if remedy else logits)

    check(step)


def hooks_added(remedy):
    """A new hook at every step, of which each keeps what it has seen."""
    model = make_model()
    seen = []

    def step():
        hook = model[0].register_forward_hook(lambda *parts: seen.append(parts[-1].detach()))
        model(torch.ones(256, 512)).sum().backward()
        if remedy:
            hook.remove()
            seen.clear()

    check(step)


def copies_of_weights(remedy):
    """The best weights, but also all that were the best before."""
    model = make_model()
    best = []

    def step():
        best.append(copy.deepcopy(model.state_dict()))
        if remedy:
            del best[:-1]

    check(step)


def caught_too_late(remedy):
    """In the except block, the frames of the failed step still have its tensors."""
    found = []

    def fail():
        activations = torch.ones(2**20)
        found.append(weakref.ref(activations))
        raise RuntimeError("out of memory")

    is_full = False
    try:
        fail()
    except RuntimeError:
        is_full = True
        if not remedy:
            found.append(found[0]())
    if is_full and remedy:
        found.append(found[0]())
    assert found[1] is None, "the activations are still there"


class Texts(Dataset):
    """Each item says how much of its memory is this worker's own; all but the first read first."""

    def __init__(self, is_array):
        texts = [f"text {i:05}" for i in range(400_000)]
        self.texts = torch.tensor([*map(len, texts)]) if is_array else texts

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index:
            for text in self.texts if isinstance(self.texts, list) else [self.texts.sum()]:
                del text  # it was read
        with open("/proc/self/smaps_rollup") as file:
            own = next(line for line in file if line.startswith("Private_Dirty"))
        return int(own.split()[1]) / 1024  # MiB


def copied_by_workers(remedy):
    """Reading a Python object writes into its reference count, so its page is copied."""
    options = {"num_workers": 1, "multiprocessing_context": "fork", "batch_size": 1}
    own = [item.item() for item in DataLoader(Texts(is_array=remedy), **options)]
    assert own[-1] - own[0] < 10, f"{own[-1] - own[0]:.0f} MiB more in a worker"


if __name__ == "__main__":
    show(
        losses_with_graphs,
        evaluated_with_graphs,
        outputs_kept,
        hooks_added,
        copies_of_weights,
        caught_too_late,
        copied_by_workers,
    )
