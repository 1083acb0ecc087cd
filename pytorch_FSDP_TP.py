"""Train on several devices with tensor parallelism in groups of ranks, and FSDP across the groups.

Differs     from pytorch_TP.py: in a 2-D device mesh, the ranks of a tensor-parallel group process
            the same part of the batch, and FSDP shards each rank's tensor-parallel shards again,
            across the groups. Lines tagged "# 2-D:".
Command:    torchrun --nproc_per_node=4 pytorch_FSDP_TP.py --tp 2
            torchrun --nproc_per_node=4 pytorch_FSDP_TP.py --tp 2 --sequence-parallel
Use it      on several machines: tensor parallelism, which sends most, within one, and FSDP, which
            overlaps with computation, between them. Not on one where pytorch_FSDP.py alone fits.
Holds       1/N of the blocks' matrices, with their gradients and optimizer state, and 1/R of all
            other parameters for R groups; and the shards of one or two blocks while they compute.
            Activations are those of pytorch_TP.py for 1/R of the batch.
Sends       per step and rank, within a group what pytorch_TP.py sends, for 1/R of the batch; across
            the groups, 3 * 4 * (R - 1) / R bytes per parameter of its tensor-parallel shard.
"""

import logging
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.data import DistributedSampler

import common
from jobs.language_models import check_tensor_parallel
from jobs.model_parts import units_of
from parallel.experts import SplitExperts  # TP, option: a mixture of experts


