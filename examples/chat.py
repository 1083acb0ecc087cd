"""The loop of ddp.py fine-tunes a chat model of the Hub: torchrun --nproc_per_node=2 chat.py"""

import gc
import glob
import json
import math
import os

import torch
import torch.distributed as dist
from jinja2 import TemplateError
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER, DATA, LENGTH = "model", "chat.jsonl", 2048  # tokens of a row
OUT, STEPS, EVERY, BATCH, LR, WARMUP, DECAY = "runs/chat", 300, 100, 32, 2e-5, 9, 0.0


def make_model():  # with flash_attention_2 packing needs one row per forward, or cu_seq_lens_q
    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    return AutoModelForCausalLM.from_pretrained(FOLDER, **options)


def documents_of(messages, tokenizer):  # tokens, and labels that are -100 outside of answers
    [message["role"] + message["content"] for message in messages]  # both are text
    tokens, labels = [], []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            render = tokenizer.apply_chat_template
            prompt = render(messages[:i], add_generation_prompt=True, return_dict=False)
            answered = render(messages[: i + 1], return_dict=False)
            if answered[: len(prompt)] != prompt:
                raise ValueError("the chat template changes the prompt when an answer follows")
            if prompt[: len(tokens)] != tokens:  # it changes earlier answers: a new document
                yield tokens, labels
                tokens, labels = [], []
            labels = labels + [-100] * (len(prompt) - len(tokens)) + answered[len(prompt) :]
            tokens = answered
    yield tokens, labels


def pack(documents):  # into rows; positions restart, so no document attends to another one
    rows, padding = [], [(0, i, -100) for i in range(LENGTH)]
    for tokens, labels in documents:
        document = [*zip(tokens[:-1], range(LENGTH), labels[1:], strict=False)]  # cut to LENGTH
        if not rows or len(rows[-1]) + len(document) > LENGTH:
            rows.append([])
        rows[-1] += document
    rows = [torch.tensor((row + padding)[:LENGTH]).T for row in rows]
    return [{"input_ids": row[0], "position_ids": row[1], "labels": row[2]} for row in rows]


def make_data():  # for training, and every 20th conversation for evaluation
    tokenizer, found = AutoTokenizer.from_pretrained(FOLDER), []
    for number, line in enumerate(open(DATA, encoding="utf-8"), 1):
        try:
            found.append([*documents_of(json.loads(line)["messages"], tokenizer)])
            if any(max(labels[1 : LENGTH + 1], default=-100) < 0 for _, labels in found[-1]):
                raise ValueError(f"no answer of an assistant within {LENGTH} tokens")
        except (ValueError, KeyError, TypeError, TemplateError) as error:
            why = f"{type(error).__name__}: {error}"
            raise SystemExit(f"{DATA}, line {number}: {why}") from error
    train_set = [document for i, each in enumerate(found) if i % 20 for document in each]
    return pack(train_set), pack(sum(found[::20], []))


def loss_of(model, batch):  # the sum over all labels, and their number; -100 does not count
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    logits = model(**inputs, use_cache=False).logits.float()  # a cache would ignore the packing
    labels = batch["labels"]
    loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    return torch.stack([loss, (labels >= 0).sum()])


def export(model, weights):
    model.save_pretrained(f"{OUT}/best", state_dict=weights)
    AutoTokenizer.from_pretrained(FOLDER).save_pretrained(f"{OUT}/best")


def order(samples, start):  # the indices of each batch: a new permutation every epoch
    for step in range(start, STEPS):
        epoch, i = divmod(step, max(1, samples // BATCH))
        permutation = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch))
        yield permutation[i * BATCH : (i + 1) * BATCH].tolist()


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():  # one GPU per rank
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    os.makedirs(f"{OUT}/best", exist_ok=True)
    model, (train_set, eval_set) = make_model().to(device), make_data()
    if min(BATCH, len(train_set)) < world:
        raise SystemExit(f"{world} ranks need a row each of {len(train_set)}, {BATCH} in a batch")
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=DECAY)
    start, best = 0, math.inf
    files, steps = sorted(glob.glob(f"{OUT}/step-*.pt")), [""] * world
    dist.all_gather_object(steps, os.path.basename(files[-1]) if files else "")
    owner = steps.index(max(steps))  # of the newest: machines may have disks of their own
    found = [torch.load(files[-1], map_location="cpu") if files and rank == owner else None]
    dist.broadcast_object_list(found, owner)
    if saved := found[0]:
        start, best = saved["step"], saved["best"]
        if rank == 0:
            print(f"resumes after step {start}")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    model = DistributedDataParallel(model)  # averages the gradients in backward

    rows = (batch[rank::world] for batch in order(len(train_set), start))  # this rank's
    train_loader = DataLoader(train_set, batch_sampler=rows)
    share = range(rank, len(eval_set), world)
    eval_loader = DataLoader(Subset(eval_set, share), BATCH // world)
    torch.manual_seed(start * world + rank)  # of augmentation in loader workers
    for step, batch in enumerate(train_loader, start + 1):
        model.train()  # from_pretrained() returns a model in evaluation mode
        torch.manual_seed(step * world + rank)  # of dropout: each rank has its own masks
        for group in optimizer.param_groups:  # a linear warm-up, then half a cosine
            group["lr"] = LR * min(step / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        sums = loss_of(model, batch)
        total = sums.detach().clone()
        dist.all_reduce(total)  # ranks may have different numbers of labels
        (sums[0] * world / total[1]).backward()  # DDP divides by world
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY and step < STEPS:
            continue

        model.eval()
        found = torch.zeros(2, device=device)
        for batch in eval_loader:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            with torch.no_grad():
                found += loss_of(model.module, batch)
        dist.all_reduce(found)
        if rank > 0:  # every rank has the same weights: rank 0 saves them
            continue
        loss, value = (total[0] / total[1]).item(), (found[0] / found[1]).item()
        print(f"step {step}: loss {loss:.4f}, evaluation loss {value:.4f}, norm {norm:.4f}")
        if value < best:
            best = value
            export(model.module, model.module.state_dict())
        saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved | {"step": step, "best": best}, f"{OUT}/part")
        os.replace(f"{OUT}/part", f"{OUT}/step-{step:08}.pt")  # never half a file
        for old in sorted(glob.glob(f"{OUT}/step-*.pt"))[:-2]:
            os.remove(old)


main()
gc.collect()  # frees DDP, which holds the process group: else gloo may abort at exit
dist.destroy_process_group()
