"""Train on several devices with FSDP by autograd: backward of an all-gather is a reduce-scatter.

Differs     from pytorch_FSDP.py: no hooks and no units. A parameter is a DTensor, its shard; a
            property gathers it whenever a layer reads it. Lines tagged "# SimpleFSDP:".
Command:    torchrun --nproc_per_node=4 pytorch_SimpleFSDP_by_hand.py
Use it      to learn what a compiler can make of FSDP. To train, take pytorch_FSDP.py: here, each
            parameter is a collective of its own, and compute waits for it.
Holds       per parameter 4/N bytes, 4/N for its gradient, and 4/N (SGD with momentum) or 8/N
            (AdamW) for the optimizer; and one or two whole matrices while they compute.
Sends       per step and rank, 3 * 4 * (N - 1) / N bytes per parameter: an all-gather in forward and
            one in backward, and a reduce-scatter of its gradient. Backward gathers no embedding.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.data import DistributedSampler

import common


def shard_parameters(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace each parameter by a DTensor, of which this rank has some rows."""
    shards = {}  # tied ones stay tied
    for module in model.modules():
        for name, p in [*module.named_parameters(recurse=False)]:
            if p not in shards:
                rows = distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None)
                shards[p] = nn.Parameter(rows, p.requires_grad)
            module.register_parameter(name, shards[p])


def gather(shard: DTensor) -> torch.Tensor:
    """The whole parameter. Its gradient is a term of a mean: autograd reduce-scatters it."""
    whole = shard.redistribute(placements=[Replicate()])  # SimpleFSDP: an all-gather
    whole = whole.to_local(grad_placements=[Partial("avg")])  # SimpleFSDP: over the ranks' samples
    whole.untyped_storage().shard = shard  # SimpleFSDP: for keep_shard, which gets views of it
    return whole


def gather_when_read(model: nn.Module) -> None:
    """Give each module a class of its own, with a property for each parameter."""
    for module in model.modules():
        properties = {}
        for name, shard in module.named_parameters(recurse=False):
            read = lambda _, shard=shard: gather(shard)  # noqa: E731
            properties[name] = property(read)  # SimpleFSDP: layer.weight is the whole one
        module.__class__ = type(type(module).__name__, (type(module),), properties)


def keep_shard(tensor: torch.Tensor) -> torch.Tensor | tuple:
    """What autograd keeps instead of a tensor that backward needs."""
    shard = getattr(tensor.untyped_storage(), "shard", None)
    if shard is None:  # an activation
        return tensor
    return shard, tensor.shape, tensor.stride(), tensor.storage_offset()


def gather_again(kept: torch.Tensor | tuple) -> torch.Tensor:
    """The tensor that autograd gave to ``keep_shard``."""
    if isinstance(kept, torch.Tensor):
        return kept
    shard, *view = kept
    return gather(shard.detach()).as_strided(*view)  # SimpleFSDP: a view, such as weight.T


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__)
    parser.add_argument("--local-rank", "--local_rank")  # FSDP: torch.distributed.launch passes it
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
    shard_parameters(model, mesh)  # SimpleFSDP: no units, and no hooks
    model.to_empty(device=device)  # FSDP: memory for this rank's shards
    common.init_weights(args, model, train_set.classes)  # FSDP: each rank fills its shards
    gather_when_read(model)  # SimpleFSDP: from here on, layer.weight is a whole copy

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
            with saved_tensors_hooks(keep_shard, gather_again):  # SimpleFSDP: for backward
                logits = model(inputs)
            loss = train_set.loss(logits, labels)
            loss.backward()  # SimpleFSDP: gathers again; backward of gather() reduce-scatters
            if args.clip_grad:
                run.grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
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
