"""Train on many devices with the techniques combined, on a mesh that has a dimension for each.

Differs     from pytorch_torchrun_DDP.py: this script is made of the others. It imports what they
            define, which no other may, and its own lesson is their order. Lines tagged "# ND:".
Command:    torchrun --nproc_per_node=4 pytorch_ND_parallel.py --tp 2
            torchrun --nproc_per_node=8 pytorch_ND_parallel.py --model llama-4x4x64 --dp-shard 2
            --tp 2 --pp 2 --ac full --dtype bfloat16
Use it      for a model that no single technique fits: shard first (--dp-shard), recompute (--ac),
            then split matrices within a machine (--tp), then stages between machines (--pp), and
            sequences only if one alone is too long (--cp). "python estimate.py --recommend" says
            which. Not when one technique fits: each dimension sends more.
Holds       1/(dp-shard * cp * tp * pp) of the parameters, gradients and optimizer; activations as
            the lessons say, of 1/(dp-replicate * dp-shard) of the batch.
Sends       what each lesson sends, of the shard that the other dimensions leave.

Experts (pytorch_EP.py) are not among the dimensions: their ranks are borrowed from dp-shard, and
fully_shard would have to shard them over the others alone: a mesh, a clipping and a snapshot of
their own.
"""

import logging
import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DistributedSampler

import common
from common import attention
from libraries.mesh import add_flags, check, connect_ends
from libraries.pipelining import divide, make_shapes
from pytorch_activation_checkpointing import SLOW
from pytorch_CP import ATTENTIONS, WholeSequences
from pytorch_PP import Stage, forward, keep_only, make_schedule, mean_loss
from pytorch_TP import add_up_gradients, parallelize


def checkpoint_blocks(blocks: nn.ModuleList, selective: bool) -> None:
    """Each keeps its input, and backward computes it again; ``selective``: see pytorch_activation_
    checkpointing.py."""
    options = {}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, SLOW)
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


def clip_grad_norm(model: nn.Module, max_norm: float, stages, counted_elsewhere: set) -> None:
    """``nn.utils.clip_grad_norm_`` by the global gradient norm. That of DTensors is of their mesh:
    parameters are taken mesh by mesh, and the squares added up over the stages."""
    alike = {}
    for p in model.parameters():
        alike.setdefault(getattr(p, "device_mesh", None), []).append(p)
    own = [[p.grad for p in group if p not in counted_elsewhere] for group in alike.values()]
    norms = [nn.utils.get_total_norm(gradients) for gradients in own if gradients]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    squares = torch.stack(norms).square().sum()
    dist.all_reduce(squares, group=stages)
    for group in alike.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, squares.sqrt())


