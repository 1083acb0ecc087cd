"""Train replicas of a sharded model, and continue without a restart when a replica dies.

Differs     from pytorch_FSDP.py: each replica is a run of its own, started by its own torchrun, and
            shards the model among its ranks. Between replicas, rank r of each averages gradients
            in a group that can be made anew: HSDP by hand. If a replica dies, the others notice,
            agree in a store on who is alive, and average the gradients that they still have. All
            of them apply the same sum, or none does. A replica that is started again gets
            weights, optimizer state and step from one that is alive. Lines tagged "# tolerance:".
Command:    python pytorch_fault_tolerance.py --serve 29510  # the store, on a machine of its own
            torchrun --standalone --nproc_per_node=2 --max-restarts=9 pytorch_fault_tolerance.py \
                --store HOST:29510 --replicas 3 --output-dir runs/replica-0
            # and the same for runs/replica-1 and runs/replica-2, on other machines
Use it      on so many machines that one of them dies every few hours. With fewer, restart all ranks
            from a snapshot (docs/reliability.md): nothing runs that could fail by itself.
Exact       a step averages over the samples of the replicas that live to its end, so it is the step
            of one process on these samples. From the next step, the living replicas divide the
            whole global batch: learning rate and schedule do not change.
Holds       what pytorch_FSDP.py holds on the S ranks of a replica, and the gradients of a rank's
            shard twice more (8/S bytes per parameter), in CPU memory.
Sends       per step and rank, what pytorch_FSDP.py sends in a replica; and to R replicas,
            2 * 4/S * (R - 1) / R bytes per parameter in one all-reduce.
"""

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DistributedSampler, Sampler

import common
from jobs.model_parts import units_of
from jobs.text import Documents
from parallel.rounds import Rounds, connect, is_here, serve

# Flags that each replica may set as it likes; with other ones it would take other steps
OWN = ("output_dir", "data_dir", "resume", "store", "patience", "timeout", "device", "workers")
OWN += ("local_rank", "serve", "print_freq", "snapshot_every", "on_save_error", "trace")


