"""Fine-tune low-rank adapters (LoRA) on top of frozen weights that fully_shard shards.

Differs     from pytorch_FSDP.py: only two thin matrices per chosen layer are trained. All other
            weights are frozen, in --dtype; the adapters are in fp32. Lines tagged "# LoRA:".
Command:    torchrun --nproc_per_node=4 pytorch_LoRA.py --dtype bfloat16 --weights FOLDER
Use it      to fine-tune a model whose gradients and optimizer state would not fit. Not to train
            from scratch. It saves no activations: add recomputation if these do not fit.
Holds       per frozen parameter 4/N bytes, or 2/N with --dtype bfloat16; per parameter of an
            adapter 16/N with AdamW, or 12/N with SGD; and one or two unsharded blocks.
Sends       per step and rank, (N - 1) / N of: the bytes of all parameters twice, to gather them
            for forward and backward, and 4 bytes per parameter of an adapter, its gradient.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DistributedSampler

import common
from jobs.model_parts import units_of
from libraries import peft_folder


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
        help="dtype of compute and of the frozen weights (default: float32)",
    )  # fmt: skip
    peft_folder.add_flags(parser)  # LoRA: --rank, --alpha, --targets, --adapter, --merge
    args = peft_folder.complete(common.parse_args(parser))
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
            common.save_model(args, merge(weights, args.alpha / args.rank))
    run.finish(model, optimizer)
    # DDP: leave together. Not in a finally block: after an error on one rank, nccl would wait for
    # the others, which are in the middle of a collective, and the error would stay hidden.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
