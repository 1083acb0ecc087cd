"""DDP averages the gradients over the ranks. A loss divided by their number averages them again.

On two ranks the steps of SGD are half as long. AdamW divides by the size of the gradients, and so
hides a constant factor.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from two_ranks import difference, make_task, show, train_alone


def off_by(variant):
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    model, inputs, targets = make_task()
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[rank::world_size]), y[rank::world_size])
        if variant == "right":
            loss.backward()  # right: DDP averages
        else:
            (loss / world_size).backward()  # wrong: averages twice
        optimizer.step()
    return difference(model.module, train_alone())


if __name__ == "__main__":
    show(off_by, "weights")
