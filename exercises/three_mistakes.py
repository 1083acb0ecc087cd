"""A hunt: three silent mistakes in one loop.

Problem     This loop runs without an error, its loss falls, and on one rank its weights are right.
            On two and three ranks they are not those of one process with the same global batch.
Write       nothing new: find the three mistakes, and mend them where they are.
The judge   trains on 1, 2 and 3 ranks, compares the weights with those of one process, and says how
            many mistakes it still sees. No batch is divisible by 3.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

BATCH = 10  # samples of a step, on all ranks together
MAX_NORM = 0.1  # of the gradients of a step


def train(model: nn.Module, inputs: Tensor, targets: Tensor, epochs: int) -> None:
    """Train in place. Every rank begins with the same model, and has all samples."""
    raise NotImplementedError("delete this line, and the hunt begins")
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(100 * epoch + rank)  # another order every epoch
        order = torch.randperm(len(inputs), generator=generator)
        for batch in order.split(BATCH):
            own = batch[rank::ranks]
            loss = F.mse_loss(model(inputs[own]), targets[own])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= ranks
            optimizer.step()
