"""Train on several devices with FSDP2, and update each parameter during backward.

Differs     from pytorch_FSDP.py: as soon as the gradients of a block are averaged, the optimizer
            uses them, and their memory is freed. No step sees all gradients at once. Lines tagged
            "# in-backward:".
Command:    torchrun --nproc_per_node=4 pytorch_optimizer_in_backward.py
            torchrun --nproc_per_node=4 pytorch_optimizer_in_backward.py --dtype bfloat16
Use it      when gradients are the largest part of what does not fit: a large model, small batches.
            Not to clip the gradient norm, to accumulate gradients or to skip a step with NaN: these
            need all gradients before the first update.
Holds       per parameter 4/N bytes, and 4/N (SGD with momentum) or 8/N (AdamW) for the optimizer;
            no gradients, except during backward those of one block.
Sends       per step and rank, 3 * 4 * (N - 1) / N bytes per parameter: as pytorch_FSDP.py.
"""

import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
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
    args = common.parse_args(parser)
    if args.clip_grad or args.on_nan in ("stop", "skip"):  # in-backward: too late for both
        flag = f"--clip-grad {args.clip_grad}" if args.clip_grad else f"--on-nan {args.on_nan}"
        common.fail(f"{flag} needs all gradients before the first update; use pytorch_FSDP.py")
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
    mesh = init_device_mesh(device.type, (world_size,))
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
    # in-backward: optimizer.step() runs inside backward, so it does not end a phase of the step
    run.resume_or_exit(model, optimizer, scheduler, engine=model)

    def update(parameters, _):
        if all(p.grad is not None for p in parameters):
            optimizer.step()  # in-backward: other blocks have no gradient: skipped
            optimizer.zero_grad()  # in-backward: frees the buffer that FSDP reduced for this block

    norms = {p for norm in batch_norms(model) for p in norm.parameters()}
    for unit in units_of(model):
        own = [p for p in unit.parameters() if p.requires_grad and p not in norms]
        for p in own:  # in-backward: the hook runs after the reduce-scatter
            p.register_post_accumulate_grad_hook(partial(update, own))

    # 5. Train
    for epoch in run.epochs_left():
        sampler.set_epoch(epoch)  # DDP: a new order every epoch, the same on all ranks
        model.train()
        for inputs, labels in run.batches(train_loader, epoch):
            logits = model(inputs).to(torch.get_default_dtype())  # FSDP: all-gathers each block
            loss = train_set.loss(logits, labels)
            loss.backward()  # FSDP: all-gathers again, and reduce-scatters each block's gradients
            optimizer.step()  # in-backward: BatchNorm, and what is in no block
            optimizer.zero_grad()
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
