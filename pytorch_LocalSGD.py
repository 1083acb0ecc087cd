"""Train on several devices with Local SGD: independent steps, and weights averaged every H steps.

Differs     from pytorch_torchrun_DDP.py: there is no DDP. Each rank takes steps on its own part of
            the batch, and every H steps (--sync-every) the ranks average their weights, instead of
            averaging gradients at every step (Stich 2018, arXiv:1805.09767). --outer-lr and
            --outer-momentum use the difference between the last common weights and the average as a
            gradient, for a step with Nesterov momentum: DiLoCo (Douillard et al. 2023,
            arXiv:2311.08105). --fragments averages parts of the model in turn, as streaming DiLoCo
            does (Douillard et al. 2025, arXiv:2501.18512). Lines tagged "# local:".
Command:    torchrun --nproc_per_node=4 pytorch_LocalSGD.py --sync-every 8
            torchrun --nproc_per_node=4 pytorch_LocalSGD.py --outer-lr 0.7 --outer-momentum 0.9
Use it      where communication takes longer than computation, as between distant machines; with a
            --print-freq of H or more, because the ranks wait for each other to print the loss. Not
            where DDP is fast enough: with H > 1 this is another algorithm, and may converge worse.
Exact       with SGD and H = 1: the mean of the ranks' steps is the step of their mean gradient. Not
            with AdamW or --clip-grad, for any H: these are not linear in the gradient.
Syncs       after every H-th step, counted from the start of the run, and at the end of each epoch
            and of the run, because the evaluated and saved model is that of all ranks. This depends
            only on the number of the step, so a run that was stopped at any step resumes with the
            same bits. A run that --max-steps cut short has synchronized at that step.
Holds       what one device holds, except that the activations are those of 1/N of the batch; with
            --outer-lr or --outer-momentum 8 more bytes per parameter, for the last common weights
            and the momentum.
Sends       per step and rank, 2 * 4 * (N - 1) / N / H bytes per parameter, in one all-reduce at
            every H-th step.
"""

import os
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DistributedSampler

import common
from parallel import local_sgd


