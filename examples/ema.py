"""The loop of fsdp.py, which evaluates and exports an exponential moving average (EMA) of the
weights: torchrun --nproc_per_node=2 ema.py"""

import gc
import glob
import math
import os
import shutil
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader, default_collate

OUT = "runs/ema"  # checkpoints, and the best weights
STEPS = 60  # of the whole run
EVERY = 20  # steps: evaluates and saves
BATCH = 32  # samples of a step, of all ranks together
LR = 1e-2  # the highest learning rate
WARMUP = 6  # steps until LR is reached
DECAY = 0.01  # of weights
EMA = 0.99  # the decay of the average: a step moves it by 1 - EMA of the way to the weights
TIMEOUT = timedelta(minutes=60)  # ranks wait so long for one that exports
SOME = sd.StateDictOptions(strict=False)  # optimizer state of some parameters; dcp.load is strict


def make_model():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(nn.Embedding(64, 64), *blocks, nn.Linear(64, 64, bias=False))


def layers_of(model):  # the blocks: each is gathered when it computes
    return model[1:-1]


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


def shards_of(tensors):  # what this rank has of each
    tensors = [tensor.detach() for tensor in tensors.values()]
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def update(average, weights, step):  # each rank its shards: nothing is sent
    decay = min(EMA, (1 + step) / (10 + step))  # forgets the first weights soon
    get_ema_multi_avg_fn(decay)(shards_of(average), shards_of(weights), step)


def swap(average, weights, model):  # in place: FSDP does not notice a new tensor in .data
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # else it computes with what it gathered before
    for averaged, weight in zip(shards_of(average), shards_of(weights), strict=True):
        kept = weight.clone()
        weight.copy_(averaged)
        averaged.copy_(kept)


def main():
    if "RANK" not in os.environ:
        raise SystemExit("start this file with the command in its first lines")
    device = torch.device("cpu")
    if torch.cuda.is_available():  # one GPU per rank
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    half = torch.cuda.is_bf16_supported(including_emulation=False)  # a GPU that has bfloat16
    torch.set_float32_matmul_precision("high")  # TF32 for what is not in bfloat16
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT)
    rank = dist.get_rank()
    world = dist.get_world_size()

    folder = find_checkpoint(rank, world)
    train_set, eval_set = make_data()
    if min(BATCH, len(train_set)) < world:
        raise SystemExit(f"{len(train_set)} samples, BATCH {BATCH}: too few for {world} ranks")
    torch.manual_seed(0)  # what make_model() draws is the same on every rank
    model = make_model().float()  # shards and AdamW: bfloat16 would lose small updates
    policy = MixedPrecisionPolicy()
    if half:  # gathers and computes in bfloat16, and adds up gradients in fp32
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for part in list(model.modules()):
        if isinstance(part, nn.modules.batchnorm._BatchNorm):  # its statistics stay in fp32
            fully_shard(part)
    for layer in layers_of(model):
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)  # all other parameters
    if hasattr(model, "set_reduce_scatter_unused_params"):  # PyTorch 2.13
        model.set_reduce_scatter_unused_params(True)  # ranks may use different ones
    optimizer = torch.optim.AdamW(groups_of(model), LR, weight_decay=DECAY)
    rates = [group["lr"] for group in optimizer.param_groups]  # after the warm-up
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    shards = {name: p for name, p in model.named_parameters() if p.requires_grad}
    average = {name: shard.detach().clone() for name, shard in shards.items()}  # in float32
    start = 0
    best = math.inf
    values = []
    if folder:
        sd.get_optimizer_state_dict(model, optimizer)  # an empty step: all parameters have a state
        drop_unsaved(model, optimizer, folder)
        weights, moments = sd.get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": moments, "average": average}
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
        sums = loss_of(forward(model, batch), batch)
        total = sums.detach().clone()
        dist.all_reduce(total)  # ranks may have different numbers of labels
        count = total[1].clamp(min=1e-9)  # a batch may have no label
        (sums[0] * world / count).backward()  # FSDP divides by world
        norm = nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        update(average, shards, step)
        model.zero_grad()  # also of parameters that no group has
        if step % EVERY and step < STEPS:
            continue

        for buffer in model.buffers():
            dist.broadcast(buffer, 0)  # BatchNorm saw other samples on each rank
        swap(average, shards, model)  # evaluates and exports the average
        model.eval()
        found = torch.zeros_like(total)
        for part, batch in zip(parts, eval_loader, strict=True):
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            with torch.no_grad():  # every rank gathers the layers, also one without a sample
                sums = loss_of(forward(model, batch), batch)
            if part:
                found += sums
        dist.all_reduce(found)
        norm = norm.full_tensor()  # on every rank: a sum over their shards
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
        swap(average, shards, model)  # training continues from the weights
        weights, moments = sd.get_state_dict(model, optimizer)  # this rank's shards
        saved = {"model": weights, "optimizer": moments, "average": average}
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
