"""The solution of exercises/lora.py."""

import torch
import torch.nn.functional as F


def start(outputs, inputs, rank):
    a = torch.randn(rank, inputs, dtype=torch.float32) / inputs**0.5
    return a, torch.zeros(outputs, rank, dtype=torch.float32)


def forward(x, weight, a, b, scale):
    return F.linear(x, weight) + F.linear(F.linear(x, a), b) * scale


def merge(weight, a, b, scale):
    return (weight.to(a.dtype) + b @ a * scale).to(weight.dtype)
