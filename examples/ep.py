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


def exchange_tokens(experts, x, index, weights):  # in place of the experts' own
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
        y = F.linear(experts.act_fn(gate) * up, down[i])
        found[chosen] = y.to(found.dtype)  # under autocast, it is in bfloat16
    found = Exchange.apply(found, incoming, outgoing) * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, token, found.to(x.dtype))


def shard(model, mesh):  # the experts; all other modules stay whole
    names = {"gate_up_proj", "down_proj"}
    found = 0
    for module in model.modules():
        stacks = dict(module.named_parameters(recurse=False))
        if stacks.keys() == names:
            found += 1
            for name, stack in stacks.items():
                if len(stack) % mesh.size():
                    raise SystemExit(
                        f"{len(stack)} experts cannot be divided among {mesh.size()} ranks"
                    )
                own = distribute_tensor(stack.detach(), mesh, [Shard(0)])
                setattr(module, name, nn.Parameter(own, stack.requires_grad))
            module.forward = partial(exchange_tokens, module)
    if not found:
        raise SystemExit(f"no module of the model has the parameters {sorted(names)} alone")


def split_by_kind(parameters):  # no operation takes both DTensors and plain tensors
    parameters = list(parameters)
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    return sharded, [p for p in parameters if not isinstance(p, DTensor)]


def clip_grad_norm(parameters, limit):  # by the norm of all gradients, of sharded and whole ones
    kinds = split_by_kind(p for p in parameters if p.grad is not None)
    norms = []
    for part in filter(None, kinds):
        norm = nn.utils.get_total_norm([p.grad for p in part])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.stack(norms).norm()
    for part in kinds:
        nn.utils.clip_grads_with_norm_(part, limit, total)
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


def count_cores():  # that this process may use
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


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
    half = torch.cuda.is_bf16_supported(including_emulation=False)  # a GPU that has bfloat16
    compute = torch.autocast(device.type, torch.bfloat16, enabled=half)(forward)  # not the loss
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
    sample = collate([train_set[0]])
    for name, tensor in sample.items():  # all positions may take long on a CPU
        sample[name] = tensor[:, :256] if tensor.dim() > 1 else tensor
    expected = None
    if rank == 0:  # the untouched model, on the CPU, which has room for it
        threads = torch.get_num_threads()
        torch.set_num_threads(count_cores())  # torchrun gives each rank one
        with torch.no_grad():
            expected = loss_of(forward(model.eval(), sample), sample).to(device)
        torch.set_num_threads(threads)
    shard(model, init_device_mesh(device.type, (world,)))
    model.to(device)
    sample = {name: tensor.to(device) for name, tensor in sample.items()}
    with torch.no_grad():  # the loss, as rounding may send a token to another expert
        found = loss_of(forward(model.eval(), sample), sample)
    if expected is None:
        expected = torch.empty_like(found).contiguous()  # of rank 0, instead
    dist.broadcast(expected, 0)
    why = "exchange_tokens() is not what the experts of this model compute: another loss"
    check(found, expected, next(model.parameters()).dtype, why)
    torch.set_float32_matmul_precision("high")  # TF32 for what is not in bfloat16, from here on
    whole = split_by_kind(model.parameters())[1]
    groups = []
    for group in groups_of(model):
        parts = filter(None, split_by_kind(group["params"]))  # an empty group cannot be loaded
        groups += [group | {"params": part} for part in parts]
    optimizer = torch.optim.AdamW(groups, LR, weight_decay=DECAY)
    rates = [group["lr"] for group in optimizer.param_groups]  # after the warm-up
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    start = 0
    best = math.inf
    values = []
    if folder:
        sd.get_optimizer_state_dict(model, optimizer)  # an empty step: all parameters have a state
        drop_unsaved(model, optimizer, folder)
        weights, moments = sd.get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": moments}
        saved |= {"step": start, "best": best, "values": values}
        dcp.load(saved, checkpoint_id=folder)  # into the shards of this number of ranks
        start = saved["step"]
        best = saved["best"]
        values = saved["values"]
        states = {"model_state_dict": weights, "optim_state_dict": moments}
        sd.set_state_dict(model, optimizer, **states, options=SOME)
        if is_done(values):
            start = STEPS

    batches = (batch[rank::world] for batch in order(train_set, start))  # this rank's samples
    train_loader = DataLoader(train_set, batch_sampler=batches, collate_fn=collate)
    parts = [part[rank::world].tolist() for part in torch.arange(len(eval_set)).split(BATCH)]
    some = [part or [0] for part in parts]  # a rank without a sample takes any, and ignores it
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
        (sums[0] / count).backward()  # experts get the gradients of all ranks' tokens
        used = torch.tensor([p.grad is not None for p in whole], device=device).int()
        dist.all_reduce(used)  # a rank's samples may leave out what those of another one use
        for p, uses in zip(whole, used.tolist(), strict=True):
            if uses:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
        norm = clip_grad_norm(trained, 1.0)
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
                sums = loss_of(compute(model, batch), batch)
            if part:
                found += sums
        dist.all_reduce(found)
        loss = (total[0] / count).item()
        value, _, *metrics = (found / found[1]).tolist()  # the same on every rank
        values.append(value)
        if rank == 0:
            line = f"step {step}: loss {loss:.4f}, evaluation loss {value:.4f}, norm {norm:.4f}"
            print(line, *[f"{metric:.4f}" for metric in metrics])
        if value < best:
            best = value
            options = sd.StateDictOptions(full_state_dict=True, cpu_offload=True)
            weights = sd.get_model_state_dict(model, options=options)  # on every rank, for rank 0
            if rank == 0:
                export(model, weights)
        weights, moments = sd.get_state_dict(model, optimizer)  # this rank's shards
        saved = {"model": weights, "optimizer": moments}
        saved |= {"step": step, "best": best, "values": values}
        dcp.save(saved, checkpoint_id=f"{OUT}/step-{step:08}")
        if rank == 0:
            for old in sorted(glob.glob(f"{OUT}/step-*/.metadata"))[:-2]:
                shutil.rmtree(os.path.dirname(old))
        if is_done(values):
            break


if __name__ == "__main__":
    main()
    gc.collect()  # frees the model, which holds the process group: else gloo may abort at exit
    dist.destroy_process_group()
