"""Train on several devices with DDP, and recompute activations in backward instead of saving them.

Differs     from pytorch_torchrun_DDP.py: forward saves only the input of each block (Chen et al.
            2016, arXiv:1604.06174), and backward recomputes the block. --selective also saves the
            results of attention and of every second matrix product. --offload moves what is saved
            to CPU memory until backward. Lines tagged "# checkpointing:", and
            "# checkpointing, option:" for what --selective, --offload and BatchNorm add.
Command:    torchrun --nproc_per_node=4 pytorch_activation_checkpointing.py
            torchrun --nproc_per_node=4 pytorch_activation_checkpointing.py --selective
            torchrun --nproc_per_node=4 pytorch_activation_checkpointing.py --offload
Use it      when the activations do not fit: a large batch, a long context, a deep model.
            Not when parameters and optimizer do not: shard those with pytorch_FSDP.py. A step takes
            up to a third longer, because forward is computed twice.
Holds       per parameter what DDP holds. Activations: the input of each block, with --offload in
            CPU memory; and all of one block while backward is in it.
Sends       as DDP, per step and rank: 2 * 4 * (N - 1) / N bytes per parameter for N ranks.
"""

import contextlib
import inspect
import os
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy as Policy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DistributedSampler

import common
from jobs.model_parts import batch_norms, blocks_of

aten = torch.ops.aten
# checkpointing, option: --selective saves every second result of these
PRODUCTS = aten.mm, aten.addmm, aten.bmm, aten._grouped_mm, aten._scaled_mm, aten.convolution


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__)
    parser.add_argument(
        "--selective", action="store_true", help="save some results of each block, too"
    )
    parser.add_argument("--offload", action="store_true", help="save in CPU memory")
    args = common.parse_args(parser)
    is_new = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    if args.selective and args.offload and not is_new:
        common.fail(f"--selective --offload needs PyTorch 2.14, not {torch.__version__}; use one")
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
    model = common.make_model(args, train_set.classes).to(device)
    for block in blocks_of(model):  # checkpointing: forward saves its input, and backward reruns it
        options = options_of(args, block)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
        if args.offload:  # checkpointing, option: what is saved waits in CPU memory
            block.forward = saving_on_cpu(block.forward)
    if args.selective:  # checkpointing, option: an in-place ReLU would overwrite what is saved
        for layer in model.modules():
            if hasattr(layer, "inplace"):
                layer.inplace = False
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
            optimizer.zero_grad()  # otherwise gradients would accumulate
            logits = model(inputs)
            loss = train_set.loss(logits, labels)
            loss.backward()  # DDP: averages the gradients in buckets, as they become ready
            if args.clip_grad:
                run.grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
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


def saving_on_cpu(forward: Callable) -> Callable:
    """checkpointing, option: ``forward``, whose saved tensors are copied to pinned CPU memory, and
    back when backward needs them."""

    def offloaded(*args, **kwargs):
        with save_on_cpu(pin_memory=True):
            return forward(*args, **kwargs)

    return offloaded


def options_of(args, block: nn.Module) -> dict:
    """checkpointing, option: what ``checkpoint`` does beside saving the arguments of ``block``."""
    options = {"context_fn": partial(contexts_of, block, args.selective)}
    if args.selective and args.offload:
        options["respect_saved_tensors_hooks"] = True  # otherwise results stay on the GPU
    return options


def contexts_of(block: nn.Module, selective: bool):
    """checkpointing, option: contexts for a block's forward, and for its second run in backward."""
    forward = again = contextlib.nullcontext()
    if selective:
        forward, again = keep_some()
    return forward, counted_once(block, again)


def keep_some():
    """checkpointing, option: contexts that save attention, collectives and every second product."""
    products = Counter()

    def choose(context, op, *args, **kwargs):
        keep = "attention" in op.__name__ or op.namespace == "_c10d_functional"
        if op.overloadpacket in PRODUCTS:  # older PyTorch asks again when it recomputes
            products[context.is_recompute] += 1
            keep = products[context.is_recompute] % 2 == 1
        return Policy.MUST_SAVE if keep else Policy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


@contextlib.contextmanager
def counted_once(block: nn.Module, again):
    """checkpointing, option: BatchNorm's running statistics are not updated a second time."""
    buffers = [buffer for norm in batch_norms(block) for buffer in norm.buffers()]
    before = [buffer.clone() for buffer in buffers]
    try:
        with again:
            yield
    finally:  # PyTorch ends the recomputation early, by an exception
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)


if __name__ == "__main__":
    main()
