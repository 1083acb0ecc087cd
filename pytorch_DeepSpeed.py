"""Train on several devices with DeepSpeed: ZeRO stages 0 to 3, chosen in a JSON file.

Differs     from pytorch_torchrun_DDP.py: DeepSpeed's engine takes the place of DDP. It shards the
            optimizer (stage 1 of ZeRO), also the gradients (2), also the parameters (3).
            Lines tagged "# DeepSpeed:".
Command:    deepspeed pytorch_DeepSpeed.py --deepspeed_config config/zero_stage2_config.json
            deepspeed --num_gpus 2 pytorch_DeepSpeed.py (or torchrun --nproc_per_node=2, or python)
Use it      when the model does not fit one device, or to try the stages; with offload, when it fits
            no number of them. pytorch_FSDP.py does what stage 3 does, and needs PyTorch alone.
Holds       per parameter, with K = 4 (SGD with momentum) or 8 (AdamW) for the optimizer: stage 0,
            4 + 4 + K bytes, as DDP; stages 1 and 2, 4 + (4 + K) / N and a second copy of the
            weights, 4 / N; stage 3, (4 + 8 + K) / N and the copy, 4 / N. During backward also a
            bucket of gradients; stage 1 holds all of them, 4, until backward ends.
Sends       per step and rank, with a = 4 * (N - 1) / N bytes per parameter: stage 0, all-reduces of
            the gradients, 2a; stages 1 and 2, these and an all-gather of the weights, 3a; stage 3,
            all-gathers of the weights and a reduce-scatter of the gradients, 3a by its paper
            (arXiv:1910.02054), 2a counted on ResNet-18.
"""

import json
import os
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DistributedSampler

import common
import fault_tolerance


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__)
    parser.add_argument("--local-rank", "--local_rank")  # DeepSpeed: its launcher passes it
    parser.add_argument(
        "--deepspeed_config", "--deepspeed-config", metavar="FILE",
        default="config/zero_stage2_config.json", help="(default: %(default)s)",
    )  # fmt: skip
    args = common.parse_args(parser)
    if args.double:
        common.fail("--double: DeepSpeed computes in float32 at most; leave it out")
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
    config = read_config(args, world_size)
    common.announce(args, device)
    common.seed_everything(args.seed + rank, args.deterministic)  # DDP: dropout differs by rank
    deepspeed = import_deepspeed(args, device, config)

    # 2. Data
    train_set, eval_set = common.make_datasets(args)
    batch_size = args.batch_size // world_size  # DDP: this rank's share of the global batch
    # DDP: all ranks shuffle alike; rank r of N takes every N-th image, starting with the r-th
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = common.make_loader(args, train_set, batch_size, sampler, drop_last=True)
    eval_sampler = DistributedSampler(eval_set, shuffle=False)  # DDP: likewise, in order
    eval_loader = common.make_loader(args, eval_set, batch_size, eval_sampler)

    # 3. Model
    model = common.make_model(args, train_set.classes).to(device)

    # 4. Optimizer and schedule
    model, _, _, scheduler = deepspeed.initialize(  # DeepSpeed: sends rank 0's weights to all
        model=model,
        model_parameters=model.parameters(),
        # DeepSpeed: calls these two, or makes what the file names
        optimizer=None if "optimizer" in config else partial(common.make_optimizer, args),
        lr_scheduler=None
        if "scheduler" in config
        else partial(common.make_scheduler, args, steps_per_epoch=len(train_loader)),
        config=config,
    )
    optimizer = model.basic_optimizer  # DeepSpeed: PyTorch's, which now updates this rank's part
    dtype = next(model.parameters()).dtype  # DeepSpeed: bfloat16 if the file says so
    run = common.Run(args, device, train_loader)
    load_snapshot(run, model, optimizer, None if "scheduler" in config else scheduler)
    held = watch(run, model, optimizer)

    # 5. Train
    for epoch in range(run.start_epoch, run.epochs):
        sampler.set_epoch(epoch)  # DDP: a new order every epoch, the same on all ranks
        model.train()
        for images, labels in run.batches(train_loader, epoch):
            logits = model(images.to(dtype)).float()  # DeepSpeed: stage 3 gathers layer by layer
            loss = F.cross_entropy(logits, labels)
            if run.all_finite(
                loss, model, gradients=False
            ):  # DeepSpeed: has its own place for them
                model.backward(loss)  # DeepSpeed: averages the gradients, bucket by bucket
                model.step()  # DeepSpeed: steps optimizer and scheduler, and clears the gradients
                run.log(loss)
            if run.snapshot_is_due():  # every --snapshot-every steps, or to stop
                save_snapshot(run, model, scheduler)  # DeepSpeed: each rank writes its part

        # 6. Evaluate
        for buffer in model.module.buffers():
            dist.broadcast(buffer, src=0)  # DDP: BatchNorm saw other images on each rank
        run.report(common.evaluate(model, eval_loader, device))  # DDP: on every rank
        save_snapshot(run, model, scheduler)  # DeepSpeed: each rank writes its part

    # 7. Save and report
    weights = model.module.state_dict()  # DeepSpeed: complete, but for stage 3 and bfloat16
    for name, parameter in model.module.named_parameters():
        # DeepSpeed: gathers one tensor at a time, of the fp32 copy; stage 0 has none
        whole = deepspeed.utils.safe_get_full_fp32_param(parameter)
        if whole is not None and rank == 0:
            weights[name] = whole.cpu()
    if rank == 0:
        common.save_model(weights, args.output_dir)
    run.finish(model, optimizer, **held)
    # DDP: all leave together. Not in a finally: after an error on one rank, nccl would wait for the
    # others, which are in the middle of a collective, and the error would stay unseen.
    dist.destroy_process_group()


