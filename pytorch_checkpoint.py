"""Train with FSDP, and save and resume with torch.distributed.checkpoint (DCP).

Differs     from pytorch_FSDP.py: DCP saves and resumes, not the harness. Lines tagged "# DCP:".
Command:    torchrun --nproc_per_node=4 pytorch_checkpoint.py --async-save
            torchrun --nproc_per_node=2 pytorch_checkpoint.py --async-save --resume auto
Use it      in your own loop. Not where the harness's snapshots do: they also verify checksums.
Holds       what pytorch_FSDP.py holds; with --async-save, also a copy of its shards, on the CPU.
Sends       what pytorch_FSDP.py sends; a checkpoint sends buffers, and names and shapes of shards.
"""

import os
import shutil
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler

import common
from jobs.model_parts import units_of

GPU = torch.cuda.is_available()  # DCP: pinned memory for the copy, which is kept for the next save
STAGER = DefaultStager(StagingOptions(GPU, False, False, GPU))  # DCP: not before 2.14


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a folder, newest last. DCP writes `.metadata` last, by a rename."""
    places = (".metadata", "step-*/.metadata", "snapshots/step-*/.metadata")  # DCP: complete
    return [path.parent for place in places for path in sorted(folder.glob(place))]


def save_then_exit_if_asked(run, model, optimizer, group, writing):
    """Save a checkpoint; return the future of an asynchronous save. All ranks call it."""
    rank = dist.get_rank()
    folder = run.store.folder / run.state.snapshot_name
    if writing:  # DCP: one at a time, so there is never more than one copy of the shards
        with run.saving():
            writing.result()  # DCP: raises the exception of the thread
    for buffer in model.buffers():  # DCP: any rank's copy may be written
        dist.broadcast(buffer, src=0)
    weights, state = sd.get_state_dict(model, optimizer)  # DCP: this rank's shards
    tensors = {"model": weights, "optimizer": state["state"]}
    run_state = run.state_dict() | {"param_groups": state["param_groups"]}  # DCP: step, epoch, ...
    with run.saving():  # all ranks fail, or none: then --on-save-error decides
        # DCP: separate, as DCP would pickle non-tensors and load any pickle
        common.together(common.save_file, run_state, folder / "run.pt", here=rank == 0)
        newest = {folder, *complete_checkpoints(folder.parent)[-2:]}
        for old in {*folder.parent.glob("step-*")} - newest if rank == 0 else ():
            (old / ".metadata").unlink(missing_ok=True)  # DCP: first, as it was written last
            shutil.rmtree(old)
        if run.args.async_save and not run.ends_now:  # DCP: a future, once shards are copied
            options = {"async_stager": STAGER} if torch.__version__ >= "2.14" else {}
            return dcp.async_save(tensors, checkpoint_id=folder, process_group=group, **options)
        dcp.save(tensors, checkpoint_id=folder, process_group=group)  # DCP: `.metadata` comes last
    run.exit_if_asked(next(reversed(complete_checkpoints(folder.parent)), None))


def resume_or_exit(run, model, optimizer, scheduler, group) -> None:
    """Resume from the checkpoint that --resume selects, if any. All ranks call it."""
    asked = run.args.resume
    of_this_run = asked in ("auto", "none")
    run_state = None
    complete = complete_checkpoints(run.store.folder if of_this_run else Path(asked))
    if not (of_this_run or complete):
        common.fail(f"--resume {asked} has no complete DCP checkpoint; give another, or none")
    found = [complete[-1] if complete and asked != "none" else None]
    dist.broadcast_object_list(found, src=0)  # DCP: all ranks take the one that rank 0 sees
    if path := found[0]:
        run_state = common.load_file(path / "run.pt", "--resume")
        run.store.check(path, run_state)  # same model, data and batch size
        weights, state = sd.get_state_dict(model, optimizer)
        tensors = {"model": weights, "optimizer": state["state"]}  # DCP: for these keys, each rank
        dcp.load(tensors, checkpoint_id=path, process_group=group)  # DCP: reads its shards
        state["param_groups"] = run_state["param_groups"]
        sd.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    run.start(model, optimizer, scheduler, run_state)


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__)
    parser.add_argument("--async-save", action="store_true", help="save in the background")
    args = common.parse_args(parser)
    if common.local_folder(args.output_dir) != args.output_dir:
        common.fail(f"--output-dir {args.output_dir}: DCP writes to a local folder; give one")
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
    for unit in units_of(model):  # FSDP: blocks, embedding, head: gathered one at a time
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)  # FSDP: the other parameters
    model.to_empty(device=device)  # FSDP: memory for this rank's shards
    common.init_weights(args, model, train_set.classes)  # FSDP: each rank fills its shards

    # 4. Optimizer and schedule
    optimizer = common.make_optimizer(args, model)
    scheduler = common.make_scheduler(args, optimizer, len(train_loader))
    run = common.Run(args, device, train_loader)
    # Not the default group: the thread's collectives must not mix with those of training.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=args.timeout))  # DCP: its own
    resume_or_exit(run, model, optimizer, scheduler, group)
    writing = None

    # 5. Train
    for epoch in run.epochs_left():
        sampler.set_epoch(epoch)  # DDP: a new order every epoch, the same on all ranks
        model.train()
        for inputs, labels in run.batches(train_loader, epoch):
            optimizer.zero_grad()  # otherwise gradients would accumulate
            logits = model(inputs)  # FSDP: all-gathers each block
            loss = train_set.loss(logits, labels)
            loss.backward()  # FSDP: all-gathers again, and reduce-scatters each block's gradients
            if args.clip_grad:
                run.grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            optimizer.step()
            scheduler.step()
            run.log(loss)  # copied from the device only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or when asked to stop
                writing = save_then_exit_if_asked(run, model, optimizer, group, writing)

        # 6. Evaluate
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)  # DDP: BatchNorm saw different samples on each rank
        run.report(common.evaluate(model, eval_loader, device))  # DDP: on every rank
        writing = save_then_exit_if_asked(run, model, optimizer, group, writing)

    # 7. Save and report
    run.load_best_weights()  # with --eval-every; otherwise the last ones stay
    whole = sd.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = sd.get_model_state_dict(model, options=whole)  # FSDP: on the CPU of rank 0
    if rank == 0:
        common.save_model(args, weights)
    run.finish(model, optimizer)
    # DDP: leave together. Not in a finally block: after an error on one rank, nccl would wait for
    # the others, which are in the middle of a collective, and the error would stay hidden.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
