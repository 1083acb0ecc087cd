"""The loop of ddp.py with a contrastive loss (InfoNCE, as CLIP) over the samples of all ranks:
torchrun --nproc_per_node=2 contrastive.py"""

import gc
import glob
import math
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, default_collate

OUT = "runs/contrastive"  # checkpoints, and the best weights
STEPS = 60  # of the whole run
EVERY = 20  # steps: evaluates and saves
BATCH = 32  # samples of a step, of all ranks together
LR = 3e-3  # the highest learning rate
WARMUP = 6  # steps until LR is reached
DECAY = 0.01  # of weights
TEMPERATURE = 0.2  # by which similarities are divided
TIMEOUT = timedelta(minutes=60)  # ranks wait so long for one that exports


def make_model():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(nn.Embedding(64, 64), *blocks, nn.Linear(64, 64, bias=False))


def make_data():  # for training and for evaluation: two views of each sample
    torch.manual_seed(0)
    first = torch.randint(64, [600, 16])
    second = torch.randint(64, [600, 16]).where(torch.rand(600, 16) < 0.25, first)
    rows = [{"first": a, "second": b} for a, b in zip(first, second, strict=True)]
    return rows[:535], rows[535:]


def collate(samples):  # a batch: a dictionary of tensors, with the samples in dimension 0
    return default_collate(samples)


def order(train_set, start):  # the samples of each batch: a new permutation every epoch
    batches = max(1, len(train_set) // BATCH)
    for step in range(start, STEPS):
        epoch, i = divmod(step, batches)
        generator = torch.Generator().manual_seed(epoch)
        permutation = torch.randperm(len(train_set), generator=generator)
        yield permutation[i * BATCH : (i + 1) * BATCH].tolist()


def forward(model, batch):  # [samples, views, width]: embeddings of length 1
    views = torch.cat([batch["first"], batch["second"]])  # DDP sees one forward
    embeddings = nn.functional.normalize(model(views).float().mean(1), dim=-1)
    return embeddings.unflatten(0, (2, -1)).transpose(0, 1)


class Gather(torch.autograd.Function):  # rows of all ranks; dist.all_gather alone has no backward
    @staticmethod
    def forward(ctx, rows):
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):  # adds up what the losses of all ranks say about this rank's rows
        parts = [part.contiguous() for part in gradient.chunk(dist.get_world_size())]
        total = torch.empty_like(parts[0])
        dist.reduce_scatter(total, parts)
        return total


def gather(rows):  # of all ranks, where this rank's begin, and which of them are no padding
    world = 1
    rank = 0
    if dist.is_initialized():
        world = dist.get_world_size()
        rank = dist.get_rank()
    most = -(-BATCH // world)  # a rank with fewer pads them: all ranks send the same size
    if len(rows) > most:
        raise SystemExit(f"{len(rows)} samples on rank {rank}: more than BATCH {BATCH} / {world}")
    padded = torch.cat([rows.flatten(1), rows.new_ones(len(rows), 1)], 1)
    padded = nn.functional.pad(padded, (0, 0, 0, most - len(rows)))
    if world > 1:
        padded = Gather.apply(padded)
    return padded[:, :-1].unflatten(1, rows.shape[1:]), rank * most, padded[:, -1] > 0


def loss_of(output, batch):  # sums over this rank's samples; the samples of all ranks are negatives
    everyone, first, is_sample = gather(output)
    numbers = first + torch.arange(len(output), device=output.device)
    loss = 0
    for view in (0, 1):  # finds the other view
        logits = output[:, view] @ everyone[:, 1 - view].T / TEMPERATURE
        logits = logits.masked_fill(~is_sample, -math.inf)
        loss = loss + nn.functional.cross_entropy(logits, numbers, reduction="sum") / 2
    right = (logits.argmax(1) == numbers).sum()
    return torch.stack([loss, torch.ones_like(numbers).sum(), right])  # a loss per sample; accuracy


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
    if min(BATCH, len(train_set)) < world:
        raise SystemExit(f"{len(train_set)} samples, BATCH {BATCH}: too few for {world} ranks")
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
        if rank == 0:
            print(f"resumes after step {start}")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if is_done(values):
            start = STEPS
    # Averages the gradients in backward; without the option, it would hold each of them twice
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)

    batches = (batch[rank::world] for batch in order(train_set, start))  # this rank's samples
    train_loader = DataLoader(train_set, batch_sampler=batches, collate_fn=collate)
    parts = [part[rank::world].tolist() for part in torch.arange(len(eval_set)).split(BATCH)]
    some = [part or [0] for part in parts]  # every rank has as many batches: the loss communicates
    eval_loader = DataLoader(eval_set, batch_sampler=some, collate_fn=collate)
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
        for part, batch in zip(parts, eval_loader, strict=True):
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            with torch.no_grad():
                output = compute(model.module, batch)[: len(part)]  # not the sample that stands in
                found += loss_of(output, batch)
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
            saved |= {"step": step, "best": best, "values": values}
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
