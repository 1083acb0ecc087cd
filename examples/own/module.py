"""A model and its data for --module: a tied matrix, a buffer in no state dict, labels to ignore."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.token = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.head.weight = self.token.weight  # tied
        self.register_buffer("scale", torch.rand(32), persistent=False)

    def forward(self, ids):
        x = self.token(ids).cumsum(1) * self.scale.to(self.token.weight)
        for layer in self.layers:
            x = x + self.dropout(layer(x).tanh())
        return self.head(x).transpose(1, 2)  # [batch, classes, time]


class Answers(torch.utils.data.Dataset):
    def __init__(self, n):
        self.ids = torch.arange(n * 6).view(n, 6) ** 2 % 64

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        labels = self.ids[i].clone()
        labels[: 1 + i % 6] = -100  # the question: it is not predicted
        return {"ids": self.ids[i], "labels": labels}


def make_model():
    return {"module": Model(), "train": Answers(60), "eval": Answers(15)}
