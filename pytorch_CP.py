"""Train a GPT on several devices with context parallelism: each rank has a shard of every sequence.

Differs     from pytorch_torchrun_DDP.py: all ranks read the same sequences. Each computes 1/N of
            their positions, and attention exchanges keys and values. Lines tagged "# CP:".
Command:    torchrun --nproc_per_node=4 pytorch_CP.py
            torchrun --nproc_per_node=4 pytorch_CP.py --attention ulysses (or allgather, pytorch)
Use it      when the activations of one sequence do not fit, or a batch has fewer sequences than
            ranks; for short sequences DDP sends less. ring holds the keys and values of two ranks
            at a time; ulysses sends the least, but needs at least one head per rank; allgather is
            the simplest; pytorch is PyTorch's own ring attention, for GPUs.
Holds       what one device holds, except that the activations are those of 1/N of the positions.
            allgather also keeps all keys and values until backward.
Sends       per step and rank, 2 * 4 * (N - 1) / N bytes per parameter, as DDP does. And per layer,
            with K = 4 * B * T * D bytes for the keys of B sequences of T positions and width D:
            6 (ring), 4 (allgather) or 8 / N (ulysses) times K * (N - 1) / N.
"""

import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import common
from jobs.language_models import size_of
from jobs.model_parts import blocks_of
from parallel import attention, attention_kernels


def send_on(tensor: Tensor, group) -> tuple[Tensor, list[dist.Work]]:
    """Send to the next rank of the ring. Return what arrives, and works that keep both alive."""
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    coming = torch.empty_like(tensor)
    send = dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % ranks)
    receive = dist.P2POp(dist.irecv, coming, group=group, group_peer=(rank - 1) % ranks)
    return coming, dist.batch_isend_irecv([send, receive])


def rotate(own: Tensor, group) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank and its shard, ours first. The next shard is received in the meantime."""
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    for turn in range(ranks):
        coming, works = send_on(own, group) if turn < ranks - 1 else (None, [])
        yield (rank - turn) % ranks, own
        for work in works:
            work.wait()
        own = coming


def visible(source: int, rank: int, half: int) -> tuple[slice, slice, bool]:
    """Which of our queries see which keys of rank ``source``, and whether the mask is causal. In
    every turn with another rank's keys, these are half of all pairs."""
    if source == rank:
        return slice(None), slice(None), True
    if source < rank:  # its second chunk follows both of ours
        return slice(None), slice(half), False
    return slice(half, None), slice(None), False  # both of its chunks lie between ours


def merge(out: Tensor, log: Tensor, more: Tensor, log_more: Tensor) -> tuple[Tensor, Tensor]:
    """The output for the keys of two blocks, and its log-sum-exp, from those of each block."""
    both = torch.logaddexp(log, log_more)  # CP: of the scores of both blocks
    share = (log - both).exp()[..., None]  # CP: each output was divided by the sum of its block
    return out * share + more * (log_more - both).exp()[..., None], both