def read_config(args, world_size: int) -> dict:
    """The JSON file, and in it the batch size, which is the command line's to say."""
    path = args.deepspeed_config
    try:
        config = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:  # ValueError: not JSON, or not even text
        common.fail(f"--deepspeed_config {path} is not a JSON file that can be read ({error})")
    if not isinstance(config, dict):
        common.fail(f"--deepspeed_config {path} holds a {type(config).__name__}, not an object")
    sizes = {
        "train_batch_size": args.batch_size,
        "train_micro_batch_size_per_gpu": args.batch_size // world_size,
        "gradient_accumulation_steps": 1,
    }
    for name, ours in sizes.items():
        if config.get(name, "auto") not in ("auto", ours):
            common.fail(
                f"--deepspeed_config {path} has {name} {config[name]}, and --batch-size "
                f"{args.batch_size} on {world_size} ranks makes it {ours}; leave it out of the file"
            )
    for name in ("optimizer", "scheduler"):
        if name in config:
            common.say(f"{name}: that of {path}; the flags for it have no effect")
    return {"log_level": "error"} | config | sizes


def import_deepspeed(args, device: torch.device, config: dict):
    """Not at the top: it looks for a device while it is imported, and we know which one it is."""
    os.environ["DS_ACCELERATOR"] = device.type
    try:
        import deepspeed
    except ImportError as error:
        common.fail(f"DeepSpeed cannot be imported ({error}); pip install deepspeed")
    if device.type == "cpu":
        # It would compile an all-reduce through shared memory for half a minute, which only serves
        # inference. With no op in this list it does without, and needs no compiler.
        deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)  # takes over the group
    try:
        deepspeed.DeepSpeedConfig(config)
    except Exception as error:  # of DeepSpeed, of pydantic or an assertion
        common.fail(f"--deepspeed_config {args.deepspeed_config}: {error}")
    return deepspeed


def load_snapshot(run: common.Run, model, optimizer, scheduler) -> None:
    path, state = run.find_snapshot("scheduler")
    if path:
        try:
            fault_tolerance.check_deepspeed(path / "zero")
            found, _ = model.load_checkpoint(path, "zero")
        except Exception as error:  # untrusted, or of another stage or number of ranks
            why = f"{type(error).__name__}: {error}"[:200]
            common.fail(f"--resume {path} cannot be loaded ({why}); give another, or none")
        if found is None:
            common.fail(f"--resume {path} holds no checkpoint of DeepSpeed; give another, or none")
    run.keep_buffers(model)
    run.start(optimizer, scheduler, path, state)


def save_snapshot(run: common.Run, model, scheduler) -> None:
    """Write a snapshot: DeepSpeed's checkpoint, and beside it the state of the run."""

    def write(folder: Path) -> None:
        with fault_tolerance.raise_at_the_end(model.checkpoint_engine, "save"):
            model.save_checkpoint(folder, "zero", save_latest=False)
        if common.RANK == 0:
            (folder / "latest").write_text("zero")  # for zero_to_fp32.py

    states = [value for state in model.basic_optimizer.state.values() for value in state.values()]
    tensors = [value for value in states if torch.is_tensor(value)]
    tensors += [p for group in model.basic_optimizer.param_groups for p in group["params"]]
    size = common.count_bytes(model.parameters())
    size += common.WORLD_SIZE * common.count_bytes(tensors)
    run.write_snapshot(write, size, scheduler=scheduler)


def watch(run: common.Run, model, optimizer) -> dict[str, list[torch.Tensor]]:
    """The tensors of this rank, by name, to be counted: DeepSpeed keeps them in places of its own,
    and frees the gradients while it steps. So they are noted just before, in the last step."""
    parameters = list(model.parameters())
    held = {"parameters": parameters, "gradients": [], "fp32_copy": []}
    stage3 = hasattr(parameters[0], "ds_tensor")
    if stage3:  # which keeps small parameters whole besides
        held["parameters"] = [p.ds_tensor for p in parameters]
        held |= {"gradient_buffer": [], "small_parameters": []}
        if dist.get_world_size() > 1:  # at one rank they are its share
            held["small_parameters"] += [p for p in parameters if p.ds_persist]

    def before_step(optimizer, *_):
        if run.step == run.total_steps:
            updated = [p for group in optimizer.param_groups for p in group["params"]]
            held["gradients"] += [p.grad for p in updated]
            held["fp32_copy"] += [p for p in updated if p not in set(parameters)]
            if stage3:  # what it reduces the gradients into, before it copies them
                held["gradient_buffer"].append(model.optimizer.grad_partitions_flat_buffer)

    optimizer.register_step_pre_hook(before_step)
    return held


if __name__ == "__main__":
    main()
