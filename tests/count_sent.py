"""Run a script and count what one of its steps sends, from the collectives that really run.

Used in place of a script's name, after its launcher:

    torchrun --standalone --nproc_per_node=2 tests/count_sent.py pytorch_FSDP.py --max-steps 3 ...

Only the last step counts, from forward to optimizer, without the evaluation after it. How many
bytes of a collective a rank sends is defined in estimator/sent.py.

The run is unchanged, except that its ``result.json`` also has ``sent`` and ``calls``, by
collective: bytes, averaged over the ranks, and number of calls on rank 0; and that it saves no
snapshot, which would take most of the time.
"""

import collections
import json
import os
import runpy
import sys
import threading
from pathlib import Path

import small_resnet  # noqa: F401  a model to choose
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
script = next(word for word in sys.argv if word.startswith(("pytorch_", "lightning_")))
sys.argv = [script, *(word for word in sys.argv[1:] if word != script)]  # launch adds a flag before

import common  # noqa: E402
from estimator.sent import Message, message_of  # noqa: E402
from harness.world import gather_objects  # noqa: E402


class CountSent(TorchDispatchMode):
    """Sees every collective that this thread, autograd's included, asks a process group for."""

    def __init__(self):
        super().__init__()
        self.calls, self.sent = collections.Counter(), collections.Counter()
        self.counts = False

    def count(self, message):
        self.calls[message.kind] += 1
        self.sent[message.kind] += message.sent

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it comes again with what is in it
        if self.counts and (message := message_of(func, args)):
            self.count(message)
        return func(*args, **(kwargs or {}))


def main():
    counter = CountSent()
    batches, all_reduce = common.Run.batches, dist.all_reduce

    def counted_batches(run, loader, epoch, *dtype):
        for batch in batches(run, loader, epoch, *dtype):
            if run.step < run.total_steps:
                yield batch
                continue
            counter.counts = True
            with counter:
                yield batch
            counter.counts = False

    def counted_all_reduce(tensor, *args, **kwargs):
        in_callback = threading.current_thread() is not threading.main_thread()
        if counter.counts and in_callback:  # PowerSGD's: the mode is of the main thread
            counter.count(Message("allreduce", tensor.nbytes, dist.get_world_size()))
        return all_reduce(tensor, *args, **kwargs)

    def uncounted(method):  # what the record of a run costs is not the technique's
        def call(*args, **kwargs):
            counts, counter.counts = counter.counts, False
            result = method(*args, **kwargs)
            counter.counts = counts
            return result

        return call

    def finish_and_write(run, *args, **kwargs):
        everyone, path = gather_objects(counter.sent), run.args.output_dir / "result.json"
        kinds = {kind for sent in everyone for kind in sent}
        sent = {kind: sum(theirs[kind] for theirs in everyone) / len(everyone) for kind in kinds}
        finish(run, *args, **kwargs)
        if os.environ.get("RANK", "0") == "0":
            result = json.loads(path.read_text()) | {"sent": sent, "calls": counter.calls}
            path.write_text(json.dumps(result, indent=2) + "\n")

    finish = common.Run.finish
    common.Run.batches, common.Run.finish = counted_batches, finish_and_write
    for name in {"log", "all_finite"} & set(vars(common.Run)):
        setattr(common.Run, name, uncounted(getattr(common.Run, name)))
    dist.all_reduce = counted_all_reduce
    nothing = lambda *args, **kwargs: None  # noqa: E731
    common.Run.write_snapshot = ZeroRedundancyOptimizer.consolidate_state_dict = nothing
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
