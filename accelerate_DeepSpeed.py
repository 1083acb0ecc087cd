"""Train on several devices with DeepSpeed, ZeRO stages 0 to 3, through Hugging Face Accelerate.

Differs     from pytorch_DeepSpeed.py: Accelerate creates the process group and calls DeepSpeed. The
            file that `accelerate launch` reads names the DeepSpeed configuration file. Lines tagged
            "# Accelerate:".
Command:    accelerate launch --config_file config/accelerate_DeepSpeed.yml accelerate_DeepSpeed.py
Use it      when one script is to run under DDP, FSDP and DeepSpeed.
Holds       what pytorch_DeepSpeed.py holds.
Sends       what pytorch_DeepSpeed.py sends.
"""

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DistributedSampler

import common
from libraries import deepspeed_engine
from libraries.accelerate_launch import check_launch

accelerate = common.import_optional("accelerate")


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__)
    parser.add_argument(
        "--deepspeed_config", "--deepspeed-config", metavar="FILE",
        # Accelerate: deepspeed_config_file in the file of its launcher
        default=os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none"),
        help="DeepSpeed's configuration file (default: the one in Accelerate's file)",
    )  # fmt: skip
    args = common.parse_args(parser)
    common.prepare_process(args)
    check_launch("DEEPSPEED")  # Accelerate: checks the launcher's configuration file
    if args.double:
        common.fail("--double: DeepSpeed computes in float32 at most; leave it out")
    if "RANK" not in os.environ:  # torchrun: sets these; without it, there is one process
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = common.get_device(args, local_rank)  # DDP: one device per local rank
    config = deepspeed_engine.read_config(args)  # DeepSpeed: adds the batch size
    if {"optimizer", "scheduler"} & config.keys():  # Accelerate: would raise an exception
        file = args.deepspeed_config
        common.fail(f"{file} sets an optimizer or a scheduler, as this script does; remove them")
    os.environ["DS_ACCELERATOR"] = device.type  # DeepSpeed: reads it on import
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=config)
    accelerator = accelerate.Accelerator(  # Accelerate: init_process_group() and set_device()
        cpu=device.type == "cpu",
        deepspeed_plugin=plugin,
        kwargs_handlers=[
            accelerate.InitProcessGroupKwargs(timeout=timedelta(seconds=args.timeout))
        ],
    )
    if device.type == "cpu":  # Accelerate: allows DeepSpeed on GPUs only, yet it runs on CPUs
        for state in (accelerate.PartialState(), accelerator.state):
            state.distributed_type = accelerate.DistributedType.DEEPSPEED
        accelerator.state.deepspeed_plugins = plugin
    rank = dist.get_rank()  # DDP: from 0 to world_size - 1
    world_size = dist.get_world_size()
    common.announce(args, device)
    common.seed_everything(args.seed + rank, args.deterministic)  # DDP: dropout differs by rank
    deepspeed_engine.import_deepspeed(args, device, config)

    # 2. Data
    train_set, eval_set = common.make_datasets(args)
    batch_size = args.batch_size // world_size  # DDP: this rank's share of the global batch
    # DDP: the same order on all ranks; rank r of N takes every N-th sample, beginning with the r-th
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = common.make_loader(args, train_set, batch_size, sampler, drop_last=True)
    eval_sampler = DistributedSampler(eval_set, shuffle=False)  # DDP: the same, without shuffling
    eval_loader = common.make_loader(args, eval_set, batch_size, eval_sampler)

    # 3. Model
    # DeepSpeed: default memory format, because it flattens the weights
    model = common.make_model(args, train_set.classes, channels_last=False).to(device)

    # 4. Optimizer and schedule
    optimizer_class, options = common.optimizer_class(args)
    optimizer = optimizer_class(common.parameter_groups(args, model), **options)
    model, _ = accelerator.prepare(model, optimizer)  # Accelerate: calls deepspeed.initialize()
    # Accelerate: passes on only DeepSpeed's own schedules
    model.lr_scheduler = common.make_scheduler(args, optimizer, len(train_loader))
    dtype = next(model.parameters()).dtype  # DeepSpeed: bfloat16 if the file says so
    run = common.Run(args, device, train_loader)
    deepspeed_engine.resume_or_exit(run, model)  # DeepSpeed: each rank reads its shards

    # 5. Train
    for epoch in run.epochs_left():
        sampler.set_epoch(epoch)  # DDP: a new order every epoch, the same on all ranks
        model.train()
        for inputs, labels in run.batches(train_loader, epoch, dtype):  # DeepSpeed: in this dtype
            logits = model(inputs).float()  # DeepSpeed: stage 3 gathers layer by layer
            loss = train_set.loss(logits, labels)
            # Accelerate: steps optimizer and scheduler, and clears the gradients, in here
            accelerator.backward(loss)  # DeepSpeed: averages the gradients in buckets
            run.log(loss)  # copied from the device only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or when asked to stop
                deepspeed_engine.save_then_exit_if_asked(run, model)  # DeepSpeed: one file per rank

        # 6. Evaluate
        for buffer in model.module.buffers():
            dist.broadcast(buffer, src=0)  # DDP: BatchNorm saw different samples on each rank
        run.report(common.evaluate(model, eval_loader, device))  # DDP: on every rank
        deepspeed_engine.save_then_exit_if_asked(run, model)

    # 7. Save and report
    run.load_best_weights()  # with --eval-every; otherwise the last ones stay
    # DeepSpeed: gathers the fp32 copy on the CPU of rank 0, one tensor at a time
    weights = deepspeed_engine.gather_weights(model)
    if rank == 0:
        common.save_model(args, weights)
    run.finish(model, optimizer=None)  # DeepSpeed: has buffers of its own
    # DDP: leave together. Not in a finally block: after an error on one rank, nccl would wait for
    # the others, which are in the middle of a collective, and the error would stay hidden.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
