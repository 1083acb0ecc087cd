"""What Accelerate does by default, on two ranks on a CPU. Started by torchrun, prints a line of
JSON, which tests/test_library_defaults.py checks."""

import json
import os

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from torch import nn
from torch.utils.data import DataLoader


def main():
    os.environ["ACCELERATE_USE_FSDP"] = "true"  # as the launcher does for distributed_type: FSDP
    accelerator = Accelerator(cpu=True)
    seen = {"distributed_type": accelerator.distributed_type.value}

    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    numbers = DataLoader(torch.arange(16.0), batch_size=4)
    odd = DataLoader(torch.arange(5), batch_size=2)
    model, optimizer, schedule, loader, evaluation = accelerator.prepare(
        model, optimizer, schedule, numbers, odd
    )
    batch = next(iter(loader))
    seen["samples of a step"] = accelerator.gather(batch).tolist()
    seen["own samples of a step"] = batch.tolist()
    accelerator.backward(model(batch[:, None]).mean())
    optimizer.step()
    schedule.step()
    seen["scheduler is at step"] = schedule.scheduler.last_epoch
    gathered = [accelerator.gather(batch).tolist() for batch in evaluation]
    seen["evaluated samples"] = sorted(number for batch in gathered for number in batch)

    # FSDP itself, as accelerate_FSDP.py switches it on for CPUs; each rank has weights of its own
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    for state in (PartialState(), accelerator.state):
        state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model = nn.Linear(1, 4, bias=False)
    nn.init.constant_(model.weight, accelerator.process_index)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, _ = accelerator.prepare(model, optimizer)
    seen["weights of FSDP"] = model.weight.full_tensor().flatten().tolist()
    if accelerator.is_main_process:
        print(json.dumps(seen))
    accelerator.end_training()


if __name__ == "__main__":
    main()
