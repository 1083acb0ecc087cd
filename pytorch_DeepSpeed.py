"""Train on several devices with DeepSpeed: ZeRO stages 0 to 3, chosen in a JSON file.

Differs     from pytorch_torchrun_DDP.py: DeepSpeed's engine replaces DDP. It shards the optimizer
            state (ZeRO stage 1), also the gradients (stage 2), and also the parameters (stage 3).
            Lines tagged "# DeepSpeed:".
Command:    deepspeed pytorch_DeepSpeed.py --deepspeed_config config/zero_stage2_config.json
            deepspeed --num_gpus 2 pytorch_DeepSpeed.py (or torchrun --nproc_per_node=2, or python)
Use it      when the model does not fit one device, or to compare the stages; with offload, when it
            does not fit all GPUs together. pytorch_FSDP.py does what stage 3 does in plain PyTorch.
Holds       per parameter, with K = 4 (SGD with momentum) or 8 (AdamW) for the optimizer: stage 0,
            4 + 4 + K bytes, as DDP; stages 1 and 2, 4 + (4 + K) / N and a second copy of the
            weights, 4 / N; stage 3, (4 + 8 + K) / N and the copy, 4 / N. During backward, also a
            bucket of gradients; stage 1 holds all gradients, 4, until backward ends.
Sends       per step and rank, with a = 4 * (N - 1) / N bytes per parameter: stage 0, all-reduces of
            the gradients, 2a; stages 1 and 2, also an all-gather of the weights, 3a; stage 3,
            all-gathers of the weights and a reduce-scatter of the gradients, 3a according to the
            paper (arXiv:1910.02054), 2a as measured on ResNet-18.
"""

import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DistributedSampler

import common
from libraries import deepspeed_engine


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__)
    parser.add_argument("--local-rank", "--local_rank")  # DeepSpeed: its launcher passes it
    parser.add_argument(
        "--deepspeed_config", "--deepspeed-config", metavar="FILE",
        default="config/zero_stage2_config.json",
        help="DeepSpeed's configuration file (default: %(default)s)",
    )  # fmt: skip
    args = common.parse_args(parser)
    common.prepare_process(args)
    if args.double:
        common.fail("--double: DeepSpeed computes in float32 at most; leave it out")
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
    config = deepspeed_engine.read_config(args)  # DeepSpeed: adds the batch size
    common.announce(args, device)
    common.seed_everything(args.seed + rank, args.deterministic)  # DDP: dropout differs by rank
    deepspeed = deepspeed_engine.import_deepspeed(args, device, config)

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
    scheduler = partial(common.make_scheduler, args, steps_per_epoch=len(train_loader))
    model, _, _, _ = deepspeed.initialize(  # DeepSpeed: broadcasts rank 0's weights
        model=model,
        model_parameters=common.parameter_groups(args, model),
        # DeepSpeed: calls these two, unless the file configures its own
        optimizer=None if "optimizer" in config else partial(optimizer_class, **options),
        lr_scheduler=None if "scheduler" in config else scheduler,
        config=config,
    )
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
            model.backward(loss)  # DeepSpeed: averages the gradients in buckets
            model.step()  # DeepSpeed: steps optimizer and scheduler, and clears the gradients
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
