"""The loop of ddp.py with context parallelism (Ulysses): torchrun --nproc_per_node=2 cp.py"""

import gc
import glob
import math
import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, default_collate

OUT = "runs/cp"  # checkpoints, and the best weights
STEPS = 60  # of the whole run
EVERY = 20  # steps: evaluates and saves
BATCH = 32  # samples of a step, of all ranks together
LR = 1e-2  # the highest learning rate
WARMUP = 6  # steps until LR is reached
DECAY = 0.01  # of weights
TIMEOUT = timedelta(minutes=60)  # ranks wait so long for one that exports


def rotate(x, positions):  # rotary position embedding of [batch, heads, time, 16]
    angles = positions[..., None] / 100 ** (torch.arange(8, device=x.device) / 8)
    cos = angles.cos()[:, None]
    sin = angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Layer(nn.Module):
    attend = staticmethod(partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True))

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(64, 64)
        self.k_proj = nn.Linear(64, 32)
        self.v_proj = nn.Linear(64, 32)
        self.o_proj = nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))
        self.dropout = nn.Dropout(0.1)
        self.norm = nn.RMSNorm(64)

    def forward(self, x, positions):
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, 16)) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = self.attend(rotate(q, positions), rotate(k, positions), v)
        x = x + self.dropout(self.o_proj(y.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 64)
        self.lm_head = nn.Linear(64, 64)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, input_ids, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, position_ids)
        return self.lm_head(x)


def make_model():
    torch.manual_seed(0)
    return Model()


def make_data():  # for training and for evaluation
    rows = [(torch.arange(17) * 7 + 37 * i) % 64 for i in range(600)]
    rows = [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]
    return rows[:540], rows[540:]


def loss_of(model, batch):  # the sum over all labels, and their number; -100 does not count
    logits = model(batch["input_ids"], batch.get("position_ids")).float()
    labels = batch["labels"]
    loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    return torch.stack([loss, (labels >= 0).sum()])


def export(model, weights):
    names = {id(t): name for name, t in reversed(model.state_dict(keep_vars=True).items())}
    second = model.state_dict().keys() - names.values()  # of a tied tensor: it is saved once
    weights = {name: tensor for name, tensor in weights.items() if name not in second}
    save_file(weights, f"{OUT}/best/model.safetensors")


def order(samples, start):  # the indices of each batch: a new permutation every epoch
    for step in range(start, STEPS):
        epoch, i = divmod(step, max(1, samples // BATCH))
        permutation = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch))
        yield permutation[i * BATCH : (i + 1) * BATCH].tolist()


class Exchange(torch.autograd.Function):  # splits one dimension over the ranks, joins another
    @staticmethod
    def forward(ctx, x, split, join):
        ctx.reverse = join, split
        parts = torch.stack(x.chunk(dist.get_world_size(), split))
        found = torch.empty_like(parts)
        dist.all_to_all_single(found, parts)
        return torch.cat(found.unbind(), join)

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.reverse), None, None


