"""Frozen weights that a loader or a policy casts to fp32 take twice the memory, and train the same.

Adapters (LoRA) need fp32, because bfloat16 would round small updates away; see
half_precision_weights.py. No update changes a frozen weight, so it can stay in bfloat16. A trainer
that casts the whole model for the sake of the adapters, or ``param_dtype=torch.float32``, which
holds for every parameter of a unit, loses what the frozen weights would save. Nothing reports it.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from two_ranks import show

WIDTH = 64
RANK = 4  # of the adapters
BLOCKS = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        options = {"bias": False, "dtype": torch.float32}
        self.frozen = nn.Linear(WIDTH, WIDTH, **options).bfloat16().requires_grad_(False)
        self.lora_A = nn.Linear(WIDTH, RANK, **options)
        self.lora_B = nn.Linear(RANK, WIDTH, **options)

    def forward(self, x):
        kept.append(sum(p.nbytes for p in self.parameters()))  # while the block is gathered
        return x + self.frozen(x.to(self.frozen.weight.dtype)).float() + self.lora_B(self.lora_A(x))


kept = []


def off_by(variant):
    world_size = dist.get_world_size()
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    policy = MixedPrecisionPolicy()
    if variant == "loaded":
        model.float()  # wrong. In transformers: dtype=torch.float32; accelerate before fully_shard
    if variant == "gathered":
        policy = MixedPrecisionPolicy(param_dtype=torch.float32)  # wrong: of the frozen ones, too
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model(torch.ones(8, WIDTH, dtype=torch.float32)).sum().backward()
    shards = sum(p.to_local().nbytes for p in model.parameters())
    a_block = 2 * WIDTH**2 + 4 * 2 * WIDTH * RANK  # bytes in bfloat16, and in fp32
    return (shards + kept[-1]) / (BLOCKS * a_block / world_size + a_block) - 1


if __name__ == "__main__":
    show(off_by, "memory", "gathered", "loaded")
