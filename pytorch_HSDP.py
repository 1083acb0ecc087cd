"""Train on several machines with fully_shard, sharded within each and replicated between them.

Differs     from pytorch_FSDP.py: the ranks form a 2-D device mesh. A shard group, by default the
            ranks of a machine, shards parameters, gradients and optimizer state. A replica group,
            one rank of each machine, has the same shard and averages its gradients. Lines tagged
            "# HSDP:".
Command:    torchrun --nproc_per_node=4 pytorch_HSDP.py --shard 2
            torchrun --nproc_per_node=4 pytorch_HSDP.py --shard 2 --dtype bfloat16
Use it      on so many machines that the all-gathers of pytorch_FSDP.py are slower than the compute,
            if the model fits the GPUs of one machine: they stay on the fast links within it.
Holds       per parameter, for S ranks in a shard group: 4/S bytes, 4/S for its gradient, and 4/S
            (SGD with momentum) or 8/S (AdamW) for the optimizer; and one or two unsharded blocks.
Sends       per step and rank, 3 * 4 * (S - 1) / S bytes per parameter in the shard group; and in
            the replica group of R ranks an all-reduce of the shard's gradients,
            2 * 4/S * (R - 1) / R.
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
from jobs.model_parts import batch_norms, units_of


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__)
    parser.add_argument("--local-rank", "--local_rank")  # FSDP: torch.distributed.launch passes it
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32",
        help="dtype of compute and of the gathered weights (default: float32)",
    )  # fmt: skip
    parser.add_argument(
        "--shard", type=common.number(int, 1), default=common.world().local_size, metavar="S",
        help="ranks that shard one replica (default: all ranks of a machine)",
    )  # fmt: skip
    args = common.parse_args(parser)
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
    if world_size % args.shard:
        common.fail(f"--shard {args.shard} does not divide {world_size} ranks; use a divisor")
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
    # HSDP: consecutive ranks, those of a machine, shard; rank r + S has the same shard as rank r
    dims = (world_size // args.shard, args.shard)
    mesh = init_device_mesh(device.type, dims, mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy()
    if args.dtype == "bfloat16":  # FSDP: gathers and computes in bfloat16, reduces in fp32
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if norms := batch_norms(model):  # FSDP: a unit of their own, in fp32
            fully_shard(norms, mesh=mesh)
    for unit in units_of(model):  # FSDP: blocks, embedding, head: gathered one at a time
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
