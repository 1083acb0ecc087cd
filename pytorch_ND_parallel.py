"""Train on many devices with several techniques combined on one device mesh.

Differs     from pytorch_FSDP_TP.py in most lines: it is not one technique. It imports the functions
            of the other scripts; its own lesson is the order to apply them in, tagged "# ND:",
            in apply_techniques().
Command:    torchrun --nproc_per_node=4 pytorch_ND_parallel.py --tp 2
            torchrun --nproc_per_node=8 pytorch_ND_parallel.py --model llama-4x4x64 --dp-shard 2
            --tp 2 --pp 2 --ac full --dtype bfloat16
Use it      when no single technique makes a model fit: shard first (--dp-shard), then recompute
            (--ac), split matrices within a machine (--tp), split the model into stages between
            machines (--pp), and split sequences only if one alone is too long (--cp). "python
            estimate.py --recommend" suggests a combination. Not when one technique is enough: each
            dimension communicates. --ep divides the experts of a mixture among ranks that shard.
Holds       1/(dp-shard * cp * tp * pp) of the parameters, gradients and optimizer state; in a
            pipeline 1/(tp * pp) of parameters and gradients during a step. Activations as in each
            script, for 1/(dp-replicate * dp-shard) of the batch.
Sends       what each of these scripts sends, for the shard that the other dimensions leave.
"""

import logging
import os
from collections.abc import Iterable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DistributedSampler

import common
from jobs.language_models import check_tensor_parallel, size_of
from jobs.model_parts import units_of
from parallel import attention
from parallel.mesh import add_flags, gather_weights, resolve
from parallel.pipelining import divide, make_shapes
from pytorch_activation_checkpointing import keep_some, saving_on_cpu
from pytorch_chunked_loss import compute_loss
from pytorch_CP import ATTENTIONS, OwnPositions
from pytorch_EP import distribute_experts
from pytorch_PP import Stage, forward, keep_only, make_schedule, part_of_loss
from pytorch_TP import add_up_gradients, parallelize


def recompute(blocks: nn.ModuleList, selective: bool, on_cpu: bool) -> None:
    """Activation checkpointing: see pytorch_activation_checkpointing.py. ``on_cpu``: the input of
    each block is in CPU memory until backward."""
    options = {}
    if selective:
        options["context_fn"] = keep_some

    def wrap(forward):  # ND: torch.compile traces functions, but not partial()
        return lambda *x, **more: checkpoint(forward, *x, **more, use_reentrant=False, **options)

    for block in blocks:
        block.forward = wrap(block.forward)
        if on_cpu:
            block.forward = saving_on_cpu(block.forward)


def part_of_chunks(head, data, parts: int, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """``part_of_loss`` of outputs of the last norm ``[tokens, width]``."""
    return head(x, labels) / labels.numel() / data.density / parts


def shard(args, stages: Iterable[nn.Module], mesh: DeviceMesh, mesh_2d, dtype) -> None:
    """Apply FSDP to this rank's tensor-parallel shards, block by block: see pytorch_FSDP.py; and to
    experts on the mesh ``mesh_2d``, if there is one: see pytorch_EP.py."""
    dims = ("replicate", "shard") if args.dp_replicate > 1 else "shard"
    options = {"mp_policy": MixedPrecisionPolicy(dtype, torch.float32 if dtype else None)}
    if args.offload:  # pinned memory is copied asynchronously
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=args.device == "cuda")
    often = options | {"reshard_after_forward": args.reshard_after_forward}
    for stage in stages:
        blocks = list(stage.blocks)
        experts = [[block.mlp.experts] if mesh_2d else [] for block in blocks]
        for own in sum(experts, []):
            fully_shard(own, mesh=mesh_2d[dims], shard_placement_fn=own.width_dim, **often)
        for unit in units_of(stage):
            when = often
            if args.loss_chunks and unit is stage.head:  # chunked: gathered for all chunks
                when = often | {"reshard_after_forward": False}
            fully_shard(unit, mesh=mesh[dims], **when)
        fully_shard(stage, mesh=mesh[dims], **options)
        if args.keep_last:  # ND: backward needs it first
            blocks[-1].set_reshard_after_forward(False)
        if args.ac == "selective":  # ND: counts all operations, also those of FSDP's gathers
            experts = [[] for _ in blocks]
        units = [[block, *own] for block, own in zip(blocks, experts, strict=True)]
        for n, block in enumerate(blocks):  # ND: gather in advance
            later = sum(units[n + 1 : n + 1 + args.prefetch], experts[n])
            block.set_modules_to_forward_prefetch(later)
            if args.prefetch:
                before = sum(units[max(0, n - args.prefetch) : n][::-1], [])
                block.set_modules_to_backward_prefetch(before)


