"""Train a GPT on several devices with context parallelism: each has a part of every text.

Differs     from pytorch_torchrun_DDP.py: all ranks read the same texts, each computes 1/N of their
            positions, and for attention they tell each other keys and values. Lines tagged "# CP:".
Command:    torchrun --nproc_per_node=4 pytorch_CP.py
            torchrun --nproc_per_node=4 pytorch_CP.py --attention ulysses (or allgather, pytorch)
Use it      when the activations of one text do not fit, or a batch has fewer texts than there are
            ranks. Not for short texts: DDP sends nothing but gradients. ring has no more than two
            ranks' keys and values at a time; ulysses sends the least, but needs a head for each
            rank; allgather is the simplest; pytorch is PyTorch's own ring, for GPUs (not run here).
Holds       what one device holds, but the activations are those of 1/N of the positions. allgather
            also keeps all keys and values until backward. While a layer computes, ring also has the
            keys and values of another rank, and their scores: (T / N)^2 numbers for each head.
Sends       per step and rank, 2 * 4 * (N - 1) / N bytes per parameter, as DDP does. And per layer,
            with K = 4 * B * T * D bytes for the keys of B texts of T positions and width D:
            6 * K * (N - 1) / N (ring), 4 * K * (N - 1) / N (allgather), or 8 * K / N * (N - 1) / N
            (ulysses).
"""

import argparse
import math
import os
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import common

# Each attention takes queries, keys and values of this rank's positions, which are the rank-th N-th
# of all: [batch, heads, time / N, width].


def visible(q: Tensor, k: Tensor, start: int) -> Tensor:
    """Which keys, of the positions from ``start`` on, are not later than our queries: ``[queries,
    keys]``."""
    queries = dist.get_rank() * q.shape[2] + torch.arange(q.shape[2], device=q.device)
    return queries[:, None] >= start + torch.arange(k.shape[2], device=k.device)


class Gather(torch.autograd.Function):
    """The parts of all ranks, put together along ``dim``."""

    @staticmethod
    def forward(ctx, part: Tensor, dim: int) -> Tensor:
        ctx.dim, world_size = dim, dist.get_world_size()
        parts = part.new_empty(world_size * len(part), *part.shape[1:])
        dist.all_gather_into_tensor(parts, part.contiguous())
        return torch.cat(parts.chunk(world_size), dim)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        """All ranks have used our part, and its gradient is the sum of theirs."""
        parts = gradient.chunk(dist.get_world_size(), ctx.dim)
        own = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter_tensor(own, torch.cat(parts))
        return own, None


def allgather_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Our queries, and all keys and values (as Llama 3 was trained, arXiv:2407.21783)."""
    k, v = Gather.apply(torch.stack([k, v]), 3)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible(q, k, 0))


def send_on(tensor: Tensor) -> tuple[Tensor, list[dist.Work]]:
    """To the next rank, in a ring: what comes from the one before, and what to wait for."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    coming = torch.empty_like(tensor)
    send = dist.P2POp(dist.isend, tensor, (rank + 1) % world_size)
    receive = dist.P2POp(dist.irecv, coming, (rank - 1) % world_size)
    return coming, dist.batch_isend_irecv([send, receive])


