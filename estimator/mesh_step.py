"""Train a GPT on a mesh of four techniques at once, as far as memory and messages go: a script like
the others, made of their functions. It writes nothing, and ends with its last step.

    tp  pytorch_TP.py         a part of every matrix, and with --sequence-parallel of positions
    pp  pytorch_PP.py         some of the blocks; 1F1B, or of a single stage no micro-batches
    cp  pytorch_CP.py         a shard of every sequence, and one of its attentions
    dp  pytorch_FSDP_TP.py    fully_shard, over dp x cp: ranks with other tokens share parameters

Ranks that differ by tp only are neighbours, then come cp, dp and pp, as in torchtitan: what sends
most is closest. Also as there, fully_shard keeps a stage's parameters together from the first
micro-batch to the last, where it would gather them again for each (reshard_after_forward).
"""

import inspect
import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DistributedSampler

import common
import pytorch_CP
import pytorch_PP
import pytorch_TP
from common import attention
from libraries.pipelining import SCHEDULES


def settle(args) -> None:
    """Refuse what cannot be divided, and settle ``--microbatches``."""
    layers, heads, _, _, _ = common.size_of(args.model)
    if heads % args.tp:
        common.fail(f"--model {args.model}: {heads} heads are not divisible by tp {args.tp}")
    if args.attention == "ulysses" and heads // args.tp % args.cp:
        common.fail(
            f"--attention ulysses: {heads // args.tp} heads of {args.model} are not divisible by "
            f"cp {args.cp}; use --attention ring"
        )
    parts = (2 * args.cp if args.cp > 1 else 1) * (args.tp if args.sequence_parallel else 1)
    if args.context % parts:
        common.fail(f"--context {args.context} is not divisible by {parts} parts of a text")
    if layers < args.pp:
        common.fail(f"--model {args.model} has {layers} layers, too few for pp {args.pp}")
    if args.batch_size % args.dp:
        common.fail(f"--batch-size {args.batch_size} is not divisible by dp {args.dp}")
    if args.pp == 1:
        args.microbatches = 1
        return
    share = args.batch_size // args.dp
    fit = [n for n in range(args.pp, share + 1) if share % n == 0]
    if not fit:
        common.fail(
            f"--batch-size {args.batch_size} has no {args.pp} micro-batches for pp {args.pp} in "
            f"each of {args.dp} shares; use {args.dp * args.pp}"
        )
    if args.microbatches is None:
        args.microbatches = next((n for n in fit if n >= 2 * args.pp), fit[-1])
    if args.microbatches not in fit:
        common.fail(
            f"--microbatches {args.microbatches} is not for pp {args.pp} and a share of {share} "
            f"samples; use one of {', '.join(map(str, fit))}"
        )


