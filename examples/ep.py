"""The loop of ddp.py with expert parallelism: torchrun --nproc_per_node=2 ep.py"""

import gc
import glob
import math
import os
import shutil
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import DataLoader, default_collate

OUT = "runs/ep"  # checkpoints, and the best weights
STEPS = 60  # of the whole run
EVERY = 20  # steps: evaluates and saves
BATCH = 32  # samples of a step, of all ranks together
LR = 1e-2  # the highest learning rate
WARMUP = 6  # steps until LR is reached
DECAY = 0.01  # of weights
TIMEOUT = timedelta(minutes=60)  # ranks wait so long for one that exports
SOME = sd.StateDictOptions(strict=False)  # optimizer state of some parameters; dcp.load is strict
WHOLE = sd.StateDictOptions(full_state_dict=True, cpu_offload=True)  # on rank 0


class Experts(nn.Module):  # with stacked weights, as in transformers
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 128, 64) / 8)  # [experts, 2 * inner, width]
        self.down_proj = nn.Parameter(torch.randn(4, 64, 64) / 8)  # [experts, width, inner]
        self.act_fn = nn.SiLU()

    def forward(self, x, index, weights):  # each token's width, its experts, and their weights
        found = torch.zeros_like(x)
        for expert in range(len(self.down_proj)):
            token, place = torch.where(index == expert)
            gate, up = F.linear(x[token], self.gate_up_proj[expert]).chunk(2, -1)
            y = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
            found = found.index_add(0, token, y * weights[token, place, None])
        return found


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.gate = nn.Linear(64, 4)
        self.experts = Experts()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        y = self.norm(x).flatten(0, -2)
        weights, index = self.gate(y).softmax(-1).topk(2)
        return x + self.dropout(self.experts(y, index, weights).view_as(x))


def make_model():
    torch.manual_seed(0)
    layers = [Layer() for _ in range(4)]
    return nn.Sequential(nn.Embedding(64, 64), *layers, nn.RMSNorm(64), nn.Linear(64, 64))


def make_data():  # for training and for evaluation
    rows = [(torch.arange(17) * 7 + 37 * i) % 64 for i in range(600)]
    rows = [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]
    return rows[:540], rows[540:]


def loss_of(model, batch):  # the sum over all labels, and their number; -100 does not count
    logits = model(batch["input_ids"]).float()
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


class Exchange(torch.autograd.Function):  # all-to-all of rows, of given numbers per rank
    @staticmethod
    def forward(ctx, rows, outgoing, incoming):
        ctx.reverse = incoming, outgoing
        found = rows.new_empty(sum(incoming), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), incoming, outgoing)
        return found

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.reverse), None, None


def forward(experts, x, index, weights):  # in place of the experts' own
    gate_up = experts.gate_up_proj.to_local()  # of this rank's experts
    down = experts.down_proj.to_local()
    count = len(down)
    world = dist.get_world_size()
    order = index.flatten().argsort(stable=True)  # by expert, and so by rank
    token = order // index.shape[1]  # of each row
    sizes = index.flatten().bincount(minlength=count * world)
    theirs = torch.empty_like(sizes)
    dist.all_to_all_single(theirs, sizes)  # how many rows each rank has for each of our experts
    outgoing = sizes.view(world, count).sum(1).tolist()  # rows for each rank
    incoming = theirs.view(world, count).sum(1).tolist()
    rows = Exchange.apply(x[token], outgoing, incoming)
    expert = torch.arange(count, device=x.device).repeat(world).repeat_interleave(theirs)
    found = torch.zeros_like(rows)
    for i in range(count):
        chosen = expert == i
        gate, up = F.linear(rows[chosen], gate_up[i]).chunk(2, -1)
        found[chosen] = F.linear(experts.act_fn(gate) * up, down[i])
    found = Exchange.apply(found, incoming, outgoing) * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, token, found.to(x.dtype))


def shard(model, mesh):  # the experts; all other modules stay whole
    for module in model.modules():
        stacks = dict(module.named_parameters(recurse=False))
        if stacks.keys() == {"gate_up_proj", "down_proj"}:
            for name, stack in stacks.items():
                if len(stack) % mesh.size():
                    raise SystemExit(
                        f"{len(stack)} experts cannot be divided among {mesh.size()} ranks"
                    )
                own = distribute_tensor(stack.detach(), mesh, [Shard(0)])
                setattr(module, name, nn.Parameter(own, stack.requires_grad))
            module.forward = partial(forward, module)


def clip_grad_norm(groups, limit):  # by the norm of all gradients, of sharded and whole ones
    norms = []
    for group in groups:
        gradients = [p.grad for p in group if p.grad is not None]
        if gradients:
            norm = nn.utils.get_total_norm(gradients)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.stack(norms).norm()
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, limit, total)
    return total


def drop_unsaved(model, optimizer, folder):  # of parameters that never had a gradient
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    saved = {name.rpartition(".")[0] for name in saved}
    for name, parameter in model.named_parameters():
        if f"optimizer.state.{name}" not in saved:
            optimizer.state.pop(parameter, None)


