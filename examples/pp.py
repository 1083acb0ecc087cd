"""The loop of ddp.py with pipeline parallelism: torchrun --nproc_per_node=2 pp.py"""

import gc
import glob
import math
import os
import shutil
from collections import OrderedDict
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, default_collate

OUT = "runs/pp"  # checkpoints, and the best weights
STEPS = 60  # of the whole run
EVERY = 20  # steps: evaluates and saves
BATCH = 32  # samples of a step, of all ranks together
LR = 1e-2  # the highest learning rate
WARMUP = 6  # steps until LR is reached
DECAY = 0.01  # of weights
TIMEOUT = timedelta(minutes=60)  # ranks wait so long for one that exports
MICRO = 8  # micro-batches of a batch: the more, the shorter ranks wait for each other
INPUT = "input_ids"  # of a batch: later stages get hidden states in its place
NAMES = ("model.embed_tokens", "model.layers", "model.norm", "lm_head")  # as in transformers
FLAT = sd.StateDictOptions(flatten_optimizer_state_dict=True)  # by parameters' names


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
    return nn.Sequential(OrderedDict(model=nn.Sequential(model), lm_head=nn.Linear(64, 64)))


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


class Elsewhere(nn.Module):  # in the place of a module that another rank has
    def forward(self, x, *args, **kwargs):
        return x


class Stage(nn.Module):
    def __init__(self, model, rank, world):
        super().__init__()
        self.model = model
        self.batch = {}  # the current one, on every rank
        self.half = False
        count = len(model.model.layers)
        for i in range(count):
            if i * world // count != rank:
                model.model.layers[i] = Elsewhere()  # later layers keep their names
        if rank > 0:
            model.model.embed_tokens = Elsewhere()
        if rank < world - 1:
            model.model.norm = Elsewhere()
            model.lm_head = Elsewhere()

    def forward(self, x, rows):  # of a micro-batch, and which rows of the batch these are
        part = rows_of(self.batch, rows, BATCH) | {INPUT: x}
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.half):
            return forward(self.model, part)


def check_stages(model, world, sample):  # every trained parameter is of one stage
    modules = dict(model.named_modules())
    for name in NAMES:
        if name not in modules:
            raise SystemExit(f"the model has no {name}: stages are made of {', '.join(NAMES)}")
    if INPUT not in sample:
        raise SystemExit(f"a batch has no {INPUT!r}: INPUT is one of {', '.join(sample)}")
    parts = tuple(f"{name}." for name in NAMES)
    seen = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        is_of_one = name.startswith(parts) and parameter not in seen  # not tied, nor beside them
        if parameter.requires_grad and not is_of_one:
            raise SystemExit(f"{name} is not trained by one stage alone: untie it, or freeze it")
        seen.add(parameter)
    layers = len(model.model.layers)
    if world > min(layers, MICRO) or BATCH % MICRO:
        raise SystemExit(
            f"{layers} layers and {BATCH} rows in {MICRO} micro-batches on {world} ranks: "
            "use at most as many ranks as layers and as micro-batches, and a multiple of these rows"
        )


