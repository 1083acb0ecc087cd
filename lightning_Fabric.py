"""Train on several devices with Lightning Fabric, in the training loop of pytorch_torchrun_DDP.py.

Differs     from pytorch_torchrun_DDP.py: Fabric wraps the model and the optimizer, and calls
            backward and the clipping. Lines tagged "# Fabric:".
Command:    fabric run --devices=2 --strategy=ddp lightning_Fabric.py
            torchrun --nproc_per_node=4 lightning_Fabric.py (or python: a single process)
Use it      when you want to keep your loop, and to have the library wrap it. Not when the raw
            script does all you need: that is shorter, and nothing in it is hidden.
Holds       what pytorch_torchrun_DDP.py holds.
Sends       what pytorch_torchrun_DDP.py sends.
"""

import logging
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import common

lightning = common.import_optional("lightning")


def make_fabric(args, world_size):
    """Fabric, or a one-line error if the flags of `fabric run` and of this script conflict."""
    logging.getLogger("lightning").setLevel(logging.ERROR)  # Fabric: repeats what Run prints
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # Fabric: would set both
    # Fabric: rejects this object if the command line of `fabric run` names a strategy
    named = os.environ.pop("LT_STRATEGY", "ddp")
    if named != "ddp":
        common.fail(f"--strategy={named}: this script supports only DDP; use --strategy=ddp")
    named = os.environ.pop("LT_ACCELERATOR", "auto")
    ours = args.device
    if named not in ("auto", ours, "gpu" if ours == "cuda" else ours):
        common.fail(f"--accelerator={named} and --device {ours} differ; give the same device")
    os.environ.pop("LT_DEVICES", None)  # Fabric: rejects devices= if this is "auto"
    strategy = lightning.fabric.strategies.DDPStrategy(gradient_as_bucket_view=True)
    try:
        fabric = lightning.Fabric(
            accelerator=args.device,
            strategy=strategy,
            devices=common.world().local_size,
            num_nodes=world_size // common.world().local_size,
            precision="64-true" if args.double else "32-true",
        )
    except ValueError as error:  # Fabric: another flag of `fabric run` conflicts
        common.fail(error)
    if "LT_CLI_USED" not in os.environ:  # Fabric: otherwise it is already launched
        fabric.launch()
    return fabric


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__)
    args = common.parse_args(parser)
    common.prepare_process(args)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if "LT_CLI_USED" in os.environ and os.environ.get("OMP_NUM_THREADS") == str(cores):
        os.environ["OMP_NUM_THREADS"] = "1"  # Fabric: gives every rank as many threads as all cores
    if "RANK" not in os.environ:  # torchrun: sets these; without it, there is one process
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = common.get_device(args, local_rank)  # DDP: one device per local rank
    if device.type == "cuda":
        torch.cuda.set_device(device)  # DDP: otherwise every rank also allocates memory on GPU 0
    # Fabric: would create the group, too, but without the store; it uses an existing one
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
    fabric = make_fabric(args, world_size)
    common.announce(args, device)
    common.seed_everything(args.seed + rank, args.deterministic)  # DDP: dropout differs by rank

    # 2. Data
    train_set, eval_set = common.make_datasets(args)
    batch_size = args.batch_size // world_size  # DDP: this rank's share of the global batch
    # DDP: the same order on all ranks; rank r of N takes every N-th sample, beginning with the r-th
    # Fabric: no setup_dataloaders(), which would replace this sampler by its own
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = common.make_loader(args, train_set, batch_size, sampler, drop_last=True)
    eval_sampler = DistributedSampler(eval_set, shuffle=False)  # DDP: the same, without shuffling
    eval_loader = common.make_loader(args, eval_set, batch_size, eval_sampler)

    # 3. Model
    model = common.make_model(args, train_set.classes).to(device)
    model = fabric.setup_module(model)  # Fabric: DDP, which broadcasts rank 0's weights
    # Fabric: its wrapper passes attributes to the plain model, not to DDP
    ddp = next(part for part in model.modules() if isinstance(part, DistributedDataParallel))
    ddp.broadcast_buffers = False  # DDP: broadcast before evaluation, not at every step

    # 4. Optimizer and schedule
    optimizer = common.make_optimizer(args, model)
    optimizer = fabric.setup_optimizers(optimizer)
    scheduler = common.make_scheduler(args, optimizer, len(train_loader))
    run = common.Run(args, device, train_loader)
    run.resume_or_exit(ddp, optimizer, scheduler)

    # 5. Train
    for epoch in run.epochs_left():
        sampler.set_epoch(epoch)  # DDP: a new order every epoch, the same on all ranks
        model.train()
        for inputs, labels in run.batches(train_loader, epoch):
            optimizer.zero_grad()  # otherwise gradients would accumulate
            logits = model(inputs)
            loss = train_set.loss(logits, labels)
            fabric.backward(loss)  # DDP: averages the gradients in buckets
            if args.clip_grad:
                # Fabric: would raise an exception before --on-nan can report it
                run.grad_norm = fabric.clip_gradients(
                    model, optimizer, max_norm=args.clip_grad, error_if_nonfinite=False
                )
            optimizer.step()
            scheduler.step()
            run.log(loss)  # copied from the device only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or when asked to stop
                run.save_then_exit_if_asked(ddp, optimizer, scheduler)

        # 6. Evaluate
        for buffer in model.module.buffers():
            dist.broadcast(buffer, src=0)  # DDP: BatchNorm saw different samples on each rank
        run.report(common.evaluate(model.module, eval_loader, device))  # DDP: on every rank
        run.save_then_exit_if_asked(ddp, optimizer, scheduler)

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
