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


def collate(samples):  # a batch: a dictionary of tensors, with the samples in dimension 0
    return default_collate(samples)


def order(train_set, start):  # the samples of each batch: a new permutation every epoch
    batches = max(1, len(train_set) // BATCH)
    for step in range(start, STEPS):
        epoch, i = divmod(step, batches)
        generator = torch.Generator().manual_seed(epoch)
        permutation = torch.randperm(len(train_set), generator=generator)
        yield permutation[i * BATCH : (i + 1) * BATCH].tolist()


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
    q, k = (x.to(v.dtype) for x in (q, k))  # under autocast, a rotation makes them float32
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


def add_positions(model, args, kwargs):  # of this rank's part of the first argument
    x = [*args, *kwargs.values()][0]
    first = x.shape[1] * dist.get_rank()
    positions = torch.arange(first, first + x.shape[1], device=x.device).expand(len(x), -1)
    return args, {"position_ids": positions} | kwargs


def shard(batch, device):  # this rank's part of the sequence, which is dimension 1 of each tensor
    rank = dist.get_rank()
    world = dist.get_world_size()
    shapes = {name: [*tensor.shape] for name, tensor in batch.items()}
    times = {shape[1] if len(shape) > 1 else 1 for shape in shapes.values()}
    if len(times) > 1 or min(times) % world:
        why = f"{world} ranks cannot share dimension 1, the sequence, of {shapes}"
        raise SystemExit(f"{why}: let collate() pad it at the end")
    return {name: tensor.chunk(world, 1)[rank].to(device) for name, tensor in batch.items()}


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
    half = torch.cuda.is_bf16_supported(including_emulation=False)  # a GPU that has bfloat16
    compute = torch.autocast(device.type, torch.bfloat16, enabled=half)(forward)  # not the loss
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT)
    rank = dist.get_rank()
    world = dist.get_world_size()

    os.makedirs(f"{OUT}/best", exist_ok=True)
    torch.manual_seed(0)  # what make_model() draws is the same on every rank
    model = make_model().to(device)
    train_set, eval_set = make_data()
    sample = collate([train_set[0]])
    cut = 256 // world * world  # positions: the attention of all of them may need too much memory
    for name, tensor in sample.items():
        sample[name] = tensor[:, :cut] if tensor.dim() > 1 else tensor
    whole = {name: tensor.to(device) for name, tensor in sample.items()}
    with torch.no_grad():
        expected = forward(model.eval(), whole).chunk(world, 1)[rank]
        model.register_forward_pre_hook(add_positions, with_kwargs=True)
        replace_attention(model)
        found = forward(model, shard(sample, device))
    why = "attend() is not the attention of this model: other outputs"
    check(found, expected, next(model.parameters()).dtype, why)
    torch.set_float32_matmul_precision("high")  # TF32 for what is not in bfloat16, from here on
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

    batches = order(train_set, start)
    train_loader = DataLoader(train_set, batch_sampler=batches, collate_fn=collate)
    eval_loader = DataLoader(eval_set, BATCH, collate_fn=collate)  # every rank reads all samples
    torch.manual_seed(start)  # of augmentation in loader workers: every rank draws the same
    for step, batch in enumerate(train_loader, start + 1):
        model.train()  # from_pretrained() returns a model in evaluation mode
        torch.manual_seed(step * world + rank)  # of dropout: each rank has its own masks
        factor = min(step / max(1, WARMUP), 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor  # a linear warm-up, then half a cosine
        batch = shard(batch, device)
        sums = loss_of(compute(model, batch), batch)
        total = sums.detach().clone()
        dist.all_reduce(total)  # ranks may have different numbers of labels
        count = total[1].clamp(min=1e-9)  # a batch may have no label
        (sums[0] * world / count).backward()  # DDP divides by world
        norm = nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        model.zero_grad()  # also of parameters that no group has
        torch.manual_seed(step)  # of augmentation without workers: every rank draws the same
        if step % EVERY and step < STEPS:
            continue

        for buffer in model.buffers():
            dist.broadcast(buffer, 0)  # BatchNorm saw other samples on each rank
        model.eval()
        found = torch.zeros_like(total)
        for batch in eval_loader:
            batch = shard(batch, device)
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