def attend(q, k, v, window=None, **options):  # causal, of [batch, heads, this rank's time, width]
    world = dist.get_world_size()
    heads = q.shape[1]
    if heads % world:
        raise SystemExit(f"{heads} attention heads cannot be divided among {world} ranks")
    if k.shape[1] % world:  # too few heads of keys and values
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    q, k, v = (Exchange.apply(x, 1, 2) for x in (q, k, v))  # all the time, of 1/N of the heads
    time = torch.arange(q.shape[2], device=q.device)
    mask = None
    if window and window < len(time):
        ago = time[:, None] - time
        mask = (ago >= 0) & (ago < window)
    options |= {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": True}
    return Exchange.apply(F.scaled_dot_product_attention(q, k, v, **options), 2, 1)


def replace_attention(model):  # of each layer, by attend()
    for module in model.modules():
        if hasattr(module, "attend"):
            module.attend = attend


def shard(batch, device):  # this rank's positions of every row; padded to a multiple of the ranks
    rank = dist.get_rank()
    world = dist.get_world_size()
    rows, time = batch["input_ids"].shape
    missing = -time % world
    padded = {name: F.pad(tensor, (0, missing)) for name, tensor in batch.items()}
    padded["labels"] = F.pad(batch["labels"], (0, missing), value=-100)
    padded["position_ids"] = torch.arange(time + missing).expand(rows, -1)
    return {name: tensor.chunk(world, 1)[rank].to(device) for name, tensor in padded.items()}


def check(found, expected, dtype, why):  # once, before the first step: is it the same model?
    # A part of the model was replaced, and its forward may do more than the new part knows of
    eps = torch.finfo(dtype).eps
    off = (found.float() - expected.float()).norm() / expected.float().norm().clamp(min=eps)
    off = off.nan_to_num(math.inf)
    dist.all_reduce(off, dist.ReduceOp.MAX)  # every rank ends, or none
    if off > eps**0.5:
        raise SystemExit(f"{why} (relative difference {off:.1g})")


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
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT)
    rank = dist.get_rank()
    world = dist.get_world_size()

    os.makedirs(f"{OUT}/best", exist_ok=True)
    torch.manual_seed(0)  # what make_model() draws is the same on every rank
    model = make_model().to(device)
    train_set, eval_set = make_data()
    sample = default_collate([{name: tensor[:256] for name, tensor in train_set[0].items()}])
    sample["position_ids"] = torch.arange(sample["input_ids"].shape[1])[None]
    whole = {name: tensor.to(device) for name, tensor in sample.items()}
    with torch.no_grad():
        expected = loss_of(model.eval(), whole)
        replace_attention(model)
        found = loss_of(model, shard(sample, device))
    dist.all_reduce(found)  # a sum over the ranks' positions
    why = "attend() is not the attention of this model: another loss"
    check(found, expected, next(model.parameters()).dtype, why)
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs, but not for the comparison
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=DECAY)
    rates = [group["lr"] for group in optimizer.param_groups]  # after the warm-up
    start = 0
    best = math.inf
    saved = newest_checkpoint(rank, world)
    if saved:
        start = saved["step"]
        best = saved["best"]
        if rank == 0:
            print(f"resumes after step {start}")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    model = DistributedDataParallel(model)  # averages the gradients in backward

    train_loader = DataLoader(train_set, batch_sampler=order(len(train_set), start))
    eval_loader = DataLoader(eval_set, BATCH)  # every rank reads all rows
    torch.manual_seed(start * world + rank)  # of augmentation in loader workers
    for step, batch in enumerate(train_loader, start + 1):
        model.train()  # from_pretrained() returns a model in evaluation mode
        torch.manual_seed(step * world + rank)  # of dropout: each rank has its own masks
        factor = min(step / max(1, WARMUP), 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor  # a linear warm-up, then half a cosine
        batch = shard(batch, device)
        sums = loss_of(model, batch)
        total = sums.detach().clone()
        dist.all_reduce(total)  # ranks may have different numbers of labels
        (sums[0] * world / total[1]).backward()  # DDP divides by world
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY and step < STEPS:
            continue

        for buffer in model.buffers():
            dist.broadcast(buffer, 0)  # BatchNorm saw other samples on each rank
        model.eval()
        found = torch.zeros_like(total)
        for batch in eval_loader:
            with torch.no_grad():
                found += loss_of(model.module, shard(batch, device))
        dist.all_reduce(found)
        loss = (total[0] / total[1]).item()
        value = (found[0] / found[1]).item()  # the same on every rank
        is_best = value < best
        best = min(best, value)
        if rank == 0:  # every rank has the same weights: rank 0 saves them
            print(f"step {step}: loss {loss:.4f}, evaluation loss {value:.4f}, norm {norm:.4f}")
            if is_best:
                export(model.module, model.module.state_dict())
            saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved | {"step": step, "best": best}, f"{OUT}/part")
            os.replace(f"{OUT}/part", f"{OUT}/step-{step:08}.pt")  # never half a file
            for old in sorted(glob.glob(f"{OUT}/step-*.pt"))[:-2]:
                os.remove(old)


main()
gc.collect()  # frees DDP, which holds the process group: else gloo may abort at exit
dist.destroy_process_group()
