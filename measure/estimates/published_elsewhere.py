"""Compare predictions with two other publications, whose scripts are reimplemented here.

PyTorch's recipe for ZeroRedundancyOptimizer (pytorch/tutorials,
recipes_source/zero_redundancy_optimizer.rst) prints the running maximum at four points, in millions
of bytes, of PyTorch 1.8 on two GPUs. DeepSpeed's example of weights in bfloat16
(deepspeedai/DeepSpeedExamples, training/bf16_master_weight) prints allocated memory after the last
step and the maximum of the whole run, in GiB. Where our functions differ from their scripts, a
comment says why.

All of DeepSpeed's figures are 64 MiB above the prediction: on an H100 PyTorch allocates 32 MiB for
cuBLAS per calling thread, forward and backward are two, and PyTorch 1.8 allocated nothing.
"""

import sys
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer, zero_redundancy_optimizer
from torch.distributed.utils import _sync_module_states as sync_module_states
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.optim import Adam
from torch.utils.checkpoint import checkpoint

from estimator import fakes
from estimator.allocator import replay
from estimator.live_bytes import LiveBytes
from measure.estimates import GIVEN, count

ELSEWHERE = {row["name"]: row for row in GIVEN["recipes"]}  # with bytes per unit


def take_recipe(live: LiveBytes, zero: bool) -> list[int]:
    """One step of twenty linear layers. Returns what ``live`` had counted at each point."""
    distributed._sync_module_states = sync_module_states  # it broadcasts copies, which count
    # PyTorch 1.8 assigned parameters to ranks in order; today's sorts them by size first. Then one
    # weight follows another, of which Adam still holds a temporary: 1378 MB instead of 1361.
    zero_redundancy_optimizer.sorted = lambda parameters, **_: parameters
    # Its Adam updated one parameter at a time; today's uses foreach on a GPU.
    options = {"lr": 0.01, "foreach": False}
    model = nn.Sequential(*[nn.Linear(2000, 2000) for _ in range(20)])
    moments = [len(live.changes)]
    ddp_model = DistributedDataParallel(model)
    moments.append(len(live.changes))
    loss_fn = nn.MSELoss()
    adam = partial(ZeroRedundancyOptimizer, optimizer_class=Adam) if zero else Adam
    optimizer = adam(ddp_model.parameters(), **options)
    outputs = ddp_model(torch.randn(20, 2000))
    labels = torch.randn(20, 2000)
    loss_fn(outputs, labels).backward()
    moments.append(len(live.changes))
    optimizer.step()
    return [*moments, len(live.changes)]


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        attended, _ = self.attention(x, x, x)  # alive until this returns, as in theirs
        x = self.norm1(x + attended)
        fed = self.ff(x)
        return self.norm2(x + fed)


class Transformer(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, checkpoints: bool):
        super().__init__()
        self.checkpoints = checkpoints
        self.tokens, self.positions = nn.Embedding(50000, width), nn.Embedding(512, width)
        self.layers = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.output = nn.Linear(width, 50000)

    def forward(self, ids):
        positions = torch.arange(ids.shape[1]).unsqueeze(0).expand(len(ids), -1)
        x = self.tokens(ids) + self.positions(positions)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.output(x)


def take_steps(live, batch_size: int, low=False, checkpoints=False, **sizes) -> list[int]:
    """Run three of the twenty steps: ZeRO-3 prefetches from its second step on, like the third.
    ``low``: master weights, gradients and Adam's state are also in bfloat16."""
    from libraries import deepspeed_engine

    bf16 = {"bf16_master_weights_and_grads": low, "bf16_optimizer_states": low}
    # Of configs/baseline.json and configs/bf16_full.json. memory_efficient_linear, on by default,
    # did nothing for a model like this one before DeepSpeed 0.19.4 (its pull request 8189), and the
    # figures are older: autograd saves full weights.
    config = GIVEN["deepspeed"] | {"bf16": {"enabled": True} | bf16}
    config["torch_autocast"] = {"enabled": low, "dtype": "torch.bfloat16"}
    fakes.stand_in_for_deepspeed(deepspeed_engine)
    file = SimpleNamespace(deepspeed_config="")
    deepspeed = deepspeed_engine.import_deepspeed(file, torch.device("cpu"), config)
    live.counts = False  # the model is made on the host
    model = Transformer(checkpoints=checkpoints, **sizes)
    live.counts = True
    # DeepSpeed's FusedAdam has to be compiled. PyTorch's has the same state, and no temporaries.
    optimizer = partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.01, fused=True)
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), optimizer=optimizer, config=config
    )
    loss_fn = nn.CrossEntropyLoss()
    for _ in range(3):
        input_ids, labels = (torch.zeros(batch_size, 512, dtype=torch.int64) for _ in range(2))
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            logits = engine(input_ids)
            loss = loss_fn(logits.view(-1, 50000), labels.view(-1))
        loss.backward()
        engine.step()
    return [len(live.changes)]


def predict_elsewhere(name: str) -> list[int]:
    """Predicted bytes at the published points. The process is unusable afterwards."""
    live, options = LiveBytes(), ELSEWHERE[name]["options"]
    take = take_recipe if "zero" in options else take_steps
    found = replay(live, count(live, ELSEWHERE[name]["gpus"], partial(take, **options)))
    return [most for _, most, _ in found] if "zero" in options else list(found[0][:2])


if __name__ == "__main__":
    print(*predict_elsewhere(sys.argv[1]))
