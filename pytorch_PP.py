"""Train a GPT on several devices as a pipeline: each rank holds a part of its blocks.

Differs     from pytorch_torchrun_DDP.py: ranks share out the model, not the batch. A batch is cut
            into micro-batches, which follow each other through the ranks, forward and back; in
            which order is the schedule's to say. Lines tagged "# PP:".
Command:    torchrun --nproc_per_node=4 pytorch_PP.py
            torchrun --nproc_per_node=4 pytorch_PP.py --pipeline-schedule zbv
Use it      when a model does not fit one device, and the links are slow, as between machines: only
            activations cross them. Not when it fits: at both ends of a step ranks wait for each
            other, the less the more micro-batches there are.
Holds       per parameter 4/N bytes, 4/N for its gradient, and 4/N (SGD with momentum) or 8/N
            (AdamW) for the optimizer, the first and the last rank more: embedding and head. And the
            activations of its blocks: gpipe of the whole batch, 1f1b of N micro-batches at most.
Sends       per step and rank, 4 bytes per token and width to the next one, and as many back; twice
            that with two stages on a rank (interleaved, zbv). Nothing per parameter.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DistributedSampler

import common

SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,  # all forward, then all back (Huang et al. 2019)
    "1f1b": pipelining.Schedule1F1B,  # back as soon as can be: fewer activations are kept
    "interleaved": pipelining.ScheduleInterleaved1F1B,  # two stages a rank: shorter waits
    "zbv": pipelining.ScheduleZBVZeroBubble,  # and gradients of weights where it would wait
}


def ranks_of_stages(schedule: str, ranks: int) -> list[int]:
    """The rank that holds each stage: each one, two in a loop (0 1 0 1), or in a V (0 1 1 0)."""
    once = list(range(ranks))
    return once + {"interleaved": once, "zbv": once[::-1]}.get(schedule, [])


def settle(args, ranks: int) -> None:
    """Settle ``--microbatches``, and refuse what would let one rank raise and the others wait."""
    schedule, batch = args.pipeline_schedule, args.batch_size
    stages, layers = len(ranks_of_stages(schedule, ranks)), common.size_of(args.model)[0]
    if layers < stages:
        common.fail(
            f"--model {args.model} has {layers} layers, and --pipeline-schedule {schedule} makes "
            f"{stages} stages of them on {ranks} ranks; use fewer ranks, or more layers"
        )
    fit = [n for n in range(1, batch + 1) if batch % n == 0]  # each has as many samples
    if schedule == "1f1b":
        fit = [n for n in fit if n >= ranks]
    if schedule == "interleaved":  # it takes them in rounds, of at least as many as there are ranks
        fit = [n for n in fit if n % max(1, n // ranks) == 0]
    if not fit:
        common.fail(f"--batch-size {batch} has no micro-batch for each of {ranks} ranks; use more")
    if args.microbatches is None:
        args.microbatches = next((n for n in fit if n >= 2 * ranks), fit[-1])
    if args.microbatches not in fit:
        common.fail(
            f"--microbatches {args.microbatches} is not for --pipeline-schedule {schedule} with "
            f"--batch-size {batch} on {ranks} ranks; use one of {', '.join(map(str, fit))}"
        )


class Stage(nn.Module):
    """Some of the blocks, in the first stage the embeddings, in the last one the head."""

    def __init__(self, model: nn.Module, number: int, stages: int):
        super().__init__()
        begin, end = (len(model.blocks) * n // stages for n in (number, number + 1))
        self.blocks = model.blocks[begin:end]
        self.is_first, self.is_last = number == 0, number == stages - 1
        if self.is_first:
            self.token, self.position, self.dropout = model.token, model.position, model.dropout
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens, or what the stage before returned, to what the next one takes, or to logits."""
        if self.is_first:
            positions = torch.arange(x.shape[1], device=x.device)
            x = self.dropout(self.token(x) + self.position(positions))
        x = self.blocks(x)
        return self.head(self.norm(x)).transpose(1, 2).contiguous() if self.is_last else x


def keep_only(stages: dict[int, Stage], model: nn.Module) -> None:
    """Take out of the model what other ranks hold. What stays has the names that it had."""
    kept = {parameter for stage in stages.values() for parameter in stage.parameters()}
    for number, block in enumerate(model.blocks):
        if kept.isdisjoint(block.parameters()):
            model.blocks[number] = nn.Identity()  # or those after it would have other numbers
    for name in ("token", "position", "norm", "head"):  # with --tie token and head are one
        if kept.isdisjoint(getattr(model, name).parameters()):
            delattr(model, name)


def make_schedule(args, stages: dict[int, Stage], count: int, classes: int, device: torch.device):
    """The order in which this rank computes, sends and receives."""
    samples = args.batch_size // args.microbatches
    # Shapes between stages. Else a first forward would find them out, and draw dropout for it.
    with torch.device("meta"):
        tokens = torch.empty(samples, args.context, dtype=torch.int64)
        hidden = torch.empty(*tokens.shape, common.size_of(args.model)[2], requires_grad=True)
        logits = torch.empty(samples, classes, args.context, requires_grad=True)
    parts = [
        pipelining.PipelineStage(
            stage, number, count, device,
            input_args=tokens if stage.is_first else hidden,
            output_args=logits if stage.is_last else hidden,
        )
        for number, stage in stages.items()
    ]  # fmt: skip
    if device.type == "cpu":
        for part in parts:  # PyTorch 2.11 greets neighbours first, and gloo cannot greet itself
            part._get_init_p2p_neighbors_ops = list
    return SCHEDULES[args.pipeline_schedule](
        parts if len(parts) > 1 else parts[0],
        args.microbatches,
        loss_fn=lambda logits, labels: F.cross_entropy(logits, labels) / args.microbatches,
        scale_grads=False,  # the loss is: a matrix that two stages share would be scaled twice
    )


