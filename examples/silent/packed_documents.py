"""Documents that are packed into one sequence are trained as if each were alone.

Attention sees one document only, positions restart with each, and its last token does not predict
the next one. Context parallelism splits the sequence: its ranks find the boundaries before.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import difference, show

LENGTHS = torch.tensor([5, 3, 6, 2])  # of the documents in a sequence
torch.manual_seed(0)
tokens = torch.randint(12, (4, 1, 16))  # four batches of one sequence


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(12, 8)
        self.position = nn.Embedding(16, 8)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 12)

    def forward(self, tokens, positions, documents):
        x = self.token(tokens) + self.position(positions)
        times = torch.arange(tokens.shape[1])
        visible = (times <= times[:, None]) & (documents[:, None] == documents[..., None])
        attended = F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1), visible)
        return self.head(x + attended).transpose(1, 2)


def train_alone():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    for row in tokens:
        optimizer.zero_grad()
        parts = [part[None] for part in row[0].split(LENGTHS.tolist())]
        for part in parts:
            inputs = part[:, :-1]
            labels = part[:, 1:]
            logits = model(inputs, torch.arange(inputs.shape[1])[None], torch.zeros_like(inputs))
            loss = F.cross_entropy(logits, labels, reduction="sum")
            (loss / (LENGTHS - 1).sum()).backward()
        optimizer.step()
    return model


def off_by(variant):
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    for row in tokens:
        optimizer.zero_grad()
        positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]  # right: restart
        last = torch.cat([torch.arange(n) == n - 1 for n in LENGTHS])[None]
        labels = row.roll(-1, 1).masked_fill(last, -100)  # right: none of the next document
        documents = (positions == 0).cumsum(1)  # right: of the whole sequence
        if variant == "mask":
            documents = torch.zeros_like(positions)  # wrong: sees the documents before
        elif variant == "positions":
            positions = torch.arange(16)[None]  # wrong: of the sequence
        elif variant == "labels":
            labels = row.roll(-1, 1)  # wrong: the first token of the next document
            labels[:, -1] = -100
        elif variant == "shards":
            shards = positions.chunk(world_size, 1)
            documents = torch.cat([(shard == 0).cumsum(1) for shard in shards], 1)  # wrong: of each
        logits = model(row, positions, documents)
        own = slice(rank * 16 // world_size, (rank + 1) * 16 // world_size)  # this rank's shard
        loss = F.cross_entropy(logits[:, :, own], labels[:, own], reduction="sum")
        (loss * world_size / (labels >= 0).sum()).backward()
        optimizer.step()
    return difference(model.module, train_alone(), start=Model())


if __name__ == "__main__":
    show(off_by, "weights", "mask", "positions", "labels", "shards")
