"""The loop of ddp.py fine-tunes a chat model of the Hub: torchrun --nproc_per_node=2 chat.py"""

import gc
import glob
import json
import math
import os
import re
from datetime import timedelta
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from jinja2 import TemplateError
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, default_collate
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = "model"  # of the Hub
DATA = "chat.jsonl"
LENGTH = 2048  # tokens of a row
PACKED = True  # several conversations in a row, if the model keeps them apart by their positions
OUT = "runs/chat"  # checkpoints, and the best weights
STEPS = 300  # of the whole run
EVERY = 100  # steps: evaluates and saves
BATCH = 32  # samples of a step, of all ranks together
LR = 2e-5  # the highest learning rate
WARMUP = 9  # steps until LR is reached
DECAY = 0.0  # of weights
TIMEOUT = timedelta(minutes=60)  # ranks wait so long for one that exports


def make_model():  # with flash_attention_2 packing needs one row per forward, or cu_seq_lens_q
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


REASONING = {"reasoning", "reasoning_content", "thinking"}
WEIGHTS = {"weight", "train", "loss_mask"}  # of a message: 0 or false if it is not to be learned
KNOWN = {"role", "content", "name", "id", "tool_calls", "tool_call_id", *REASONING}
UNSUPPORTED = {  # what others read, and what to write instead
    "system": "make it the first of the messages",
    "functions": "write them as tools",
    "function_call": "write it as tool_calls",
    **dict.fromkeys(WEIGHTS, "give one to each message"),
    **dict.fromkeys(("images", "videos", "audios"), "only text is supported"),
}
EMPTY = None, "", []  # what a message has in a column that only others need


def documents_of(line, tokenizer):
    """The documents of a conversation: the text of each, and where its answers begin and end.

    Most templates make one document. If a template changes earlier messages when others follow, as
    Qwen3's, which drops the reasoning of earlier answers, a new document begins there. So each
    answer is learned as the model will generate it, and once.
    """
    messages, learned, options = parse(line, str(tokenizer.chat_template))
    render = partial(tokenizer.apply_chat_template, tokenize=False, **options)
    whole = render(messages)
    if options["tools"] and is_same(render, messages, whole, tools=None):
        raise ValueError("the chat template does not use its tools")
    for i, message in enumerate(messages):
        other = [*messages[:i], message | {"content": "?"}, *messages[i + 1 :]]
        if message["content"].strip() not in whole and is_same(render, other, whole):
            raise ValueError(f"the chat template drops the content of message {i + 1}")

    documents = []
    for i in learned:
        prompt = render(messages[:i], add_generation_prompt=True)
        answered = render(messages[: i + 1])
        if not answered.startswith(prompt):  # DeepSeek-R1's ends with <think>, its answers do not
            prompt = render(messages[:i])
        if not answered.startswith(prompt) or answered == prompt:
            raise ValueError(f"the chat template does not add message {i + 1} to those before")
        for what, bare in without(messages[i]):
            if is_same(render, [*messages[:i], bare], answered):
                raise ValueError(f"the chat template drops the {what} of message {i + 1}")
        said = messages[i]["content"].strip()
        if said and answered.endswith(said) and not said.endswith(str(tokenizer.eos_token)):
            raise ValueError(f"the chat template adds no end to message {i + 1}, only its text")
        spans = []
        if documents and answered.startswith(documents[-1][0]):
            _, spans = documents.pop()
        documents.append((answered, [*spans, (len(prompt), len(answered))]))
    return documents or [(whole, [])]


def parse(line, template):
    """The messages of a line, the indices of the answers to learn, and the template's options."""
    found = json.loads(line)
    written = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(written, list) or not written:
        raise ValueError("it has no list of messages")
    for name, instead in UNSUPPORTED.items():
        if found.get(name) not in EMPTY:
            raise ValueError(f"its {name} would be ignored; {instead}")
    tools = found.get("tools")
    if isinstance(tools, str):  # as in a column of TRL, where other lines have an empty one
        tools = json.loads(tools or "[]")
    options = found.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise ValueError("its chat_template_kwargs are no object")
    words = {*re.findall(r"\w+", template)}
    if unused := sorted(options.keys() - words):
        raise ValueError(f"the chat template does not use {unused[0]} of chat_template_kwargs")
    messages = []
    learned = []
    for i, message in enumerate(written):
        try:
            messages.append(clean(message, words))
            if is_learned(message):
                learned.append(i)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"message {i + 1}: {error}") from error
    if learned[:1] == [0]:
        raise ValueError("message 1 is an answer to nothing; remove it, or give it a weight of 0")
    return messages, learned, {"tools": tools or None, **options}


