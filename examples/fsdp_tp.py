"""The loop of fsdp.py with tensor parallelism inside it: torchrun --nproc_per_node=4 fsdp_tp.py"""

import gc
import glob
import logging
import math
import os
import shutil
from collections import OrderedDict
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, default_collate

OUT = "runs/fsdp_tp"  # checkpoints, and the best weights
STEPS = 60  # of the whole run
EVERY = 20  # steps: evaluates and saves
BATCH = 32  # samples of a step, of all ranks together
LR = 1e-2  # the highest learning rate
WARMUP = 6  # steps until LR is reached
DECAY = 0.01  # of weights
TIMEOUT = timedelta(minutes=60)  # ranks wait so long for one that exports
TP = 2  # ranks that share each matrix: neighbours, as on one machine
COLWISE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # a rank has some heads, columns
ROWWISE = ("o_proj", "down_proj")  # a rank has the matching rows, and the ranks sum their outputs
PER_HEAD = ("q_norm", "k_norm")  # whole on every rank, which applies it to its heads only
SOME = sd.StateDictOptions(strict=False)  # optimizer state of some parameters; dcp.load is strict


class Layer(nn.Module):  # with the names of transformers
    head_dim = 16

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(64, 64)
        self.k_proj = nn.Linear(64, 32)
        self.v_proj = nn.Linear(64, 32)
        self.o_proj = nn.Linear(64, 64)
        self.q_norm = nn.RMSNorm(16)
        self.k_norm = nn.RMSNorm(16)
        self.gate_proj = nn.Linear(64, 128)
        self.up_proj = nn.Linear(64, 128)
        self.down_proj = nn.Linear(128, 64)
        self.dropout = nn.Dropout(0.1)
        self.input_layernorm = nn.RMSNorm(64)
        self.post_attention_layernorm = nn.RMSNorm(64)

    def forward(self, x):
        y = self.input_layernorm(x)
        q, k, v = (f(y).unflatten(-1, (-1, 16)) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (y.transpose(1, 2) for y in (self.q_norm(q), self.k_norm(k), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.dropout(self.o_proj(y.transpose(1, 2).flatten(2)))
        y = self.post_attention_layernorm(x)
        return x + self.dropout(self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y)))


def make_model():
    torch.manual_seed(0)
    layers = nn.Sequential(*(Layer() for _ in range(4)))
    model = OrderedDict(embed_tokens=nn.Embedding(64, 64), layers=layers, norm=nn.RMSNorm(64))
    head = nn.Linear(64, 64, bias=False)
    return nn.Sequential(OrderedDict(model=nn.Sequential(model), lm_head=head))


def layers_of(model):  # the blocks: each is gathered when it computes
    return model.model.layers


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


def parents_of(model, names):  # the modules that have layers of these names
    found = [name.rpartition(".") for name, _ in model.named_modules()]
    return {parent for parent, _, last in found if last in names}


def shard(model, mesh):  # embedding, norms and head stay whole
    columns = parents_of(model, COLWISE)
    rows = parents_of(model, ROWWISE)
    if columns != rows or not rows:
        parent = min(columns ^ rows, default="")
        modules = model.get_submodule(parent).named_modules()
        names = {name.rpartition(".")[2] for name, m in modules if hasattr(m, "weight")}
        where = parent or "the model"
        raise SystemExit(f"COLWISE and ROWWISE need the layers of {where}: {sorted(names)}")
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in COLWISE:
            parts = module.out_features // getattr(model.get_submodule(parent), "head_dim", 1)
            if parts % mesh.size():
                raise SystemExit(f"{name}: {mesh.size()} ranks cannot share {parts} heads")
            parallelize_module(module, mesh, ColwiseParallel())
        elif last in ROWWISE:
            parallelize_module(module, mesh, RowwiseParallel())
        elif last in PER_HEAD:
            width = module.weight.numel()
            if width != getattr(model.get_submodule(parent), "head_dim", width):
                raise SystemExit(f"{name} normalizes all heads together, and no rank has them")


def split_by_mesh(parameters):  # no operation takes DTensors of two meshes
    parameters = list(parameters)
    sharded = [p for p in parameters if p.device_mesh.ndim == 2]  # over "tp", too
    return sharded, [p for p in parameters if p.device_mesh.ndim == 1]


def clip_grad_norm(parameters, limit):  # by the norm of all gradients, on either mesh
    meshes = split_by_mesh(p for p in parameters if p.grad is not None)
    norms = []
    for part in filter(None, meshes):
        norm = nn.utils.get_total_norm([p.grad for p in part])
        norms.append(norm.full_tensor())
    total = torch.stack(norms).norm()
    for part in meshes:
        nn.utils.clip_grads_with_norm_(part, limit, total)
    return total


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


def main():
    if "RANK" not in os.environ:
        raise SystemExit("start this file with the command in its first lines")
    device = torch.device("cpu")
    if torch.cuda.is_available():  # one GPU per rank
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    half = torch.cuda.is_bf16_supported(including_emulation=False)  # a GPU that has bfloat16
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT)
    rank = dist.get_rank()
    world = dist.get_world_size()
    if world % TP:
        raise SystemExit(f"{world} ranks are not divisible by TP = {TP}")
    # Without this, PyTorch warns that the gradient norm takes two all-reduces, one per dimension
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    mesh = init_device_mesh(device.type, (world // TP, TP), mesh_dim_names=("dp", "tp"))
    dp = mesh["dp"].get_local_rank()  # ranks with the same dp have the same samples
    dps = world // TP
    dp_group = mesh["dp"].get_group()
    tp_group = mesh["tp"].get_group()

    folder = find_checkpoint(rank, world)
    train_set, eval_set = make_data()
    if min(BATCH, len(train_set)) < dps:
        raise SystemExit(f"{len(train_set)} samples, BATCH {BATCH}: too few for {dps} ranks")
    torch.manual_seed(0)  # what make_model() draws is the same on every rank
    model = make_model().float()  # shards and AdamW: bfloat16 would lose small updates
    sample = collate([train_set[0]])
    for name, tensor in sample.items():  # all positions may take long on a CPU
        sample[name] = tensor[:, :256] if tensor.dim() > 1 else tensor
    expected = None
    if rank == 0:  # the untouched model, on the CPU, which has room for it
        threads = torch.get_num_threads()
        torch.set_num_threads(count_cores())  # torchrun gives each rank one
        with torch.no_grad():
            expected = forward(model.eval(), sample).to(device).contiguous()
        torch.set_num_threads(threads)
    shard(model, mesh["tp"])
    policy = MixedPrecisionPolicy()
    if half:  # gathers and computes in bfloat16, and adds up gradients in fp32
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for part in list(model.modules()):
        if isinstance(part, nn.modules.batchnorm._BatchNorm):  # its statistics stay in fp32
            fully_shard(part, mesh=mesh["dp"])
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)  # all other parameters
    if hasattr(model, "set_reduce_scatter_unused_params"):  # PyTorch 2.13
        model.set_reduce_scatter_unused_params(True)  # ranks may use different ones
    sample = {name: tensor.to(device) for name, tensor in sample.items()}
    with torch.no_grad():
        found = forward(model.eval(), sample)
    model.reshard()  # the optimizer needs the shards
    if expected is None:
        expected = torch.empty_like(found).contiguous()  # of rank 0, instead
    dist.broadcast(expected, 0)
    why = "COLWISE, ROWWISE and PER_HEAD do not fit the layers of this model: other outputs"
    check(found, expected, policy.param_dtype or torch.float32, why)
    torch.set_float32_matmul_precision("high")  # TF32 for what is not in bfloat16, from here on
    per_head = [p for name, p in model.named_parameters() if {*name.split(".")} & {*PER_HEAD}]
    per_head = [p for p in per_head if p.requires_grad]
    groups = []
    for group in groups_of(model):
        groups += [group | {"params": part} for part in split_by_mesh(group["params"])]
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

    batches = (batch[dp::dps] for batch in order(train_set, start))  # this rank's samples
    train_loader = DataLoader(train_set, batch_sampler=batches, collate_fn=collate)
    parts = [part[dp::dps].tolist() for part in torch.arange(len(eval_set)).split(BATCH)]
    some = [part or [0] for part in parts]  # a rank without a sample takes any, and ignores it
    eval_loader = DataLoader(eval_set, batch_sampler=some, collate_fn=collate)
    torch.manual_seed(start * dps + dp)  # of augmentation in loader workers
    for step, batch in enumerate(train_loader, start + 1):
        model.train()  # from_pretrained() returns a model in evaluation mode
        torch.manual_seed(step * dps + dp)  # of dropout: one mask for ranks with the same samples
        factor = min(step / max(1, WARMUP), 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor  # a linear warm-up, then half a cosine
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        sums = loss_of(forward(model, batch), batch)
        total = sums.detach().clone()
        dist.all_reduce(total, group=dp_group)  # ranks may have different numbers of labels
        count = total[1].clamp(min=1e-9)  # a batch may have no label
        (sums[0] * dps / count).backward()  # FSDP divides by dps
        for parameter in per_head:
            dist.all_reduce(parameter.grad.to_local(), group=tp_group)
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
            with torch.no_grad():  # every rank gathers the layers, also one without a sample
                sums = loss_of(forward(model, batch), batch)
            if part:
                found += sums
        dist.all_reduce(found, group=dp_group)
        dist.broadcast(found, 0)  # to the last bit: ranks decide by it what they do next
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