def go_round(part: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The rank and the part of each, ours first. While one is used, the next is on its way."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for turn in range(world_size):
        coming, messages = send_on(part) if turn < world_size - 1 else (None, [])
        yield (rank - turn) % world_size, part
        for message in messages:
            message.wait()
        part = coming


class RingAttention(torch.autograd.Function):
    """Our queries, and the keys and values of one rank after the other, in forward and again in
    backward (Liu et al. 2023, arXiv:2310.01889). Only one part of the scores is there at a time:
    softmax needs of the others no more than the sum of their exponentials."""

    @staticmethod
    def scores(q: Tensor, k: Tensor, source: int) -> Tensor:
        """How much scaled queries ask for the keys of rank ``source``, which is not after ours."""
        scores = q @ k.mT
        if source == dist.get_rank():
            scores.masked_fill_(~visible(q, k, source * k.shape[2]), -math.inf)
        return scores

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q / math.sqrt(q.shape[-1])
        found, log_sum = torch.zeros_like(q), q.new_full((*q.shape[:3], 1), -math.inf)
        for source, (keys, values) in go_round(torch.stack([k, v])):
            if source > dist.get_rank():
                continue  # all are later; but they travel on
            scores, before = RingAttention.scores(q, keys, source), log_sum
            log_sum = torch.logaddexp(log_sum, scores.logsumexp(-1, keepdim=True))
            found = found * (before - log_sum).exp() + scores.sub_(log_sum).exp_() @ values
        ctx.save_for_backward(q, k, v, found, log_sum)
        return found

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, found, log_sum = ctx.saved_tensors
        mean = (gradient * found).sum(-1, keepdim=True)  # of the weights' gradients, by weight
        of_q, of_others = torch.zeros_like(q), torch.zeros_like(torch.stack([k, v]))
        for source, (keys, values) in go_round(torch.stack([k, v])):
            of_part = torch.zeros_like(of_others)
            if source <= dist.get_rank():
                weights = RingAttention.scores(q, keys, source).sub_(log_sum).exp_()
                of_scores = (gradient @ values.mT).sub_(mean).mul_(weights)
                of_q += of_scores @ keys / math.sqrt(q.shape[-1])
                of_part = torch.stack([of_scores.mT @ q, weights.mT @ gradient])
            if source == dist.get_rank():
                of_own = of_part
                continue
            of_others, messages = send_on(of_others + of_part)  # follows its part, and comes home
            for message in messages:
                message.wait()
        return of_q, *(of_own + of_others)


class Exchange(torch.autograd.Function):
    """Deals out a tensor to the ranks along one dimension, and joins what comes along another."""

    @staticmethod
    def forward(ctx, tensor: Tensor, split: int, join: int) -> Tensor:
        ctx.split, ctx.join = split, join
        parts = torch.stack(tensor.chunk(dist.get_world_size(), split))
        theirs = torch.empty_like(parts)
        dist.all_to_all_single(theirs, parts)
        return torch.cat(theirs.unbind(), join)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return Exchange.apply(gradient, ctx.join, ctx.split), None, None


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All positions of 1/N of the heads, for which ranks exchange the others' (Jacobs et al. 2023,
    arXiv:2309.14509)."""
    q, k, v = Exchange.apply(torch.stack([q, k, v]), 2, 3)
    return Exchange.apply(F.scaled_dot_product_attention(q, k, v, is_causal=True), 2, 1)


def make_pytorch_attention() -> Callable:
    """PyTorch's ring, an experiment of its own, for which DTensors say who has which positions."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.distributed.tensor.experimental import _attention

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    _attention._cp_options.enable_load_balance = False  # it would have other positions on each rank
    _attention._enable_context_parallel_dispatcher()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (DTensor.from_local(t, mesh, [Shard(2)], run_check=False) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).to_local()

    return attend


ATTENTIONS = {
    "ring": lambda: RingAttention.apply,
    "allgather": lambda: allgather_attention,
    "ulysses": lambda: ulysses_attention,
    "pytorch": make_pytorch_attention,
}


