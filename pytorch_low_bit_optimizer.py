"""Train with FSDP and AdamW whose moments take 8 bits; with weights in bfloat16, 6 bytes in all.

Differs     from pytorch_FSDP.py: between steps, AdamW's moments are float8 numbers with a scale per
            --block of a row, rounded stochastically. With --bf16-weights, weights and gradients
            are in bfloat16, without an fp32 copy. Lines tagged "# low-bit:".
Command:    torchrun --nproc_per_node=4 pytorch_low_bit_optimizer.py
            torchrun --nproc_per_node=4 pytorch_low_bit_optimizer.py --dtype bfloat16 --bf16-weights
Use it      when weights, gradients and optimizer state do not fit, and there are no more GPUs. Not
            when they do: each rounding is noise, and these lines take longer than a fused AdamW.
Holds       per parameter 4/N bytes, 4/N for its gradient, and (2 + 8/256)/N for the optimizer; with
            --bf16-weights 2/N, 2/N and the same; and one or two unsharded blocks.
Sends       what pytorch_FSDP.py sends.
"""

import math
import os
import zlib
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import tensor as dtensor
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DistributedSampler

import common
from jobs.model_parts import units_of

DROPPED = {torch.bfloat16: 16, torch.float8_e4m3fn: 20}  # of the 23 bits of an fp32 mantissa


def noise_of(x: Tensor, first: int, salt: str) -> Tensor:
    """32 random bits for each element of a shard, which begins with element ``first`` of its
    parameter: a hash of its place. So they do not depend on the number of ranks, every replica has
    the same, and so has a run that resumes. A generator per rank would give none of this."""
    places = torch.arange(first, first + x.numel(), device=x.device)
    noise = (places * 0x9E3779B1 + zlib.crc32(salt.encode())) & 0xFFFFFFFF
    for _ in range(2):
        noise = (((noise >> 16) ^ noise) * 0x45D9F3B) & 0xFFFFFFFF
    return ((noise >> 16) ^ noise).view_as(x)


def round_to(dtype: torch.dtype, x: Tensor, noise: Tensor | None) -> Tensor:
    """Round fp32 to one of the two neighbours in ``dtype``, the nearer one more often, so that the
    mean is exact: add noise to the bits that are dropped. Without noise, to the nearest; so are
    numbers of float8 below 2**-6, which have fewer digits."""
    if noise is not None:
        step = 2 ** DROPPED[dtype]
        noise = (noise & (step - 1)).int()
        bits = x.view(torch.int32) + noise  # low-bit: may carry into the digits that stay
        x = (bits & -step).view(torch.float32)
    return x.to(dtype)


def pack(x: Tensor, block: int, noise: Tensor | None) -> Tensor:
    """Moments ``[rows, columns]`` as bytes ``[rows, columns + 4 * columns / block]``: codes in
    float8, then the scales of the row's blocks in fp32. A row needs no other row, so the bytes can
    be sharded by rows. A vector (of a norm) stays in fp32: ``[elements, 4]``."""
    if x.ndim == 1:
        return x.float().unsqueeze(1).view(torch.uint8)
    blocks = x.float().unflatten(1, (-1, block))
    scales = blocks.abs().amax(2, keepdim=True) / 448  # low-bit: the largest number of float8 e4m3
    scaled = (blocks / scales.clamp(min=1e-38)).flatten(1)
    scaled = scaled.clamp(-448, 448)  # low-bit: rounding may exceed it, and the next number is NaN
    codes = round_to(torch.float8_e4m3fn, scaled, noise)
    return torch.cat([codes.view(torch.uint8), scales.flatten(1).view(torch.uint8)], dim=1)


def unpack(packed: Tensor, shape: torch.Size, block: int) -> Tensor:
    """The moments of :func:`pack`, in fp32."""
    if len(shape) == 1:
        return packed.contiguous().view(torch.float32).squeeze(1)
    codes, scales = packed.split([shape[1], shape[1] // block * 4], dim=1)
    blocks = codes.contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (-1, block))
    return (blocks * scales.contiguous().view(torch.float32).unsqueeze(2)).flatten(1)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, dtensor.DTensor) else tensor


