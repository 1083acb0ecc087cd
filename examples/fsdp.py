"""The loop of plain.py with FSDP2: torchrun --nproc_per_node=2 fsdp.py"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoint", default="checkpoint")
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
    for block in blocks:  # each block is gathered before it computes and freed afterwards
        fully_shard(block)
    fully_shard(model)  # the parameters that are in no block
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    start = 0
    while os.path.exists(f"{args.checkpoint}/{start + 1}/.metadata"):  # written last
        start += 1
    if start:
        weights, moments = get_state_dict(model, optimizer)
        saved = {"model": weights, "optim": moments}
        dcp.load(saved, checkpoint_id=f"{args.checkpoint}/{start}")  # into these shards
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)  # a new order every epoch, the same on every rank
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f} on rank 0")
        weights, moments = get_state_dict(model, optimizer)  # this rank's shards
        dcp.save(
            {"model": weights, "optim": moments}, checkpoint_id=f"{args.checkpoint}/{epoch + 1}"
        )


main()
gc.collect()  # frees the model, which holds the process group: else gloo may abort at exit
dist.destroy_process_group()