def gather_logits(stage: nn.Module, inputs, logits: torch.Tensor) -> torch.Tensor:
    """For evaluation: of the whole vocabulary, where a rank has a part of it."""
    training = torch.is_grad_enabled() or not isinstance(logits, DTensor)
    return logits if training else logits.full_tensor()


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__, only_gpt=True)
    add_flags(parser, ATTENTIONS)
    args = common.parse_args(parser)
    common.prepare_process(args)
    if "RANK" not in os.environ:  # torchrun: sets these; without it, this is a world of one
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = common.get_device(args, local_rank)  # DDP: a device per rank of this machine
    if device.type == "cuda":
        torch.cuda.set_device(device)  # DDP: or every rank would also take memory on GPU 0
    dist.init_process_group(  # DDP: returns when all ranks have joined
        # offload: gloo, too, for what is on the CPU: the length of the gradients, and snapshots
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=common.make_store(args),  # torchrun: a restarted rank finds no dead one's address
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=args.timeout),  # DDP: the longest wait for each other
        device_id=device if device.type == "cuda" else None,
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()  # DDP: our number, of how many
    check(args, common.size_of(args), world_size)
    shares = args.dp_replicate * args.dp_shard  # ND: tp, pp and cp ranks read the same batch
    batch_size = args.batch_size // shares
    layers, width = common.size_of(args).layers, common.size_of(args).width
    owners, microbatches = [0], 1
    if args.pp > 1:
        owners, microbatches = divide(args, layers, args.pp, batch_size // args.accumulate)
    common.announce(args, device, readers=shares)
    # ND: dropout differs by rank; where tp ranks have the same positions, it is the same
    own = rank if args.sequence_parallel else rank // args.tp
    common.seed_everything(args.seed + own, args.deterministic)

    # ND: what sends most is innermost, on neighbours, as launchers number the ranks of a machine
    # one after the other: tp in every layer, cp in every attention, shards once a block, replicas
    # once a step, and the pipeline, which sends least, between machines
    sizes = args.pp, args.dp_replicate, args.dp_shard * args.cp, args.tp
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "replicate", "shard", "tp"))
    pipeline = mesh["pp"].get_group()
    # ND: ranks of one sequence have other tokens each, so gradients and shards are theirs together
    sizes = world_size // args.cp // args.tp, args.cp, args.tp
    cp = init_device_mesh(device.type, sizes, mesh_dim_names=("other", "cp", "tp"))[
        "cp"
    ].get_group()

    # ND: or it would advise to flatten mesh dimensions, for a norm, and for the weights at the end
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

    # 2. Data
    train_set, eval_set = common.make_datasets(args)
    share = mesh["replicate"].get_local_rank() * args.dp_shard
    share += mesh["shard"].get_local_rank() // args.cp
    shared = {"num_replicas": shares, "rank": share}
    sampler = DistributedSampler(train_set, **shared, seed=args.seed, drop_last=True)
    train_loader = common.make_loader(args, train_set, batch_size, sampler, drop_last=True)
    eval_sampler = DistributedSampler(eval_set, **shared, shuffle=False)
    eval_loader = common.make_loader(args, eval_set, batch_size, eval_sampler)

    # 3. Model
    with torch.device("meta"):  # ND: shapes alone, as no rank is to hold the whole model
        model = common.make_model(args, train_set.classes, channels_last=False)
    names, classes = list(model.state_dict()), len(train_set.classes)
    positions = torch.arange(args.context, device=device)
    if args.cp > 1:
        positions = attention.shard(positions, 0, cp)
        for block in model.blocks:
            block.attention.attend = ATTENTIONS[args.attention](cp)
    if args.tp > 1:  # ND: first, as it cuts modules by their names, and what follows wraps them
        parallelize(model, mesh["tp"], args.sequence_parallel)
    if args.ac != "none":  # ND: within what is compiled, or the compiler would keep activations
        checkpoint_blocks(model.blocks, args.ac == "selective")
    if args.compile:  # ND: a block, before FSDP hooks around it, which would cut the graph
        for block in model.blocks:
            block.compile()
    stages = {0: model}
    if args.pp > 1:
        here = mesh["pp"].get_local_rank()
        stages = {
            n: Stage(model, n, len(owners), positions)
            for n in range(len(owners))
            if owners[n] == here
        }
        keep_only(stages, model)
    half = torch.bfloat16 if args.dtype == "bfloat16" else None
    if shares * args.cp > 1 or half or args.offload:
        # ND: last, so that a block is gathered whole, before all that is in it. Of a stage once a
        # step: for each micro-batch it would be gathered again
        options = {} if args.pp == 1 else {"reshard_after_forward": False}
        options["mesh"] = mesh["replicate", "shard"] if args.dp_replicate > 1 else mesh["shard"]
        options["mp_policy"] = MixedPrecisionPolicy(half, torch.float32 if half else None)
        options["offload_policy"] = CPUOffloadPolicy() if args.offload else OffloadPolicy()
        for stage in stages.values():
            for block in stage.blocks:
                fully_shard(block, **options)
            fully_shard(stage, **options)
    tied, counted_elsewhere = set(), set()
    if args.tie and args.pp > 1:  # ND: one matrix in two stages, of which FSDP has replaced one
        ends = connect_ends(args.pp)
        for stage in stages.values():
            if stage.is_first:
                model.head.weight = stage.token.weight
            if stage.is_last:
                model.token.weight = stage.head.weight
    model.to_empty(device="cpu" if args.offload else device)  # ND: memory for this rank's shards
    common.init_weights(args, model, train_set.classes)  # ND: on each rank its shards
    for name, buffer in model.named_buffers():
        setattr(model, name, buffer.to(device))  # offload: they are not sharded, and stay
    if (
        args.tie
        and args.pp > 1
        and owners[-1] != 0
        and mesh["pp"].get_local_rank() in (0, owners[-1])
    ):
        tied = {model.token.weight}
        counted_elsewhere = set() if mesh["pp"].get_local_rank() == 0 else tied
    loss_fn = partial(mean_loss, microbatches * args.accumulate)
    for stage in stages.values():
        stage.register_forward_hook(gather_logits)
    if args.pp > 1:
        size = batch_size // args.accumulate // microbatches, args.context // args.cp
        between = args.tp if args.sequence_parallel else 1
        shapes = make_shapes(size, width, classes, between, half)
        schedule = make_schedule(
            args.pipeline_schedule,
            stages,
            len(owners),
            microbatches,
            shapes,
            loss_fn,
            device,
            pipeline,
        )
        model.forward = lambda tokens, positions=None: forward(
            stages, owners, shapes, pipeline, tokens
        )
    evaluated = WholeSequences(model, cp) if args.cp > 1 else model

    # 4. Optimizer and schedule
    fused = args.optimizer == "adamw" and args.tp == 1  # TP: which takes no mixture
    optimizer = common.make_optimizer(args, model, fused)
    scheduler = common.make_scheduler(args, optimizer, len(train_loader))
    run = common.Run(args, device, train_loader)
    run.load_sharded_snapshot(model, optimizer, scheduler)  # ND: each rank reads its shards

    # 5. Train
    for epoch in range(run.start_epoch, run.epochs):
        sampler.set_epoch(epoch)  # DDP: a new order every epoch, the same on all ranks
        model.train()
        for images, labels in run.batches(train_loader, epoch):
            optimizer.zero_grad()  # gradients would add up otherwise
            if args.cp > 1:
                images, labels = (attention.shard(t, 1, cp) for t in (images, labels))
            losses = []
            # ND: FSDP adds up shards of gradients, part by part: whole ones would be a whole model
            parts = (t.chunk(args.accumulate) for t in (images, labels))
            for inputs, targets in zip(*parts, strict=True):
                with loss_parallel():  # TP: if each rank has logits of a part of the vocabulary
                    if args.pp > 1:
                        of_part, inputs = [], [inputs] if 0 in stages else []
                        schedule.step(*inputs, target=targets, losses=of_part, return_outputs=False)
                    else:
                        of_part = [loss_fn(model(inputs, positions), targets)]
                        of_part[0].backward()  # FSDP: reduce-scatters each block's gradients
                losses += of_part
            for parameter in tied:
                gradient = parameter.grad
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                dist.all_reduce(local, group=ends)  # PP: each rank has a part of it
            if args.sequence_parallel:
                add_up_gradients(model)  # TP: but for norms, which see other positions on each rank
            if args.clip_grad:
                clip_grad_norm(model, args.clip_grad, pipeline, counted_elsewhere)
            optimizer.step()
            scheduler.step()
            # ND: ranks of other stages have 0, so that the mean over all is that of the last stage
            loss = args.pp * sum((x.detach() for x in losses), torch.zeros((), device=device))
            run.log(loss)  # fetched only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or to stop
                run.save_sharded_snapshot(model, optimizer, scheduler)  # ND: its shards

        # 6. Evaluate
        run.report(common.evaluate(evaluated, eval_loader, device))  # DDP: on every rank
        run.save_sharded_snapshot(model, optimizer, scheduler)  # ND: its shards

    # 7. Save and report
    own = {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).cpu()
        for name, t in model.state_dict().items()
    }
    parts = [None] * args.pp if rank == 0 else None
    if rank % (world_size // args.pp) == 0:  # ND: the first rank of each stage
        dist.gather_object(own, parts, group=pipeline, group_dst=0)
    if rank == 0:
        weights = {name: tensor for part in parts for name, tensor in part.items()}
        common.save_model(args, {name: weights[name] for name in names})
    run.finish(model, optimizer)
    # DDP: all leave together. Not in a finally: after an error on one rank, nccl would wait for the
    # others, which are in the middle of a collective, and the error would stay unseen.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