def first_row(p: Tensor) -> int:
    """The row of the parameter with which this rank's shard begins."""
    if not isinstance(p, dtensor.DTensor):
        return 0
    mesh = p.device_mesh
    return -(-len(p) // mesh.size()) * mesh.get_local_rank()  # low-bit: as torch.chunk() divides


class AdamW8bit(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) for tensors or shards of rows. Stored between steps: the
    mean of the gradients, and the root of the mean of their squares, whose range is as small."""

    def __init__(self, groups: list[dict], block: int, stochastic: bool, lr: float, weight_decay):
        self.stochastic = stochastic
        options = {"betas": (0.9, 0.999), "eps": 1e-8, "steps": 0, "block": block}
        super().__init__(groups, options | {"lr": lr, "weight_decay": weight_decay})

    def empty(self, p: Tensor, block: int) -> Tensor:
        """Bytes of zeros, sharded as the parameter is."""
        wide = 4 if p.ndim == 1 else p.shape[1] + p.shape[1] // block * 4
        if not isinstance(p, dtensor.DTensor):
            return torch.zeros(len(p), wide, dtype=torch.uint8, device=p.device)
        layout = {"device_mesh": p.device_mesh, "placements": p.placements}
        return dtensor.zeros(len(p), wide, dtype=torch.uint8, **layout)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        number = 0
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                number += 1
                if p.grad is not None:
                    self.update(p, group, f"{number} {group['steps']}")

    def update(self, p: Tensor, group: dict, salt: str) -> None:
        """One step of a parameter. ``salt`` names parameter and step, alike on all ranks."""
        state = self.state[p]
        block = group["block"]  # low-bit: of the snapshot, if there is one
        if not state:
            state |= {"mean": self.empty(p, block), "root": self.empty(p, block)}
        for name, packed in state.items():  # low-bit: load_state_dict() has cast them to the dtype
            state[name] = packed.to(torch.uint8)  # of the weight, which is exact for bytes
        weight = local(p)
        if not weight.numel():  # low-bit: more ranks than rows
            return
        gradient = local(p.grad).to(torch.promote_types(p.dtype, torch.float32))
        begin = first_row(p) * weight[0].numel()
        mean = unpack(local(state["mean"]), weight.shape, block).to(gradient.dtype)
        root = unpack(local(state["root"]), weight.shape, block).to(gradient.dtype)
        mean = mean.lerp(gradient, 1 - group["betas"][0])
        square = root.square().lerp(gradient.square(), 1 - group["betas"][1])
        for name, value in (("mean", mean), ("root", square.sqrt())):
            noise = noise_of(value, begin, f"{salt} {name}") if self.stochastic else None
            local(state[name]).copy_(pack(value, block, noise))
        corrections = [1 - beta ** group["steps"] for beta in group["betas"]]
        change = (mean / corrections[0]) / ((square / corrections[1]).sqrt() + group["eps"])
        new = weight.to(gradient.dtype) * (1 - group["lr"] * group["weight_decay"])
        new -= group["lr"] * change
        if weight.dtype == torch.bfloat16:  # low-bit: which would round small updates away
            new = round_to(p.dtype, new, noise_of(new, begin, salt) if self.stochastic else None)
        weight.copy_(new)


def make_optimizer(args, model: nn.Module) -> AdamW8bit:
    """With the flags of a script; ``--block`` has to divide the columns of each matrix."""
    widths = {p.shape[1]: name for name, p in model.named_parameters() if p.ndim > 1}
    block = args.block or math.gcd(256, *widths)
    for width, name in widths.items():
        if block < 1 or width % block:
            why = f"does not divide the {width} columns of {name}"
            common.fail(f"--block {block} {why}; use {math.gcd(256, *widths)}")
    stochastic = args.rounding == "stochastic"
    groups = common.parameter_groups(args, model)
    return AdamW8bit(groups, block, stochastic, args.lr, args.weight_decay)


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__, only_gpt=True)
    parser.add_argument("--local-rank", "--local_rank")  # FSDP: torch.distributed.launch passes it
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32",
        help="dtype of compute and of the gathered weights (default: float32)",
    )  # fmt: skip
    parser.add_argument("--bf16-weights", action="store_true", help="store weights in bfloat16")
    parser.add_argument(
        "--rounding", choices=["stochastic", "nearest"], default="stochastic",
        help="how moments and bfloat16 weights are rounded (default: stochastic)",
    )  # fmt: skip
    parser.add_argument(
        "--block", type=int, metavar="N",
        help="moments of a row that share a scale (default: 256, or less if it does not divide it)",
    )  # fmt: skip
    args = common.parse_args(parser)
    if args.optimizer != "adamw":
        common.fail(f"--optimizer {args.optimizer}: this is AdamW; leave the flag out")
    if args.bf16_weights and args.dtype != "bfloat16":
        common.fail("--bf16-weights computes in bfloat16; add --dtype bfloat16")
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
    for weight in model.parameters() if args.bf16_weights else ():  # low-bit: not the buffers
        weight.data = weight.to(torch.bfloat16)  # low-bit: gradients too; their sums stay in fp32
    mesh = init_device_mesh(device.type, (world_size,))
    policy = MixedPrecisionPolicy()
    if args.dtype == "bfloat16":  # FSDP: gathers and computes in bfloat16, reduces in fp32
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for unit in units_of(model):  # FSDP: blocks, embedding, head: gathered one at a time
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)  # FSDP: the other parameters
    model.to_empty(device=device)  # FSDP: memory for this rank's shards
    common.init_weights(args, model, train_set.classes)  # FSDP: each rank fills its shards

    # 4. Optimizer and schedule
    optimizer = make_optimizer(args, model)  # low-bit: instead of torch.optim.AdamW
    args = common.replace(args, optimizer="adamw-8bit")  # low-bit: AdamW cannot resume it
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