def find_checkpoint(rank, world):  # rank 0 decides, and every rank has to see what it found
    found = [None]
    seen = [None] * world
    if rank == 0:
        os.makedirs(f"{OUT}/best", exist_ok=True)
        found = sorted(glob.glob(f"{OUT}/step-*/.metadata"))[-1:] or [f"{OUT}/best"]
    dist.broadcast_object_list(found)
    dist.all_gather_object(seen, os.path.exists(found[0]))
    if not all(seen):
        why = f"rank {seen.index(False)} does not see {found[0]}"
        raise SystemExit(f"{why}: OUT has to be on a disk that all machines share")
    return os.path.dirname(found[0]) if found[0].endswith(".metadata") else None


def check(found, expected, dtype, why):  # once, before the first step: is it the same model?
    # A part of the model was replaced, and its forward may do more than the new part knows of
    eps = torch.finfo(dtype).eps
    off = (found.float() - expected.float()).norm() / expected.float().norm().clamp(min=eps)
    off = off.nan_to_num(math.inf)
    dist.all_reduce(off, dist.ReduceOp.MAX)  # every rank ends, or none
    if off > eps**0.5:
        raise SystemExit(f"{why} (relative difference {off:.1g})")


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

    folder = find_checkpoint(rank, world)
    train_set, eval_set = make_data()
    if min(BATCH, len(train_set)) < world:
        raise SystemExit(f"{len(train_set)} samples, BATCH {BATCH}: too few for {world} ranks")
    torch.manual_seed(0)  # what make_model() draws is the same on every rank
    model = make_model()
    sample = default_collate([train_set[0]])
    expected = None
    if rank == 0:  # the untouched model, on the CPU, which has room for it
        threads = torch.get_num_threads()
        torch.set_num_threads(os.cpu_count())  # torchrun gives each rank one
        with torch.no_grad():
            expected = loss_of(model.eval(), sample).to(device)
        torch.set_num_threads(threads)
    shard(model, init_device_mesh(device.type, (world,)))
    model.to(device)
    with torch.no_grad():
        found = loss_of(model.eval(), {name: tensor.to(device) for name, tensor in sample.items()})
    why = "forward() is not what the experts of this model compute: another loss"
    if expected is None:
        expected = found.clone()  # of rank 0, instead
    dist.broadcast(expected, 0)
    check(found, expected, next(model.parameters()).dtype, why)
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs, but not for the comparison
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizer = torch.optim.AdamW([{"params": sharded}, {"params": whole}], LR, weight_decay=DECAY)
    rates = [group["lr"] for group in optimizer.param_groups]  # after the warm-up
    start = 0
    best = math.inf
    if folder:  # only then: get_state_dict takes an empty step, which AdamW would count
        sd.get_optimizer_state_dict(model, optimizer)  # an empty step: all parameters have a state
        drop_unsaved(model, optimizer, folder)
        weights, moments = sd.get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": moments, "step": 0, "best": best}
        dcp.load(saved, checkpoint_id=folder)  # into the shards of this number of ranks
        start = saved["step"]
        best = saved["best"]
        states = {"model_state_dict": weights, "optim_state_dict": moments}
        sd.set_state_dict(model, optimizer, **states, options=SOME)

    rows = (batch[rank::world] for batch in order(len(train_set), start))  # this rank's
    train_loader = DataLoader(train_set, batch_sampler=rows)
    parts = [part[rank::world].tolist() for part in torch.arange(len(eval_set)).split(BATCH)]
    eval_loader = DataLoader(eval_set, batch_sampler=[part or [0] for part in parts])
    torch.manual_seed(start * world + rank)  # of augmentation in loader workers
    for step, batch in enumerate(train_loader, start + 1):
        model.train()  # from_pretrained() returns a model in evaluation mode
        torch.manual_seed(step * world + rank)  # of dropout: each rank has its own masks
        factor = min(step / max(1, WARMUP), 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor  # a linear warm-up, then half a cosine
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        sums = loss_of(model, batch)
        total = sums.detach().clone()
        dist.all_reduce(total)  # ranks may have different numbers of labels
        (sums[0] / total[1]).backward()  # experts get the gradients of all ranks' tokens
        used = torch.tensor([p.grad is not None for p in whole], device=device).int()
        dist.all_reduce(used)  # a rank's rows may leave out what those of another one use
        for p, count in zip(whole, used.tolist(), strict=True):
            if count:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
        norm = clip_grad_norm([sharded, whole], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY and step < STEPS:
            continue

        for buffer in model.buffers():
            dist.broadcast(buffer, 0)  # BatchNorm saw other samples on each rank
        model.eval()
        found = torch.zeros_like(total)
        for part, batch in zip(parts, eval_loader, strict=True):
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            with torch.no_grad():  # every rank has experts, also one without a row
                sums = loss_of(model, batch)
            if part:
                found += sums
        dist.all_reduce(found)
        loss = (total[0] / total[1]).item()
        value = (found[0] / found[1]).item()  # the same on every rank
        if rank == 0:
            print(f"step {step}: loss {loss:.4f}, evaluation loss {value:.4f}, norm {norm:.4f}")
        if value < best:
            best = value
            weights = sd.get_model_state_dict(model, options=WHOLE)
            if rank == 0:
                export(model, weights)
        weights, moments = sd.get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": moments, "step": step, "best": best}
        dcp.save(saved, checkpoint_id=f"{OUT}/step-{step:08}")
        if rank == 0:
            for old in sorted(glob.glob(f"{OUT}/step-*/.metadata"))[:-2]:
                shutil.rmtree(os.path.dirname(old))


main()
gc.collect()  # frees the model, which holds the process group: else gloo may abort at exit
dist.destroy_process_group()
