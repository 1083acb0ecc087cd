"""Train a mixture of experts on several devices: each rank holds some of the experts.

Differs     from pytorch_torchrun_DDP.py: a block has several MLPs, distributed among the ranks. A
            token goes to some of them (dispatch) and back (combine). Lines tagged "# EP:".
Command:    torchrun --nproc_per_node=4 pytorch_EP.py
            torchrun --nproc_per_node=4 pytorch_EP.py --experts 16 --top-k 2
Use it      for mixture-of-experts models, within a machine: every block exchanges tokens, and
            nothing overlaps with this communication. Not for a dense model.
Holds       what one device holds, but only 1/N of the experts, their gradients and their optimizer
            state; and the activations of 1/N of the batch, in experts of the tokens routed to them.
Sends       per step, rank and block, 4 * 4 * K * (N - 1) / N bytes per element of this rank's
            activations, with --top-k K: dispatch and combine, in forward and in backward. In
            addition, 2 * 4 * (N - 1) / N bytes per non-expert parameter, in all-reduces.
"""

import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import common


class Exchange(torch.autograd.Function):
    """All-to-all of rows: sends each rank its rows; returns those received, in rank order."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, outgoing: list[int], incoming: list[int]) -> torch.Tensor:
        ctx.sizes = outgoing, incoming  # EP: number of rows to and from each rank
        received = rows.new_empty(sum(incoming), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), incoming, outgoing)
        return received

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        outgoing, incoming = ctx.sizes
        return Exchange.apply(gradient, incoming, outgoing), None, None  # EP: the reverse exchange


def run_distributed_experts(mixture: nn.Module, tokens: torch.Tensor, counts: torch.Tensor):
    """MixtureOfExperts.run_own_experts() for experts that are distributed over the ranks."""
    world_size, held = dist.get_world_size(), len(mixture.experts)
    theirs = torch.empty_like(counts)  # EP: how many tokens each rank has for our experts
    dist.all_to_all_single(theirs, counts)
    both = torch.stack([counts, theirs]).view(2, world_size, held)
    on_cpu = both.to("cpu", non_blocking=True)
    if both.is_cuda:
        torch.cuda.current_stream().synchronize()  # EP: the CPU waits for the GPU here, once
    outgoing, incoming = on_cpu.sum(2).tolist()
    received = Exchange.apply(tokens, outgoing, incoming)  # EP: sorted by rank, then expert
    expert = torch.arange(held, device=counts.device).repeat(world_size)
    expert = expert.repeat_interleave(theirs, output_size=len(received))
    order = expert.argsort(stable=True)  # EP: sorted by expert
    sizes = on_cpu[1].sum(0).tolist()
    outputs = mixture.run_own_experts(received[order], both[1].sum(0), sizes)
    return Exchange.apply(outputs[order.argsort()], incoming, outgoing)


def mean_over_ranks(load: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(load)  # EP: otherwise each rank would balance only its own tokens
    return load / dist.get_world_size()


def distribute_experts(model: nn.Module, device: torch.device) -> set[nn.Parameter]:
    """Keep 1/N of each block's experts, move the model to the device; return their parameters."""
    rank, world_size, names = dist.get_rank(), dist.get_world_size(), []
    for number, block in enumerate(model.blocks):
        mixture = block.mlp
        for i in range(mixture.count):
            if i * world_size // mixture.count != rank:
                del mixture.experts[str(i)]
        mixture.run_experts = partial(run_distributed_experts, mixture)
        mixture.mean_over_ranks = mean_over_ranks
        names += dict(mixture.experts.named_parameters(prefix=f"blocks.{number}.mlp.experts"))
    model.to(device)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    experts = {model.get_parameter(name) for name in names}
    for p in experts:  # EP: an expert's gradient is a sum over ranks; DDP averages the others
        p.register_hook(lambda gradient: gradient / world_size)
    return experts


def clip_grad_norm(parameters: list[nn.Parameter], experts: set, max_norm: float) -> None:
    """nn.utils.clip_grad_norm_ by the global gradient norm, over the experts of all ranks."""
    own = nn.utils.get_total_norm([p.grad for p in parameters if p in experts])
    others = nn.utils.get_total_norm([p.grad for p in parameters if p not in experts])
    dist.all_reduce(squares := own.square())  # EP: others are identical on every rank
    nn.utils.clip_grads_with_norm_(parameters, max_norm, (squares + others.square()).sqrt())


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__, only_gpt=True, experts=True)
    parser.set_defaults(experts=8)
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32",
        help="dtype of matrix products (default: float32)",
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
    rank, world_size = dist.get_rank(), dist.get_world_size()  # DDP: ranks 0 to world_size - 1
    if args.experts % world_size:
        near = max(args.experts // world_size, 1) * world_size
        common.fail(f"--experts {args.experts} are not divisible by {world_size} ranks; use {near}")
    common.announce(args, device)
    common.seed_everything(args.seed + rank, args.deterministic)  # DDP: dropout differs by rank

    # 2. Data
    train_set, eval_set = common.make_datasets(args)
    batch_size = args.batch_size // world_size  # DDP: this rank's share of the global batch
    # DDP: the same order on all ranks; rank r of N takes every N-th image, beginning with the r-th
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = common.make_loader(args, train_set, batch_size, sampler, drop_last=True)
    eval_sampler = DistributedSampler(eval_set, shuffle=False)  # DDP: the same, without shuffling
    eval_loader = common.make_loader(args, eval_set, batch_size, eval_sampler)

    # 3. Model
    model = common.make_model(args, train_set.classes, channels_last=False)
    names = list(model.state_dict())
    experts = distribute_experts(model, device)
    if args.dtype == "bfloat16":  # AMP: forward in bfloat16, in training and in evaluation
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
    run.resume(model, optimizer, scheduler)

    # 5. Train
    for epoch in range(run.start_epoch, run.epochs):
        sampler.set_epoch(epoch)  # DDP: a new order every epoch, the same on all ranks
        model.train()
        for images, labels in run.batches(train_loader, epoch):
            optimizer.zero_grad()  # otherwise gradients would accumulate
            logits = model(images).to(torch.get_default_dtype())
            loss = F.cross_entropy(logits, labels) * train_set.weight(labels)  # chat: by tokens
            loss.backward()  # DDP: averages the gradients in buckets, as they become ready
            if args.clip_grad:
                clip_grad_norm(list(model.parameters()), experts, args.clip_grad)
            optimizer.step()
            scheduler.step()
            run.log(loss)  # copied from the device only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or when asked to stop
                run.save(model, optimizer, scheduler)

        # 6. Evaluate
        for buffer in model.module.buffers():
            dist.broadcast(buffer, src=0)  # DDP: BatchNorm saw different images on each rank
        run.report(common.evaluate(model.module, eval_loader, device))  # DDP: on every rank
        run.save(model, optimizer, scheduler)

    # 7. Save and report
    parts = [None] * world_size if rank == 0 else None
    own = model.module.state_dict()
    own = {k: v.cpu() for k, v in own.items() if rank == 0 or ".experts." in k}
    # EP: to rank 0, through the CPU: nccl would gather all weights on its GPU
    dist.gather_object(own, parts, group=dist.new_group(backend="gloo"))
    if rank == 0:
        weights = {name: tensor for part in parts for name, tensor in part.items()}
        common.save_model(args, {name: weights[name] for name in names})
    run.finish(model, optimizer)
    # DDP: leave together. Not in a finally block: after an error on one rank, nccl would wait for
    # the others, which are in the middle of a collective, and the error would stay hidden.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