def make_stage(model, rank, world, device, sample):
    check_stages(model, world, sample)
    embedding = model.model.embed_tokens
    head = model.lm_head
    with torch.device("meta"):  # without them, the first step would draw dropout twice
        ids = torch.empty(BATCH // MICRO, *sample[INPUT].shape[1:], dtype=sample[INPUT].dtype)
        options = {"dtype": torch.float32, "requires_grad": True}  # as forward() returns
        hidden = torch.empty(*ids.shape, embedding.embedding_dim, **options)
        logits = torch.empty(*ids.shape, head.out_features, **options)
    stage = Stage(model, rank, world).to(device)
    inputs = ids if rank == 0 else hidden
    outputs = logits if rank == world - 1 else hidden
    # It is called for each schedule
    return stage, partial(PipelineStage, stage, rank, world, device, inputs, outputs)


def full(batch, shapes, device):  # the last row fills a batch: all have the same shape
    for name, shape in shapes.items():
        if batch[name].shape[1:] != shape:
            found = [*batch[name].shape[1:]]
            why = f"{name} of a sample has the shape {found}, and of the first one {[*shape]}"
            raise SystemExit(f"{why}: let collate() pad all to one shape")
    rows = torch.arange(BATCH).clamp(max=len(batch[INPUT]) - 1)
    return {name: tensor[rows].to(device) for name, tensor in batch.items()}


def rows_of(batch, rows, count):  # of consecutive ones, those below this count
    first = int(rows[0])
    last = min(first + len(rows), count)
    return {name: tensor[first:last] for name, tensor in batch.items()}


def total_of(sums, width, device):  # of all micro-batches, from the rank of the last stage
    total = torch.zeros(width, device=device)
    for each in sums:
        total += each
    sums.clear()
    dist.all_reduce(total)
    return total


def average_and_clip(parameters, count, limit):  # no reference to a gradient stays
    gradients = [p.grad for p in parameters if p.grad is not None]
    for gradient in gradients:
        gradient /= count.clamp(min=1e-9)  # micro-batches have different numbers of labels
    norm = nn.utils.get_total_norm(gradients)
    squares = norm.square().to(count.device)  # on the CPU, if the whole stage is frozen
    dist.all_reduce(squares)  # a sum over the stages
    nn.utils.clip_grads_with_norm_(parameters, limit, squares.sqrt())
    return squares.sqrt()


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
        config = getattr(dist, "config", None)
        for option in ("pipeline_per_direction_p2p", "pipeline_per_edge_p2p"):  # PyTorch 2.14, 2.15
            if hasattr(config, option):  # off by default
                setattr(config, option, True)  # activations do not wait for gradients
    half = torch.cuda.is_bf16_supported(including_emulation=False)  # a GPU that has bfloat16
    backend = "nccl" if device.type == "cuda" else "gloo"
    gpu = device if device.type == "cuda" else None  # without it, the option is an error
    dist.init_process_group(backend, timeout=TIMEOUT, device_id=gpu)
    rank = dist.get_rank()
    world = dist.get_world_size()

    folder = find_checkpoint(rank, world)
    train_set, eval_set = make_data()
    torch.manual_seed(0)  # what make_model() draws is the same on every rank
    model = make_model()
    groups = groups_of(model)
    sample = collate([train_set[0]])
    found = expected = torch.ones(1, device=device)  # of a rank without logits
    width = [None]  # of what loss_of() returns
    if rank == world - 1:  # it will have the logits; the untouched model computes on the CPU
        threads = torch.get_num_threads()
        torch.set_num_threads(count_cores())  # torchrun gives each rank one
        with torch.no_grad():
            expected = forward(model.eval(), sample)
            width = [len(loss_of(expected, sample))]
        expected = expected.to(device)
        torch.set_num_threads(threads)
    dist.broadcast_object_list(width, world - 1)
    shapes = {name: tensor.shape[1:] for name, tensor in sample.items()}
    stage, new_stage = make_stage(model, rank, world, device, sample)
    own = set(model.parameters())
    for group in groups:
        group["params"] = [p for p in group["params"] if p in own]  # others are of other ranks
    groups = [group for group in groups if group["params"]]  # an empty group cannot be loaded
    frozen = [p for p in model.parameters() if not p.requires_grad]
    optimizer = torch.optim.AdamW(groups or [{"params": frozen}], LR, weight_decay=DECAY)
    sums = []  # of each micro-batch, what loss_of() returns
    count = 1  # rows of the batch; all others only fill it
    firsts = []  # the logits of each micro-batch's first row

    def loss_of_rows(output, rows):
        part = rows_of(stage.batch, rows, count)
        output = output[: max(0, count - int(rows[0]))]
        found = loss_of(output, part)
        sums.append(found.detach())
        return found[0]

    def keep_first(output, rows):
        firsts.append(output[:1].clone())
        return output.sum()

    def run(method, batch):  # of a schedule
        stage.batch = full(batch, shapes, device)
        inputs = [stage.batch[INPUT]] if rank == 0 else []  # all other stages receive theirs
        options = {"rows": torch.arange(BATCH), "target": torch.arange(BATCH)}
        # The outermost autocast frees the weights in bfloat16: so micro-batches share a copy
        with torch.autocast(device.type, enabled=False):
            method(*inputs, **options, return_outputs=False)

    schedule = Schedule1F1B(new_stage(), MICRO, keep_first)
    with torch.no_grad():
        model.eval()
        run(schedule.eval, sample)
    if rank == world - 1:
        found = firsts[0]
    firsts.clear()
    why = "forward does more than embedding, layers, norm and head, as scaling embeddings, "
    why += "which each stage repeats: other logits"
    check(found, expected, next(model.parameters()).dtype, why)
    # A new stage for training: in PyTorch 2.11, one that has evaluated first sends no gradients
    schedule = Schedule1F1B(new_stage(), MICRO, loss_of_rows, scale_grads=False)
    stage.half = half
    torch.set_float32_matmul_precision("high")  # TF32 for what is not in bfloat16, from here on
    gloo = dist.new_group(backend="gloo", timeout=TIMEOUT)  # nccl would gather on the GPU
    rates = [group["lr"] for group in optimizer.param_groups]  # after the warm-up
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    start = 0
    best = math.inf
    values = []
    if folder:
        sd.get_optimizer_state_dict(model, optimizer, options=FLAT)  # an empty step: states for all
        drop_unsaved(model, optimizer, folder)
        weights, moments = sd.get_state_dict(model, optimizer, options=FLAT)
        saved = {"model": weights, "optimizer": moments}
        saved |= {"step": start, "best": best, "values": values}
        dcp.load(saved, checkpoint_id=folder)  # into the shards of this number of ranks
        start = saved["step"]
        best = saved["best"]
        values = saved["values"]
        states = {"model_state_dict": weights, "optim_state_dict": moments}
        sd.set_state_dict(model, optimizer, **states, options=FLAT)
        if is_done(values):
            start = STEPS

    batches = order(train_set, start)
    train_loader = DataLoader(train_set, batch_sampler=batches, collate_fn=collate)
    eval_loader = DataLoader(eval_set, BATCH, collate_fn=collate)
    torch.manual_seed(start)  # of augmentation in loader workers: every rank draws the same
    for step, batch in enumerate(train_loader, start + 1):
        model.train()  # from_pretrained() returns a model in evaluation mode
        torch.manual_seed(step * world + rank)  # of dropout: each rank has its own masks
        factor = min(step / max(1, WARMUP), 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor  # a linear warm-up, then half a cosine
        count = len(batch[INPUT])
        run(schedule.step, batch)
        total = total_of(sums, *width, device)
        norm = average_and_clip(trained, total[1], 1.0)
        optimizer.step()
        model.zero_grad()  # also of parameters that no group has
        torch.manual_seed(step)  # of augmentation without workers: every rank draws the same
        if step % EVERY and step < STEPS:
            continue

        model.eval()
        for batch in eval_loader:
            count = len(batch[INPUT])
            with torch.no_grad():
                run(schedule.eval, batch)
        found = total_of(sums, *width, device)
        loss = (total[0] / total[1].clamp(min=1e-9)).item()
        value, _, *metrics = (found / found[1]).tolist()  # the same on every rank
        values.append(value)
        if rank == 0:
            line = f"step {step}: loss {loss:.4f}, evaluation loss {value:.4f}, norm {norm:.4f}"
            print(line, *[f"{metric:.4f}" for metric in metrics])
        if value < best:
            best = value
            weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
            parts = [None] * world if rank == 0 else None
            dist.gather_object(weights, parts, group=gloo)
            if rank == 0:
                export(model, {name: part[name] for part in parts for name in part})
        weights, moments = sd.get_state_dict(model, optimizer, options=FLAT)  # this rank's shards
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
