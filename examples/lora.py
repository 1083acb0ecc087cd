"""The loop of pretrained.py, training adapters (LoRA) of frozen weights, saved as peft reads them:
torchrun --nproc_per_node=2 lora.py"""

import gc
import glob
import json
import math
import os
import shutil
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.data import DataLoader, default_collate

OUT = "runs/lora"  # checkpoints, and the best weights
STEPS = 60  # of the whole run
EVERY = 20  # steps: evaluates and saves
BATCH = 32  # samples of a step, of all ranks together
LR = 1e-2  # the highest learning rate
WARMUP = 6  # steps until LR is reached
DECAY = 0.01  # of weights
TIMEOUT = timedelta(minutes=60)  # ranks wait so long for one that exports
WEIGHTS = ""  # a folder with *.safetensors; without one, make_model() has the weights
RANK = 8  # of the adapters
ALPHA = 16  # their output is multiplied by ALPHA / RANK
TARGETS = ["0"]  # names of layers, or their ends: ["q_proj", "v_proj"]
WHOLE = []  # of modules that are trained whole, as a new head: ["classifier"]
FROZEN = torch.bfloat16  # no step changes frozen weights, so none is lost by rounding
SOME = sd.StateDictOptions(ignore_frozen_params=True, strict=False)  # what is trained


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


def export(model, weights):  # in the format of peft
    tensors = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            end = ".weight" if ".lora_" in name else ""
            tensors[f"base_model.model.{name}{end}"] = weights[name]
    save_file(tensors, f"{OUT}/best/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS}
    config["modules_to_save"] = WHOLE or None
    with open(f"{OUT}/best/adapter_config.json", "w") as file:
        json.dump(config, file)


def named(modules, end):  # those whose name is this, or ends with it
    found = [module for name, module in modules.items() if f".{name}".endswith(f".{end}")]
    if not found:
        names = sorted({name.rpartition(".")[2] for name in modules})
        raise SystemExit(f"no layer has the name {end}; these could have an adapter: {names}")
    return found


def adapt(model):  # freezes it, and adds B @ A * ALPHA / RANK to layers; B is 0 at first
    model.requires_grad_(False)
    modules = dict(model.named_modules())
    linear = {name: layer for name, layer in modules.items() if isinstance(layer, nn.Linear)}
    for end in WHOLE:
        for module in named(modules, end):
            module.requires_grad_(True)
    for end in TARGETS:
        for layer in named(linear, end):
            if hasattr(layer, "lora_A"):  # TARGETS names it twice
                continue
            a = torch.empty(RANK, layer.in_features)
            layer.lora_A = nn.Parameter(a.uniform_(-1, 1) / layer.in_features**0.5)
            layer.lora_B = nn.Parameter(torch.zeros(layer.out_features, RANK))
            layer.register_forward_hook(add_adapter)


def add_adapter(layer, args, out):
    linear = nn.functional.linear
    return out + linear(linear(args[0], layer.lora_A), layer.lora_B) * (ALPHA / RANK)


def to_meta(module, name, parameter):  # without memory; one that is tied to another stays tied
    if not parameter.is_meta:
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)


def make_empty_model():  # no rank may have room for all parameters, so they take no memory here
    if not WEIGHTS:
        return make_model()
    with register_module_parameter_registration_hook(to_meta):
        return make_model()


def allocate(model, device):  # memory for this rank's shards
    adapters = {n: p.detach().clone() for n, p in model.named_parameters() if not p.is_meta}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    model.to_empty(device=device)
    for name, adapter in adapters.items():  # they have their values, too
        model.get_parameter(name).data.copy_(adapter)
    for name, buffer in buffers.items():  # to_empty() took their values, which no file may have
        module, _, name = name.rpartition(".")
        setattr(model.get_submodule(module), name, buffer.to(device))


def files_of(folder):  # as transformers chooses them: others may be of another save
    index = f"{folder}/model.safetensors.index.json"
    if os.path.exists(f"{folder}/model.safetensors") or not os.path.exists(index):
        return ["model.safetensors"]
    with open(index) as file:
        return sorted(set(json.load(file)["weight_map"].values()))


def end_if(why):  # every rank ends, or none: the others would wait for one that ends alone
    found = [why] * dist.get_world_size()
    dist.all_gather_object(found, why)
    for rank, each in enumerate(found):
        if each:
            raise SystemExit(f"rank {rank}: {WEIGHTS} {each}")


def read_weights(model):  # of the folder WEIGHTS, only the shards of this rank
    kept = model.state_dict()
    tensors = {n: p for n, p in model.named_parameters() if ".lora_" not in n}  # a tied one once
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in kept}
    files = files_of(WEIGHTS)
    absent = [name for name in files if not os.path.exists(f"{WEIGHTS}/{name}")]
    end_if(f"has no {absent[0]}" if absent else "")
    with tempfile.TemporaryDirectory() as links:  # the reader reads every file of a folder
        for name in files:
            os.symlink(os.path.abspath(f"{WEIGHTS}/{name}"), f"{links}/{name}")
        reader = dcp.HuggingFaceStorageReader(links)
        found = reader.read_metadata().state_dict_metadata.keys()
        missing = sorted(tensors.keys() - found)
        end_if(f"has no {missing[0]}, which the model of make_model() has" if missing else "")
        unread = sorted(found - kept.keys())
        if unread and dist.get_rank() == 0:
            print(f"not read from {WEIGHTS}: {unread[0]}, ..., which the model does not have")
        tied = [name for name in kept if name in found and name not in tensors]
        twins = {name: torch.empty_like(kept[name]) for name in tied}
        dcp.load(tensors | twins, storage_reader=reader)
    for name, twin in twins.items():  # of tied parameters: transformers unties them if they differ
        if not torch.equal(twin, kept[name]):  # all ranks compare their shards, and get one answer
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
    model = make_empty_model()
    adapt(model)  # before sharding: adapters are sharded and gathered with their layer, in fp32
    for parameter in model.parameters():  # not buffers: rotary frequencies would be rounded, too
        dtype = torch.float32 if parameter.requires_grad else FROZEN
        if parameter.is_floating_point():  # not what a quantized model has packed
            parameter.data = parameter.data.to(dtype)
    policy = MixedPrecisionPolicy(torch.float32)  # of compute: weights and adapters alike
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
    if WEIGHTS:
        allocate(model, device)
        read_weights(model)
    elif rank == 0:
        print("WEIGHTS is not set: starts from the weights of make_model()")
    optimizer = torch.optim.AdamW(groups_of(model), LR, weight_decay=DECAY)
    rates = [group["lr"] for group in optimizer.param_groups]  # after the warm-up
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    start = 0
    best = math.inf
    values = []
    if folder:
        sd.get_optimizer_state_dict(model, optimizer, options=SOME)  # an empty step: states for all
        drop_unsaved(model, optimizer, folder)
        weights, moments = sd.get_state_dict(model, optimizer, options=SOME)
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
        sums = loss_of(forward(model, batch), batch)
        total = sums.detach().clone()
        dist.all_reduce(total)  # ranks may have different numbers of labels
        count = total[1].clamp(min=1e-9)  # a batch may have no label
        (sums[0] * world / count).backward()  # FSDP divides by world
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
            options.ignore_frozen_params = True
            weights = sd.get_model_state_dict(model, options=options)  # on every rank, for rank 0
            if rank == 0:
                export(model, weights)
        weights, moments = sd.get_state_dict(model, optimizer, options=SOME)  # shards
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
