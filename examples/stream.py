"""The loop of ddp.py for a stream of shards: torchrun --nproc_per_node=2 stream.py"""

import gc
import glob
import math
import os
import random
from datetime import timedelta
from itertools import chain, islice

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Subset,
    default_collate,
    get_worker_info,
)

OUT = "runs/stream"  # checkpoints, and the best weights
STEPS = 60  # of the whole run
EVERY = 20  # steps: evaluates and saves
BATCH = 32  # samples of a step, of all ranks together
LR = 1e-2  # the highest learning rate
WARMUP = 6  # steps until LR is reached
DECAY = 0.01  # of weights
TIMEOUT = timedelta(minutes=60)  # ranks wait so long for one that exports
LANES = 6  # groups of shards, read side by side: best a multiple of the number of ranks
BLOCK = 32  # samples of a lane that are read, and shuffled, together
WORKERS = 2  # processes that read, for each rank


def make_model():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(nn.Embedding(64, 64), *blocks, nn.Linear(64, 64, bias=False))


def make_data():  # shards, which have a length and can be iterated again; a set for evaluation
    rows = [(torch.arange(17) * 7 + 37 * i) % 64 for i in range(600)]
    rows = [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]
    return [rows[i:540:12] for i in range(12)], rows[540:]


def collate(samples):  # a batch: a dictionary of tensors, with the samples in dimension 0
    return default_collate(samples)


def forward(model, batch):
    return model(batch["input_ids"]).float()


def loss_of(output, batch):  # sums: of the loss, and of what it is divided by; then of any metrics
    labels = batch["labels"]
    loss = nn.functional.cross_entropy(output.flatten(0, -2), labels.flatten(), reduction="sum")
    return torch.stack([loss, (labels >= 0).sum()])  # labels of -100 do not count


def groups_of(model):  # what is trained; a group may have its own "lr" and "weight_decay"
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


def is_done(values):  # of all evaluations so far: whether training ends before STEPS
    return False


def export(model, weights):
    seen = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:  # a tied tensor has several names, and is saved under its first
            del weights[name]
        seen.add(id(tensor))
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(weights, f"{OUT}/best/model.safetensors")


