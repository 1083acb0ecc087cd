"""Train a GPT on several devices with pipeline parallelism: each rank holds some of the blocks.

Differs     from pytorch_torchrun_DDP.py: the model is split, not the batch. A batch is cut into
            micro-batches, which pass through the ranks, forward and backward, in the order of the
            schedule. Lines tagged "# PP:".
Command:    torchrun --nproc_per_node=4 pytorch_PP.py
            torchrun --nproc_per_node=4 pytorch_PP.py --pipeline-schedule zbv
Use it      when a model does not fit one device and the links are slow, as between machines: only
            activations cross them. Not when it fits: at the start and the end of a step some ranks
            are idle (the bubble), which more micro-batches reduce.
Holds       per parameter 4/N bytes, 4/N for its gradient, and 4/N (SGD with momentum) or 8/N
            (AdamW) for the optimizer; the first and the last rank also embedding and head. And the
            activations of its blocks: of the whole batch (gpipe), at most N micro-batches (1f1b).
            With --dtype bfloat16 also 2/N during a step, for its matrices in bfloat16; of experts
            this is 2/N for each micro-batch in flight.
Sends       per step and rank, 4 bytes per token and unit of width to the next rank, and as many
            back; twice that with two stages per rank (not gpipe, 1f1b). Nothing per parameter.
"""

import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DistributedSampler

import common
from jobs.language_models import size_of
from parallel.pipelining import SCHEDULES, PipelineStage, divide, gather_weights, make_shapes