class CommonWeights:
    """The weights that all ranks have after a sync, and the outer step that updates them.

    Args:
        parameters: of this rank's model; a sync overwrites them.
        lr, momentum: of the outer optimizer. With 1 and 0 a sync is the plain average and needs no
            state.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float):
        self.parameters = parameters
        self.sizes = [p.numel() for p in parameters]
        self.lr = lr
        self.momentum = momentum
        self.state = {}  # local: flat buffers: the last common weights, and the momentum

    def average(self, part: slice = slice(None)) -> torch.Tensor:
        """The average of all ranks' weights, flattened; ``part``: of these parameters."""
        flat = torch.cat([p.detach().flatten() for p in self.parameters[part]])
        dist.all_reduce(flat.div_(dist.get_world_size()))  # local: one all-reduce
        return flat

    def begin(self) -> None:
        """Start from the average, unless a snapshot has set the common weights."""
        if (self.lr, self.momentum) != (1, 0) and not self.state:
            average = self.average()
            self.state = {"weights": average, "momentum": torch.zeros_like(average)}

    @torch.no_grad()
    def sync(self, part: slice = slice(None)) -> None:
        """Synchronize the weights of all ranks; ``part``: of these parameters."""
        common_weights = self.average(part)
        if self.state:
            begin = sum(self.sizes[: part.start or 0])
            here = slice(begin, begin + common_weights.numel())
            anchor = self.state["weights"][here]  # local: what all ranks had after the last sync
            momentum = self.state["momentum"][here]
            outer_gradient = anchor - common_weights  # local: against the ranks' way, as a gradient
            momentum.mul_(self.momentum).add_(outer_gradient)
            step = outer_gradient.add_(momentum, alpha=self.momentum)  # local: Nesterov's
            common_weights = anchor.sub_(step, alpha=self.lr)
        shares = common_weights.split(self.sizes[part])
        for p, share in zip(self.parameters[part], shares, strict=True):
            p.copy_(share.view_as(p))  # local: in place, in its aligned memory

    def fragments(self, number: int) -> list[slice]:
        """Divide the parameters, in their order, into so many parts of about the same size."""
        ends = torch.tensor(self.sizes).cumsum(0)
        wanted = [ends[-1] * (i + 1) / number for i in range(number - 1)]
        cuts = [0, *(int((ends < size).sum()) + 1 for size in wanted), len(self.sizes)]
        return [slice(*pair) for pair in pairwise(cuts) if pair[0] < pair[1]]

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        if (self.lr, self.momentum) != (1, 0):
            device = self.parameters[0].device
            self.state = {name: flat.to(device) for name, flat in state.items()}


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__)
    # fmt: off
    flag = parser.add_argument
    number = common.number
    flag("--sync-every", type=number(int, 1), default=8, metavar="H",
         help="synchronize every H steps (default: 8)")
    flag("--outer-lr", type=number(float, 0, above=0), default=1.0, metavar="X",
         help="learning rate of the outer optimizer (default: 1, plain averaging)")
    flag("--outer-momentum", type=number(float, 0, 1), default=0.0, metavar="X",
         help="momentum of the outer optimizer (default: 0)")
    flag("--fragments", type=number(int, 1), default=1, metavar="F",
         help="parts of the model that are averaged at different steps (default: 1)")
    # fmt: on
    args = common.parse_args(parser)
    if args.fragments > args.sync_every:
        why = f"--fragments {args.fragments} need as many steps between two averages"
        common.fail(f"{why}; use --sync-every {args.fragments} or more")
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
    model = common.make_model(args, train_set.classes).to(device)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)  # by hand: all ranks start with rank 0's weights

    # 4. Optimizer and schedule
    optimizer = common.make_optimizer(args, model)
    scheduler = common.make_scheduler(args, optimizer, len(train_loader))
    run = common.Run(args, device, train_loader)
    trained = [p for p in model.parameters() if p.requires_grad]
    outer = CommonWeights(trained, args.outer_lr, args.outer_momentum)
    local_sgd.resume_or_exit(run, model, optimizer, scheduler, outer)
    outer.begin()
    fragments = outer.fragments(args.fragments)
    steps = [i * args.sync_every // len(fragments) for i in range(len(fragments))]
    parts = list(zip(fragments, steps, strict=True))  # local: each is synchronized in turn

    # 5. Train
    for epoch in run.epochs_left():
        sampler.set_epoch(epoch)  # DDP: a new order every epoch, the same on all ranks
        model.train()
        for inputs, labels in run.batches(train_loader, epoch):
            optimizer.zero_grad()  # otherwise gradients would accumulate
            logits = model(inputs)
            loss = train_set.loss(logits, labels)
            loss.backward()  # local: no communication
            if args.clip_grad:
                run.grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            optimizer.step()
            scheduler.step()
            # local: weights differ, at an epoch's end too; of fragments, always some do
            apart = run.step % args.sync_every > 0 or len(parts) > 1
            for part, later in parts:  # local: with --fragments, streaming DiLoCo
                if (run.step + later) % args.sync_every == 0:
                    outer.sync(part)
            run.log(loss)  # copied from the device only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or when asked to stop
                # local: each rank writes its own optimizer state, and its weights if they differ
                local_sgd.save_then_exit_if_asked(run, model, optimizer, scheduler, outer, apart)

        # 6. Evaluate
        for part, later in parts:
            if (run.step + later) % args.sync_every > 0:
                outer.sync(part)  # local: one common model is evaluated
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)  # DDP: BatchNorm saw different samples on each rank
        run.report(common.evaluate(model, eval_loader, device))  # DDP: on every rank
        local_sgd.save_then_exit_if_asked(run, model, optimizer, scheduler, outer, apart=False)

    # 7. Save and report
    run.load_best_weights()  # with --eval-every; otherwise the last ones stay
    if rank == 0:
        common.save_model(args, model.state_dict())
    run.finish(model, optimizer, outer=outer.state.values())
    # DDP: leave together. Not in a finally block: after an error on one rank, nccl would wait for
    # the others, which are in the middle of a collective, and the error would stay hidden.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