def attend_in_a_ring(q: Tensor, k: Tensor, v: Tensor, group) -> tuple[Tensor, Tensor]:
    """The attention of our queries to all keys, and its log-sum-exp, in fp32 or better."""
    found = None
    log_sum = None
    rank = dist.get_rank(group)
    for source, (keys, values) in rotate(torch.stack([k, v]), group):  # CP: of one rank at a time
        ours, seen, causal = visible(source, rank, q.shape[2] // 2)
        out, sums = attention_kernels.forward(
            q[:, :, ours], keys[:, :, seen], values[:, :, seen], causal
        )
        if found is None:
            found = out.to(sums.dtype, copy=True)  # updated in place
            log_sum = sums.clone()
            continue
        merged, both = merge(found[:, :, ours], log_sum[:, :, ours], out, sums)
        found[:, :, ours] = merged
        log_sum[:, :, ours] = both
    return found, log_sum


class RingAttention(torch.autograd.Function):
    """Attention of our queries to the keys and values of one rank after the other, in forward and
    in backward (Liu et al. 2023, arXiv:2310.01889). Fused kernels return the log-sum-exp that
    merging two outputs needs."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group) -> Tensor:
        ctx.group = group
        found, log_sum = attend_in_a_ring(q, k, v, group)
        found = found.to(q.dtype)
        ctx.save_for_backward(q, k, v, found, log_sum)
        return found

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, found, log_sum = ctx.saved_tensors
        own = torch.stack([k, v])
        rank = dist.get_rank(ctx.group)
        of_q, travelling = (torch.zeros_like(t, dtype=log_sum.dtype) for t in (q, own))  # sums
        for source, (keys, values) in rotate(own, ctx.group):
            ours, seen, causal = visible(source, rank, q.shape[2] // 2)
            of_ours, *of_seen = attention_kernels.backward(
                *(t[:, :, ours] for t in (gradient, q)), keys[:, :, seen], values[:, :, seen],
                *(t[:, :, ours] for t in (found, log_sum)), causal,
            )  # fmt: skip
            of_q[:, :, ours] += of_ours
            if source == rank:
                of_own = torch.stack(of_seen)
                works = []
                continue
            for work in works:
                work.wait()
            travelling[:, :, :, seen] += torch.stack(of_seen)
            travelling, works = send_on(travelling, ctx.group)  # follows its shard around the ring
        for work in works:
            work.wait()
        return of_q.to(q.dtype), *(of_own + travelling).to(q.dtype), None


ATTENTIONS = {"ring": lambda group=None: lambda q, k, v: RingAttention.apply(q, k, v, group)}
ATTENTIONS |= {**attention.OTHERS, "pytorch": attention_kernels.pytorch_ring}


class OwnPositions(nn.Module):
    """Takes whole sequences, and returns the logits of this rank's positions."""

    def __init__(self, model: nn.Module, group=None):
        super().__init__()
        self.model = model
        self.group = group

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
        return self.model(*(attention.shard(t, group=self.group) for t in (tokens, positions)))


def check(args, world_size: int) -> None:  # CP, detail: rejects invalid flags
    """Check that positions and heads can be divided among the ranks."""
    heads = size_of(args).kv_heads
    chunks = 2 * world_size
    if args.context % chunks:
        common.fail(
            f"--context {args.context} is not divisible by {chunks}, two chunks for each of "
            f"{world_size} ranks; use --context {max(args.context // chunks, 1) * chunks}"
        )
    if args.attention == "ulysses" and heads % world_size:
        why = f"{heads} heads of {args.model} cannot be divided among {world_size} ranks"
        common.fail(f"--attention ulysses: {why}; use --attention ring")
    if args.attention == "pytorch" and (args.device == "cpu" or args.double):
        common.fail("--attention pytorch needs a GPU and no --double; use --attention ring")


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__, only_gpt=True, experts=True)
    about = "how ranks exchange keys and values (default: ring)"
    parser.add_argument("--attention", choices=ATTENTIONS, default="ring", help=about)
    about = "dtype of matrix products (default: float32)"
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help=about)
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
    check(args, world_size)  # CP, detail: rejects invalid flags
    common.announce(args, device, readers=1)  # CP: all ranks read the whole batch
    common.seed_everything(args.seed + rank, args.deterministic)  # DDP: dropout differs by rank

    # 2. Data
    train_set, eval_set = common.make_datasets(args)
    batch_size = args.batch_size  # CP: the whole global batch
    replica = {"num_replicas": 1, "rank": 0}  # CP: every rank reads every sample
    sampler = DistributedSampler(train_set, **replica, seed=args.seed, drop_last=True)
    train_loader = common.make_loader(args, train_set, batch_size, sampler, drop_last=True)
    eval_sampler = DistributedSampler(eval_set, **replica, shuffle=False)
    eval_loader = common.make_loader(args, eval_set, batch_size, eval_sampler)

    # 3. Model
    model = common.make_model(args, train_set.classes).to(device)
    attend = ATTENTIONS[args.attention](dist.new_group())  # CP: need not wait for DDP's buckets
    for block in blocks_of(model):
        block.attention.attend = attend  # CP: only attention mixes positions
    positions = attention.shard(torch.arange(args.context, device=device), 0)  # CP: own positions
    if args.dtype == "bfloat16":  # CP, option: forward in bfloat16, also in evaluation
        model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)
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
            tokens, labels = (attention.shard(t) for t in (inputs, labels))  # CP: of all positions
            optimizer.zero_grad()  # otherwise gradients would accumulate
            logits = model(tokens, positions).to(torch.get_default_dtype())
            loss = train_set.loss(logits, labels)  # CP: own positions, as many on each rank
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
        own = OwnPositions(model.module)  # CP: each rank computes and scores its own positions
        run.report(common.evaluate(own, eval_loader, device, attention.shard))  # DDP: on every rank
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
