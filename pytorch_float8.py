"""Train with FSDP and float8: the linear layers multiply in 8 bits (torchao).

Differs     from pytorch_FSDP.py --dtype bfloat16: inputs, weights and gradients are scaled and cast
            to float8 before they are multiplied. Lines tagged "# float8:".
Command:    pip install -r requirements-ecosystem.txt
            torchrun --nproc_per_node=4 pytorch_float8.py --compile
            torchrun --nproc_per_node=4 pytorch_float8.py --compile --scaling rowwise
Use it      for layers with thousands of inputs and outputs, on GPUs with compute capability 8.9 or
            higher, and with --compile. Casting small matrices takes longer than the multiplication
            saves. On all other devices float8 is emulated: rounded as on a GPU, but slower.
Leaves out  the last layer, because its rounding error goes directly into the loss; layers whose
            inputs or outputs are not a multiple of 16, which a GPU cannot multiply; and embeddings,
            norms and attention.
Holds       what pytorch_FSDP.py holds: weights, gradients and optimizer state in float32.
Sends       what pytorch_FSDP.py --dtype bfloat16 sends: weights are cast after the all-gather.
"""

import dataclasses
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

float8 = common.import_optional("torchao.float8")


def fits(layer: nn.Module, name: str) -> bool:
    """Every linear layer but the last, if a GPU can multiply its shape."""
    return name != "head" and layer.in_features % 16 == 0 and layer.out_features % 16 == 0


def multiplies_float8(device: torch.device) -> bool:
    """NVIDIA's GPUs since compute capability 8.9 (Ada, Hopper), AMD's since MI300 and RDNA 4."""
    if device.type == "cpu":
        return False
    gpu = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return gpu.gcnArchName.startswith(("gfx94", "gfx95", "gfx12"))
    return (gpu.major, gpu.minor) >= (8, 9)


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__, only_gpt=True)
    parser.add_argument(
        "--scaling", choices=["tensorwise", "rowwise"], default="tensorwise",
        help="one scale per tensor or per row of a tensor (default: tensorwise)",
    )  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="compile block by block")
    parser.set_defaults(dtype="bfloat16")  # float8: for all other operations
    args = common.parse_args(parser)
    common.prepare_process(args)
    if args.compile:
        common.need_compiler(args.device)
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
    if (tokens := batch_size * args.context) % 16:  # float8: a matmul in backward sums over tokens
        common.fail(
            f"--context {args.context}: {tokens} tokens per rank, which must be a multiple of 16 "
            "for float8; change --context or --batch-size"
        )

    # 3. Model
    with torch.device("meta"):  # FSDP: shapes only: no rank holds the whole model
        model = common.make_model(args, train_set.classes, channels_last=False)  # FSDP: shards rows
    mesh = init_device_mesh(device.type, (world_size,))
    emulate = not multiplies_float8(device)
    config = float8.Float8LinearConfig.from_recipe_name(args.scaling)  # float8: dtypes and scales
    config = dataclasses.replace(config, emulate=emulate)
    layers = [(m, name) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    chosen = sum(fits(*layer) for layer in layers)
    if not chosen:
        common.fail(f"--model {args.model}: no linear layer is a multiple of 16; use another width")
    how = "emulated, because this device cannot multiply float8" if emulate else "on the GPU"
    common.print0(f"float8: {chosen} of {len(layers)} linear layers, {args.scaling}, {how}")
    # float8: each nn.Linear becomes a layer that scales, casts and multiplies
    float8.convert_to_float8_training(model, config=config, module_filter_fn=fits)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for unit in units_of(model):  # FSDP: blocks, embedding, head: gathered one at a time
        if args.compile:
            unit.compile()  # float8: fuses scaling and casting with the operations around them
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)  # FSDP: the other parameters
    model.to_empty(device=device)  # FSDP: memory for this rank's shards
    common.init_weights(args, model, train_set.classes)  # FSDP: each rank fills its shards

    # 4. Optimizer and schedule
    optimizer = common.make_optimizer(args, model)
    scheduler = common.make_scheduler(args, optimizer, len(train_loader))
    run = common.Run(args, device, train_loader)
    run.resume_or_exit(model, optimizer, scheduler)

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
                run.save_then_exit_if_asked(model, optimizer, scheduler)

        # 6. Evaluate
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)  # DDP: BatchNorm saw different samples on each rank
        run.report(common.evaluate(model, eval_loader, device))  # DDP: on every rank
        run.save_then_exit_if_asked(model, optimizer, scheduler)

    # 7. Save and report
    run.load_best_weights()  # with --eval-every; otherwise the last ones stay
    whole = sd.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = sd.get_model_state_dict(model, options=whole)  # FSDP: gathered on rank 0, on the CPU
    if rank == 0:
        common.save_model(args, weights)
    run.finish(model, optimizer)
    # DDP: leave together. Not in a finally block: after an error on one rank, nccl would wait for
    # the others, which are in the middle of a collective, and the error would stay hidden.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
