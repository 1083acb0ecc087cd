"""Train on several devices with DDP and mixed precision, the usual setup in practice.

Differs     from pytorch_torchrun_DDP.py: autocast, GradScaler and gradient clipping, as in
            pytorch_auto_mixed_precision.py. Lines tagged "# AMP:".
Command:    torchrun --nproc_per_node=4 pytorch_DDP_AMP.py
            torchrun --nproc_per_node=4 pytorch_DDP_AMP.py --dtype bfloat16 --clip-grad 1
Use it      as the first choice on several GPUs with tensor cores. Not when the model does not fit.
Holds       per parameter 4 bytes, 4 for its gradient, and 4 (SGD with momentum) or 8 (AdamW) for
            the optimizer, and during a step 2 for the half-precision copy. The activations are
            those of 1/N of the batch; what matrix products and convolutions read takes half of its
            fp32 memory.
Sends       as DDP, per step and rank, 2 * 4 * (N - 1) / N bytes per parameter: gradients are fp32.
            pytorch_comm_hooks.py sends half of that.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import common


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__)
    parser.add_argument(
        "--dtype", choices=["float16", "bfloat16"],
        help="dtype of autocast (default: float16 on a GPU, bfloat16 on a CPU)",
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
    common.announce(args, device)
    common.seed_everything(args.seed + rank, args.deterministic)  # DDP: dropout differs by rank
    dtype = common.get_dtype(args, device)

    # 2. Data
    train_set, eval_set = common.make_datasets(args)
    batch_size = args.batch_size // world_size  # DDP: this rank's share of the global batch
    # DDP: the same order on all ranks; rank r of N takes every N-th sample, beginning with the r-th
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = common.make_loader(args, train_set, batch_size, sampler, drop_last=True)
    eval_sampler = DistributedSampler(eval_set, shuffle=False)  # DDP: the same, without shuffling
    eval_loader = common.make_loader(args, eval_set, batch_size, eval_sampler)

    # 3. Model
    model = common.make_model(args, train_set.classes).to(device)
    model = DistributedDataParallel(  # DDP: broadcasts rank 0's weights
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,  # DDP: no second copy of the gradients
    )
    model.broadcast_buffers = False  # DDP: broadcast before evaluation, not at every step

    # 4. Optimizer and schedule
    optimizer = common.make_optimizer(args, model)
    scheduler = common.make_scheduler(args, optimizer, len(train_loader))
    # AMP: float16 rounds gradients below 6e-8 to zero, so the loss is scaled up, and the gradients
    # are scaled down before the step. bfloat16 has the range of fp32 and needs no scaling.
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    run = common.Run(args, device, train_loader)
    run.resume_or_exit(model, optimizer, scheduler, scaler=scaler)

    # 5. Train
    for epoch in run.epochs_left():
        sampler.set_epoch(epoch)  # DDP: a new order every epoch, the same on all ranks
        model.train()
        for inputs, labels in run.batches(train_loader, epoch):
            optimizer.zero_grad()  # otherwise gradients would accumulate
            with torch.autocast(device.type, dtype):  # AMP: forward and loss, not backward
                logits = model(inputs)
                loss = train_set.loss(logits, labels)
            # DDP: averages the gradients in buckets, as they become ready
            scaler.scale(loss).backward()  # AMP: 1. scale
            if args.clip_grad:
                scaler.unscale_(optimizer)  # AMP: 2. unscale: clipping needs unscaled gradients
                # AMP: 3. clip
                run.grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            scaler.step(optimizer)  # AMP: 4. step, unless a gradient overflowed
            scaler.update()  # AMP: 5. lower the scale after an overflow, else raise it now and then
            scheduler.step()
            run.log(loss)  # copied from the device only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or when asked to stop
                run.save_then_exit_if_asked(model, optimizer, scheduler, scaler=scaler)

        # 6. Evaluate
        for buffer in model.module.buffers():
            dist.broadcast(buffer, src=0)  # DDP: BatchNorm saw different samples on each rank
        with torch.autocast(device.type, dtype):  # AMP: as in training
            metrics = common.evaluate(model.module, eval_loader, device)  # DDP: on every rank
        run.report(metrics)
        run.save_then_exit_if_asked(model, optimizer, scheduler, scaler=scaler)

    # 7. Save and report
    run.load_best_weights()  # with --eval-every; otherwise the last ones stay
    if rank == 0:
        common.save_model(args, model.module.state_dict())
    run.finish(model, optimizer)
    # DDP: leave together. Not in a finally block: after an error on one rank, nccl would wait for
    # the others, which are in the middle of a collective, and the error would stay hidden.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
