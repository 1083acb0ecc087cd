"""How much of a bare loop's speed a training script keeps.

    python tests/measure_overhead.py pytorch_SingleGPU.py --max-steps 60
    torchrun --standalone --nproc_per_node=2 tests/measure_overhead.py pytorch_torchrun_DDP.py

The script runs as it is. After each of its steps one step of a bare loop follows, in the same
process: same model, optimizer and DDP options, on tensors that are already there, without loader,
crops, losses, progress bar or TensorBoard. So both meet the same machine at the same time. The last
line gives both medians and their ratio; 1.00 would be a script that costs nothing. On a GPU its own
clock times them, and no step is waited for (harness/clock.py).
"""

import runpy
import statistics
import sys
from pathlib import Path

import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[1]


def main():
    sys.argv = [str(ROOT / sys.argv[1]), *sys.argv[2:]]
    sys.path.insert(0, str(ROOT))
    import common
    from harness.clock import WARMUP_STEPS, StepClock

    batches = common.Run.batches
    script_seconds, bare_seconds = [], []

    def interleaved(run, loader, epoch, *dtype):
        args = run.args
        model = common.make_model(args, run.train_set.classes).to(run.device).train()
        if dist.is_initialized():
            model = DistributedDataParallel(
                model,
                device_ids=[run.device] if run.device.type == "cuda" else None,
                gradient_as_bucket_view=True,
            )
            model.broadcast_buffers = False
        optimizer = common.make_optimizer(args, model)
        batch_size = args.batch_size // common.WORLD_SIZE
        batch = run.train_set.__getitems__(list(range(batch_size)))
        images, labels = run.train_set.prepare(batch, run.device, args.seed, 0, 0)

        clock = StepClock([run.device])
        clock.start()
        for batch in batches(run, loader, epoch, *dtype):
            yield batch
            clock.tick()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            clock.tick()
        clock.read()
        script_seconds.extend(clock.seconds[::2])
        bare_seconds.extend(clock.seconds[1::2])

    common.Run.batches = interleaved
    runpy.run_path(sys.argv[0], run_name="__main__")
    script = statistics.median(script_seconds[WARMUP_STEPS:])
    bare = statistics.median(bare_seconds[WARMUP_STEPS:])
    common.print0(
        f"median of {len(bare_seconds) - WARMUP_STEPS} steps: script {script * 1e3:.1f} ms, "
        f"bare {bare * 1e3:.1f} ms, the script runs at {bare / script:.3f} of the bare loop"
    )


if __name__ == "__main__":
    main()
