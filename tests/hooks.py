"""Run a script with something added: a counter, a record, a fault, a way to be slow.

Used in place of a script's name, after its launcher. The environment variable HOOKS has the names
of functions, which may be combined; arguments stand after a colon.

    HOOKS="sent waits" torchrun --standalone --nproc_per_node=2 tests/hooks.py pytorch_FSDP.py ...
    HOOKS="poison:gradient,7,7,1" python tests/hooks.py pytorch_SingleGPU.py ...

What counts or records is below, what changes a run in hook_changes.py, the ways to be slow are in
slow.py. Without hooks a script has the models of small_resnet.py, and is otherwise unchanged.
"""

import atexit
import collections
import contextlib
import functools
import hashlib
import json
import os
import runpy
import sys
import threading
from pathlib import Path

import hook_changes
import slow
import small_resnet  # noqa: F401  models to choose
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hook_changes import RANK, around_batches
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

TESTS = Path(__file__).resolve().parent


def print_line(*words):
    """In one write: those of other ranks do not get between."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


# ------------------------------------------------------------------------------------- counters
class CountSent(TorchDispatchMode):
    """Sees every collective that this thread, autograd's included, asks a process group for."""

    def __init__(self):
        super().__init__()
        self.calls, self.sent, self.seen = (collections.Counter() for _ in range(3))
        self.counts = False

    def count(self, message):
        if message and message.kind != "send":  # as recorded() has them
            kind = "allreduce" if message.kind == "reduce_scatter" else message.kind
            parts = message.ranks if kind == "allgather" else 1
            self.seen[kind, message.size // parts, message.ranks] += 1
        if message and self.counts:
            self.calls[message.kind] += 1
            self.sent[message.kind] += message.sent

    def count_other_threads(self):
        """PowerSGD sends in one, and a mode is of one thread."""
        from estimator.sent import Message

        all_reduce = dist.all_reduce

        def counted(tensor, *args, **kwargs):
            if threading.current_thread() is not threading.main_thread():
                self.count(Message("allreduce", tensor.nbytes, dist.get_world_size()))
            return all_reduce(tensor, *args, **kwargs)

        dist.all_reduce = counted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        from estimator.sent import message_of

        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it comes again with what is in it
        self.count(message_of(func, args))
        return func(*args, **(kwargs or {}))


def recorded():
    """The collectives in PyTorch's own record, which C++ keeps where gloo starts them, in order:
    group with its ranks, kind, bytes of the input. A reduce-scatter is an all-reduce there, and a
    send is not in it."""
    from hangs.recorder import read_recorder
    from harness.trace_rows import bytes_of

    found = []
    record = read_recorder() if dist.is_initialized() else {}
    for entry in record.get("entries", ()):
        kind = entry["profiling_name"].removeprefix("gloo:").replace("_", "")
        group = entry["process_group"][0]
        ranks = tuple(json.loads(record["pg_config"][group]["ranks"]))
        elements = sum(torch.Size(shape).numel() for shape in entry["input_sizes"])
        if entry["input_dtypes"]:  # not of a barrier
            found.append(((group, ranks), kind, bytes_of(elements, entry["input_dtypes"][0])))
    return found


def asked_of(order, ranks):
    """What a rank asked the groups that these ranks are in for. Only the sizes of an all-to-all
    differ."""
    return [
        (group, kind, "alltoall" in kind or size)
        for group, kind, size in order
        if ranks <= set(group[1])
    ]


def compare_order(everyone):
    """Any two ranks ask the groups that both are in for the same, in the same order, of each group
    and between groups: otherwise nccl may wait for ever."""
    for rank, order in enumerate(everyone[1:], 1):
        for other, theirs in enumerate(everyone[:rank]):
            both = [asked_of(one, {rank, other}) for one in (theirs, order)]
            assert both[0] == both[1], f"ranks {other} and {rank} send in another order: {both}"


def sent():
    """Count what the last step sends, from forward to optimizer, from the collectives that really
    run; how many bytes of one a rank sends is defined in estimator/sent.py. result.json also has
    ``sent`` and ``calls``, by collective: bytes, averaged over the ranks, and number of calls on
    rank 0."""
    from harness.run import Run
    from harness.world import gather_objects

    os.environ["TORCH_FR_BUFFER_SIZE"] = "20000"  # the whole run
    counter = CountSent()
    log = Run.log
    finish = Run.finish
    saves = []
    save = dcp.async_save
    order = []  # in which this rank asked for the last step's
    dcp.async_save = lambda *args, **kwargs: saves.append(save(*args, **kwargs)) or saves[-1]

    def count_last(run, batches):
        for batch in batches:
            last = counter.counts = run.step == run.total_steps
            for writing in saves if last else ():
                writing.result()  # whose thread sends, too
            before = len(recorded()) if last else 0
            counter.seen.clear()  # PowerSGD's are noted in all steps
            with counter if last else contextlib.nullcontext():
                yield batch
            counter.counts = False
            if last:
                order[:] = recorded()[before:]
                found = collections.Counter((kind, size, len(g[1])) for g, kind, size in order)
                seen = counter.seen
                assert found == seen, f"PyTorch has {found - seen}, CountSent {seen - found}"

    def uncounted_log(run, loss):  # what the record of a run sends is not the technique's
        counts, counter.counts = counter.counts, False
        log(run, loss)
        counter.counts = counts

    def finish_and_write(run, *args, **kwargs):
        compare_order(gather_objects(order))
        everyone = gather_objects(counter.sent)
        total = collections.Counter()
        for theirs in everyone:
            total.update(theirs)
        sent = {kind: size / len(everyone) for kind, size in total.items()}
        path = run.args.output_dir / "result.json"
        finish(run, *args, **kwargs)
        if RANK == 0:
            result = json.loads(path.read_text()) | {"sent": sent, "calls": counter.calls}
            path.write_text(json.dumps(result, indent=2) + "\n")

    around_batches(count_last)
    Run.log = uncounted_log
    Run.finish = finish_and_write
    counter.count_other_threads()


# `tolist` of a CPU tensor is not dispatched: hence the methods, besides the dispatcher's own.
READS = ["item", "tolist", "cpu", "__bool__", "__float__", "__int__", "__index__"]


def waits():
    """Count what would make the main thread wait for a GPU; other threads save. Each rank writes
    ``waits-RANK.json`` into --output-dir: by step, the calls that read a value from a tensor, from
    its batch to that of the next. On a GPU, such a call between two prints is also an error."""
    import torch.distributed.optim  # noqa: F401  PyTorch 2.11 compiles Adam here
    from torch.optim import adam

    found = collections.defaultdict(collections.Counter)
    counted_step = None
    get_value = adam._get_value

    class SeeDispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if counted_step and "_local_scalar_dense" in func.__name__:
                found[counted_step][func.__name__] += 1
            return func(*args, **(kwargs or {}))

    def count_steps(run, batches):
        nonlocal counted_step
        on_gpu = run.device.type == "cuda"
        with SeeDispatched():
            for batch in batches:
                counted_step = run.step
                found[counted_step].update()
                if on_gpu:
                    waits = counted_step in (2, run.total_steps)  # DDP rebuilds its buckets in 2
                    waits |= counted_step % run.args.print_freq == 0
                    torch.cuda.set_sync_debug_mode("default" if waits else "error")
                yield batch
            counted_step = None
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
        (run.args.output_dir / f"waits-{RANK}.json").write_text(json.dumps(found, indent=2) + "\n")

    def number_of_steps(tensor):
        """AdamW keeps it on the CPU: no GPU is waited for."""
        nonlocal counted_step
        step, counted_step = counted_step, None
        number = get_value(tensor)
        counted_step = step
        return number

    def count(name):
        original = getattr(torch.Tensor, name)

        @functools.wraps(original)
        def counted(tensor, *args, **kwargs):
            if counted_step and threading.current_thread() is threading.main_thread():
                found[counted_step][name] += 1
            return original(tensor, *args, **kwargs)

        setattr(torch.Tensor, name, counted)

    for name in READS:
        count(name)
    adam._get_value = number_of_steps
    around_batches(count_steps)


def products():
    """Print, for each rank, in which dtypes it multiplies matrices in its last step."""
    found = set()

    class SeeProducts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(kind.__name__ == "DTensor" for kind in types):
                return NotImplemented  # it comes again with what is in it
            if func.overloadpacket.__name__ in ("mm", "addmm", "bmm"):
                found.add(str(args[-1].dtype).removeprefix("torch."))
            return func(*args, **(kwargs or {}))

    def see_last(run, batches):
        for batch in batches:
            is_last = run.step == run.total_steps
            with SeeProducts() if is_last else contextlib.nullcontext():
                yield batch
            if is_last:
                print_line("products", RANK, *sorted(found))

    around_batches(see_last)


def eager():
    """Nothing is compiled, for which there may be no compiler."""
    import common

    common.need_compiler = lambda device: None
    torch.compiler.set_stance("force_eager")


def live(*given):
    """rank0.json, ... in --output-dir get the bytes at the peak of the third step, by kind, as on a
    CPU. ``given``: a number of fake ranks, of which it is the first; ``to_one``; ``backward``."""
    from estimator import live_bytes, trial

    folder = Path(sys.argv[sys.argv.index("--output-dir") + 1])
    ranks = next((int(word) for word in given if word.isdigit()), None)
    if "comm_hooks" in sys.argv[0]:
        dist._DEFAULT_FIRST_BUCKET_BYTES = 2**40  # one bucket, as the script asks for on gloo
    # In the second step DDP makes its buckets anew.
    options = {"block": 1, "steps": 3, "as_on_a_gpu": False, "to_one": "to_one" in given}
    counted, _ = trial.run_script(list(sys.argv), ranks, **options)
    folder.mkdir(parents=True, exist_ok=True)
    peaks = counted.peaks()[2:4] if "backward" in given else counted.peaks()  # two of each phase
    (folder / f"rank{RANK}.json").write_text(json.dumps(live_bytes.highest(peaks)))
    sys.stdout.flush()
    os._exit(0)  # the others are not waited for


def objects(most):
    """No object of a collective is larger than so many bytes: a pickle is there several times."""
    from torch.distributed import distributed_c10d

    pickled = distributed_c10d._object_to_tensor

    def small(value, *args, **kwargs):
        tensor, size = pickled(value, *args, **kwargs)
        assert len(tensor) <= int(most), f"an object of {len(tensor)} bytes"
        return tensor, size

    distributed_c10d._object_to_tensor = small


def threads():
    """Print, in the end, how many of gloo's threads are left."""

    def count():
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        print_line("threads of gloo left:", sum("gloo" in name for name in names))

    atexit.register(count)


def all_blocks():
    """estimate.py predicts models with all of their blocks, instead of two with some."""
    from estimator import techniques

    techniques.few_blocks = lambda blocks: ([], 0)


# -------------------------------------------------------------------------------------- records
def batches(folder):
    """Save the batches that it trains on, as FOLDER/step1-rank0.pt, ..."""

    def record(run, batches):
        for images, labels in batches:
            torch.save((images.clone(), labels.clone()), f"{folder}/step{run.step}-rank{RANK}.pt")
            yield images, labels

    around_batches(record)


def dropout():
    """Print what each rank drops: a line per call of a dropout, with a hash of the mask."""
    forward = nn.Dropout.forward

    def noted(layer, x: torch.Tensor) -> torch.Tensor:
        dropped = forward(layer, x)
        if layer.training:
            local = dropped.to_local() if isinstance(dropped, DTensor) else dropped
            mask = (local == 0).cpu().numpy().tobytes()
            print_line("mask", RANK, hashlib.md5(mask).hexdigest())
        return dropped

    nn.Dropout.forward = noted


def parts():
    """Record in which order each rank of a pipeline computes. It writes ``parts-RANK.json`` into
    --output-dir: a list of steps, each of which is a list of parts. A part is its kind (F for
    forward, B for backward, I and W for its halves, with respect to inputs and weights), stage and
    micro-batch."""
    from torch.distributed.pipelining import PipelineStage

    steps = []

    def note(method, kind):
        original = getattr(PipelineStage, method)

        @functools.wraps(original)
        def noted(stage, number, *args, **kwargs):
            of_inputs = kind == "B" and not kwargs.get("full_backward", True)
            steps[-1].append(["I" if of_inputs else kind, stage.stage_index, number])
            return original(stage, number, *args, **kwargs)

        setattr(PipelineStage, method, noted)

    def note_steps(run, batches):
        for batch in batches:
            steps.append([])
            yield batch
        path = run.args.output_dir / f"parts-{RANK}.json"
        path.write_text(json.dumps(steps) + "\n")

    note("forward_one_chunk", "F")
    note("backward_one_chunk", "B")
    note("backward_weight_one_chunk", "W")
    around_batches(note_steps)


def main():
    at = next(i for i, word in enumerate(sys.argv) if i and word.endswith(".py"))
    sys.argv = [sys.argv[at], *sys.argv[1:at], *sys.argv[at + 1 :]]  # a launcher's flag is before
    sys.path[:0] = [str(Path(sys.argv[0]).resolve().parent), str(TESTS.parent)]
    for word in os.environ.get("HOOKS", "").split():
        name, _, given = word.partition(":")
        (globals() | vars(hook_changes) | slow.WAYS)[name](*filter(None, given.split(",")))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
