"""What the breakdown of a step costs (harness/phases.py): steps with its marks and without them
take turns, in one process, and so meet the same machine.

    python tests/measure_breakdown.py pytorch_SingleGPU.py --max-steps 400 ...
    torchrun --standalone --nproc_per_node=2 tests/measure_breakdown.py pytorch_torchrun_DDP.py ...

The last line gives both medians, what the marks of a step themselves take, and its share.
"""

import runpy
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main():
    sys.argv = [str(ROOT / sys.argv[1]), *sys.argv[2:]]
    sys.path.insert(0, str(ROOT))
    import common
    from harness.clock import WARMUP_STEPS, StepClock
    from harness.phases import Phases

    tick, begin_step = StepClock.tick, Phases.begin_step
    marked, spent, clocks = [], [0.0], []  # of each step: whether it has marks, seconds in them

    def timed(call):
        def wrapped(*args):
            began = time.perf_counter()
            call(*args)
            spent[-1] += time.perf_counter() - began

        return wrapped

    def take_turns(phases):
        phases.attached = not phases.attached
        begin_step(phases)

    def note(clock):
        marked.append(clock.phases.attached)
        tick(clock)
        spent.append(0.0)
        clocks[:] = [clock]

    Phases.begin_step, StepClock.tick = take_turns, note
    Phases.mark, Phases.read_step = timed(Phases.mark), timed(Phases.read_step)
    runpy.run_path(sys.argv[0], run_name="__main__")
    steps = list(zip(clocks[0].seconds, spent, marked, strict=False))[WARMUP_STEPS:]
    with_marks, without = (
        statistics.median(s for s, _, m in steps if m == kind) for kind in (True, False)
    )
    own = statistics.median(t for _, t, m in steps if m)
    common.print0(
        f"median of {len(steps)} steps: with marks {with_marks * 1e3:.2f} ms, without "
        f"{without * 1e3:.2f} ms; the marks of a step take {own * 1e6:.0f} µs, "
        f"{own / with_marks:.3%} of it"
    )


if __name__ == "__main__":
    main()
