"""Train a mixture of experts on several devices: each holds some of the experts.

Differs     from pytorch_torchrun_DDP.py: the MLPs of a block are many, and a token has use for one
            or a few. Ranks share them out, send each token where its experts are, and get the
            answers back. Lines tagged "# EP:".
Command:    torchrun --nproc_per_node=4 pytorch_EP.py
            torchrun --nproc_per_node=4 pytorch_EP.py --experts 16 --top-k 2
Use it      for such models: most of what they weigh are experts. Within a machine, as tokens travel
            in every block, and nothing is computed meanwhile. Not for a model with one MLP.
Holds       what one device holds, but of the experts, their gradients and their optimizer 1/N; and
            the activations of 1/N of the batch, with as many tokens for our experts as chose them.
Sends       per step, rank and block, 4 * 4 * K * (N - 1) / N bytes for each number in this rank's
            activations, if K experts answer a token: there and back, in forward and in backward.
            And 2 * 4 * (N - 1) / N bytes per parameter that is no expert's, in all-reduces.
"""

import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DistributedSampler

import common


class Exchange(torch.autograd.Function):
    """Rows for each rank, one rank's after the other's, to rows from each rank."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, outgoing: list[int], incoming: list[int]) -> torch.Tensor:
        ctx.sizes = outgoing, incoming  # EP: how many rows, to and from each rank
        received = rows.new_empty(sum(incoming), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), incoming, outgoing)
        return received

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        outgoing, incoming = ctx.sizes
        return Exchange.apply(gradient, incoming, outgoing), None, None  # EP: the same way back


def answer_on_all_ranks(mixture: nn.Module, tokens: torch.Tensor, counts: torch.Tensor):
    """What Mixture.answer_here() does, where each rank has some of the experts."""
    world_size = dist.get_world_size()
    theirs = torch.empty_like(counts)  # EP: of each rank, how many tokens it has for our experts
    dist.all_to_all_single(theirs, counts)
    outgoing, incoming = (c.view(world_size, -1).sum(1).tolist() for c in (counts, theirs))
    received = Exchange.apply(tokens, outgoing, incoming)  # EP: by rank, and of each rank by expert
    own = torch.arange(len(mixture.experts), device=counts.device)
    expert = own.repeat(world_size).repeat_interleave(theirs)
    order = expert.argsort(stable=True)  # EP: by expert, of all ranks
    sizes = torch.bincount(expert, minlength=len(own)).tolist()
    parts = received[order].split(sizes)
    answers = [answer(part) for answer, part in zip(mixture.experts.values(), parts, strict=True)]
    return Exchange.apply(torch.cat(answers)[order.argsort()], incoming, outgoing)


def mean_over_ranks(shares: torch.Tensor) -> torch.Tensor:
    """Else each rank would balance the experts for its own tokens."""
    dist.all_reduce(shares)
    return shares / dist.get_world_size()


def share_out(model: nn.Module) -> list[nn.Parameter]:
    """Leave this rank 1/N of each mixture's experts, under their names. Returns what they hold."""
    rank, world_size, kept = dist.get_rank(), dist.get_world_size(), []
    for block in model.blocks:
        mixture = block.mlp
        for i in range(mixture.count):
            if i * world_size // mixture.count != rank:
                del mixture.experts[str(i)]
        mixture.answer = partial(answer_on_all_ranks, mixture)
        mixture.mean_over_ranks = mean_over_ranks
        kept += mixture.experts.parameters()
    return kept


def average_gradients(parameters: list[nn.Parameter], experts: set[nn.Parameter]) -> None:
    """As DDP does, for which all parameters are on all ranks."""
    sent = [dist.all_reduce(p.grad, async_op=True) for p in parameters if p not in experts]
    for message in sent:
        message.wait()
    for p in parameters:  # EP: an expert's is the sum over the tokens of all ranks already
        p.grad /= dist.get_world_size()


def clip_grad_norm(parameters: list[nn.Parameter], experts: set, max_norm: float) -> None:
    """nn.utils.clip_grad_norm_ by the length of all ranks' gradients together."""
    squares = [
        nn.utils.get_total_norm([p.grad for p in parameters if (p in experts) == own]) ** 2
        for own in (True, False)
    ]
    dist.all_reduce(squares[0])  # EP: of the others, all ranks have the same
    nn.utils.clip_grads_with_norm_(parameters, max_norm, sum(squares).sqrt())


def gather_experts(model: nn.Module, names: list[str]) -> dict[str, torch.Tensor]:
    """On rank 0 the whole model, in the order of ``names``."""
    own = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    parts = [None] * dist.get_world_size()
    dist.gather_object(own, parts if dist.get_rank() == 0 else None)
    if dist.get_rank() != 0:
        return {}
    found = {name: tensor for part in parts for name, tensor in part.items()}
    return {name: found[name] for name in names}


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__, only_gpt=True, experts=True)
    parser.set_defaults(experts=8)
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
    if args.experts % world_size:
        near = max(args.experts // world_size, 1) * world_size
        common.fail(f"--experts {args.experts} are not divisible by {world_size} ranks; use {near}")
    common.announce(args, device)
    common.seed_everything(args.seed, args.deterministic)  # EP: all ranks draw the same weights

    # 2. Data
    train_set, eval_set = common.make_datasets(args)
    batch_size = args.batch_size // world_size  # DDP: this rank's share of the global batch
    # DDP: all ranks shuffle alike; rank r of N takes every N-th image, starting with the r-th
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = common.make_loader(args, train_set, batch_size, sampler, drop_last=True)
    eval_sampler = DistributedSampler(eval_set, shuffle=False)  # DDP: likewise, in order
    eval_loader = common.make_loader(args, eval_set, batch_size, eval_sampler)

    # 3. Model
    model = common.make_model(args, train_set.classes, channels_last=False)
    names = list(model.state_dict())
    torch.manual_seed(args.seed + rank)  # DDP: dropout differs by rank
    experts = set(share_out(model))  # EP: before the device sees them
    parameters = list(model.to(device).parameters())

    # 4. Optimizer and schedule
    optimizer = common.make_optimizer(args, model)
    scheduler = common.make_scheduler(args, optimizer, len(train_loader))
    run = common.Run(args, device, train_loader)
    run.load_sharded_snapshot(model, optimizer, scheduler)  # EP: its own experts

    # 5. Train
    for epoch in range(run.start_epoch, run.epochs):
        sampler.set_epoch(epoch)  # DDP: a new order every epoch, the same on all ranks
        model.train()
        for images, labels in run.batches(train_loader, epoch):
            optimizer.zero_grad()  # gradients would add up otherwise
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
            loss.backward()
            average_gradients(parameters, experts)
            if args.clip_grad:
                clip_grad_norm(parameters, experts, args.clip_grad)
            optimizer.step()
            scheduler.step()
            run.log(loss)  # fetched only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or to stop
                run.save_sharded_snapshot(model, optimizer, scheduler)  # EP: its own experts

        # 6. Evaluate
        run.report(common.evaluate(model, eval_loader, device))  # DDP: on every rank
        run.save_sharded_snapshot(model, optimizer, scheduler)  # EP: its own experts

    # 7. Save and report
    weights = gather_experts(model, names)
    if rank == 0:
        common.save_model(weights, args.output_dir)
    run.finish(model, optimizer)
    # DDP: all leave together. Not in a finally: after an error on one rank, nccl would wait for the
    # others, which are in the middle of a collective, and the error would stay unseen.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
