"""Weights that are tied before the model is sharded are not tied afterwards.

``parallelize_module`` replaces the parameters layer by layer, and so makes two of one.
(``fully_shard`` on each layer does the same in PyTorch 2.11; in 2.15 it raises an error.)
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import parallel as tp
from two_ranks import difference, show

torch.manual_seed(0)
tokens, labels = torch.randint(12, (2, 4, 8, 6))


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12, bias=False))
    model[1].weight = model[0].weight
    return model


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    for x, y in zip(tokens, labels, strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x).transpose(1, 2), y).backward()
        optimizer.step()
    return model


def off_by(variant):
    mesh = init_device_mesh("cpu", (2,))
    embedding = tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    head = tp.ColwiseParallel(output_layouts=Replicate())
    model = tp.parallelize_module(make_model(), mesh, {"0": embedding, "1": head})
    if variant == "right":
        model[1].weight = model[0].weight  # wrong without this line, which ties them again
    trained = train(model)[:1]  # the embedding
    alone = train(make_model())[:1]
    return difference(trained, alone, start=make_model()[:1])


if __name__ == "__main__":
    show(off_by, "weights")