class Stage(nn.Module):
    """Some of the blocks; the first stage also has the embeddings, the last one the head."""

    def __init__(self, model: nn.Module, number: int, stages: int, order=None, half=False):
        super().__init__()
        begin, end = (len(model.blocks) * n // stages for n in (number, number + 1))
        self.is_first = number == 0
        self.is_last = number == stages - 1
        self.blocks = model.blocks[begin:end]
        self.order = order
        self.half = half
        self.embed = model.embed
        self.locate = model.locate
        self.unembed = model.unembed
        for name in self.is_first * model.before + self.is_last * model.after:
            setattr(self, name, getattr(model, name))

    def forward(self, x: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        """From tokens or the previous stage's output to the next stage's input or logits. All
        stages get the ``samples``: packed ones also have positions, which every block needs."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.half):
            tokens, positions, places = self.locate(samples, self.order)
            x = self.embed(tokens, positions) if self.is_first else x
            for block in self.blocks:
                x = block(x, places)
            return self.unembed(x).to(torch.get_default_dtype()) if self.is_last else x


def keep_only(stages: dict[int, Stage], model: nn.Module) -> None:  # PP, detail: names stay
    """Remove the modules of other ranks from the model. Those that stay keep their names."""
    own = {parameter for stage in stages.values() for parameter in stage.parameters()}
    for number, block in enumerate(model.blocks):
        if own.isdisjoint(block.parameters()):
            model.blocks[number] = nn.Identity()  # keeps the numbers of later blocks
    for name in {*model.before, *model.after} - {"dropout"}:  # --tie: token and head share one
        if own.isdisjoint(getattr(model, name).parameters()):
            delattr(model, name)


def make_schedule(name, stages, count, microbatches, shapes, loss_fn, device, group=None):
    """The pipeline schedule, which computes, sends and receives for all stages of this rank."""
    tokens, hidden, logits = shapes
    parts = []
    for number, stage in stages.items():
        ends = tokens if stage.is_first else hidden, logits if stage.is_last else hidden
        parts.append(PipelineStage(stage, number, count, device, *ends, group=group))
    return SCHEDULES[name](
        parts if len(parts) > 1 else parts[0],
        microbatches,
        loss_fn=loss_fn,
        scale_grads=False,  # part_of_loss() does; the schedule would scale a tied matrix twice
    )


def forward(  # PP, detail: evaluation
    stages: dict[int, Stage], owners: list[int], shapes, group, tokens, positions=None
):
    """Run all stages in order, for evaluation: not every schedule can evaluate. All ranks call it,
    and that of the last stage gets the logits. NCCL connects ranks when they first communicate."""
    x = tokens
    rank = dist.get_rank(group)
    last = len(owners) - 1
    hidden = x.new_empty(len(x), *shapes[1].shape[1:], dtype=shapes[1].dtype)
    for number, stage in stages.items():
        if number > 0 and owners[number - 1] != rank:
            dist.recv(hidden, group=group, group_src=owners[number - 1])
            x = hidden
        x = stage(x, tokens)
        if number < last and owners[number + 1] != rank:
            dist.send(x, group=group, group_dst=owners[number + 1])
    return x if owners[last] == rank else None


def part_of_loss(data, parts: int, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return data.loss(logits, labels) / parts  # PP: of equally large micro-batches


def clip_grad_norm(  # PP, option: --clip-grad
    model: nn.Module, max_norm: float, copies: set
) -> torch.Tensor:
    """``nn.utils.clip_grad_norm_`` by the global gradient norm, over all ranks. Of ``copies``,
    another rank counts the gradients."""
    updated = [p for p in model.parameters() if p.grad is not None]
    own = [p.grad for p in updated if p not in copies]
    squares = nn.utils.get_total_norm(own).square()
    dist.all_reduce(squares)
    total_norm = squares.sqrt()
    nn.utils.clip_grads_with_norm_(updated, max_norm, total_norm)
    return total_norm


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__, only_gpt=True, experts=True)
    flag = parser.add_argument
    fewest = "micro-batches (default: at least two per rank)"
    flag("--pipeline-schedule", choices=SCHEDULES, default="1f1b", help="schedule (default: 1f1b)")
    flag("--microbatches", type=common.number(int, 1), metavar="M", help=fewest)
    about = "dtype of matrix products (default: float32)"
    flag("--dtype", choices=["float32", "bfloat16"], default="float32", help=about)
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
    size = size_of(args)
    owners, microbatches = divide(args, size.layers, world_size)  # PP: also rejects invalid flags
    common.announce(args, device, readers=1)  # PP: the batch is not divided among the ranks
    common.seed_everything(args.seed + rank, args.deterministic)  # DDP: dropout differs by rank

    # 2. Data
    train_set, eval_set = common.make_datasets(args)
    batch_size = args.batch_size  # PP: on all ranks; the first uses the tokens, the last the labels
    sampler = DistributedSampler(train_set, 1, 0, seed=args.seed, drop_last=True)
    train_loader = common.make_loader(args, train_set, batch_size, sampler, drop_last=True)
    eval_sampler = DistributedSampler(eval_set, 1, 0, shuffle=False)  # PP: without shuffling
    eval_loader = common.make_loader(args, eval_set, batch_size // microbatches, eval_sampler)

    # 3. Model
    with torch.device("meta"):  # PP: shapes only: no rank holds the whole model
        model = common.make_model(args, train_set.classes, channels_last=False)
    names = list(model.state_dict())
    classes = len(train_set.classes)
    count = len(owners)
    own = [n for n in range(count) if owners[n] == rank]
    half = args.dtype == "bfloat16"
    stages = {n: Stage(model, n, count, half=half) for n in own}  # PP: this rank's
    keep_only(stages, model)
    model.to_empty(device=device)  # PP: memory for this rank's stages
    common.init_weights(args, model, train_set.classes)  # PP: each rank fills its stages
    shapes = make_shapes((batch_size // microbatches, *args.row), size.width, classes)
    model.forward = partial(forward, stages, owners, shapes, None)
    loss_fn = partial(part_of_loss, train_set, microbatches)
    schedule = make_schedule(
        args.pipeline_schedule, stages, count, microbatches, shapes, loss_fn, device,
        group=dist.new_group(),  # PP: evaluation sends in another one
    )  # fmt: skip
    shared = set()  # PP, option: parameters on two ranks
    ends = [0, owners[-1]]  # PP, option: the ranks of the embedding and the head
    if args.tie and ends != [0, 0]:  # PP, option: these share a matrix, on two ranks
        group = dist.new_group(ends)
        shared = {model.token.weight} if rank in ends else set()

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
            losses = []  # PP: one per micro-batch, on the rank of the last stage
            tokens = [inputs] if rank == 0 else []  # PP: the first stage has the embedding
            # PP: forward and backward of all micro-batches, with the communication between ranks.
            # The outermost autocast frees the weights in bfloat16: so micro-batches share a copy.
            with torch.autocast(device.type, enabled=False):
                schedule.step(
                    *tokens, samples=inputs, target=labels, losses=losses, return_outputs=False
                )
            for parameter in shared:  # PP, option: --tie
                dist.all_reduce(parameter.grad, group=group)  # PP: sums both ranks' gradients
            if args.clip_grad:
                run.grad_norm = clip_grad_norm(model, args.clip_grad, shared if rank else set())
            optimizer.step()
            scheduler.step()
            loss = world_size * sum(losses, torch.zeros((), device=device))  # PP: 0 on other ranks
            run.log(loss)  # copied from the device only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or when asked to stop
                run.save_then_exit_if_asked(model, optimizer, scheduler)

        # 6. Evaluate
        run.report(common.evaluate(model, eval_loader, device))  # DDP: on every rank
        run.save_then_exit_if_asked(model, optimizer, scheduler)

    # 7. Save and report
    run.load_best_weights()  # with --eval-every; otherwise the last ones stay
    gloo = dist.new_group(backend="gloo")  # PP, detail: nccl would use rank 0's GPU
    weights = gather_weights(model, gloo)
    if rank == 0:
        common.save_model(args, {name: weights[name] for name in names})
    run.finish(model, optimizer)
    # DDP: leave together. Not in a finally block: after an error on one rank, nccl would wait for
    # the others, which are in the middle of a collective, and the error would stay hidden.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
