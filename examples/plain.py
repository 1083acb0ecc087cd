"""A plain training loop on one device: python plain.py --epochs 3 --checkpoint checkpoint.pt"""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    inputs = torch.randn(512, 32, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs[:, :10].argmax(1))  # the label: the largest of ten numbers
    generator = torch.Generator()
    sampler = RandomSampler(data, generator=generator)
    loader = DataLoader(data, 64, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(nn.Linear(32, 64), *blocks, nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    start = 0
    if os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint, map_location="cpu")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"]

    for epoch in range(start, args.epochs):
        generator.manual_seed(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved | {"epoch": epoch + 1}, f"{args.checkpoint}.part")
        os.replace(f"{args.checkpoint}.part", args.checkpoint)  # never half a file


main()