class Shares(Sampler):
    """This rank's samples: of each global batch, rank q of n takes every n-th, from the q-th on.
    The order depends only on seed and epoch, so replicas can divide a batch in any number."""

    def __init__(self, args: common.Settings, samples: int):
        self.args = args
        self.samples = samples
        self.epoch = 0
        self.divide(0, 1)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def divide(self, replica: int, replicas: int) -> None:
        """Take the share of the ``replica``-th of so many."""
        ranks = dist.get_world_size()
        first = replica * ranks
        self.rank = first + dist.get_rank()
        self.num_replicas = replicas * ranks  # of the model's copies, as DistributedSampler counts
        every = range(first, first + ranks)
        sizes = [len(range(q, self.args.batch_size, self.num_replicas)) for q in every]
        self.size = sizes[dist.get_rank()]
        self.size_of_replica = sum(sizes)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.args.seed + self.epoch)
        order = torch.randperm(self.samples, generator=generator).tolist()
        for step in range(self.samples // self.args.batch_size):
            batch = order[step * self.args.batch_size :][: self.args.batch_size]
            yield from batch[self.rank :: self.num_replicas]

    def __len__(self) -> int:
        return self.samples // self.args.batch_size * self.size


class Replicas(Rounds):
    """What the living replicas agree on and exchange: gradients, and the state of training.

    Every decision is a key of a store. The first proposal for a key stays, and all ranks act on the
    one that stayed: so none applies a gradient that another has not.
    """

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective, until it fails, others have given up, or --patience is over; gloo
        itself gives up after half of it."""
        end = time.monotonic() + self.args.patience
        asked = time.monotonic()
        while not work.is_completed():
            time.sleep(0.001)
            if time.monotonic() - asked > 0.1:
                asked = time.monotonic()
                if asked > end or self.store.check([f"{self.round}/{self.calls}"]):
                    raise RuntimeError("a replica is late or dead")
        work.wait()  # raises if it failed

    def decide(self, done: bool) -> str:
        """What all do after a collective: "keep" its result, if every rank of every member has it;
        "grow" says that others wait to be let in; or "redo" it among those who are left."""
        key = f"{self.round}/{self.calls}"
        votes = len(self.members) * self.ranks
        if not done:
            self.agree(key, "redo")
        elif self.store.add(f"{key} votes", 1) == votes:
            room = len(self.members) < self.args.replicas
            # All have read what they decided before
            self.store.delete_key(f"{self.round}/{self.calls - 1}")
            self.store.delete_key(f"{self.round}/{self.calls - 1} votes")
            grow = room and self.store.check([f"{self.round + 1}/joined"])
            self.agree(key, "grow" if grow else "keep")
        end = time.monotonic() + self.args.patience
        while not self.store.check([key]):
            if time.monotonic() > end:
                self.agree(key, "redo")
            time.sleep(0.002)
        return self.store.get(key).decode()

    def until_agreed(self, task: Callable[[], None]) -> str:
        """Run a task of collectives, again whenever a member dies, until all have its result."""
        failures = 0  # with the same members
        while True:
            self.calls += 1
            members = self.members
            why = None
            try:
                if not self.group:
                    self.make_group()
                task()
            except RuntimeError as error:  # of gloo, or wait()
                why = str(error)
            decision = self.decide(done=why is None)
            if decision != "redo":
                return decision
            self.next_round_or_exit(newcomers=False)
            failures = failures + 1 if self.members == members else 0
            if failures == 3:  # the same for all: nobody is dead
                slow = f"or --patience {self.args.patience} is too short for one of their sums"
                raise RuntimeError(f"replicas {members} cannot reach each other, {slow}: {why}")

    def divide(self, sampler: Shares) -> None:
        """Give a sampler the share of this replica."""
        if self.members:
            sampler.divide(self.members.index(self.me), len(self.members))
        self.changed = False

    def average(self, model: nn.Module, samples: int, step: int) -> bool:
        """Average the gradients over all samples of the replicas that are alive at the end.

        Args:
            model: has the gradients of this rank's shards, the mean over the ranks of a replica.
            samples: those of this replica in this batch.

        Returns:
            Whether a replica waits to be let in.
        """
        shards = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
        if not self.args.store:
            for shard in shards:
                shard.mul_(self.ranks / samples)
            return False
        count = shards[0].new_tensor([samples])  # tolerance: replicas' shares differ
        # tolerance: gloo, whose collectives end when a peer dies
        own = torch.cat([part.flatten().cpu() for part in (*shards, count)])
        before = self.members

        def add_up() -> None:
            self.total = own.clone()  # tolerance: what failed half-way is not used
            self.wait(self.group.allreduce([self.total]))

        decision = self.until_agreed(add_up)
        count = round(self.total[-1].item())
        if self.members != before:
            dead = sorted(set(before) - set(self.members))
            common.print0(
                f"step {step}: replicas {dead} are dead, {self.members} continue; "
                f"{count} of {self.args.batch_size} samples in this step"
            )
        self.total.mul_(self.ranks / count)  # FSDP divided by the ranks of a replica
        parts = self.total[:-1].split([shard.numel() for shard in shards])
        for shard, part in zip(shards, parts, strict=True):
            shard.copy_(part.view_as(shard))
        return decision == "grow"

    def meet(self, run: common.Run, model: nn.Module, optimizer, scheduler) -> None:
        """Let replicas in, or be let in: all get the state of the one that has done most steps."""
        if not self.args.store:
            return
        self.step = run.step
        self.next_round_or_exit(newcomers=True)
        tensors = list(model.state_dict().values())
        if max(self.steps()):  # otherwise no optimizer has a state
            sd.get_optimizer_state_dict(model, optimizer)  # an empty step, where there is none
            for p in model.parameters():
                state = optimizer.state.get(p, {})
                tensors += [state[name] for name in sorted(state)]
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        options = dist.BroadcastOptions()

        def send_state() -> None:
            options.rootRank = self.steps().index(max(self.steps()))
            self.sent = [tensor.detach().to("cpu", copy=True) for tensor in local]
            for tensor in self.sent:
                self.wait(self.group.broadcast([tensor], options))

        self.until_agreed(send_state)
        for tensor, theirs in zip(local, self.sent, strict=True):
            tensor.detach().copy_(theirs)  # tolerance: not before everyone has all of it
        del self.sent
        self.step = max(self.steps())
        if not self.step:
            optimizer.state.clear()  # the empty step of before counts as one
        if self.step != run.step:
            run.state.step = self.step
            scheduler.last_epoch = self.step - 1
            scheduler.step()
        common.print0(f"step {self.step}: replicas {self.members}; this is {self.me}")


def check_others(args: common.Settings, replicas: Replicas) -> None:
    """Refuse flags that are not those of the other replicas."""
    for name, value in {**vars(args), "ranks of a replica": replicas.ranks}.items():
        is_plain = value is None or isinstance(value, (bool, int, float, str))
        if args.store and is_plain and name not in OWN:
            theirs = replicas.agree(name, repr(value))
            if theirs != repr(value):
                common.fail(f"{name} {value}: the other replicas have {theirs}; use the same")


def check_flags(args: common.Settings) -> None:
    """Refuse flags that do not fit together, before the data are read."""
    ranks = common.world().size * args.replicas
    if args.replicas > 1 and not args.store:
        common.fail(f"--replicas {args.replicas} need a --store; start one with --serve PORT")
    if args.batch_size < ranks:
        common.fail(f"--batch-size {args.batch_size}: {ranks} ranks need a sample each; raise it")
    if args.store and args.eval_every:
        why = "a replica that has returned would choose other weights as the best"
        common.fail(f"--eval-every {args.eval_every}: {why}; leave it out")
    if args.schedule == "plateau":
        common.fail("--schedule plateau: a replica that joins does not get its state; use cosine")


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__, only_gpt=True)  # tolerance: no BatchNorm
    parser.add_argument("--local-rank", "--local_rank")  # FSDP: torch.distributed.launch passes it
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32",
        help="dtype of compute and of the gathered weights (default: float32)",
    )  # fmt: skip
    parser.add_argument(
        "--serve", type=common.number(int, 0, 65535), metavar="PORT",
        help="only host the store, which must outlive all replicas",
    )  # fmt: skip
    parser.add_argument("--store", metavar="HOST:PORT", help="where --serve runs")
    parser.add_argument(
        "--replicas", type=common.number(int, 1), default=1, metavar="R",
        help="number of replicas that training begins with, and at most has (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--patience", type=common.number(float, 0, above=0), default=30.0, metavar="SECONDS",
        help="how long replicas wait for one that is late or dead (default: 30)",
    )  # fmt: skip
    args = common.parse_args(parser)
    if args.serve is not None:
        return serve(args.serve)
    check_flags(args)
    # tolerance: replicas on other machines are not on loopback
    common.prepare_process(args, bool(args.store) and not is_here(args.store))
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
    common.announce(args, device, replicas=args.replicas)
    replicas = Replicas(args, device, connect(args.store))
    check_others(args, replicas)
    # tolerance: dropout also differs by replica
    common.seed_everything(args.seed + rank + world_size * replicas.me, args.deterministic)

    # 2. Data
    train_set, eval_set = common.make_datasets(args)
    batch_size = args.batch_size // world_size  # DDP: this rank's share of the global batch
    if isinstance(train_set, Documents):
        uneven = "is padded, so shares have different numbers of labels"
        common.fail(f"--dataset {args.dataset} {uneven}; use a text, such as shakespeare")
    sampler = Shares(args, len(train_set))
    train_loader = common.make_loader(args, train_set, sampler.size, sampler, drop_last=True)
    eval_sampler = DistributedSampler(eval_set, shuffle=False)  # DDP: the same, without shuffling
    eval_loader = common.make_loader(args, eval_set, batch_size, eval_sampler)

    # 3. Model
    with torch.device("meta"):  # FSDP: shapes only: no rank holds the whole model
        model = common.make_model(args, train_set.classes, channels_last=False)  # FSDP: shards rows
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
    optimizer = common.make_optimizer(args, model)
    scheduler = common.make_scheduler(args, optimizer, len(train_loader))
    run = common.Run(args, device, train_loader)
    run.resume_or_exit(model, optimizer, scheduler)
    replicas.meet(run, model, optimizer, scheduler)

    # 5. Train
    for epoch in run.epochs_left():
        sampler.set_epoch(epoch)  # DDP: a new order every epoch, the same on all ranks
        replicas.divide(sampler)  # tolerance: anew, if there are other replicas
        train_loader = common.make_loader(args, train_set, sampler.size, sampler, drop_last=True)
        model.train()
        for inputs, labels in run.batches(train_loader, epoch):
            optimizer.zero_grad()  # otherwise gradients would accumulate
            logits = model(inputs).to(torch.get_default_dtype())  # FSDP: all-gathers each block
            loss = train_set.loss(logits, labels)
            # tolerance: sums over samples, of which another replica may have more
            (loss * len(labels)).backward()  # FSDP: reduce-scatters each block's gradients
            # tolerance: among the replicas that are alive
            waiting = replicas.average(model, sampler.size_of_replica, run.step)
            if args.clip_grad:
                run.grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            optimizer.step()
            scheduler.step()
            if waiting:
                replicas.meet(run, model, optimizer, scheduler)  # tolerance: let replicas in
            run.log(loss)  # copied from the device only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or when asked to stop
                run.save_then_exit_if_asked(model, optimizer, scheduler)
            if replicas.changed and not run.is_due(run.step):
                break  # tolerance: the living divide the rest of the epoch
        if not run.is_due(run.step):
            continue

        # 6. Evaluate
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)  # DDP: BatchNorm saw different samples on each rank
        run.report(common.evaluate(model, eval_loader, device))  # DDP: on every rank
        run.save_then_exit_if_asked(model, optimizer, scheduler)

    # 7. Save and report
    replicas.end()  # tolerance: a replica that starts again finds nothing to do
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