def tie_again(model: nn.Module, stages: Iterable[nn.Module]) -> None:
    """Tie again: the first stage has the embedding, the last one the head, ``model`` both names."""
    for stage in stages:
        if stage.is_first:
            model.head.weight = stage.token.weight
        if stage.is_last:
            model.token.weight = stage.head.weight


def clip_grad_norm(model: nn.Module, max_norm: float, pipeline, tied: set) -> torch.Tensor:
    """``nn.utils.clip_grad_norm_`` by the global gradient norm, computed separately for the
    parameters of each mesh; the squares are summed over the pipeline stages."""
    by_mesh = {}
    for p in model.parameters():
        if p.grad is not None:
            by_mesh.setdefault(getattr(p, "device_mesh", None), []).append(p)
    copies = tied if dist.get_rank(pipeline) else set()
    norms = []
    for group in by_mesh.values():
        gradients = [p.grad for p in group if p not in copies]
        if gradients:
            norms.append(common.whole(nn.utils.get_total_norm(gradients)))
    squares = torch.stack(norms).square().sum()
    dist.all_reduce(squares, group=pipeline)
    total_norm = squares.sqrt()
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, total_norm)
    return total_norm


def apply_techniques(args, model: nn.Module, mesh, mesh_2d, cp, owners, order, dtype) -> dict:
    """Apply the techniques to ``model`` on the meta device, and return this rank's stages of it.

    Args:
        mesh_2d: the mesh of the experts, or None.
        cp: the group of ranks that share a sequence, or None.
        owners: the pipeline rank of each stage.
        order: this rank's positions in a sequence, or None.
        dtype: of compute, or None for that of the parameters.
    """
    if cp:  # ND: replaces a function, and does not depend on the parameters
        for block in model.blocks:
            block.attention.attend = ATTENTIONS[args.attention](cp)
    if mesh_2d:  # ND: cuts experts by all dimensions but FSDP's; tp leaves them alone
        distribute_experts(model, mesh_2d["ep", "tp"] if args.tp > 1 else mesh_2d["ep"])
    if args.tp > 1:  # ND: finds modules by their names, and cuts whole parameters
        parallelize(model, mesh["tp"], args.sequence_parallel)
    if args.ac != "none":  # ND: recomputes the collectives of tp and cp, too
        recompute(model.blocks, args.ac == "selective", args.offload_activations)
    for block in model.blocks if args.compile else ():  # ND: compiles the recomputation, too
        block.compile()
    if args.loss_chunks:  # ND: the model ends at its norm; FSDP gathers the head for the loss
        model.unembed = lambda x: model.norm(x).flatten(0, 1)
        model.head.forward = partial(compute_loss, model.head, args.loss_chunks, False)
    stages = {0: model}
    if args.pp > 1:  # ND: before FSDP, which shards the blocks of a rank's own stages
        here = mesh["pp"].get_local_rank()
        of = len(owners)
        own = [n for n, owner in enumerate(owners) if owner == here]
        stages = {n: Stage(model, n, of, order) for n in own}
        keep_only(stages, model)
    if mesh["replicate"].size() * mesh["shard"].size() > 1 or dtype or args.offload:
        shard(args, stages.values(), mesh, mesh_2d, dtype)  # ND: last, to gather before all else
    return stages


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__, only_gpt=True, experts=True)
    add_flags(parser, ATTENTIONS)
    args = common.parse_args(parser)
    common.prepare_process(args)
    if "RANK" not in os.environ:  # torchrun: sets these; without it, there is one process
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = common.get_device(args, local_rank)  # DDP: one device per local rank
    if device.type == "cuda":
        torch.cuda.set_device(device)  # DDP: otherwise every rank also allocates memory on GPU 0
    # offload: gloo as well, for CPU tensors: the gradient norm and snapshots
    on_gpus = "cpu:gloo,cuda:nccl" if args.offload else "nccl"
    dist.init_process_group(  # DDP: returns once all ranks have joined
        backend=on_gpus if device.type == "cuda" else "gloo",
        store=common.make_store(args),  # torchrun: a restart must not find dead ranks' addresses
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=args.timeout),  # DDP: how long ranks wait for each other
        device_id=device if device.type == "cuda" else None,
    )
    rank = dist.get_rank()  # DDP: from 0 to world_size - 1
    world_size = dist.get_world_size()
    args = resolve(args, size_of(args), world_size)
    shares = args.dp_replicate * args.dp_shard  # ND: tp, pp and cp ranks read the same batch
    batch_size = args.batch_size // shares
    owners = [0]
    microbatches = 1
    if args.pp > 1:
        layers = size_of(args).layers
        at_once = batch_size // args.accumulate
        owners, microbatches = divide(args, layers, args.pp, at_once)
    common.announce(args, device, readers=shares)
    # ND: the dimension that sends most is innermost, because launchers number the ranks of a
    # machine consecutively: tp in each layer, cp in each attention, shards by block, pp least.
    # cp ranks have different tokens, so FSDP treats them like other data-parallel ranks
    sizes = args.pp, args.dp_replicate, args.dp_shard * args.cp, args.tp
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "replicate", "shard", "tp"))
    pipeline = mesh["pp"].get_group()
    here = mesh["pp"].get_local_rank()
    cp = None
    if args.cp > 1:  # ND: groups of their own, within those of shard
        span = args.cp * args.tp
        groups = [[*range(r, r + span, args.tp)] for r in range(world_size) if r % span < args.tp]
        cp, _ = dist.new_subgroups_by_enumeration(groups)
    # ND: hides the advice to flatten mesh dimensions
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # ND: dropout differs by rank, but not among tp ranks that have the same positions
    own = rank if args.sequence_parallel else rank // args.tp
    common.seed_everything(args.seed + own, args.deterministic)

    # 2. Data
    train_set, eval_set = common.make_datasets(args)
    check_tensor_parallel(args, args.tp, f"--tp {args.tp}", train_set.classes)
    share = mesh["replicate"].get_local_rank() * args.dp_shard
    share += mesh["shard"].get_local_rank() // args.cp
    shared = {"num_replicas": shares, "rank": share}
    sampler = DistributedSampler(train_set, **shared, seed=args.seed, drop_last=True)
    train_loader = common.make_loader(args, train_set, batch_size, sampler, drop_last=True)
    eval_sampler = DistributedSampler(eval_set, **shared, shuffle=False)
    parts = microbatches * args.accumulate
    eval_loader = common.make_loader(args, eval_set, batch_size // parts, eval_sampler)

    # 3. Model
    with torch.device("meta"):  # ND: shapes only: no rank holds the whole model
        model = common.make_model(args, train_set.classes, channels_last=False)
    names = list(model.state_dict())
    order = attention.shard(torch.arange(args.context, device=device), group=cp) if cp else None
    mesh_2d = None
    if args.ep > 1:  # EP: a second mesh, which splits shard: ep ranks have different experts
        sizes = *sizes[:2], args.dp_shard * args.cp // args.ep, args.ep, args.tp
        dims = "pp", "replicate", "shard", "ep", "tp"
        mesh_2d = init_device_mesh(device.type, sizes, mesh_dim_names=dims)
    dtype = torch.bfloat16 if args.dtype == "bfloat16" else None
    stages = apply_techniques(args, model, mesh, mesh_2d, cp, owners, order, dtype)
    if args.tie and args.pp > 1:  # ND: one matrix in two stages; FSDP has replaced one
        tie_again(model, stages.values())
    model.to_empty(device="cpu" if args.offload else device)  # ND: memory for this rank's shards
    common.init_weights(args, model, train_set.classes)  # ND: each rank fills its shards
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))  # offload: not sharded, stay on the GPU
    tied = set()
    if args.tie and owners[-1] > 0:
        last = range(world_size - world_size // args.pp, world_size)  # PP: they share a matrix
        ends, _ = dist.new_subgroups_by_enumeration([[r - last[0], r] for r in last])
        tied = {model.token.weight} if here in (0, owners[-1]) else set()
    loss_fn = partial(part_of_loss, train_set, parts)
    scored = {}
    if args.loss_chunks:  # chunked: the head computes the loss, and logits in the evaluation
        loss_fn = partial(part_of_chunks, model.head, train_set, parts)
        scored["head"] = model.head
    if args.pp > 1:
        size = batch_size // parts, *args.row[:-1], args.context // args.cp
        between = args.tp if args.sequence_parallel else 1
        width = size_of(args).width
        classes = len(train_set.classes)
        shapes = make_shapes(size, width, classes, between, dtype)
        made = stages, len(owners), microbatches, shapes, loss_fn, device, pipeline
        schedule = make_schedule(args.pipeline_schedule, *made)
        model.forward = partial(forward, stages, owners, shapes, pipeline)
    evaluated = model
    if args.cp > 1:  # CP: each rank computes and scores its own positions
        evaluated = OwnPositions(model, cp)
        scored["cut"] = partial(attention.shard, group=cp)

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
            if args.cp > 1:
                inputs, labels = (attention.shard(t, group=cp) for t in (inputs, labels))
            losses = []
            loss = torch.zeros((), device=device)
            # ND: FSDP accumulates sharded gradients, but in a pipeline: there unsharded ones
            inputs_of = inputs.chunk(args.accumulate)
            labels_of = labels.chunk(args.accumulate)
            for tokens, targets in zip(inputs_of, labels_of, strict=True):
                with loss_parallel():  # TP, option: of logits that --sequence-parallel shards
                    if args.pp > 1:
                        first = [tokens] if 0 in stages else []  # PP: it has the embedding
                        given = {"samples": tokens, "target": targets, "losses": losses}
                        schedule.step(*first, **given, return_outputs=False)
                    else:
                        losses = [loss_fn(model(tokens, order), targets)]
                        losses[0].backward()  # FSDP: reduce-scatters each block's gradients
                for part in losses:  # ND: empty on ranks without the last stage
                    loss = loss + args.pp * part.detach()  # ND: the mean over ranks is exact
            add_up_gradients(model)  # TP, option: of norms and routers, over the ranks
            for parameter in tied:
                gradient = parameter.grad
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                dist.all_reduce(local, group=ends)  # PP: sums both ranks' gradients
            if args.clip_grad:
                run.grad_norm = clip_grad_norm(model, args.clip_grad, pipeline, tied)
            optimizer.step()
            scheduler.step()
            run.log(loss)  # copied from the device only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or when asked to stop
                run.save_then_exit_if_asked(model, optimizer, scheduler)

        # 6. Evaluate
        run.report(common.evaluate(evaluated, eval_loader, device, **scored))
        run.save_then_exit_if_asked(model, optimizer, scheduler)

    # 7. Save and report
    run.load_best_weights()  # with --eval-every; otherwise the last ones stay
    weights = gather_weights(model, args.pp)  # ND: gathered on rank 0, on the CPU
    if rank == 0:
        common.save_model(args, {name: weights[name] for name in names})
    run.finish(model, optimizer)
    # DDP: leave together. Not in a finally block: after an error on one rank, nccl would wait for
    # the others, which are in the middle of a collective, and the error would stay hidden.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