class Within:
    """``torch.distributed`` as a script sees it whose world is one of our groups."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def __getattr__(self, name: str):
        found = getattr(dist, name)
        if inspect.isfunction(found) and "group" in inspect.signature(found).parameters:
            found = partial(found, group=self.group)
        return found

    isend, irecv = staticmethod(dist.isend), staticmethod(dist.irecv)  # P2POp wants these

    def P2POp(self, operation, tensor: torch.Tensor, peer: int) -> dist.P2POp:
        peer = dist.get_global_rank(self.group, peer)
        return dist.P2POp(operation, tensor, peer, self.group)


def shard_sequences(args, model: nn.Module, mesh: DeviceMesh) -> None:
    """CP: of every sequence this rank has a shard."""
    pytorch_CP.dist = attention.dist = Within(mesh.get_group())
    attend = pytorch_CP.ATTENTIONS[args.attention]()
    for block in model.blocks:
        block.attention.attend = attend
    own = attention.shard(torch.arange(args.context), 0)
    model.position.register_forward_pre_hook(lambda _, positions: (own.to(positions[0].device),))


def make_schedule(args, stage: nn.Module, mesh: DeviceMesh, classes: int, device: torch.device):
    """PP: 1F1B. Shapes are told, so no stage has to ask the one before."""
    samples = args.batch_size // args.dp // args.microbatches
    length = args.context // args.cp
    between = length // args.tp if args.sequence_parallel else length
    with torch.device("meta"):
        tokens = torch.empty(samples, length, dtype=torch.int64)
        hidden = torch.empty(samples, between, common.size_of(args.model)[2], requires_grad=True)
        logits = torch.empty(samples, classes, length, requires_grad=True)
    part = pipelining.PipelineStage(
        stage, mesh.get_local_rank(), args.pp, device,
        input_args=tokens if stage.is_first else hidden,
        output_args=logits if stage.is_last else hidden,
        group=mesh.get_group(),
    )  # fmt: skip
    if releasable := getattr(part, "_output_slot_is_releasable", None):
        with _disable_current_modes():
            plain = torch.empty(0)  # PyTorch 2.15 frees what it has sent, but no fake tensors
        part._output_slot_is_releasable = lambda _: releasable(plain)
    return SCHEDULES["1f1b"](
        part,
        args.microbatches,
        loss_fn=lambda logits, labels: F.cross_entropy(logits, labels) / args.microbatches,
        scale_grads=False,
    )


def connect_ends(stages: int) -> dist.ProcessGroup:
    """The first and the last stage, which with --tie have a copy each of one matrix. All ranks make
    all groups."""
    ranks = dist.get_world_size()
    of_stage = ranks // stages
    ends = [[number, ranks - of_stage + number] for number in range(of_stage)]
    return dist.new_subgroups_by_enumeration(ends)[0]


def clip_grad_norm(model: nn.Module, max_norm: float, stages, counted_elsewhere: set) -> None:
    """``nn.utils.clip_grad_norm_`` by the length of the gradients of all ranks together."""
    alike = {}
    for p in model.parameters():
        alike.setdefault(getattr(p, "device_mesh", None), []).append(p)
    own = [[p.grad for p in group if p not in counted_elsewhere] for group in alike.values()]
    norms = [nn.utils.get_total_norm(gradients) for gradients in own if gradients]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    squares = torch.stack(norms).square().sum()
    if stages is not None:
        dist.all_reduce(squares, group=stages)
    for group in alike.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, squares.sqrt())


def make_stage(args, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """What this rank computes; what it does not hold is taken out of the model."""
    if args.tp > 1:
        pytorch_TP.parallelize(model, mesh["tp"], args.sequence_parallel)
    number = mesh["pp"].get_local_rank()
    stage = pytorch_PP.Stage(model, number, args.pp)
    pytorch_PP.keep_only({number: stage}, model)
    if args.dp * args.cp > 1:
        again = {} if args.pp == 1 else {"reshard_after_forward": False}
        for block in stage.blocks:
            fully_shard(block, mesh=mesh["shares"], **again)
        fully_shard(stage, mesh=mesh["shares"], **again)
    if args.tie and args.pp > 1 and stage.is_first:  # of two names it has replaced what one means
        model.head.weight = stage.token.weight
    if args.tie and args.pp > 1 and stage.is_last:
        model.token.weight = stage.head.weight
    return stage


def parse_args():
    parser = common.argument_parser(__doc__, only_gpt=True)
    for name in ("dp", "tp", "pp", "cp"):
        parser.add_argument(f"--{name}", type=common.number(int, 1), default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--microbatches", type=common.number(int, 1))
    parser.add_argument("--attention", choices=["ring", "allgather", "ulysses"], default="ring")
    return common.parse_args(parser)


def main():
    args = parse_args()
    common.prepare_process(args)
    settle(args)
    device = common.get_device(args, int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=common.make_store(args),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=args.timeout),
    )
    common.announce(args, device, readers=args.dp)
    common.seed_everything(args.seed, args.deterministic)
    dp, tp, pp, cp = args.dp, args.tp, args.pp, args.cp
    mesh = init_device_mesh(device.type, (pp, dp * cp, tp), mesh_dim_names=("pp", "shares", "tp"))
    share = mesh["shares"].get_local_rank() // cp

    train_set, _ = common.make_datasets(args)
    sampler = DistributedSampler(train_set, num_replicas=dp, rank=share, drop_last=True)
    loader = common.make_loader(args, train_set, args.batch_size // dp, sampler, drop_last=True)

    model = common.make_model(args, train_set.classes, channels_last=False)
    if cp > 1:
        names = ("pp", "dp", "cp", "tp")
        shard_sequences(
            args, model, init_device_mesh(device.type, (pp, dp, cp, tp), mesh_dim_names=names)["cp"]
        )
    stage = make_stage(args, model, mesh)
    model.to(device)
    shared, elsewhere, stages = set(), set(), mesh["pp"].get_group() if pp > 1 else None
    if pp > 1:
        schedule = make_schedule(args, stage, mesh["pp"], len(train_set.classes), device)
    if pp > 1 and args.tie:
        ends = connect_ends(pp)
        shared = {model.token.weight} if stage.is_first or stage.is_last else set()
        elsewhere = set() if stage.is_first else shared

    optimizer = common.make_optimizer(args, model, fused=tp == 1)
    scheduler = common.make_scheduler(args, optimizer, len(loader))
    run = common.Run(args, device, loader)
    run.load_sharded_snapshot(model, optimizer, scheduler)
    model.train()
    for tokens, labels in run.batches(loader, 0):
        if cp > 1:
            tokens, labels = attention.shard(tokens), attention.shard(labels)
        optimizer.zero_grad()
        with loss_parallel():
            if pp == 1:
                logits = stage(tokens)
                loss = F.cross_entropy(logits, labels)
                loss.backward()
            else:
                inputs = [tokens] if stage.is_first else []
                schedule.step(*inputs, target=labels, losses=[], return_outputs=False)
        for parameter in shared:
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            dist.all_reduce(local, group=ends)
        if args.sequence_parallel:
            pytorch_TP.add_up_gradients(model)
        if args.clip_grad:
            clip_grad_norm(model, args.clip_grad, stages, elsewhere)
        optimizer.step()
        scheduler.step()


if __name__ == "__main__":
    main()