class WholeModel(nn.Module):
    """For evaluation: a batch goes through all stages, one by one, and its logits to all ranks. All
    ranks call it. (The schedules can evaluate as well, but not zbv.)"""

    def __init__(self, stages: dict[int, Stage], owners: list[int], width: int, classes: int):
        super().__init__()
        self.stages = nn.ModuleDict({str(number): stage for number, stage in stages.items()})
        self.owners, self.width, self.classes = owners, width, classes

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rank, (samples, length), device = dist.get_rank(), tokens.shape, tokens.device
        x, source = tokens, 0
        for number, owner in enumerate(self.owners):
            if rank == owner != source:
                x = torch.empty(samples, length, self.width, device=device)
                dist.recv(x, source)
            if rank == source != owner:
                dist.send(x, owner)
            if rank == owner:
                x = self.stages[str(number)](x)
            source = owner
        if rank != source:
            x = torch.empty(samples, self.classes, length, device=device)
        dist.broadcast(x, source)
        return x


def clip_grad_norm(parameters: list, max_norm: float, counted_elsewhere: set) -> None:
    """``nn.utils.clip_grad_norm_`` by the length of the gradients of all ranks together."""
    own = [p.grad for p in parameters if p not in counted_elsewhere]
    squares = nn.utils.get_total_norm(own).square()
    dist.all_reduce(squares)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, squares.sqrt())


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__, only_gpt=True)
    # (--schedule is that of the learning rate)
    parser.add_argument("--pipeline-schedule", choices=list(SCHEDULES), default="1f1b")
    parser.add_argument(
        "--microbatches", type=common.number(int, 1), metavar="M",
        help="equal parts of the batch (default: twice the ranks, or the next that divides it)",
    )  # fmt: skip
    args = common.parse_args(parser)
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
    settle(args, world_size)
    common.announce(args, device, readers=1)  # PP: the batch is not divided among the ranks
    common.seed_everything(args.seed, args.deterministic)  # PP: all ranks draw the same weights

    # 2. Data
    train_set, eval_set = common.make_datasets(args)
    # PP: all ranks read the same samples: the first has use for the tokens, the last for the labels
    one = {"num_replicas": 1, "rank": 0}
    sampler = DistributedSampler(train_set, **one, seed=args.seed, drop_last=True)
    train_loader = common.make_loader(args, train_set, args.batch_size, sampler, drop_last=True)
    eval_sampler = DistributedSampler(eval_set, **one, shuffle=False)
    eval_loader = common.make_loader(args, eval_set, args.batch_size, eval_sampler)

    # 3. Model
    model = common.make_model(args, train_set.classes, channels_last=False)
    torch.manual_seed(args.seed + rank)  # PP: dropout differs by rank
    names, classes = list(model.state_dict()), len(train_set.classes)
    owners = ranks_of_stages(args.pipeline_schedule, world_size)
    mine = [number for number, owner in enumerate(owners) if owner == rank]
    stages = {number: Stage(model, number, len(owners)) for number in mine}
    keep_only(stages, model)  # PP: before the device sees it
    model.to(device)
    schedule = make_schedule(args, stages, len(owners), classes, device)
    whole_model = WholeModel(stages, owners, common.size_of(args.model)[2], classes)
    shared, last = set(), owners[-1]  # PP: the rank that knows the loss
    if args.tie and last != 0:  # PP: the first and the last rank have a copy each
        ends = dist.new_group([0, last])
        shared = {model.token.weight} if rank in (0, last) else set()

    # 4. Optimizer and schedule
    optimizer = common.make_optimizer(args, model)
    scheduler = common.make_scheduler(args, optimizer, len(train_loader))
    run = common.Run(args, device, train_loader)
    run.load_sharded_snapshot(model, optimizer, scheduler)  # PP: each rank reads its part

    # 5. Train
    for epoch in range(run.start_epoch, run.epochs):
        sampler.set_epoch(epoch)  # DDP: a new order every epoch, the same on all ranks
        model.train()
        for images, labels in run.batches(train_loader, epoch):
            optimizer.zero_grad()  # gradients would add up otherwise
            losses = []  # PP: of each micro-batch, on the last rank
            tokens = [images] if rank == 0 else []
            # PP: forward and backward of all micro-batches, with what is sent between ranks
            schedule.step(*tokens, target=labels, losses=losses, return_outputs=False)
            for parameter in shared:
                dist.all_reduce(parameter.grad, group=ends)  # PP: each end has a part of it
            if args.clip_grad:
                clip_grad_norm(list(model.parameters()), args.clip_grad, shared if rank else set())
            optimizer.step()
            scheduler.step()
            loss = world_size * sum(losses, torch.zeros((), device=device))  # PP: others have 0
            run.log(loss)  # fetched only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or to stop
                run.save_sharded_snapshot(model, optimizer, scheduler)  # PP: its part

        # 6. Evaluate
        run.report(common.evaluate(whole_model, eval_loader, device))
        run.save_sharded_snapshot(model, optimizer, scheduler)  # PP: its part

    # 7. Save and report
    parts = [None] * world_size if rank == 0 else None
    own = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    dist.gather_object(own, parts)  # PP: to rank 0
    if rank == 0:
        weights = {name: tensor for part in parts for name, tensor in part.items()}
        common.save_model({name: weights[name] for name in names}, args.output_dir)
    run.finish(model, optimizer)
    # DDP: all leave together. Not in a finally: after an error on one rank, nccl would wait for the
    # others, which are in the middle of a collective, and the error would stay unseen.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
