"""Train a GPT with pipeline parallelism written out: 1F1B with send and receive.

Differs     from pytorch_PP.py: the schedule is a loop of this script, with one stage per rank.
            Lines tagged "# by hand:" are what PyTorch's schedules would do.
Command:    torchrun --nproc_per_node=4 pytorch_PP_by_hand.py
            torchrun --nproc_per_node=4 pytorch_PP_by_hand.py --pipeline-schedule gpipe
Use it      to learn how it works. To train, take pytorch_PP.py, which has more schedules.
Holds       as pytorch_PP.py with the same schedule.
Sends       as pytorch_PP.py with these schedules: activations and their gradients.
"""

import os
from collections import deque
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DistributedSampler

import common
from jobs.language_models import size_of
from parallel.pipelining import divide, gather_weights


class Stage(nn.Module):
    """Some of the blocks; the first stage also has the embeddings, the last one the head."""

    def __init__(self, model: nn.Module, number: int, stages: int):
        super().__init__()
        begin, end = (len(model.blocks) * n // stages for n in (number, number + 1))
        self.is_first = number == 0
        self.is_last = number == stages - 1
        self.blocks = model.blocks[begin:end]
        self.embed = model.embed
        self.locate = model.locate
        self.unembed = model.unembed
        for name in self.is_first * model.before + self.is_last * model.after:
            setattr(self, name, getattr(model, name))

    def forward(self, x: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        """From tokens or the previous stage's output to the next stage's input or logits."""
        tokens, positions, places = self.locate(samples)
        x = self.embed(tokens, positions) if self.is_first else x
        for block in self.blocks:
            x = block(x, places)
        return self.unembed(x) if self.is_last else x


def keep_only(stages: dict[int, Stage], model: nn.Module) -> None:  # PP, detail: names stay
    """Remove the modules of other ranks from the model. Those that stay keep their names."""
    own = {parameter for stage in stages.values() for parameter in stage.parameters()}
    for number, block in enumerate(model.blocks):
        if own.isdisjoint(block.parameters()):
            model.blocks[number] = nn.Identity()  # keeps the numbers of later blocks
    for name in {*model.before, *model.after} - {"dropout"}:  # --tie: token and head share one
        if own.isdisjoint(getattr(model, name).parameters()):
            delattr(model, name)


class Pipe:
    """This rank's stage, between its neighbours'. ``new(n)``: a buffer for what a
    stage sends of n samples."""

    def __init__(self, stage: Stage, warmup: int, microbatches: int, new, loss_fn, group):
        self.stage = stage
        self.warmup = warmup
        self.parts = microbatches
        self.loss_fn = loss_fn
        self.new = new
        self.group = group
        self.waiting = deque()

    def exchange(self, direction: int, sent=None, samples: int = 0) -> torch.Tensor | None:
        """Send to the previous (-1) or the next rank (1), and receive so many samples from it, if
        there is one. Both at once: if both ranks sent first, each would wait for the other."""
        peer = dist.get_rank(self.group) + direction
        if not 0 <= peer < dist.get_world_size(self.group):
            return None
        received = self.new(samples) if samples else None
        operations = []
        for send_or_receive, tensor in ((dist.isend, sent), (dist.irecv, received)):
            if tensor is not None:
                operation = dist.P2POp(send_or_receive, tensor, group=self.group, group_peer=peer)
                operations.append(operation)
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return received

    def forward(self, i: int, received: torch.Tensor | None) -> torch.Tensor:
        """Forward of micro-batch i. Returns what the next rank gets, or on the last rank a loss."""
        x = self.tokens[i] if received is None else received.requires_grad_()
        output = self.stage(x, self.tokens[i])
        if self.stage.is_last:
            output = self.loss_fn(output, self.labels[i])
            self.losses.append(output.detach())
        self.waiting.append((x, output))  # by hand: keeps the activations of micro-batch i
        return output.detach()

    def backward(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Backward of the oldest micro-batch. Returns what the previous rank gets."""
        x, output = self.waiting.popleft()
        output.backward(gradient)  # by hand: from the next rank; a loss needs none
        return x.grad

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        """Forward and backward of all micro-batches. Returns their losses, on the last rank."""
        self.tokens = tokens.chunk(self.parts)
        self.labels = labels.chunk(self.parts)
        self.losses = []
        size = len(self.tokens[0])
        last = self.parts - 1
        for i in range(self.warmup):  # by hand: forwards, to fill the pipeline
            self.exchange(1, self.forward(i, self.exchange(-1, samples=size)))
        received = self.exchange(-1, samples=size * (self.warmup <= last))
        for i in range(self.warmup, self.parts):  # by hand: one forward, one backward
            gradient = self.exchange(1, self.forward(i, received), samples=size)
            received = self.exchange(-1, self.backward(gradient), samples=size * (i < last))
        for _ in range(self.warmup):  # by hand: backwards, to empty it
            self.exchange(-1, self.backward(self.exchange(1, samples=size)))
        return self.losses

    def evaluate(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Forward of one batch, on all ranks: on the last rank the logits."""
        received = self.exchange(-1, samples=len(tokens))
        output = self.stage(tokens if received is None else received, tokens)
        self.exchange(1, output)
        return output if self.stage.is_last else None


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
    order = {"choices": ["1f1b", "gpipe"], "help": "schedule (default: 1f1b)"}
    flag("--pipeline-schedule", default="1f1b", **order)
    flag("--microbatches", type=common.number(int, 1), metavar="M", help=fewest)
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
    count = len(owners)
    stages = {rank: Stage(model, rank, count)}  # PP: this rank's
    keep_only(stages, model)
    model.to_empty(device=device)  # PP: memory for this rank's stages
    common.init_weights(args, model, train_set.classes)  # PP: each rank fills its stages
    # by hand: with 1F1B, a rank has as many forwards in advance as there are ranks after it
    warmup = microbatches if args.pipeline_schedule == "gpipe" else world_size - 1 - rank
    new = lambda samples: torch.empty(samples, args.context, size.width, device=device)  # noqa: E731
    loss_fn = partial(part_of_loss, train_set, microbatches)
    pipe = Pipe(stages[rank], warmup, microbatches, new, loss_fn, dist.new_group())
    model.forward = pipe.evaluate
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
            # PP: forward and backward of all micro-batches, with the communication between ranks
            losses = pipe.step(inputs, labels)
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
