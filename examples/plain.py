"""A training loop on one device: python plain.py. The same command again resumes from OUT."""

import glob
import math
import os

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

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
    return nn.Sequential(nn.Embedding(64, 64), *blocks, nn.Linear(64, 64))


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


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs

    os.makedirs(f"{OUT}/best", exist_ok=True)
    model = make_model().to(device)
    train_set, eval_set = make_data()
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=DECAY)
    rates = [group["lr"] for group in optimizer.param_groups]  # after the warm-up
    start = 0
    best = math.inf
    if files := sorted(glob.glob(f"{OUT}/step-*.pt")):
        saved = torch.load(files[-1], map_location="cpu", mmap=True)
        start = saved["step"]
        best = saved["best"]
        print(f"resumes after step {start}")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    train_loader = DataLoader(train_set, batch_sampler=order(len(train_set), start))
    eval_loader = DataLoader(eval_set, BATCH)
    torch.manual_seed(start)  # of augmentation in loader workers
    for step, batch in enumerate(train_loader, start + 1):
        model.train()  # from_pretrained() returns a model in evaluation mode
        torch.manual_seed(step)  # of dropout: a resumed run repeats no masks
        factor = min(step / max(1, WARMUP), 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor  # a linear warm-up, then half a cosine
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        sums = loss_of(model, batch)
        total = sums.detach()
        (sums[0] / total[1]).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY and step < STEPS:
            continue

        model.eval()
        found = torch.zeros_like(total)
        for batch in eval_loader:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            with torch.no_grad():
                found += loss_of(model, batch)
        loss = (total[0] / total[1]).item()
        value = (found[0] / found[1]).item()
        print(f"step {step}: loss {loss:.4f}, evaluation loss {value:.4f}, norm {norm:.4f}")
        if value < best:
            best = value
            export(model, model.state_dict())
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved | {"step": step, "best": best}, f"{OUT}/part")
        os.replace(f"{OUT}/part", f"{OUT}/step-{step:08}.pt")  # never half a file
        for old in sorted(glob.glob(f"{OUT}/step-*.pt"))[:-2]:
            os.remove(old)


main()
