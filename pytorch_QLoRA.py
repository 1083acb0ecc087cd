"""Fine-tune low-rank adapters on frozen weights of 4 bits, which fully_shard shards (QLoRA).

Differs     from pytorch_LoRA.py: the matrices of all blocks are stored and gathered in NF4, 4 bits
            per weight and a scale per --block weights. A layer computes with a copy of its matrix
            in --dtype, made anew in forward and in backward. Lines tagged "# QLoRA:".
Command:    torchrun --nproc_per_node=4 pytorch_QLoRA.py --dtype bfloat16 --weights FOLDER
Use it      to fine-tune a model whose frozen weights in 2 bytes would not fit, or where gathering
            them is slow. Not if they fit: unpacking takes time, and rounding costs some loss.
Holds       per frozen weight of a block (1/2 + 4/64)/N bytes; per parameter of embedding, head and
            norms what pytorch_LoRA.py holds; and while a matrix is unpacked, about 8 bytes per
            weight of it.
Sends       per step and rank, (N - 1) / N of: these bytes twice, to gather them for forward and
            backward, and 4 bytes per parameter of an adapter, its gradient.
"""

import functools
import itertools
import math
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import tensor as dtensor
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DistributedSampler

import common
from jobs.model_parts import units_of
from libraries import peft_folder

NF4 = torch.tensor([  # QLoRA: 16 quantiles of a normal distribution, as weights have (appendix E)
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
], dtype=torch.float32)  # fmt: skip


def quantize(weight: Tensor, block: int) -> Tensor:
    """Rows ``[out, in]`` as bytes ``[out, in / 2 + 4 * in / block]``: two codes in each byte, then
    the scales of the row's blocks in fp32. A row needs no other row, so a rank can quantize its
    shard, and ``fully_shard`` can shard the bytes by rows."""
    blocks = weight.float().unflatten(1, (-1, block))  # QLoRA: [out, blocks, block]
    scales = blocks.abs().amax(2, keepdim=True)  # QLoRA: the largest becomes -1 or 1
    middles = ((NF4[1:] + NF4[:-1]) / 2).to(weight.device)
    nearest = torch.bucketize(blocks * (1 / scales.clamp(min=1e-38)), middles, out_int32=True)
    codes = nearest.to(torch.uint8).flatten(1)  # QLoRA: 0 to 15
    pairs = codes[:, ::2] << 4 | codes[:, 1::2]
    return torch.cat([pairs, scales.flatten(1).view(torch.uint8)], dim=1)


@functools.cache
def pairs_of_values(device: torch.device) -> Tensor:
    """The two values of each byte, ``[256, 2]`` in fp32."""
    return torch.stack([NF4.repeat_interleave(16), NF4.repeat(16)], 1).to(device)


