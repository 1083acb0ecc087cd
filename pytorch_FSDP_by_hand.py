"""Train on several devices with FSDP written out: each rank keeps 1/N of all training state.

Differs     from pytorch_ZeRO_by_hand.py: a bucket is a block of the model. Its flat buffer is
            gathered before the block computes and freed afterwards, so a rank keeps only its shards
            of the parameters, too. Lines tagged "# FSDP:".
Command:    torchrun --nproc_per_node=4 pytorch_FSDP_by_hand.py
Use it      to learn how it works. To train, take pytorch_FSDP.py, which also does what
            docs/under_the_hood.md lists.
Holds       per parameter 4/N bytes, 4/N for its gradient, and 4/N (SGD with momentum) or 8/N
            (AdamW) for the optimizer; and one or two whole blocks while they compute.
Sends       per step and rank, 3 * 4 * (N - 1) / N bytes per parameter: an all-gather before forward
            and one before backward, and a reduce-scatter of the gradients.
"""

import contextlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DistributedSampler

import common
from jobs.model_parts import blocks_of
from parallel.flat import WholeState


class Bucket:
    """The parameters of a block in a flat buffer, which exists while the block computes."""

    def __init__(self, parameters: list[nn.Parameter], block: nn.Module):
        self.parameters = parameters
        self.sizes = [p.numel() + -p.numel() % 4 for p in parameters]
        self.sizes[-1] += -sum(self.sizes) % (4 * dist.get_world_size())
        block.register_forward_pre_hook(self.gather)  # FSDP: called before the block computes
        block.register_forward_hook(self.after_forward)  # FSDP: and after it
        self.flat = self.flatten([p.detach() for p in parameters])
        for p, part in zip(parameters, self.flat.split(self.sizes), strict=True):
            p.data = part[: p.numel()].view_as(p)
        self.shard = nn.Parameter(self.own(self.flat).clone())  # FSDP: outlives the buffer

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
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(self.shard.grad, gradients)  # ZeRO: and the whole is freed
        self.free()  # FSDP: the block has computed its gradients

    def send_when_full(self, _) -> None:
        """The hook that runs in backward as soon as a parameter has its gradient."""
        if all(p.grad is not None for p in self.parameters):
            self.send()

    def gather(self, *_) -> None:
        """Get the shards of the other ranks."""
        self.flat.untyped_storage().resize_(self.flat.nbytes)  # FSDP: room for the whole block
        dist.all_gather_into_tensor(self.flat, self.shard.detach())

    def free(self) -> None:
        """Free the flat buffer. Parameters and the tensors that autograd saved are views of it."""
        self.flat.untyped_storage().resize_(0)  # FSDP: the shard has storage of its own

    def after_forward(self, block: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self.gather)  # FSDP: called before its backward
        self.free()


def make_buckets(parameters: list[nn.Parameter], model: nn.Module) -> list[Bucket]:
    """One bucket per block with parameters of the group, and one for those outside the blocks."""
    block_of = {p: block for block in [model, *blocks_of(model)] for p in block.parameters()}
    filled = {}
    for p in parameters:
        filled.setdefault(block_of[p], []).append(p)
    return [Bucket(own, block) for block, own in filled.items()]


@contextlib.contextmanager
def whole(buckets: list[Bucket]):
    """Gather the whole model on every rank, to read or write its weights."""
    for bucket in buckets:
        bucket.gather()
    yield
    for bucket in buckets:
        bucket.shard.data.copy_(bucket.own(bucket.flat))
        bucket.free()


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
        filled = make_buckets(group["params"], model)
        sharded.append(group | {"params": [bucket.shard for bucket in filled]})
        buckets += filled
    shards = [bucket.shard for bucket in buckets]
    for bucket in buckets:
        for p in bucket.parameters:
            p.register_post_accumulate_grad_hook(bucket.send_when_full)

    # 4. Optimizer and schedule
    optimizer_class, options = common.optimizer_class(args)
    optimizer = optimizer_class(sharded, **options)  # ZeRO: has state for shards only
    optimizer.whole = WholeState(optimizer, buckets, groups)  # ZeRO: for snapshots
    scheduler = common.make_scheduler(args, optimizer, len(train_loader))
    run = common.Run(args, device, train_loader)
    with whole(buckets):
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
            scheduler.step()
            run.log(loss)  # copied from the device only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or when asked to stop
                with whole(buckets):
                    run.save_then_exit_if_asked(model, optimizer, scheduler)

        # 6. Evaluate
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)  # DDP: BatchNorm saw different samples on each rank
        run.report(common.evaluate(model, eval_loader, device))  # DDP: on every rank
        with whole(buckets):
            run.save_then_exit_if_asked(model, optimizer, scheduler)

    # 7. Save and report
    with whole(buckets):
        run.load_best_weights()  # with --eval-every; otherwise the last ones stay
        if rank == 0:
            common.save_model(args, model.state_dict())
    gradients = [shard.grad for shard in shards if shard.grad is not None]  # None before a step
    run.finish(model, optimizer, parameters=shards, gradients=gradients)
    # DDP: leave together. Not in a finally block: after an error on one rank, nccl would wait for
    # the others, which are in the middle of a collective, and the error would stay hidden.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
