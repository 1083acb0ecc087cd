"""The loop of plain.py with DeepSpeed ZeRO stage 2: deepspeed deepspeed_zero2.py"""

import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoint", default="checkpoint")
    parser.add_argument("--local_rank")  # the deepspeed launcher passes it
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():  # one GPU per rank
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")

    inputs = torch.randn(512, 32, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs[:, :10].argmax(1))  # the label: the largest of ten numbers
    sampler = DistributedSampler(data, drop_last=True)  # each rank reads 1/N of every 64 samples
    loader = DataLoader(data, 64 // dist.get_world_size(), sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(nn.Linear(32, 64), *blocks, nn.Linear(64, 10))
    config = {
        "train_batch_size": 64,
        "zero_optimization": {"stage": 2},  # shards optimizer state and gradients
        "gradient_clipping": 0.0,  # or DeepSpeed clips the gradient norm to 1.0
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    start = 0
    if os.path.exists(f"{args.checkpoint}/latest"):
        _, saved = engine.load_checkpoint(args.checkpoint)  # on every rank
        start = saved["epoch"]

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)  # a new order every epoch, the same on every rank
        for x, y in loader:
            loss = nn.functional.cross_entropy(engine(x.to(device)), y.to(device))
            engine.backward(loss)
            engine.step()  # updates, and sets the gradients to zero
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f} on rank 0")
        engine.save_checkpoint(args.checkpoint, client_state={"epoch": epoch + 1})  # on every rank


main()
dist.destroy_process_group()
