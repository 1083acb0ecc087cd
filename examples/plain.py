"""A training loop on one device: python plain.py. The same command again resumes from OUT."""

import glob
import math
import os

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, default_collate

OUT = "runs/plain"  # checkpoints, and the best weights
STEPS = 60  # of the whole run
EVERY = 20  # steps: evaluates and saves
BATCH = 32  # samples of a step
LR = 1e-2  # the highest learning rate
WARMUP = 6  # steps until LR is reached
DECAY = 0.01  # of weights


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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = torch.cuda.is_bf16_supported(including_emulation=False)  # a GPU that has bfloat16
    compute = torch.autocast(device.type, torch.bfloat16, enabled=half)(forward)  # not the loss
    torch.set_float32_matmul_precision("high")  # TF32 for what is not in bfloat16

    os.makedirs(f"{OUT}/best", exist_ok=True)
    model = make_model().to(device)
    train_set, eval_set = make_data()
    optimizer = torch.optim.AdamW(groups_of(model), LR, weight_decay=DECAY)
    rates = [group["lr"] for group in optimizer.param_groups]  # after the warm-up
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    start = 0
    best = math.inf
    values = []
    if files := sorted(glob.glob(f"{OUT}/step-*.pt")):
        saved = torch.load(files[-1], map_location="cpu", mmap=True)
        start = saved["step"]
        best = saved["best"]
        values = saved["values"]
        print(f"resumes after step {start}")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if is_done(values):
            start = STEPS

    batches = order(train_set, start)
    train_loader = DataLoader(train_set, batch_sampler=batches, collate_fn=collate)
    eval_loader = DataLoader(eval_set, BATCH, collate_fn=collate)
    torch.manual_seed(start)  # of augmentation in loader workers
    for step, batch in enumerate(train_loader, start + 1):
        model.train()  # from_pretrained() returns a model in evaluation mode
        torch.manual_seed(step)  # of dropout: a resumed run repeats no masks
        factor = min(step / max(1, WARMUP), 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor  # a linear warm-up, then half a cosine
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        sums = loss_of(compute(model, batch), batch)
        total = sums.detach()
        count = total[1].clamp(min=1e-9)  # a batch may have no label
        (sums[0] / count).backward()
        norm = nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        model.zero_grad()  # also of parameters that no group has
        if step % EVERY and step < STEPS:
            continue

        model.eval()
        found = torch.zeros_like(total)
        for batch in eval_loader:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            with torch.no_grad():
                found += loss_of(compute(model, batch), batch)
        loss = (total[0] / count).item()
        value, _, *metrics = (found / found[1]).tolist()
        values.append(value)
        line = f"step {step}: loss {loss:.4f}, evaluation loss {value:.4f}, norm {norm:.4f}"
        print(line, *[f"{metric:.4f}" for metric in metrics])
        if value < best:
            best = value
            export(model, model.state_dict())
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        saved |= {"step": step, "best": best, "values": values}
        torch.save(saved, f"{OUT}/part")
        os.replace(f"{OUT}/part", f"{OUT}/step-{step:08}.pt")  # never half a file
        for old in sorted(glob.glob(f"{OUT}/step-*.pt"))[:-2]:
            os.remove(old)
        if is_done(values):
            break


if __name__ == "__main__":
    main()
