"""Train on several devices with DDP and gradient accumulation: large batches in little memory.

Differs     from pytorch_torchrun_DDP.py: --accumulate N splits a rank's batch into N micro-batches.
            Their gradients accumulate, and are averaged over the ranks only once, in the last one.
            Lines tagged "# accumulate:".
Command:    torchrun --nproc_per_node=4 pytorch_gradient_accumulation.py --accumulate 4
Use it      when the batch that you want does not fit, or when communication is slow: there is one
            all-reduce per batch, for any N. Not to go faster on one device.
Holds       per parameter 4 bytes, 4 for its gradient, and 4 (SGD with momentum) or 8 (AdamW) for
            the optimizer; the activations are those of one micro-batch.
Sends       as DDP, per step and rank: 2 * 4 * (N - 1) / N bytes per parameter for N ranks.
"""

import contextlib
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
        "--accumulate", type=common.number(int, 1), default=4, metavar="N",
        help="micro-batches per step and rank (default: 4)",
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

    # 2. Data
    train_set, eval_set = common.make_datasets(args)
    batch_size = args.batch_size // world_size  # DDP: this rank's share of the global batch
    if args.accumulate > batch_size:
        common.fail(
            f"--accumulate {args.accumulate}: a rank has {batch_size} samples per step; use a "
            f"larger --batch-size, or --accumulate {batch_size}"
        )
    # DDP: the same order on all ranks; rank r of N takes every N-th sample, beginning with the r-th
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = common.make_loader(args, train_set, batch_size, sampler, drop_last=True)
    eval_sampler = DistributedSampler(eval_set, shuffle=False)  # DDP: the same, without shuffling
    # accumulate: evaluation, too, has room for no more samples at once
    eval_loader = common.make_loader(args, eval_set, batch_size // args.accumulate, eval_sampler)

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
    run = common.Run(args, device, train_loader)
    run.resume_or_exit(model, optimizer, scheduler)

    # 5. Train
    for epoch in run.epochs_left():
        sampler.set_epoch(epoch)  # DDP: a new order every epoch, the same on all ranks
        model.train()
        for inputs, labels in run.batches(train_loader, epoch):
            # accumulate: zeros, not None: gradients add up in DDP's buckets, not in a second copy
            optimizer.zero_grad(set_to_none=False)  # otherwise gradients would accumulate
            batch_loss = 0
            inputs_of = inputs.tensor_split(args.accumulate)
            labels_of = labels.tensor_split(args.accumulate)
            for part in range(args.accumulate):
                # accumulate: around forward AND backward, or DDP averages after every micro-batch
                last = part == args.accumulate - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    logits = model(inputs_of[part])
                    loss = train_set.loss(logits, labels_of[part])
                    loss *= len(labels_of[part]) / len(labels)  # accumulate: a part may be shorter
                    loss.backward()  # DDP: averages the gradients, in the last micro-batch
                batch_loss += loss.detach()
            if args.clip_grad:
                run.grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            optimizer.step()
            scheduler.step()
            run.log(batch_loss)  # copied from the device only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or when asked to stop
                run.save_then_exit_if_asked(model, optimizer, scheduler)

        # 6. Evaluate
        for buffer in model.module.buffers():
            dist.broadcast(buffer, src=0)  # DDP: BatchNorm saw different samples on each rank
        run.report(common.evaluate(model.module, eval_loader, device))  # DDP: on every rank
        run.save_then_exit_if_asked(model, optimizer, scheduler)

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
