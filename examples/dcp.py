"""The loop of fsdp.py, saving in the background: torchrun --nproc_per_node=2 dcp.py"""

import gc
import glob
import json
import math
import os
import shutil
import tempfile
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

OUT = "runs/dcp"  # checkpoints, and the best weights
STEPS = 60  # of the whole run
EVERY = 20  # steps: evaluates and saves
BATCH = 32  # samples of a step, of all ranks together
LR = 1e-2  # the highest learning rate
WARMUP = 6  # steps until LR is reached
DECAY = 0.01  # of weights
TIMEOUT = timedelta(minutes=60)  # ranks wait so long for one that exports
WEIGHTS = ""  # a folder with *.safetensors: each rank reads its shards of the initial weights
SOME = sd.StateDictOptions(strict=False)  # optimizer state of some parameters; dcp.load is strict
POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)  # of compute, and of reduce-scatter


def make_model():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(nn.Embedding(64, 64), *blocks, nn.Linear(64, 64))


def layers_of(model):  # the blocks: each is gathered when it computes
    return model[1:-1]


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


def recomputed(forward):  # its activations are computed again in backward, instead of kept
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def to_meta(module, name, parameter):  # without memory; one that is tied to another stays tied
    if not parameter.is_meta:
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)


def read_weights(model, device):
    buffers = dict(model.named_buffers(remove_duplicate=False))
    model.to_empty(device=device)  # memory for this rank's shards
    for name, buffer in buffers.items():  # to_empty took their values, which no file may have
        module, _, name = name.rpartition(".")
        setattr(model.get_submodule(module), name, buffer.to(device))
    kept = model.state_dict()
    tensors = dict(model.named_parameters())  # one that is tied to another is there once
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in kept}
    files = ["model.safetensors"]  # as transformers: others in the folder may be of another save
    index = f"{WEIGHTS}/model.safetensors.index.json"
    if not os.path.exists(f"{WEIGHTS}/model.safetensors") and os.path.exists(index):
        with open(index) as file:
            files = sorted(set(json.load(file)["weight_map"].values()))
    with tempfile.TemporaryDirectory() as links:  # the reader reads every file of a folder
        for name in files:
            if not os.path.exists(f"{WEIGHTS}/{name}"):
                raise SystemExit(f"{WEIGHTS} has no {name}")
            os.symlink(os.path.abspath(f"{WEIGHTS}/{name}"), f"{links}/{name}")
        reader = dcp.HuggingFaceStorageReader(links)
        found = reader.read_metadata().state_dict_metadata.keys()
        if missing := tensors.keys() - found:
            raise SystemExit(f"{WEIGHTS} has no {min(missing)}, which the model of make_model has")
        if (unread := found - kept.keys()) and dist.get_rank() == 0:
            print(f"not read from {WEIGHTS}: {min(unread)}, ..., which the model does not have")
        tied = [name for name in kept if name in found and name not in tensors]
        twins = {name: torch.empty_like(kept[name]) for name in tied}
        dcp.load(tensors | twins, storage_reader=reader)
    for name, twin in twins.items():  # of tied parameters: transformers unties them if they differ
        if not torch.equal(twin, kept[name]):
            why = f"its {name} differs from the parameter to which the model ties it"
            raise SystemExit(f"{WEIGHTS}: {why}; set tie_word_embeddings to false")


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


def complete(pending, rank):  # raises what failed in the background; .metadata is written last
    if pending:
        pending.result()
    if rank == 0:
        for old in sorted(glob.glob(f"{OUT}/step-*/.metadata"))[:-2]:
            shutil.rmtree(os.path.dirname(old))


def main():
    if "RANK" not in os.environ:
        raise SystemExit("start this file with the command in its first lines")
    device = torch.device("cpu")
    if torch.cuda.is_available():  # one GPU per rank
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT)
    rank = dist.get_rank()
    world = dist.get_world_size()
    saving = dist.new_group(backend="gloo", timeout=TIMEOUT)  # of its own: training uses the other
    pending = None

    folder = find_checkpoint(rank, world)
    train_set, eval_set = make_data()
    if min(BATCH, len(train_set)) < world:
        raise SystemExit(f"{len(train_set)} samples, BATCH {BATCH}: too few for {world} ranks")
    torch.manual_seed(0)  # what make_model() draws is the same on every rank
    with register_module_parameter_registration_hook(to_meta) if WEIGHTS else nullcontext():
        model = make_model().float()  # shards and AdamW: bfloat16 would lose small updates
    for part in list(model.modules()):
        if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d)):  # its statistics stay in fp32
            fully_shard(part)
    for layer in layers_of(model):
        layer.forward = recomputed(layer.forward)
        fully_shard(layer, mp_policy=POLICY)
    fully_shard(model, mp_policy=POLICY)  # all other parameters
    if WEIGHTS:
        read_weights(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=DECAY)
    rates = [group["lr"] for group in optimizer.param_groups]  # after the warm-up
    start = 0
    best = math.inf
    if folder:
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
        (sums[0] * world / total[1]).backward()  # FSDP divides by world
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
            with torch.no_grad():  # every rank gathers the layers, also one without a row
                sums = loss_of(model, batch)
            if part:
                found += sums
        dist.all_reduce(found)
        norm = norm.full_tensor()  # on every rank: a sum over their shards
        loss = (total[0] / total[1]).item()
        value = (found[0] / found[1]).item()  # the same on every rank
        if rank == 0:
            print(f"step {step}: loss {loss:.4f}, evaluation loss {value:.4f}, norm {norm:.4f}")
        if value < best:
            best = value
            options = sd.StateDictOptions(full_state_dict=True, cpu_offload=True)
            weights = sd.get_model_state_dict(model, options=options)  # on every rank, for rank 0
            if rank == 0:
                export(model, weights)
        weights, moments = sd.get_state_dict(model, optimizer)  # this rank's shards
        saved = {"model": weights, "optimizer": moments, "step": step, "best": best}
        complete(pending, rank)
        path = f"{OUT}/step-{step:08}"  # the shards are copied to the CPU before training goes on
        pending = dcp.async_save(saved, checkpoint_id=path, process_group=saving)
    complete(pending, rank)


main()
gc.collect()  # frees the model, which holds the process group: else gloo may abort at exit
dist.destroy_process_group()
