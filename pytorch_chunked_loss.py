"""Train with FSDP, and compute the loss in chunks of tokens, so that the logits never exist whole.

Differs     from pytorch_FSDP.py: the model ends at its last norm, and the forward of its head is
            the loss, a chunk of tokens at a time. Lines tagged "# chunked:".
Command:    torchrun --nproc_per_node=4 pytorch_chunked_loss.py
            torchrun --nproc_per_node=4 pytorch_chunked_loss.py --fused
Use it      for a large vocabulary: the logits of 8,192 x 128,256 tokens take 4 GiB in fp32.
            Backward computes them again; --fused, PyTorch's function, has gradients in forward.
Holds       what pytorch_FSDP.py holds. Activations: the logits of one chunk, instead of all.
Sends       what pytorch_FSDP.py sends, minus an all-gather of the head: all chunks share one.
"""

import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DistributedSampler

import common
from jobs.model_parts import units_of


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__, only_gpt=True)
    parser.add_argument("--local-rank", "--local_rank")  # FSDP: torch.distributed.launch passes it
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32",
        help="dtype of compute and of the gathered weights (default: float32)",
    )  # fmt: skip
    parser.add_argument("--chunks", type=common.number(int, 1), default=8, help="default: 8")
    parser.add_argument("--fused", action="store_true", help="use F.linear_cross_entropy")
    args = common.parse_args(parser)
    if args.fused and not hasattr(F, "linear_cross_entropy"):
        common.fail(f"--fused needs PyTorch 2.14, and this is {torch.__version__}; leave it out")
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
    model.unembed = lambda x: model.norm(x).flatten(0, 1)  # chunked: [tokens, width], no logits
    loss_fn = partial(compute_loss, model.head, args.chunks, args.fused)
    model.head.forward = loss_fn  # chunked: in a unit of FSDP
    mesh = init_device_mesh(device.type, (world_size,))
    policy = MixedPrecisionPolicy()
    if args.dtype == "bfloat16":  # FSDP: gathers and computes in bfloat16, reduces in fp32
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for unit in units_of(model):  # FSDP: blocks, embedding, head: gathered one at a time
        reshard = unit is not model.head  # chunked: the head stays gathered for all chunks
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
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
            outputs = model(inputs)  # FSDP: all-gathers each block
            # chunked: train_set.loss(), without having all logits at once
            loss = model.head(outputs, labels) / labels.numel() / train_set.density
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
        run.report(common.evaluate(model, eval_loader, device, head=model.head))
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


def compute_loss(head: nn.Module, chunks: int, fused: bool, x: Tensor, labels=None) -> Tensor:
    """The sum of the losses of x ``[tokens, width]``; without labels, to evaluate, its logits."""
    if labels is None:
        return F.linear(x, head.weight)
    labels = labels.flatten()
    if fused:  # chunked: without options, it would make all logits
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=1 + len(x) // chunks)
        return F.linear_cross_entropy(x, head.weight, labels, reduction="sum", options=options)
    sums = [
        checkpoint(sum_losses, head.weight, *chunk, use_reentrant=False)  # chunked: keeps no logits
        for chunk in zip(x.chunk(chunks), labels.chunk(chunks), strict=True)
    ]
    return torch.stack(sums).sum()


def sum_losses(weight: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(x, weight).to(torch.get_default_dtype())
    return F.cross_entropy(logits, labels, reduction="sum")


if __name__ == "__main__":
    main()