def clean(message, words):
    """A message as templates take it: text in place of parts and of null, objects as arguments of
    tool calls, and nothing that has no value."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError("its role is not text")
    kept = {}
    for name, value in message.items():
        if value in EMPTY or name in WEIGHTS:
            continue
        if name in UNSUPPORTED or name not in KNOWN | words:
            instead = UNSUPPORTED.get(name, "remove it")
            raise ValueError(f"the chat template does not use its {name}; {instead}")
        kept[name] = value
    content = message.get("content")
    if content is None and "tool_calls" in kept:
        content = ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") for part in parts if part.get("type") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise ValueError("its content is not text")
    kept["content"] = "".join(texts)
    if "tool_calls" in kept:
        kept["tool_calls"] = [with_object(call) for call in kept["tool_calls"]]
    return kept


def with_object(call):
    """A tool call with an object as arguments, for templates write JSON; OpenAI has text."""
    function = call.get("function", call)
    if isinstance(function.get("arguments"), str):
        function = function | {"arguments": json.loads(function["arguments"])}
    return call | {"function": function} if "function" in call else function


def is_learned(message):
    """Whether a message is an answer that has labels."""
    weights = [message[name] for name in WEIGHTS if message.get(name) is not None]
    for weight in weights:
        if weight not in (0, 1):
            raise ValueError(f"its weight is {weight!r}; use 0 or 1")
    is_answer = message["role"] == "assistant"
    if any(weights) and not is_answer:
        raise ValueError("only answers of an assistant are learned; use a weight of 0, or none")
    return is_answer and all(weights)


def without(answer):
    """What a template may drop from an answer, and the answer without it."""
    thought, _, said = answer["content"].rpartition("</think>")
    if thought.replace("<think>", "").strip():
        yield "reasoning", answer | {"content": said}
    for what, names in (("tool_calls", {"tool_calls"}), ("reasoning", REASONING)):
        if names & answer.keys():
            yield what, {name: value for name, value in answer.items() if name not in names}


def is_same(render, messages, text, **options):
    """Whether messages make this text, too."""
    try:
        return render(messages, **options) == text
    except (TemplateError, TypeError, ValueError):
        return False


def tokenize(text, answers, tokenizer):  # tokens, and labels that are -100 outside of answers
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    labels = []
    for token, (first, last) in zip(found["input_ids"], found["offset_mapping"], strict=True):
        counts = any(first < stop and last > start for start, stop in answers)
        labels.append(token if counts else -100)
    return found["input_ids"], labels


def pack(documents):  # into rows; positions restart, so no document attends to another one
    rows = []
    padding = [(0, i, -100) for i in range(LENGTH)]
    for tokens, labels in documents:
        document = [*zip(tokens[:-1], range(LENGTH), labels[1:], strict=False)]  # cut to LENGTH
        if not rows or not PACKED or len(rows[-1]) + len(document) > LENGTH:
            rows.append([])
        rows[-1] += document
    rows = [torch.tensor((row + padding)[:LENGTH]).T for row in rows]
    return [{"input_ids": row[0], "position_ids": row[1], "labels": row[2]} for row in rows]


def make_data():  # for training, and every 20th conversation for evaluation
    try:
        lines = open(DATA, "rb")
    except OSError as error:
        why = f"it cannot be read ({error.strerror})"
        raise SystemExit(f"DATA is {DATA}: {why}; set it to your .jsonl file") from error
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    found = []
    skipped = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            documents = [tokenize(*each, tokenizer) for each in documents_of(line, tokenizer)]
        except (ValueError, TypeError, NotImplementedError, TemplateError) as error:
            raise SystemExit(f"{DATA}, line {number}: {error}; correct or remove it") from error
        learned = [each for each in documents if max(each[1][1 : LENGTH + 1], default=-100) >= 0]
        if learned:
            found.append(learned)
        else:
            skipped += 1
    if os.environ.get("RANK", "0") == "0":
        print(f"{len(found)} conversations; {skipped} without an answer in {LENGTH} tokens skipped")
    if not found:
        raise SystemExit(f"{DATA}: no conversation has an answer within {LENGTH} tokens")
    train_set = [document for i, each in enumerate(found) if i % 20 for document in each]
    return pack(train_set), pack(sum(found[::20], []))


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
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    return model(**inputs, use_cache=False).logits.float()  # a cache would ignore the packing


def loss_of(output, batch):  # sums: of the loss, and of what it is divided by; then of any metrics
    labels = batch["labels"]
    loss = nn.functional.cross_entropy(output.flatten(0, -2), labels.flatten(), reduction="sum")
    return torch.stack([loss, (labels >= 0).sum()])  # labels of -100 do not count


def groups_of(model):  # what is trained; a group may have its own "lr" and "weight_decay"
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


def is_done(values):  # of all evaluations so far: whether training ends before STEPS
    return False


def export(model, weights):
    if model.config.tie_word_embeddings:  # one tensor, which FSDP gathers under both of its names
        weights.pop("lm_head.weight", None)
    model.save_pretrained(f"{OUT}/best", state_dict=weights)
    AutoTokenizer.from_pretrained(FOLDER).save_pretrained(f"{OUT}/best")


def check(found, expected, dtype, why):  # once, before the first step: is it the same model?
    # A part of the model was replaced, and its forward may do more than the new part knows of
    eps = torch.finfo(dtype).eps
    off = (found.float() - expected.float()).norm() / expected.float().norm().clamp(min=eps)
    off = off.nan_to_num(math.inf)
    dist.all_reduce(off, dist.ReduceOp.MAX)  # every rank ends, or none
    if off > eps**0.5:
        raise SystemExit(f"{why} (relative difference {off:.1g})")


@torch.no_grad()
def check_packing(model, rows, device):  # recurrent layers, and some masks, ignore positions
    for row in rows:
        # Two rows, as some attention looks for documents only where a batch has one
        row = {name: tensor.to(device) for name, tensor in collate([row, row]).items()}
        starts = torch.where(row["position_ids"][0] == 0)[0].tolist()
        ends = [*pairwise([*starts, LENGTH])]
        if (row["labels"][:, ends[-1][0] :] < 0).all():  # the last one is padding
            ends.pop()
        if len(ends) > 1:  # of the first row with several documents
            found = forward(model.eval(), row)[:, : ends[-1][1]]
            alone = []
            for a, b in ends:
                document = {name: tensor[:, a:b] for name, tensor in row.items()}
                alone.append(forward(model, document))
            expected = torch.cat(alone, 1)
            why = "the documents of a row see each other in this model: set PACKED = False"
            return check(found, expected, next(model.parameters()).dtype, why)


def newest_checkpoint(rank, world):  # of any rank: machines may have disks of their own
    files = sorted(glob.glob(f"{OUT}/step-*.pt"))
    path = f"{OUT}/copy-{rank}"
    name = ""
    if files:  # a file of the same name on another disk has another time
        name = f"{os.path.basename(files[-1])} {os.stat(files[-1]).st_mtime_ns}"
    names = [""] * world
    dist.all_gather_object(names, name)
    newest = max(names)
    if not newest:
        return None
    has_it = name == newest
    if has_it:
        path = files[-1]
    if min(names) != newest:  # those that do not see the file get a copy, piece by piece
        owner = names.index(newest)
        with open(path, "rb" if has_it else "wb") as file:
            piece = [b"-"]
            while piece[0]:
                piece = [file.read(2**26) if rank == owner else None]
                dist.broadcast_object_list(piece, owner)
                if not has_it:
                    file.write(piece[0])
    saved = torch.load(path, map_location="cpu", mmap=True)  # reads a tensor when it is used
    if not has_it:
        os.remove(path)  # mapped memory stays
    return saved


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

    os.makedirs(f"{OUT}/best", exist_ok=True)
    model = make_model().to(device)
    train_set, eval_set = make_data()
    check_packing(model, train_set, device)
    torch.set_float32_matmul_precision("high")  # TF32 for what is not in bfloat16, from here on
    if min(BATCH, len(train_set)) < world:
        raise SystemExit(f"{len(train_set)} samples, BATCH {BATCH}: too few for {world} ranks")
    optimizer = torch.optim.AdamW(groups_of(model), LR, weight_decay=DECAY)
    rates = [group["lr"] for group in optimizer.param_groups]  # after the warm-up
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    start = 0
    best = math.inf
    values = []
    saved = newest_checkpoint(rank, world)
    if saved:
        start = saved["step"]
        best = saved["best"]
        values = saved["values"]
        if rank == 0:
            print(f"resumes after step {start}")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if is_done(values):
            start = STEPS
    # Averages the gradients in backward; without the option, it would hold each of them twice
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)

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
        sums = loss_of(compute(model, batch), batch)
        total = sums.detach().clone()
        dist.all_reduce(total)  # ranks may have different numbers of labels
        count = total[1].clamp(min=1e-9)  # a batch may have no label
        (sums[0] * world / count).backward()  # DDP divides by world
        norm = nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        model.zero_grad()  # also of parameters that no group has
        if step % EVERY and step < STEPS:
            continue

        for buffer in model.buffers():
            dist.broadcast(buffer, 0)  # BatchNorm saw other samples on each rank
        model.eval()
        found = torch.zeros_like(total)
        for batch in eval_loader:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            with torch.no_grad():
                found += loss_of(compute(model.module, batch), batch)
        dist.all_reduce(found)
        loss = (total[0] / count).item()
        value, _, *metrics = (found / found[1]).tolist()  # the same on every rank
        values.append(value)
        is_best = value < best
        best = min(best, value)
        if rank == 0:  # every rank has the same weights: rank 0 saves them
            line = f"step {step}: loss {loss:.4f}, evaluation loss {value:.4f}, norm {norm:.4f}"
            print(line, *[f"{metric:.4f}" for metric in metrics])
            if is_best:
                export(model.module, model.module.state_dict())
            saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            saved |= {"step": step, "best": best, "values": values}
            torch.save(saved, f"{OUT}/part")
            os.replace(f"{OUT}/part", f"{OUT}/step-{step:08}.pt")  # never half a file
            for old in sorted(glob.glob(f"{OUT}/step-*.pt"))[:-2]:
                os.remove(old)
        if is_done(values):
            break


if __name__ == "__main__":
    main()
    gc.collect()  # frees DDP, which holds the process group: else gloo may abort at exit
    dist.destroy_process_group()
