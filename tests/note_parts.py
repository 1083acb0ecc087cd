"""Run a pipeline and record when each rank computes what.

Used in place of a script's name, after its launcher. Each rank writes ``parts-RANK.json`` into
--output-dir: a list of steps, each of which is a list of parts. A part has its kind (F for forward,
B for backward, I and W for its halves, with respect to inputs and weights), stage, micro-batch,
begin and end by the clock, and the seconds in between in which it had a core.
"""

import functools
import json
import runpy
import sys
import time
from pathlib import Path

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
script = next(word for word in sys.argv if word.startswith("pytorch_"))
sys.argv = [script, *(word for word in sys.argv[1:] if word != script)]

from harness import run  # noqa: E402
from harness.world import world  # noqa: E402

steps, batches = [], run.Run.batches


def note(method, kind):
    original = getattr(PipelineStage, method)

    @functools.wraps(original)
    def noted(stage, number, *args, **kwargs):
        begin, core = time.perf_counter(), time.thread_time()
        result = original(stage, number, *args, **kwargs)
        core, end = time.thread_time() - core, time.perf_counter()
        what = "I" if kind == "B" and not kwargs.get("full_backward", True) else kind
        part = {"what": [what, stage.stage_index, number]}
        steps[-1].append(part | {"begin": begin, "end": end, "core": core})
        return result

    setattr(PipelineStage, method, noted)


def noted_batches(run, *args):
    for batch in batches(run, *args):
        dist.barrier()  # all ranks begin a step together
        steps.append([])
        yield batch
    path = run.args.output_dir / f"parts-{world().rank}.json"
    path.write_text(json.dumps(steps) + "\n")


note("forward_one_chunk", "F")
note("backward_one_chunk", "B")
note("backward_weight_one_chunk", "W")
run.Run.batches = noted_batches
runpy.run_path(script, run_name="__main__")
