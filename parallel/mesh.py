"""The flags of pytorch_ND_parallel.py, and checks that its device mesh divides everything."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from harness.cli import ArgumentParser, fail, need_compiler, number
from harness.measure import whole
from harness.settings import fill
from parallel.pipelining import IN_A_V, SCHEDULES


def free_or_keep(text: str) -> bool | int:
    """The value of ``reshard_after_forward`` for ``fully_shard``."""
    return {"yes": True, "no": False}[text] if text in ("yes", "no") else number(int, 2)(text)


def add_flags(parser: ArgumentParser, attentions: Iterable[str]) -> None:
    flag = parser.add_argument
    positive = number(int, 1)
    # fmt: off
    flag("--dp-replicate", type=positive, default=1, metavar="N", help="replicas (default: 1)")
    flag("--dp-shard", type=positive, metavar="N",
         help="ranks that shard a replica (default: world size / other dimensions)")
    flag("--tp", type=positive, default=1, metavar="N",
         help="ranks that split each weight matrix (default: 1)")
    flag("--sequence-parallel", action="store_true",
         help="also split norms, dropout and residuals, along the sequence")
    flag("--pp", type=positive, default=1, metavar="N", help="ranks of the pipeline (default: 1)")
    flag("--pipeline-schedule", choices=SCHEDULES, default="1f1b", help="schedule (default: 1f1b)")
    flag("--microbatches", type=positive, metavar="M",
         help="micro-batches (default: at least two per rank)")
    flag("--cp", type=positive, default=1, metavar="N",
         help="ranks that split each sequence (default: 1)")
    flag("--ep", type=positive, default=1, metavar="N",
         help="sharding ranks that divide the experts (default: 1)")
    flag("--attention", choices=attentions, default="ring",
         help="how ranks exchange keys and values (default: ring)")
    flag("--ac", choices=["none", "selective", "full"], default="none",
         help="recompute each block in backward; selective: except attention and "
         "every second matmul (default: none)")
    flag("--offload-activations", action="store_true",
         help="with --ac full: keep blocks' inputs in CPU memory")
    flag("--loss-chunks", type=positive, metavar="N",
         help="compute the loss in N chunks of tokens (default: off)")
    flag("--compile", action="store_true", help="compile each block")
    flag("--dtype", choices=["float32", "bfloat16"], default="float32",
         help="dtype of compute and of the gathered weights (default: float32)")
    flag("--accumulate", type=positive, default=1, metavar="K",
         help="accumulate gradients over K micro-batches (default: 1)")
    flag("--reshard-after-forward", type=free_or_keep, metavar="K",
         help="free a block's gathered parameters after its forward (yes), keep them (no), or "
         "keep them sharded over K adjacent ranks (default: yes; with --pp no)")
    flag("--keep-last", action="store_true", help="keep the last block's gathered parameters")
    flag("--prefetch", type=number(int, 0), default=0, metavar="N",
         help="gather the parameters of N blocks ahead, in forward and backward (default: 0)")
    flag("--offload", action="store_true", help="keep parameters and optimizer in CPU memory")
    # fmt: on


def resolve(args, size, world_size: int):
    """Fill in ``--dp-shard`` and ``--reshard-after-forward``, and check all divisions."""
    others = args.dp_replicate * args.tp * args.pp * args.cp
    mesh = f"--dp-replicate {args.dp_replicate} x --tp {args.tp} x --pp {args.pp} x --cp {args.cp}"
    if world_size % others:
        fail(f"{mesh} does not divide {world_size} ranks; use {others} ranks, or a multiple")
    args = fill(args, dp_shard=world_size // others)
    if (ranks := args.dp_shard * others) != world_size:
        use = f"there are {world_size}; use --dp-shard {world_size // others}"
        fail(f"{mesh} x --dp-shard {args.dp_shard} makes {ranks} ranks, and {use}")
    if args.attention == "pytorch" and (args.device == "cpu" or args.double):
        fail("--attention pytorch needs a GPU and no --double; use --attention ring")
    if args.ep > 1:
        check_experts(args, size, args.ep, args.dp_shard * args.cp)
    free = args.reshard_after_forward
    shards = args.dp_shard * args.cp
    if args.pp > 1 and free:
        fail("--reshard-after-forward: in a pipeline each micro-batch would gather again; use no")
    if free and free is not True and (free >= shards or shards % free):
        fail(f"--reshard-after-forward {free} does not divide {shards} shards; use yes, no, or a "
             f"divisor of {shards}")  # fmt: skip
    if args.ep > 1 and free and free is not True:
        fail(f"--reshard-after-forward {free}: with --ep, experts have other shards; use yes or no")
    args = fill(args, reshard_after_forward=args.pp == 1)
    heads = size.kv_heads
    if args.attention == "ulysses" and heads // args.tp % args.cp:
        why = f"{heads // args.tp} heads cannot be divided among --cp {args.cp}"
        fail(f"--attention ulysses: {why}; use --attention ring")
    parts = (2 * args.cp if args.cp > 1 else 1) * (args.tp if args.sequence_parallel else 1)
    if args.context % parts:
        near = max(args.context // parts, 1) * parts
        fail(f"--context {args.context} is not divisible by {parts}; use --context {near}")
    shares = args.dp_replicate * args.dp_shard * args.accumulate
    if args.batch_size % shares:
        near = max(args.batch_size // shares, 1) * shares
        why = f"--batch-size {args.batch_size} is the global batch and is not divisible by"
        fail(f"{why} {shares}, shards times --accumulate; use --batch-size {near}")
    check_long_context(args)
    if args.compile:
        need_compiler(args.device)
    if args.microbatches and args.pp == 1:
        fail(f"--microbatches {args.microbatches} is for a pipeline; use --accumulate")
    if args.pp == 1 or args.pipeline_schedule not in IN_A_V:
        return args
    schedule = f"--pipeline-schedule {args.pipeline_schedule}"
    if args.tie:
        fail(f"--tie: with {schedule} one rank has both stages; use another schedule")
    if args.compile:
        fail(f"--compile does not support {schedule}, whose backward has two parts; use another")
    if args.ac == "selective":
        fail(f"--ac selective does not work with {schedule}, whose backward has two parts; "
             "use --ac full or another schedule")  # fmt: skip
    return args


def check_long_context(args) -> None:
    """Check what ``--offload-activations`` and ``--loss-chunks`` cannot be combined with."""
    if args.offload_activations and args.ac != "full":
        fail(f"--offload-activations keeps the inputs of recomputed blocks, and --ac is {args.ac}; "
             "use --ac full")  # fmt: skip
    if args.offload_activations and args.compile:
        fail("--offload-activations: a compiled block saves its input itself; leave out --compile")
    if args.loss_chunks and args.pp > 1:
        fail(f"--loss-chunks {args.loss_chunks}: a pipeline computes the loss of each micro-batch; "
             "use --microbatches")  # fmt: skip
    if args.loss_chunks and args.sequence_parallel and args.tp > 1:
        why = f"with --sequence-parallel, each rank has the logits of 1/{args.tp} of the vocabulary"
        fail(f"--loss-chunks {args.loss_chunks}: {why}; leave out one of them")


def check_experts(args, size, ep: int, ranks: int) -> None:
    """Check that ``ep`` of the ranks can divide the experts, and the others the width."""
    if not args.experts:
        fail(f"--ep {ep} is for a mixture of experts; add --experts 8")
    if ranks % ep:
        fail(f"--ep {ep} does not divide {ranks} ranks that shard; use a divisor")
    if args.experts % ep:
        near = max(args.experts // ep, 1) * ep
        fail(f"--experts {args.experts} are not divisible by {ep} ranks; use {near}")
    if size.width % (ranks // ep):
        why = f"{ranks // ep} ranks shard each expert and do not divide its width {size.width}"
        fail(f"--ep {ep}: {why}; use --ep {ranks}")


def gather_weights(model: nn.Module, stages: int) -> dict[str, torch.Tensor]:
    """Gather all weights in the CPU memory of rank 0, which alone returns them all. All ranks call
    it. ``stages``: ranks of the pipeline, or 1."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    is_first = rank % (world_size // stages) == 0  # ND: of its stage
    weights = {}
    for name, tensor in model.state_dict().items():
        tensor = whole(tensor)
        if is_first:
            weights[name] = tensor.cpu()
    if stages == 1:
        return weights
    # ND: through the CPU: nccl would gather all weights on rank 0's GPU. The group has all ranks:
    # those that are not in a gloo group wait for ever if the default group is bound to a GPU
    gloo = dist.new_group(backend="gloo")
    parts = [None] * world_size if rank == 0 else None
    dist.gather_object({name: t.to("meta") for name, t in weights.items()}, parts, group=gloo)
    # ND: one tensor at a time: gather_object would hold several copies of all of them
    if rank > 0:
        for tensor in weights.values():
            dist.send(tensor.contiguous(), 0, group=gloo)
        return weights
    for sender, theirs in enumerate(parts[1:], 1):
        for name, tensor in theirs.items():
            weights[name] = torch.empty_like(tensor, device="cpu")
            dist.recv(weights[name], sender, group=gloo)
    return weights