class WholeTexts(nn.Module):
    """Takes whole texts, and has the answer for all their positions, on every rank."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.chunk(dist.get_world_size(), 1)[dist.get_rank()]
        return Gather.apply(self.model(tokens, dist.get_rank() * tokens.shape[1]), 2)


def check(args: argparse.Namespace, world_size: int) -> None:
    """Whether texts, or heads, can be divided among the ranks."""
    _, heads, *_ = common.size_of(args.model)
    if args.context % world_size:
        near = max(args.context // world_size, 1) * world_size
        common.fail(
            f"--context {args.context} is not divisible by {world_size} ranks; use --context {near}"
        )
    if args.attention == "ulysses" and heads % world_size:
        common.fail(
            f"--attention ulysses: {heads} heads of {args.model} cannot be divided among "
            f"{world_size} ranks; use --attention ring"
        )
    if args.attention == "pytorch" and (args.device == "cpu" or args.double):
        where = "in float64" if args.double else "on a CPU"
        common.fail(f"--attention pytorch does not run {where}; use --attention ring")


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__, only_gpt=True)
    parser.add_argument(
        "--attention", choices=ATTENTIONS, default="ring",
        help="how ranks exchange keys and values (default: ring)",
    )  # fmt: skip
    args = common.parse_args(parser)
    common.prepare_process(args)
    if "RANK" not in os.environ:  # torchrun: sets these; without it, this is a world of one
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = common.get_device(args, local_rank)  # DDP: a device per rank of this machine
    if device.type == "cuda":
        torch.cuda.set_device(device)  # DDP: or every rank would also take memory on GPU 0
    dist.init_process_group(  # DDP: returns when all ranks have joined
        backend="nccl" if device.type == "cuda" else "gloo",
        store=common.make_store(args),  # torchrun: a restarted rank finds no dead one's address
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=args.timeout),  # DDP: the longest wait for each other
        device_id=device if device.type == "cuda" else None,
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()  # DDP: our number, of how many
    check(args, world_size)
    common.announce(args, device, readers=1)  # CP: all ranks read the whole batch
    common.seed_everything(args.seed + rank, args.deterministic)  # DDP: dropout differs by rank

    # 2. Data
    train_set, eval_set = common.make_datasets(args)
    batch_size = args.batch_size  # CP: all of it
    alike = {"num_replicas": 1, "rank": 0}  # CP: every rank reads every sample
    sampler = DistributedSampler(train_set, **alike, seed=args.seed, drop_last=True)
    train_loader = common.make_loader(args, train_set, batch_size, sampler, drop_last=True)
    eval_sampler = DistributedSampler(eval_set, **alike, shuffle=False)
    eval_loader = common.make_loader(args, eval_set, batch_size, eval_sampler)

    # 3. Model
    model = common.make_model(args, train_set.classes).to(device)
    attend = ATTENTIONS[args.attention]()
    for block in common.blocks_of(model):
        block.attention.attend = attend  # CP: the only place where positions look at others
    start = rank * args.context // world_size  # CP: the position of this rank's first token
    model = DistributedDataParallel(  # DDP: sends rank 0's weights to all
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,  # DDP: no second copy of the gradients
    )
    model.broadcast_buffers = False  # DDP: sent before evaluation, not at every step

    # 4. Optimizer and schedule
    optimizer = common.make_optimizer(args, model)
    scheduler = common.make_scheduler(args, optimizer, len(train_loader))
    run = common.Run(args, device, train_loader)
    run.load_snapshot(model, optimizer, scheduler)

    # 5. Train
    for epoch in range(run.start_epoch, run.epochs):
        sampler.set_epoch(epoch)  # DDP: a new order every epoch, the same on all ranks
        model.train()
        for images, labels in run.batches(train_loader, epoch):
            tokens, labels = (t.chunk(world_size, 1)[rank] for t in (images, labels))  # CP: ours
            optimizer.zero_grad()  # gradients would add up otherwise
            logits = model(tokens, start)
            loss = F.cross_entropy(logits, labels)  # CP: parts are equal: DDP's mean is over all
            loss.backward()  # DDP: averages the gradients, bucket by bucket, as they are ready
            if args.clip_grad:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            optimizer.step()
            scheduler.step()
            run.log(loss)  # fetched only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or to stop
                run.save_snapshot(model, optimizer, scheduler)

        # 6. Evaluate
        for buffer in model.module.buffers():
            dist.broadcast(buffer, src=0)  # DDP: BatchNorm saw other images on each rank
        whole = WholeTexts(model.module)  # CP: of which each rank computes its positions
        run.report(common.evaluate(whole, eval_loader, device))  # DDP: on every rank
        run.save_snapshot(model, optimizer, scheduler)

    # 7. Save and report
    if rank == 0:
        common.save_model(model.module.state_dict(), args.output_dir)
    run.finish(model, optimizer)
    # DDP: all leave together. Not in a finally: after an error on one rank, nccl would wait for the
    # others, which are in the middle of a collective, and the error would stay unseen.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
