"""The loop of ddp.py with DeepSpeed ZeRO stage 2: deepspeed --num_gpus 2 zero_deepspeed.py"""

import glob
import math
import os
import shutil
from datetime import timedelta

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Subset, default_collate

OUT = "runs/zero_deepspeed"  # checkpoints, and the best weights
STEPS = 60  # of the whole run
EVERY = 20  # steps: evaluates and saves
BATCH = 32  # samples of a step, of all ranks together
LR = 1e-2  # the highest learning rate
WARMUP = 6  # steps until LR is reached
DECAY = 0.01  # of weights
TIMEOUT = timedelta(minutes=60)  # ranks wait so long for one that exports
STAGE = 2  # 1: shards the optimizer state; 2: gradients, too


def make_model():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(nn.Embedding(64, 64), *blocks, nn.Linear(64, 64, bias=False))


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
    deepspeed.init_distributed(backend, timeout=TIMEOUT)
    rank = dist.get_rank()
    world = dist.get_world_size()

    os.makedirs(f"{OUT}/best", exist_ok=True)
    model = make_model().to(device)
    train_set, eval_set = make_data()
    if min(BATCH, len(train_set)) < world:
        raise SystemExit(f"{len(train_set)} samples, BATCH {BATCH}: too few for {world} ranks")
    optimizer = torch.optim.AdamW(groups_of(model), LR, weight_decay=DECAY)
    settings = {
        "train_micro_batch_size_per_gpu": 1,  # only for its log: the loss has its own weights
        # By default, a bucket has 5e8 elements, whose buffers take 3.7 GiB of any model
        "zero_optimization": {"stage": STAGE, "reduce_bucket_size": 10_000_000},
        "zero_allow_untested_optimizer": True,  # PyTorch's AdamW
        "gradient_clipping": 1.0,
        "torch_autocast": {"enabled": half, "dtype": "bfloat16"},  # in place of torch.autocast
    }
    model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    rates = [group["lr"] for group in optimizer.param_groups]  # after the warm-up
    start = 0
    best = math.inf
    values = []
    found = [os.path.exists(f"{OUT}/latest")]
    dist.broadcast_object_list(found)  # rank 0 decides; all need its folder, on a shared disk
    if found[0]:  # by as many ranks as saved it, or DeepSpeed's ds_to_universal.py converts it
        _, saved = model.load_checkpoint(OUT)
        if not saved:
            raise SystemExit(f"rank {rank} finds no {OUT}: it has to be on a shared disk")
        start = saved["step"]
        best = saved["best"]
        values = saved["values"]
        if is_done(values):
            start = STEPS

    batches = (batch[rank::world] for batch in order(train_set, start))  # this rank's samples
    train_loader = DataLoader(train_set, batch_sampler=batches, collate_fn=collate)
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
        sums = loss_of(forward(model, batch), batch)
        total = sums.detach().clone()
        dist.all_reduce(total)  # ranks may have different numbers of labels
        count = total[1].clamp(min=1e-9)  # a batch may have no label
        model.backward(sums[0] * world / count)  # DeepSpeed divides by world
        model.step()  # clips, updates, and sets the gradients to zero
        if step % EVERY and step < STEPS:
            continue

        for buffer in model.buffers():
            dist.broadcast(buffer, 0)  # BatchNorm saw other samples on each rank
        model.eval()
        found = torch.zeros_like(total)
        for batch in eval_loader:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=half):
                found += loss_of(forward(model.module, batch), batch)
        dist.all_reduce(found)
        loss = (total[0] / count).item()
        value, _, *metrics = (found / found[1]).tolist()  # the same on every rank
        values.append(value)
        norm = model.get_global_grad_norm()
        is_best = value < best
        best = min(best, value)
        if rank == 0:
            line = f"step {step}: loss {loss:.4f}, evaluation loss {value:.4f}, norm {norm:.4f}"
            print(line, *[f"{metric:.4f}" for metric in metrics])
            if is_best:
                export(model.module, model.module.state_dict())
        saved = {"step": step, "best": best, "values": values}
        model.save_checkpoint(OUT, f"step-{step:08}", saved, save_latest=False)  # every rank
        if rank == 0:
            with open(f"{OUT}/latest", "w") as file:  # only now is it complete
                file.write(f"step-{step:08}")
            for old in sorted(glob.glob(f"{OUT}/step-*"))[:-2]:
                shutil.rmtree(old)
        if is_done(values):
            break


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
