"""Without set_epoch a DistributedSampler draws the same order in every epoch.

Its order depends on its seed and on the epoch that it was told, which stays 0.
"""

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from two_ranks import difference, make_task, show

EPOCHS = 3
BATCH = 8  # of all ranks together


def off_by(variant):
    model, inputs, targets = make_task()
    dataset = TensorDataset(inputs.flatten(0, 1), targets.flatten(0, 1))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, BATCH // sampler.num_replicas, sampler=sampler)
    for epoch in range(EPOCHS):
        if variant == "right":
            sampler.set_epoch(epoch)  # wrong without this line
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    return difference(model.module, train_alone(dataset))


def train_alone(dataset):
    model, *_ = make_task()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        generator = torch.Generator().manual_seed(epoch)
        for numbers in torch.randperm(len(dataset), generator=generator).split(BATCH):
            optimizer.zero_grad()
            x, y = dataset[numbers]
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    return model


if __name__ == "__main__":
    show(off_by, "weights")
