"""Train on several devices with DDP written out: what DistributedDataParallel does for you.

Differs     from pytorch_SingleGPU.py: each rank computes the gradients of 1/N of the batch, and
            all-reduces average them. Lines tagged "# by hand:" are what DDP would do.
Command:    torchrun --nproc_per_node=4 pytorch_DDP_by_hand.py
            torchrun --nproc_per_node=4 pytorch_DDP_by_hand.py --average each (or buckets)
Use it      to learn how it works. To train, take pytorch_torchrun_DDP.py, which also does what
            docs/under_the_hood.md lists.
Holds       what one device holds, except that the activations are those of 1/N of the batch.
Sends       per step and rank, 2 * 4 * (N - 1) / N bytes per parameter, in bucketed all-reduces.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DistributedSampler

import common


class Bucket:
    """Parameters whose gradients are averaged in one all-reduce."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.sizes = [p.numel() for p in parameters]
        self.flat = parameters[0].new_empty(sum(self.sizes))
        self.sent = []

    def send(self) -> None:
        """Average the gradients of these parameters."""
        for p, part in zip(self.parameters, self.flat.split(self.sizes), strict=True):
            torch.div(p.grad, dist.get_world_size(), out=part.view_as(p))
            p.grad = part.view_as(p)  # by hand: a view of the flat buffer, not a copy
        self.sent.append(dist.all_reduce(self.flat, async_op=True))  # by hand: returns at once

    def send_when_full(self, _) -> None:
        """The hook that runs in backward as soon as a parameter has its gradient."""
        if all(p.grad is not None for p in self.parameters):
            self.send()


def make_buckets(parameters: list[nn.Parameter], size: int) -> list[Bucket]:
    """Fill bucket after bucket with a little more than ``size`` bytes, in the order of backward."""
    buckets = [[]]
    for p in reversed(parameters):
        if sum(p.nbytes for p in buckets[-1]) > size:
            buckets.append([])
        buckets[-1].append(p)
    return [Bucket(filled) for filled in buckets]


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__)
    parser.add_argument(
        "--average", choices=["each", "buckets", "overlap"], default="overlap",
        help="all-reduce each gradient, buckets of them, or (default) buckets during backward",
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
    if world_size == 1:
        common.print0("a single rank sends nothing; start two with torchrun --nproc_per_node=2")
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
    # by hand: default memory format, because buckets flatten the gradients
    model = common.make_model(args, train_set.classes, channels_last=False).to(device)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)  # by hand: all ranks start with rank 0's weights
    size = 0 if args.average == "each" else 4 * 2**20  # by hand: bytes; DDP's are 25 MiB
    buckets = make_buckets([p for p in model.parameters() if p.requires_grad], size)
    for bucket in buckets if args.average == "overlap" else []:
        for p in bucket.parameters:
            p.register_post_accumulate_grad_hook(bucket.send_when_full)

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
            loss.backward()  # by hand: full buckets are averaged meanwhile
            for bucket in buckets:
                if args.average != "overlap":
                    bucket.send()  # by hand: or only after backward
                bucket.sent.pop().wait()  # by hand: now the gradients are averages
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
        run.report(common.evaluate(model, eval_loader, device))  # DDP: on every rank
        run.save_then_exit_if_asked(model, optimizer, scheduler)

    # 7. Save and report
    run.load_best_weights()  # with --eval-every; otherwise the last ones stay
    if rank == 0:
        common.save_model(args, model.state_dict())
    run.finish(model, optimizer)
    # DDP: leave together. Not in a finally block: after an error on one rank, nccl would wait for
    # the others, which are in the middle of a collective, and the error would stay hidden.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