def dequantize(packed: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """The matrix ``[out, in]`` of bytes from :func:`quantize`: each value times its scale."""
    packed = packed.to(torch.uint8)  # QLoRA: gathered in bfloat16 before PyTorch 2.13, exactly
    size = packed.shape[1] * block * 2 // (block + 8)  # QLoRA: inputs
    codes, scales = packed.split([size // 2, size // block * 4], dim=1)
    values = F.embedding(codes.int(), pairs_of_values(packed.device))  # [out, in / 2, 2]
    scales = scales.contiguous().view(torch.float32)
    whole = values.flatten(1).unflatten(1, (-1, block)).mul_(scales.unsqueeze(2))
    return whole.flatten(1).to(dtype)


class Product(torch.autograd.Function):
    """``x @ W.T``. For backward, autograd would keep W; this keeps its bytes, which FSDP frees."""

    @staticmethod
    def forward(ctx, x, packed, block):
        ctx.save_for_backward(packed)  # QLoRA: not x, which only the gradient of W needs
        ctx.block = block
        return F.linear(x, dequantize(packed, block, x.dtype))

    @staticmethod
    def backward(ctx, gradient):
        [packed] = ctx.saved_tensors
        return gradient @ dequantize(packed, ctx.block, gradient.dtype), None, None


def pack(name: str, layer: nn.Linear, block: int) -> None:
    """Replace the weight of a layer by bytes, which :func:`fill` computes."""
    if block < 2 or block % 2 or layer.in_features % block:
        why = f"no even divisor of the {layer.in_features} inputs of {name}"
        common.fail(f"--block {block} is {why}; give one, or a --model of another width")
    device = layer.weight.device
    size = layer.in_features // 2 + layer.in_features // block * 4
    packed = torch.empty(layer.out_features, size, dtype=torch.uint8, device=device)
    layer.weight = nn.Parameter(packed, requires_grad=False)

    def forward(x: Tensor) -> Tensor:
        out = Product.apply(x, layer.weight, block)
        return out if layer.bias is None else out + layer.bias

    layer.forward = forward  # QLoRA: instead of F.linear, which cannot multiply bytes


@torch.no_grad()
def fill(args, model, layers: dict[str, nn.Linear], classes: list[str], block: int) -> None:
    """Draw or load the packed weights of a block at a time: each rank has its rows of that block in
    float until it has quantized them."""
    for _, names in itertools.groupby(layers, lambda name: name.split(".")[:2]):
        rows = {}
        for name in names:
            packed = layers[name].weight
            layout = {"device_mesh": packed.device_mesh, "placements": packed.placements}
            shape = len(packed), layers[name].in_features
            rows[f"{name}.weight"] = dtensor.empty(shape, **layout)
        common.init_weights(args, model, classes, rows)
        for name, floats in rows.items():
            packed = model.get_parameter(name).to_local()
            packed.copy_(quantize(floats.to_local(), block))


def freeze(model: nn.Module, dtype: torch.dtype) -> None:
    """Train no parameter, and store them in ``dtype``, before the model is sharded."""
    for weight in model.parameters():  # LoRA: no step changes them, so they need no fp32
        weight.requires_grad_(False).data = weight.to(dtype)


def adapt(layer: nn.Linear, rank: int, scale: float) -> None:
    """Add ``B(A(x)) * scale`` to what a layer computes (Hu et al. 2021, arXiv:2106.09685)."""
    options = {"bias": False, "device": layer.weight.device}  # LoRA: adapters stay in fp32
    layer.lora_A = nn.Linear(layer.in_features, rank, **options)  # LoRA: child modules
    layer.lora_B = nn.Linear(rank, layer.out_features, **options)
    # LoRA: after the layer's own forward; the layer itself stays as it is
    layer.register_forward_hook(lambda m, x, out: out + m.lora_B(m.lora_A(x[0])) * scale)


def merge(weights: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """The whole model: each matrix plus ``B @ A * scale``, added in the adapters' dtype."""
    for name in [name for name in weights if name.endswith(".lora_A.weight")]:
        layer = name.removesuffix(".lora_A.weight")
        a = weights.pop(name)
        b = weights.pop(f"{layer}.lora_B.weight")
        weights[f"{layer}.weight"] = weights[f"{layer}.weight"].to(a.dtype) + b @ a * scale
    return weights


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__, only_gpt=True)
    parser.add_argument("--local-rank", "--local_rank")  # FSDP: torch.distributed.launch passes it
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32",
        help="dtype of compute and of the other frozen weights (default: float32)",
    )  # fmt: skip
    parser.add_argument(
        "--block", type=int, metavar="N",
        help="weights of a row that share a scale (default: 64, or less if 64 does not divide it)",
    )  # fmt: skip
    peft_folder.add_flags(parser)  # LoRA: --rank, --alpha, --targets, --adapter, --merge
    args = peft_folder.complete(common.parse_args(parser))
    if torch.__version__ < "2.12":  # QLoRA: there, fully_shard fails on bytes (pytorch#177844)
        common.fail(f"it needs PyTorch 2.12, not {torch.__version__}; or use pytorch_LoRA.py")
    common.prepare_process(args)
    if "RANK" not in os.environ:  # torchrun: sets these; without it, there is one process
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = common.get_device(args, local_rank)  # DDP: one device per local rank
    if device.type == "cuda":
        torch.cuda.set_device(device)  # DDP: otherwise every rank also allocates memory on GPU 0
    dist.init_process_group(  # DDP: returns once all ranks have joined
        backend="nccl" if device.type == "cuda" else "gloo",
        store=common.make_store(args),  # torchrun: a restart must not find dead ranks' addresses
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=args.timeout),  # DDP: how long ranks wait for each other
        device_id=device if device.type == "cuda" else None,
    )
    rank = dist.get_rank()  # DDP: from 0 to world_size - 1
    world_size = dist.get_world_size()
    common.announce(args, device)
    common.seed_everything(args.seed + rank, args.deterministic)  # DDP: dropout differs by rank

    # 2. Data
    train_set, eval_set = common.make_datasets(args)
    batch_size = args.batch_size // world_size  # DDP: this rank's share of the global batch
    # DDP: the same order on all ranks; rank r of N takes every N-th sample, beginning with the r-th
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = common.make_loader(args, train_set, batch_size, sampler, drop_last=True)
    eval_sampler = DistributedSampler(eval_set, shuffle=False)  # DDP: the same, without shuffling
    eval_loader = common.make_loader(args, eval_set, batch_size, eval_sampler)

    # 3. Model
    with torch.device("meta"):  # FSDP: shapes only: no rank holds the whole model
        model = common.make_model(args, train_set.classes, channels_last=False)  # FSDP: shards rows
    freeze(model, torch.bfloat16 if args.dtype == "bfloat16" else torch.get_default_dtype())
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    linears.pop("head")  # QLoRA: its rounding error goes directly into the loss
    block = args.block or math.gcd(64, *(layer.in_features for layer in linears.values()))
    for name, layer in linears.items():
        pack(name, layer, block)  # QLoRA: before fully_shard, which shards the bytes by rows
    layers = peft_folder.find_layers(args, model)
    for layer in layers.values():  # LoRA: adapters are sharded and gathered with their block
        adapt(layer, args.rank, args.alpha / args.rank)
    mesh = init_device_mesh(device.type, (world_size,))
    policy = MixedPrecisionPolicy()
    if args.dtype == "bfloat16":  # FSDP: gathers and computes in bfloat16, reduces in fp32
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for unit in units_of(model):  # FSDP: blocks, embedding, head: gathered one at a time
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)  # FSDP: the other parameters
    model.to_empty(device=device)  # FSDP: memory for this rank's shards
    common.init_weights(args, model, train_set.classes)  # FSDP: each rank fills its shards
    fill(args, model, linears, train_set.classes, block)  # QLoRA: and quantizes its rows
    peft_folder.init(args, layers)  # LoRA: A at random, and B with zeros; or both from --adapter
    base = peft_folder.Base(args, model)  # LoRA: snapshots have only adapters

    # 4. Optimizer and schedule
    optimizer = common.make_optimizer(args, model)
    scheduler = common.make_scheduler(args, optimizer, len(train_loader))
    run = common.Run(args, device, train_loader)
    run.resume_or_exit(model, optimizer, scheduler, base=base)  # LoRA: refuses another base

    # 5. Train
    for epoch in run.epochs_left():
        sampler.set_epoch(epoch)  # DDP: a new order every epoch, the same on all ranks
        model.train()
        for inputs, labels in run.batches(train_loader, epoch):
            optimizer.zero_grad()  # otherwise gradients would accumulate
            logits = model(inputs).to(torch.get_default_dtype())  # FSDP: all-gathers each block
            loss = train_set.loss(logits, labels)
            loss.backward()  # FSDP: all-gathers again, and reduce-scatters each block's gradients
            if args.clip_grad:
                run.grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            optimizer.step()
            scheduler.step()
            run.log(loss)  # copied from the device only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or when asked to stop
                run.save_then_exit_if_asked(model, optimizer, scheduler, base=base)

        # 6. Evaluate
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)  # DDP: BatchNorm saw different samples on each rank
        run.report(common.evaluate(model, eval_loader, device))  # DDP: on every rank
        run.save_then_exit_if_asked(model, optimizer, scheduler, base=base)

    # 7. Save and report
    run.load_best_weights()  # with --eval-every; otherwise the last ones stay
    base.included = args.merge  # LoRA: all weights are gathered only if they are written
    whole = sd.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = sd.get_model_state_dict(model, options=whole)  # FSDP: gathered on rank 0, on the CPU
    if rank == 0:
        peft_folder.save(args, layers, weights)  # LoRA: a few MB, as peft reads them
        if args.merge:  # LoRA: W + B @ A * scale: a model as any other
            for name in linears:  # QLoRA: the W that the adapters were trained for, in fp32
                w = weights[f"{name}.weight"]
                weights[f"{name}.weight"] = dequantize(w, block, torch.get_default_dtype())
            common.save_model(args, merge(weights, args.alpha / args.rank))
    run.finish(model, optimizer)
    # DDP: leave together. Not in a finally block: after an error on one rank, nccl would wait for
    # the others, which are in the middle of a collective, and the error would stay hidden.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
