"""Train on several devices with DistributedDataParallel through Hugging Face Accelerate.

Differs     from pytorch_torchrun_DDP.py: Accelerate creates the process group and wraps the model
            in DDP. The file that `accelerate launch` reads selects DDP and the number of devices.
            Lines tagged "# Accelerate:".
Command:    accelerate launch --config_file config/accelerate_DDP.yml accelerate_DDP.py
            accelerate launch --config_file config/accelerate_DDP.yml --num_processes 4 ...
Use it      when one script is to run on one GPU, several GPUs and TPUs. Not to learn how DDP works.
Holds       what pytorch_torchrun_DDP.py holds.
Sends       what pytorch_torchrun_DDP.py sends.
"""

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DistributedSampler

import common
from libraries.accelerate_launch import check_launch

accelerate = common.import_optional("accelerate")


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__)
    args = common.parse_args(parser)
    common.prepare_process(args)
    check_launch()  # Accelerate: checks the launcher's configuration file
    if "RANK" not in os.environ:  # torchrun: sets these; without it, there is one process
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = common.get_device(args, local_rank)  # DDP: one device per local rank
    accelerator = accelerate.Accelerator(  # Accelerate: init_process_group() and set_device()
        cpu=device.type == "cpu",
        kwargs_handlers=[
            accelerate.InitProcessGroupKwargs(timeout=timedelta(seconds=args.timeout)),
            accelerate.DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ],
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
    model = common.make_model(args, train_set.classes).to(device)
    # Accelerate: broadcasts rank 0's weights. If given the loaders, it would multiply the batch by
    # world_size, split it in blocks, and repeat samples in evaluation. If given the schedule, it
    # would advance world_size steps at a time. So it gets neither.
    model = accelerator.prepare(model)
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
            optimizer.zero_grad()  # otherwise gradients would accumulate
            logits = model(inputs)
            loss = train_set.loss(logits, labels)
            accelerator.backward(loss)  # DDP: averages the gradients in buckets
            if args.clip_grad:
                run.grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.clip_grad)
            optimizer.step()
            scheduler.step()
            run.log(loss)  # copied from the device only when it is printed
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
