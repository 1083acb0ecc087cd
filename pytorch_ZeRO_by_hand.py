"""Train on several devices with ZeRO written out: each rank updates 1/N of a flat buffer.

Differs     from pytorch_DDP_by_hand.py: the parameters of a bucket lie in a flat buffer. Each rank
            updates its shard of it, then all-gathers the shards. With --stage 2 a rank also gets
            only its shard of the averaged gradients. Lines tagged "# ZeRO:".
Command:    torchrun --nproc_per_node=4 pytorch_ZeRO_by_hand.py
            torchrun --nproc_per_node=4 pytorch_ZeRO_by_hand.py --stage 2
Use it      to learn how it works. To train, take pytorch_DDP_ZeRO.py, or pytorch_DeepSpeed.py for
            stage 2.
Holds       per parameter 4 bytes, 4 (stage 1) or 4/N (stage 2) for its gradient, and 4/N (SGD with
            momentum) or 8/N (AdamW) for the optimizer; activations are those of 1/N of the batch.
Sends       per step and rank, per parameter, 4 * (N - 1) / N bytes to gather the shards; and for
            the gradients 2 * 4 * (N - 1) / N in stage 1, half as much in stage 2.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DistributedSampler

import common
from parallel.flat import WholeState


class Bucket:
    """Parameters in a flat buffer, of which each rank updates its shard."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.sizes = [p.numel() + -p.numel() % 4 for p in parameters]
        self.sizes[-1] += -sum(self.sizes) % (4 * dist.get_world_size())
        self.flat = self.flatten([p.detach() for p in parameters])
        for p, part in zip(parameters, self.flat.split(self.sizes), strict=True):
            p.data = part[: p.numel()].view_as(p)
        self.shard = nn.Parameter(self.own(self.flat))  # ZeRO: a view; this rank updates it

    def flatten(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Copy into one padded buffer: GPUs read 16 bytes at once, and shards have equal sizes."""
        parts = []
        for tensor, size in zip(tensors, self.sizes, strict=True):
            parts += [tensor.flatten(), tensor.new_zeros(size - tensor.numel())]
        return torch.cat(parts)

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a flat buffer."""
        return flat.chunk(dist.get_world_size())[dist.get_rank()]

    def send(self) -> None:
        """Average the gradients of these parameters."""
        gradients = self.flatten([p.grad for p in self.parameters]).div_(dist.get_world_size())
        for p in self.parameters:
            p.grad = None  # ZeRO: the optimizer uses shards only
        if self.stage == 1:
            self.shard.grad = self.own(gradients)  # ZeRO: a view, so all averages stay in memory
            dist.all_reduce(gradients)
        else:
            self.shard.grad = torch.empty_like(self.shard)
            dist.reduce_scatter_tensor(self.shard.grad, gradients)  # ZeRO: and the whole is freed

    def send_when_full(self, _) -> None:
        """The hook that runs in backward as soon as a parameter has its gradient."""
        if all(p.grad is not None for p in self.parameters):
            self.send()

    def gather(self) -> None:
        """Get the shards of the other ranks."""
        dist.all_gather_into_tensor(self.flat, self.shard.detach())


def make_buckets(parameters: list[nn.Parameter], size: int) -> list[Bucket]:
    """Fill bucket after bucket with a little more than ``size`` bytes, in the order of backward."""
    buckets = [[]]
    for p in reversed(parameters):
        if sum(p.nbytes for p in buckets[-1]) > size:
            buckets.append([])
        buckets[-1].append(p)
    return [Bucket(filled) for filled in buckets]


def clip_grad_norm_(shards: list[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Clip by the global norm, over the shards of all ranks."""
    squared = nn.utils.get_total_norm([shard.grad for shard in shards]) ** 2
    dist.all_reduce(squared)
    nn.utils.clip_grads_with_norm_(shards, max_norm, squared.sqrt())
    return squared.sqrt()


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__)
    parser.add_argument("--stage", type=int, choices=[1, 2], default=1, help="ZeRO stage")
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
    groups = common.parameter_groups(args, model)
    buckets = []
    sharded = []
    for group in groups:  # ZeRO: buckets do not mix groups, as their settings differ
        filled = make_buckets(group["params"], 4 * 2**20)
        sharded.append(group | {"params": [bucket.shard for bucket in filled]})
        buckets += filled
    shards = [bucket.shard for bucket in buckets]
    for bucket in buckets:
        bucket.stage = args.stage
        for p in bucket.parameters:
            p.register_post_accumulate_grad_hook(bucket.send_when_full)

    # 4. Optimizer and schedule
    optimizer_class, options = common.optimizer_class(args)
    optimizer = optimizer_class(sharded, **options)  # ZeRO: has state for shards only
    optimizer.whole = WholeState(optimizer, buckets, groups)  # ZeRO: for snapshots
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
            loss.backward()  # by hand: waits for each full bucket
            if any(shard.grad is None for shard in shards):
                raise RuntimeError("a parameter has no gradient, so its bucket was not sent")
            if args.clip_grad:
                run.grad_norm = clip_grad_norm_(shards, args.clip_grad)
            optimizer.step()
            for bucket in buckets:
                bucket.gather()  # ZeRO: gets the shards that other ranks updated
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
    gradients = [shard.grad for shard in shards if shard.grad is not None]  # None before a step
    run.finish(model, optimizer, gradients=gradients)
    # DDP: leave together. Not in a finally block: after an error on one rank, nccl would wait for
    # the others, which are in the middle of a collective, and the error would stay hidden.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