class Stream(IterableDataset):
    """This rank's samples of each batch, from step ``start`` on.

    Of n lanes, a lane has every n-th shard. Sample i of a batch comes from lane i % n and belongs
    to rank i % world. So the batches are the same on any number of ranks and workers, and a resumed
    run only skips samples. A rank opens the lanes of its own samples. Each of its workers reads
    these lanes, and yields every batch that is its turn.
    """

    def __init__(self, shards, start, rank, world):
        super().__init__()
        shards = list(shards)
        lanes = min(LANES, BATCH, len(shards))
        self.lanes = [shards[k::lanes] for k in range(lanes)]
        self.counts = [len(range(k, BATCH, lanes)) for k in range(lanes)]  # samples of a batch
        sizes = [sum(map(len, lane)) for lane in self.lanes]
        both = zip(sizes, self.counts, strict=True)
        self.batches = min((size // count for size, count in both), default=0)  # of an epoch
        if self.batches == 0 or BATCH < world:
            raise SystemExit(
                f"{sum(sizes)} samples in {len(shards)} shards, {min(sizes, default=0)} in the "
                f"smallest of {lanes} lanes: too few for BATCH {BATCH} on {world} ranks"
            )
        self.start = start
        self.numbers = range(rank, BATCH, world)  # of this rank's samples in a batch

    def __iter__(self):
        worker = get_worker_info()
        turn = worker.id if worker else 0
        workers = worker.num_workers if worker else 1
        n = len(self.lanes)
        readers = {}
        for step in range(self.start, STEPS):
            epoch, i = divmod(step, self.batches)
            if i == 0 or not readers:
                lanes = {number % n for number in self.numbers}
                readers = {k: self.read(k, epoch, i * self.counts[k]) for k in lanes}
            rows = {k: [*islice(reader, self.counts[k])] for k, reader in readers.items()}
            if (step - self.start) % workers == turn:
                yield [rows[number % n][number // n] for number in self.numbers]

    def read(self, lane, epoch, start):  # its samples from this one on, shuffled in blocks
        shards = [*self.lanes[lane]]
        random.Random(f"{epoch} {lane}").shuffle(shards)
        block, done = divmod(start, BLOCK)
        skipped = block * BLOCK
        while shards and len(shards[0]) <= skipped:  # not opened at all
            skipped -= len(shards.pop(0))
        samples = islice(chain.from_iterable(map(counted, shards)), skipped, None)
        while rows := [*islice(samples, BLOCK)]:
            random.Random(f"{epoch} {lane} {block}").shuffle(rows)
            yield from rows[done:]
            block += 1
            done = 0


def counted(shard):  # with a wrong length, a resumed run would skip others
    n = 0
    for sample in shard:
        n += 1
        yield sample
    if n != len(shard):
        raise ValueError(f"{shard} has {n} samples, but its length is {len(shard)}")


def newest_checkpoint(rank, world):  # of any rank: machines may have disks of their own
    files = sorted(glob.glob(f"{OUT}/step-*.pt"))
    path = f"{OUT}/copy-{rank}"
    name = ""
    if files:  # a file of the same name on another disk has another time
        name = f"{os.path.basename(files[-1])} {os.stat(files[-1]).st_mtime_ns}"
    names = [""] * world
    dist.all_gather_object(names, name)
    newest = max(names)
    if not newest:
        return None
    has_it = name == newest
    if has_it:
        path = files[-1]
    if min(names) != newest:  # those that do not see the file get a copy, piece by piece
        owner = names.index(newest)
        with open(path, "rb" if has_it else "wb") as file:
            piece = [b"-"]
            while piece[0]:
                piece = [file.read(2**26) if rank == owner else None]
                dist.broadcast_object_list(piece, owner)
                if not has_it:
                    file.write(piece[0])
    saved = torch.load(path, map_location="cpu", mmap=True)  # reads a tensor when it is used
    if not has_it:
        os.remove(path)  # mapped memory stays
    return saved


def main():
    if "RANK" not in os.environ:
        raise SystemExit("start this file with the command in its first lines")
    device = torch.device("cpu")
    if torch.cuda.is_available():  # one GPU per rank
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    half = torch.cuda.is_bf16_supported(including_emulation=False)  # a GPU that has bfloat16
    compute = torch.autocast(device.type, torch.bfloat16, enabled=half)(forward)  # not the loss
    torch.set_float32_matmul_precision("high")  # TF32 for what is not in bfloat16
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT)
    rank = dist.get_rank()
    world = dist.get_world_size()

    os.makedirs(f"{OUT}/best", exist_ok=True)
    model = make_model().to(device)
    train_set, eval_set = make_data()
    data = [BATCH, LANES, BLOCK, *map(len, train_set)]  # on which the order depends
    found = [data] * world
    dist.all_gather_object(found, data)
    if min(found) != max(found):
        raise SystemExit("the ranks do not see the same shards")
    optimizer = torch.optim.AdamW(groups_of(model), LR, weight_decay=DECAY)
    rates = [group["lr"] for group in optimizer.param_groups]  # after the warm-up
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    start = 0
    best = math.inf
    values = []
    saved = newest_checkpoint(rank, world)
    if saved:
        start = saved["step"]
        best = saved["best"]
        values = saved["values"]
        if saved["data"] != data:  # some samples would come twice, and others never
            raise SystemExit(f"{OUT} had other shards, BATCH, LANES or BLOCK: change them or OUT")
        if rank == 0:
            print(f"resumes after step {start}")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if is_done(values):
            start = STEPS
    # Averages the gradients in backward; without the option, it would hold each of them twice
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)

    batches = Stream(train_set, start, rank, world)  # this rank's samples
    train_loader = DataLoader(batches, None, num_workers=WORKERS, collate_fn=collate)
    share = Subset(eval_set, range(rank, len(eval_set), world))
    eval_loader = DataLoader(share, BATCH // world, collate_fn=collate)
    torch.manual_seed(start * world + rank)  # of augmentation in loader workers
    for step, batch in enumerate(train_loader, start + 1):
        model.train()  # from_pretrained() returns a model in evaluation mode
        torch.manual_seed(step * world + rank)  # of dropout: each rank has its own masks
        factor = min(step / max(1, WARMUP), 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor  # a linear warm-up, then half a cosine
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        sums = loss_of(compute(model, batch), batch)
        total = sums.detach().clone()
        dist.all_reduce(total)  # ranks may have different numbers of labels
        count = total[1].clamp(min=1e-9)  # a batch may have no label
        (sums[0] * world / count).backward()  # DDP divides by world
        norm = nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        model.zero_grad()  # also of parameters that no group has
        if step % EVERY and step < STEPS:
            continue

        for buffer in model.buffers():
            dist.broadcast(buffer, 0)  # BatchNorm saw other samples on each rank
        model.eval()
        found = torch.zeros_like(total)
        for batch in eval_loader:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            with torch.no_grad():
                found += loss_of(compute(model.module, batch), batch)
        dist.all_reduce(found)
        loss = (total[0] / count).item()
        value, _, *metrics = (found / found[1]).tolist()  # the same on every rank
        values.append(value)
        is_best = value < best
        best = min(best, value)
        if rank == 0:  # every rank has the same weights: rank 0 saves them
            line = f"step {step}: loss {loss:.4f}, evaluation loss {value:.4f}, norm {norm:.4f}"
            print(line, *[f"{metric:.4f}" for metric in metrics])
            if is_best:
                export(model.module, model.module.state_dict())
            saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            saved |= {"step": step, "best": best, "values": values, "data": data}
            torch.save(saved, f"{OUT}/part")
            os.replace(f"{OUT}/part", f"{OUT}/step-{step:08}.pt")  # never half a file
            for old in sorted(glob.glob(f"{OUT}/step-*.pt"))[:-2]:
                os.remove(old)
        if is_done(values):
            break


if __name__ == "__main__":
    main()
    gc.collect()  # frees DDP, which holds the process group: else gloo may abort at exit
    dist.destroy_process_group()
