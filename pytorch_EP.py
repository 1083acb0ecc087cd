"""Train a mixture of experts with FSDP and expert parallelism: ranks divide the experts.

Differs     from pytorch_FSDP.py: a block has several MLPs, its experts. A rank holds some of them
            whole, or a shard of some. A token goes to the ranks of its experts (dispatch) and back
            (combine); all other parameters are sharded over all ranks. Lines tagged "# EP:".
Command:    torchrun --nproc_per_node=4 pytorch_EP.py
            torchrun --nproc_per_node=4 pytorch_EP.py --ep 2 --experts 16 --top-k 2
Use it      for mixture-of-experts models, within a machine: every block exchanges tokens, and
            nothing overlaps with this communication. Not for a dense model.
Holds       1/N of parameters, gradients and optimizer state, as FSDP; but while a block computes,
            1/E of its experts, with --ep E, instead of all. And the activations of 1/N of the
            batch, in experts of the tokens routed to them: more, if the router prefers these.
Sends       what FSDP sends, for the experts only among N/E ranks and only their 1/E; and per step,
            rank and block, 4 * 4 * K * (E - 1) / E bytes per element of this rank's activations,
            with --top-k K: dispatch and combine, in forward and in backward.
"""

import logging
import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DistributedSampler

import common
from jobs.language_models import size_of
from jobs.model_parts import batch_norms, units_of
from parallel.mesh import check_experts

ADVICE = "torch.distributed.tensor._redistribute"  # EP, detail: it advises to flatten a mesh


class Exchange(torch.autograd.Function):
    """All-to-all of tokens: sends each rank its own; returns those received, in rank order."""

    @staticmethod
    def forward(ctx, tokens: torch.Tensor, outgoing: list[int], incoming: list[int], group):
        ctx.sizes = (outgoing, incoming)  # EP: number of tokens to and from each rank
        ctx.group = group
        received = tokens.new_empty(sum(incoming), *tokens.shape[1:])
        dist.all_to_all_single(received, tokens.contiguous(), incoming, outgoing, group)
        return received

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        outgoing, incoming = ctx.sizes  # EP: gradients go back to where tokens came from
        return Exchange.apply(gradient, incoming, outgoing, ctx.group), None, None, None


def run_distributed(experts: nn.Module, group, tokens: torch.Tensor, counts: torch.Tensor):
    """What ``experts`` would return for tokens that are sorted by expert, if it had all of them;
    ``counts``: tokens per expert. All ranks of the group call it, also those without tokens."""
    ranks = dist.get_world_size(group)
    theirs = torch.empty_like(counts)  # EP: how many tokens each rank has for our experts
    dist.all_to_all_single(theirs, counts, group=group)
    both = torch.stack([counts, theirs]).view(2, ranks, -1)
    on_cpu = both.to("cpu", non_blocking=True)
    if both.is_cuda:
        torch.cuda.current_stream().synchronize()  # EP: the CPU waits for the GPU here, once
    outgoing, incoming = on_cpu.sum(2).tolist()
    received = Exchange.apply(tokens, outgoing, incoming, group)  # EP: dispatch; sorted by rank
    expert = torch.arange(both.shape[2], device=counts.device).repeat(ranks)
    expert = expert.repeat_interleave(theirs, output_size=len(received))
    order = expert.argsort(stable=True)  # EP: sorted by expert
    outputs = experts(received[order], both[1].sum(0), on_cpu[1].sum(0).tolist())
    return Exchange.apply(outputs[order.argsort()], incoming, outgoing, group)  # EP: combine


def distribute_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the experts of every block among the ranks of a mesh, ("ep",) or ("ep", "tp")."""
    group = mesh.get_group("ep")
    for block in model.blocks:
        experts = block.mlp.experts
        for name, stack in list(experts.named_parameters(recurse=False)):  # EP: [experts, ...]
            layout = Shard(0), Shard(1 if name == "down" else 2)
            own = distribute_tensor(stack, mesh, layout[: mesh.ndim])
            setattr(experts, name, nn.Parameter(own, stack.requires_grad))
        block.mlp.run_experts = partial(run_distributed, experts, group)
        experts.sources = group.size()  # EP: FSDP averages gradients over the other ranks only


def clip_grad_norm(model: nn.Module, max_norm: float) -> torch.Tensor:
    """``nn.utils.clip_grad_norm_`` by the global norm, for sharded and unsharded parameters."""
    by_mesh = {}
    for p in model.parameters():
        if p.grad is not None:
            by_mesh.setdefault(getattr(p, "device_mesh", None), []).append(p)
    norms = []
    for group in by_mesh.values():
        gradients = [p.grad for p in group]
        norms.append(common.whole(nn.utils.get_total_norm(gradients)))
    total_norm = torch.stack(norms).norm()
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, total_norm)
    return total_norm


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__, only_gpt=True, experts=True)
    about = "ranks that divide the experts (default: all)"
    parser.add_argument("--ep", type=common.number(int, 1), metavar="N", help=about)
    parser.add_argument("--local-rank", "--local_rank")  # FSDP: torch.distributed.launch passes it
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32",
        help="dtype of compute and of the gathered weights (default: float32)",
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
    ep = args.ep or world_size  # EP: so many ranks have all experts of a block together
    check_experts(args, size_of(args), ep, world_size)  # EP, detail: rejects invalid flags
    common.announce(args, device)
    logging.getLogger(ADVICE).setLevel(logging.ERROR)  # EP, detail: hides the advice
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
    mesh = init_device_mesh(device.type, (world_size,))
    # EP: the same ranks: along "ep" they have different experts, along "shard" parts of the same
    mesh_2d = init_device_mesh(device.type, (world_size // ep, ep), mesh_dim_names=("shard", "ep"))
    distribute_experts(model, mesh_2d["ep"])
    policy = MixedPrecisionPolicy()
    if args.dtype == "bfloat16":  # FSDP: gathers and computes in bfloat16, reduces in fp32
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if norms := batch_norms(model):  # FSDP: a unit of their own, in fp32
            fully_shard(norms, mesh=mesh)
    for block in model.blocks:  # EP: a unit of their own, of which FSDP shards the width
        experts = block.mlp.experts
        options = {"mesh": mesh_2d["shard"], "shard_placement_fn": experts.width_dim}
        fully_shard(experts, **options, mp_policy=policy)
    for unit in units_of(model):  # FSDP: blocks, embedding, head: gathered one at a time
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)  # FSDP: the other parameters
    for block in model.blocks:  # EP: gather them before the CPU waits for the number of tokens
        block.set_modules_to_forward_prefetch([block.mlp.experts])
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
            logits = model(inputs).to(torch.get_default_dtype())  # FSDP: all-gathers each block
            loss = train_set.loss(logits, labels)
            loss.backward()  # FSDP: all-gathers again, and reduce-scatters each block's gradients
            if args.clip_grad:
                run.grad_norm = clip_grad_norm(model, args.clip_grad)
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
