"""Train on several devices with fully_shard (FSDP2) through Hugging Face Accelerate.

Differs     from pytorch_FSDP.py: Accelerate creates the process group and shards the model, as set
            in the file that `accelerate launch` reads. Lines tagged "# Accelerate:".
Command:    accelerate launch --config_file config/accelerate_FSDP.yml accelerate_FSDP.py
Use it      when one script is to run under DDP, FSDP and DeepSpeed. Not when only rank 0 has memory
            for the full initial weights: here each rank creates all of them.
Holds       what pytorch_FSDP.py holds, once the model is sharded.
Sends       what pytorch_FSDP.py sends, for a ResNet or a GPT; other models may have more units.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DistributedSampler

import common
from jobs.model_parts import batch_norms, blocks_of
from libraries.accelerate_launch import check_launch

accelerate = common.import_optional("accelerate")


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
    common.prepare_process(args)
    check_launch("FSDP")  # Accelerate: checks the launcher's configuration file
    if "RANK" not in os.environ:  # torchrun: sets these; without it, there is one process
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = common.get_device(args, local_rank)  # DDP: one device per local rank
    if device.type == "cpu" and torch.cuda.is_available():
        common.fail("--device cpu: Accelerate's FSDP uses the GPU; export CUDA_VISIBLE_DEVICES=")
    policy = MixedPrecisionPolicy()
    if args.dtype == "bfloat16":  # FSDP: gathers and computes in bfloat16, reduces in fp32
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    # Accelerate: reads the plugin's other settings from the environment, set from the file
    plugin = accelerate.FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
    accelerator = accelerate.Accelerator(  # Accelerate: init_process_group() and set_device()
        cpu=device.type == "cpu",
        fsdp_plugin=plugin,
        kwargs_handlers=[
            accelerate.InitProcessGroupKwargs(timeout=timedelta(seconds=args.timeout))
        ],
    )
    if device.type == "cpu":  # Accelerate: allows FSDP on GPUs only, yet it runs on CPUs
        for state in (accelerate.PartialState(), accelerator.state):
            state.distributed_type = accelerate.DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
        os.environ["DS_ACCELERATOR"] = "cpu"  # Accelerate: imports DeepSpeed, which looks for a GPU
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
    # Accelerate: shards each rank's own weights, so all ranks initialize the same ones
    torch.manual_seed(args.seed)
    model = common.make_model(args, train_set.classes, channels_last=False)  # FSDP: shards rows
    if rank > 0:
        torch.manual_seed(args.seed + rank)
    if args.dtype == "bfloat16" and (norms := batch_norms(model)):
        fully_shard(norms)  # FSDP: a unit of their own, in fp32
    # Accelerate: the names of the units that are gathered one at a time
    model._no_split_modules = list({type(block).__name__ for block in blocks_of(model)})

    # 4. Optimizer and schedule
    fused = args.optimizer == "adamw"  # FSDP: PyTorch has no fused SGD for DTensors
    optimizer = common.make_optimizer(args, model, fused)
    model, optimizer = accelerator.prepare(model, optimizer)  # Accelerate: shards both
    optimizer = optimizer.optimizer  # Accelerate: PyTorch's, without the wrapper for GradScaler
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
            accelerator.backward(loss)  # FSDP: all-gathers again, and reduce-scatters gradients
            if args.clip_grad:
                run.grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.clip_grad)
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
