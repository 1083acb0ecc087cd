"""The loop of plain.py with DDP and ZeRO stage 1: torchrun --nproc_per_node=2 zero.py"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():  # one GPU per rank
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    inputs = torch.randn(512, 32, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs[:, :10].argmax(1))  # the label: the largest of ten numbers
    sampler = DistributedSampler(data, drop_last=True)  # each rank reads 1/N of every 64 samples
    loader = DataLoader(data, 64 // dist.get_world_size(), sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(nn.Linear(32, 64), *blocks, nn.Linear(64, 10)).to(device)
    model = DistributedDataParallel(model)  # averages the gradients in backward
    optimizer = ZeroRedundancyOptimizer(  # each rank keeps the AdamW state of 1/N of the parameters
        model.parameters(), torch.optim.AdamW, lr=1e-3
    )

    start = 0
    if os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint, map_location="cpu")
        model.module.load_state_dict(saved["model"])  # .module: the model inside DDP
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"]

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)  # a new order every epoch, the same on every rank
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.consolidate_state_dict(to=0)  # on every rank: sends the shards to rank 0
        if dist.get_rank() == 0:  # every rank has the same weights: one of them saves
            print(f"epoch {epoch + 1}: loss {loss.item():.4f} on rank 0")
            saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved | {"epoch": epoch + 1}, f"{args.checkpoint}.part")
            os.replace(f"{args.checkpoint}.part", args.checkpoint)  # never half a file


main()
dist.destroy_process_group()