def parallelize(model: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Shard the matrices of every block (Shoeybi et al. 2019, arXiv:1909.08053)."""
    between = Shard(1) if sequence_parallel else Replicate()  # TP: layout of [batch, time, width]
    whole = {"input_layouts": between, "desired_input_layouts": Replicate()}
    plan = {
        # TP: f, once for query, key and value, or backward would communicate three times
        "attention": PrepareModuleInput(**whole),
        "attention.query": ColwiseParallel(),  # TP: each rank has some of the heads ...
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=between),  # TP: ... g sums their outputs
        "mlp": PrepareModuleInput(**whole),
        "mlp.up": ColwiseParallel(),  # TP: each rank has some of the hidden features ...
        "mlp.down": RowwiseParallel(output_layouts=between),  # TP: ... and g sums again
    }
    adapt(plan, model.blocks[0], between)  # TP, option: --model llama, --model qwen3, --experts
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    if sequence_parallel:  # TP, option: activations between the matrices are sharded, too
        shard_between(model, mesh)


def adapt(plan: dict, block: nn.Module, between: Placement) -> None:  # TP, option: other blocks
    """Add a Llama's gate and the norms of a Qwen's heads to a plan, or experts instead of an MLP;
    and the norms of a block, if the activations ``between`` the matrices are sharded."""
    for name in ("query_norm", "key_norm"):  # of each head, which are dimension 1
        if hasattr(block.attention, name):
            plan[f"attention.{name}"] = SequenceParallel(sequence_dim=1, use_local_output=True)
    if hasattr(block.mlp, "gate"):
        plan["mlp.gate"] = ColwiseParallel()
    if hasattr(block.mlp, "experts"):
        del plan["mlp.up"], plan["mlp.down"]
        plan["mlp"] = SplitExperts(between)
    if between.is_shard():
        plan |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}


def shard_between(model: nn.Module, mesh: DeviceMesh) -> None:  # TP, option: --sequence-parallel
    """Shard the activations outside the blocks along the sequence, the embeddings and the head by
    vocabulary (Korthikanti et al. 2022, arXiv:2205.05198)."""
    tied = model.head.weight is model.token.weight
    to_parts = {"input_layouts": Replicate()}
    plan = {
        "token": RowwiseParallel(**to_parts, output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    if hasattr(model, "position"):  # a Llama has rotary positions instead
        plan["position"] = RowwiseParallel(**to_parts, output_layouts=Shard(-2))
    parallelize_module(model, mesh, plan)
    if tied:  # parallelize_module() has silently untied them
        model.head.weight = model.token.weight


def add_up_gradients(model: nn.Module) -> None:  # TP, option: --sequence-parallel, --experts, Qwen
    """Sum gradients that cover only this rank's positions, heads or part of an expert: the
    gradients of norms and routers. All others are complete."""
    for p in model.parameters():
        if isinstance(p, DTensor) and p.grad is not None and p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(placements=p.placements)


def clip_grad_norm(model: nn.Module, max_norm: float) -> torch.Tensor:  # TP, option: --clip-grad
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
    about = "also split norms, dropout and residuals, along the sequence"
    parser.add_argument("--sequence-parallel", action="store_true", help=about)
    about = {"default": 2, "help": "ranks that split each weight matrix (default: 2)"}
    parser.add_argument("--tp", type=common.number(int, 1), metavar="T", **about)
    about = "dtype of compute and of the gathered weights (default: float32)"
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
    if world_size % args.tp:
        common.fail(f"--tp {args.tp} does not divide {world_size} ranks; use a divisor")
    groups = world_size // args.tp  # 2-D: T adjacent ranks each; rank r + T has r's TP shards
    common.announce(args, device, readers=groups)  # TP: a group's ranks work on the same batch
    common.seed_everything(args.seed, args.deterministic)  # TP: identical dropout on every rank

    # 2. Data
    train_set, eval_set = common.make_datasets(args)
    check_tensor_parallel(args, args.tp, f"--tp {args.tp}", train_set.classes)
    mesh = init_device_mesh(device.type, (groups, args.tp), mesh_dim_names=("dp", "tp"))
    group = mesh["dp"].get_local_rank()
    batch_size = args.batch_size // groups  # 2-D: a group's share of the global batch
    # 2-D: all ranks of a group read the same samples
    replica = {"num_replicas": groups, "rank": group}
    sampler = DistributedSampler(train_set, **replica, seed=args.seed, drop_last=True)
    train_loader = common.make_loader(args, train_set, batch_size, sampler, drop_last=True)
    eval_sampler = DistributedSampler(eval_set, **replica, shuffle=False)
    eval_loader = common.make_loader(args, eval_set, batch_size, eval_sampler)

    # 3. Model
    with torch.device("meta"):  # TP: shapes only: no rank holds the whole model
        model = common.make_model(args, train_set.classes, channels_last=False)
    parallelize(model, mesh["tp"], args.sequence_parallel)  # TP: each rank gets a shard
    policy = MixedPrecisionPolicy()
    if args.dtype == "bfloat16":  # FSDP: gathers and computes in bfloat16, reduces in fp32
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for unit in units_of(model):
        fully_shard(unit, mesh=mesh["dp"], mp_policy=policy)  # 2-D: a rank's TP shards, again
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    model.to_empty(device=device)  # TP: memory for this rank's shards
    common.init_weights(args, model, train_set.classes)  # TP: each rank fills its shards
    # 2-D: dropout differs by group, and by rank where ranks have different positions
    torch.manual_seed(args.seed + (rank if args.sequence_parallel else group))

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
            with loss_parallel():  # TP, option: of logits that --sequence-parallel shards
                logits = model(inputs).to(torch.get_default_dtype())
                loss = train_set.loss(logits, labels)
                loss.backward()  # 2-D: reduce-scatters the gradients across the groups
            add_up_gradients(model)  # TP, option: of norms and routers, over the ranks
            if args.clip_grad:
                run.grad_norm = clip_grad_norm(model, args.clip_grad)
            optimizer.step()
            scheduler.step()
            run.log(loss)  # copied from the device only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or when asked to stop
                run.save_then_exit_if_asked(model, optimizer, scheduler)

        # 6. Evaluate
        run.report(common.evaluate(model, eval_loader, device))  # DDP: on every rank
        run.save_then_exit_if_asked(model, optimizer, scheduler)

    # 7. Save and report
    run.load_best_weights()  # with --eval-every; otherwise the last ones stay
    whole = sd.StateDictOptions(full_state_dict=True, cpu_offload=True)
    # 2-D: hides a warning that a matrix sharded twice is gathered twice; here that happens once
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    weights = sd.get_model_state_dict(model, options=whole)  # TP: gathered on rank 0, on the CPU
    if rank == 0:
        common.save_model(args, weights)
    run.finish(model, optimizer)
    # DDP: leave together. Not in a finally block: after an error on one rank, nccl would wait for
    # the others, which are in the middle of a collective, and the error would stay hidden.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
