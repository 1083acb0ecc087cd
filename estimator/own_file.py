"""The user's own training file, a copy of one of examples/, run unchanged by this process as one
rank on fake tensors: its main() trains two steps, evaluates, saves and exports. The second step,
and what follows it, is measured.
"""

import ast
import contextlib
import dataclasses
import importlib.util
import os
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch.optim import optimizer as hooks
from torch.utils import _pytree as pytree

from estimator import compose, fakes, own_stand_ins, trial
from estimator.live_bytes import LiveBytes
from estimator.network import MACHINE
from estimator.places import Place, own_traceback
from harness.cli import fail
from libraries import hub

STEPS = 2
SAMPLES = 16  # that are read for a batch, at most; it gets the size of the whole batch
NEEDS = ("make_model", "make_data", "forward", "loss_of", "main")


# ---------------------------------------------------------------------------------- the file


def load(path: Path, folder: Path | None = None) -> ModuleType:
    """Import the user's file, which runs nothing; the process ends with one line if it is not one
    that was copied from examples/. It imports from its own folder, or from ``folder``."""
    use = "copy a file of examples/ and replace its functions (docs/your_own_model.md)"
    if not path.is_file():
        fail(f"{path}: no such file; {use}")
    nodes = ast.parse(compose.read(path)).body
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    if missing := [name for name in NEEDS if name not in names]:
        fail(f"{path} has no function {missing[0]}; {use}")
    for node in nodes:
        if isinstance(node, ast.Expr) and ast.unparse(node) == "main()":
            fail(f'{path}:{node.lineno}: main() runs on import; put it under if __name__ == "__ma'
                 'in__":')  # fmt: skip
    spec = importlib.util.spec_from_file_location("own_module", path.absolute())
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(folder or path.absolute().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        print(own_traceback(error), end="", file=sys.stderr)
        raise SystemExit(1) from None
    return module


def check_folders(module: ModuleType) -> None:
    """Refuse a folder that the file gives to ``from_pretrained`` of transformers and that is
    neither here nor, by its name, on the hub: the library would look for it for a minute."""
    path = Path(module.__file__)
    for node in ast.walk(ast.parse(compose.read(path))):
        match node:
            case ast.Call(ast.Attribute(ast.Name(kind), "from_pretrained"), [ast.Name(name), *_]):
                library = getattr(getattr(module, kind, None), "__module__", "")
                folder = getattr(module, name, None)
                is_path = isinstance(folder, (str, Path)) and library.startswith("transformers.")
                if is_path and not os.path.exists(folder):
                    hub.check_name(f"{path.name}:{node.lineno}: {name}", str(folder))


def is_launched(module: ModuleType) -> bool:
    """Whether a launcher starts it: it needs the number of its rank."""
    return b"RANK" in Path(module.__file__).read_bytes()


# ------------------------------------------------------------------------------- the prediction


@dataclasses.dataclass
class Line:
    """A line of the user's, and what it created of what is allocated at the peak."""

    place: Place  # of the largest tensor of its largest part: one kind, from one library line
    size: int
    kind: str  # of the part
    part: int  # its bytes


@dataclasses.dataclass
class Found(trial.Outcome):
    """What a file would take and send, on one rank; ``host`` is that of rank 0, which also exports;
    ``inputs`` has the shapes of its batch."""

    name: str  # of the file
    ranks: int
    batch: int  # of all ranks
    lines: list[Line] = dataclasses.field(default_factory=list)  # at the peak, largest first
    at: Place | None = None  # the line that runs at the peak
    host_each: int = 0  # bytes in CPU memory of every rank, until the evaluation
    host_at: str = ""  # when
    stand_ins: list[str] = dataclasses.field(default_factory=list)


def ranks_of(module: ModuleType, ranks: int) -> list[int]:
    """The ranks of which one has the highest peak: of a pipeline, the first stage has most
    micro-batches in flight, and the last one has the logits."""
    is_pipeline = b"torch.distributed.pipelining" in Path(module.__file__).read_bytes()
    return [0, ranks - 1] if is_pipeline and ranks > 1 else [0]


def predict(module: ModuleType, ranks: int, has_half: bool = True, batch: int = 0, rank: int = 0):
    """Predict in this process, which cannot be used for anything else afterwards: :class:`Found`.

    Args:
        module: the file, from :func:`load`.
        ranks: of all machines; 0 for a file without a launcher.
        has_half: the GPU has bfloat16.
        batch: replaces the file's BATCH.
        rank: that of this process.
    """
    if batch:
        module.BATCH = batch
    found = Found(Path(module.__file__).name, ranks, module.BATCH)
    run = Rehearsal(module, LiveBytes(finds_places=True), has_half, batch > 0)
    with trial.explaining(found, partial(end_of, found.name)):
        run.run(ranks, rank=rank)
    if not found.mistake:
        run.report(found)
    return found


def end_of(name: str, error: SystemExit, complaint: str) -> str:
    said = error.code if isinstance(error.code, str) else complaint
    return f"{name} ends with: {' '.join(said.split())}"


def fullest(found: Iterable[Found]) -> Found:
    """The rank with the highest peak; or one without a prediction."""
    return max(found, key=lambda one: (bool(one.mistake), one.peak))


class Rehearsal:
    """A run of main() with what stands in for data, files and other ranks."""

    def __init__(self, module: ModuleType, live: LiveBytes, has_half=True, repeats=False):
        """``repeats``: data sets that are smaller than BATCH have their samples several times."""
        self.module = module
        self.live = live
        self.has_half = has_half
        self.repeats = repeats
        self.numbers = fakes.KnownNumbers()
        self.stand_ins: dict[str, bool] = {}  # that were used
        self.model = lambda: None  # a weak reference
        self.eval_set = None
        self.step = 0
        self.sent = None  # number of messages when the step ends
        self.trained = None  # likewise of changes
        self.built = 0  # bytes of the model in CPU memory
        self.inputs = ""
        self.on_host = ("offloaded",)

    def run(self, ranks: int | None, as_on_a_gpu: bool = True, rank: int = 0) -> None:
        """Run main(). With ``ranks=None``, one real rank on real tensors."""
        self.is_fake = ranks is not None
        trial.prepare(ranks, as_on_a_gpu, rank)
        if ranks and ranks % MACHINE == 0:
            os.environ["LOCAL_WORLD_SIZE"] = str(MACHINE)
        torch.cuda.is_bf16_supported = lambda *_, **__: as_on_a_gpu and self.has_half
        torch.compiler.set_stance("force_eager")
        own_stand_ins.install(self)
        self.replace_functions()
        hooks.register_optimizer_step_pre_hook(self.before_update)
        hooks.register_optimizer_step_post_hook(lambda one, *_: self.live.end_update(one))
        numbers = self.numbers if self.is_fake else contextlib.nullcontext()
        with tempfile.TemporaryDirectory() as folder:
            vars(self.module).update(OUT=folder, STEPS=STEPS, EVERY=STEPS)
            with trial.counting(self.live, ranks, numbers):
                self.module.main()

    def replace_functions(self) -> None:
        own = self.module
        make_model = own.make_model
        make_data = fakes.with_numbers()(own.make_data)

        def made() -> torch.nn.Module:
            before = self.live.allocated
            model = make_model()
            if self.is_fake:
                without_data(model)
            self.built = self.live.allocated - before
            self.model = weakref.ref(model)
            return model

        def data() -> tuple:
            train_set, eval_set = make_data()
            few = min(len(eval_set), own.BATCH)
            if self.repeats:
                train_set = repeated(train_set, own.BATCH)
                few = own.BATCH
            self.eval_set = repeated(eval_set, few)
            return train_set, self.eval_set

        def computing(function, *args, **kwargs):
            self.numbers.refuses += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.numbers.refuses -= 1

        def find_checkpoint(*_) -> None:  # there is none
            os.makedirs(f"{own.OUT}/best", exist_ok=True)

        for name in {"find_checkpoint", "newest_checkpoint"} & {*vars(own)}:
            setattr(own, name, find_checkpoint)
        own.make_model = made
        own.make_data = data
        for name in ("forward", "loss_of"):
            setattr(own, name, partial(computing, getattr(own, name)))
        torch.utils.data.DataLoader.__iter__ = lambda loader: self.batches(loader)

    # --------------------------------------------------------------------------- while it runs

    def batches(self, loader):
        """One batch of the loader after the other, without data."""
        samples = loader.dataset
        while isinstance(samples, torch.utils.data.Subset) and samples is not self.eval_set:
            samples = samples.dataset
        is_training = samples is not self.eval_set
        is_stream = isinstance(samples, torch.utils.data.IterableDataset)
        if is_stream and loader.batch_size is not None:
            fail("a DataLoader collects batches from a stream; let the stream yield batches")
        rows = iter(samples if is_stream else loader.batch_sampler)
        while True:
            with fakes.with_numbers():
                chosen = next(rows, None)
                if chosen is None:
                    return
                few = list(chosen)[: SAMPLES if self.is_fake else None]
                batch = loader.collate_fn(few if is_stream else [loader.dataset[i] for i in few])
            self.begin_batch(is_training)
            copy = partial(self.copy, few=len(few), whole=len(chosen))
            batch = pytree.tree_map_only(torch.Tensor, copy, batch)
            self.live.kind = "activations"
            if is_training and not self.inputs:
                self.inputs = ", ".join(shapes_of(batch))
            yield batch
            del batch

    def copy(self, tensor: torch.Tensor, few: int, whole: int) -> torch.Tensor:
        if not self.is_fake:
            return tensor.clone()
        n = whole if tensor.shape[:1] == (few,) else len(tensor)
        return torch.empty(n, *tensor.shape[1:], dtype=tensor.dtype)

    def begin_batch(self, is_training: bool) -> None:
        if not is_training:
            if self.sent is None:
                self.sent = len(self.live.messages)
                self.trained = len(self.live.changes)
        else:
            self.step += 1
            if self.step <= STEPS:
                self.mark_state()
                self.live.begin_step()
        self.live.kind = "input"

    def mark_state(self) -> None:
        if model := self.model():
            self.live.mark([*model.parameters(), *model.buffers()], "parameters")

    def before_update(self, optimizer, *_) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.live.begin_update(parameters)
        self.live.mark(parameters, "parameters")

    def report(self, found: Found) -> None:
        """Complete the prediction."""
        if not self.step:
            found.mistake = f"{found.name}: main() has no step: it takes no batch of make_data()'s "
            found.mistake += "training set from a DataLoader"
            return
        live = self.live
        found.at, alive = live.at_peak(self.on_host)
        found.kinds = dict.fromkeys(live.KINDS, 0)
        for number, size in alive.items():
            found.kinds[live.kinds[number]] += size
        found.lines = lines_of(live, alive)
        on_gpu = set(live.KINDS) - set(self.on_host)
        not_on_host = (*on_gpu, "update")  # the CPU's optimizer is fused
        at, offloaded = live.at_peak(not_on_host)
        _, of_each = live.at_peak(not_on_host, self.trained)
        found.host_each = max(self.built, sum(of_each.values()))
        found.host = sum(offloaded.values())
        found.host_at = f"at {at}" if at else ""
        if self.built > found.host:
            found.host = self.built
            found.host_at = "while make_model() runs"
        found.messages = live.messages[: self.sent]
        found.inputs = self.inputs
        found.stand_ins = [*self.stand_ins]


def lines_of(live: LiveBytes, alive: dict[int, int]) -> list[Line]:
    """The user's lines that created these storages, by number; the line with most bytes first."""
    sizes = Counter()
    parts = Counter()
    largest = {}
    for number, size in sorted(alive.items(), key=lambda one: one[1]):
        place = live.places[number]
        part = place.line, live.kinds[number], place.library
        sizes[place.line] += size
        parts[part] += size
        largest[part] = place
    found = []
    for line, size in sizes.most_common():
        part = max((one for one in parts if one[0] == line), key=parts.get)
        found.append(Line(largest[part], size, part[1], parts[part]))
    return found


def repeated(samples, n: int) -> torch.utils.data.Subset:
    """The first ``n`` samples, several times if there are fewer."""
    return torch.utils.data.Subset(samples, [i % len(samples) for i in range(n)])


def shapes_of(batch) -> Iterator[str]:
    """Name, shape and dtype of each tensor."""
    if not isinstance(batch, dict):
        batch = {f"[{i}]": value for i, value in enumerate(pytree.tree_leaves(batch))}
    for name, value in batch.items():
        if torch.is_tensor(value):
            yield f"{name} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def without_data(module: torch.nn.Module) -> None:
    """Let fake tensors replace what make_model() read from files. Tied ones stay tied."""
    replaced = {}
    options = {"recurse": False, "remove_duplicate": False}
    for part in module.modules():
        for name, old in [*part.named_parameters(**options), *part.named_buffers(**options)]:
            if isinstance(old, fakes.FakeTensor):
                continue
            new = torch.empty_like(old)
            if isinstance(old, torch.nn.Parameter):
                new = torch.nn.Parameter(new, old.requires_grad)
            setattr(part, name, replaced.setdefault(id(old), new))
