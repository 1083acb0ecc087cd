"""Train on several devices with the Lightning Trainer, which runs the training loop.

Differs     from pytorch_torchrun_DDP.py: the Trainer runs the loop, and calls the methods of a
            LightningModule. Data, logs and snapshots stay ours. Lines tagged "# Trainer:".
Command:    torchrun --nproc_per_node=4 lightning_Trainer.py (or python: a single process)
            torchrun --nproc_per_node=4 lightning_Trainer.py --strategy fsdp (or deepspeed_stage_2)
Use it      when you want to set strategy, precision and clipping by one argument each, and to use
            existing callbacks. Not to learn what a step does, or for an unusual loop.
Holds       what pytorch_torchrun_DDP.py holds; with --strategy fsdp what pytorch_FSDP.py holds, and
            with --strategy deepspeed_stage_2 what pytorch_DeepSpeed.py holds at stage 2.
Sends       what these send; and before every step one number from rank 0, for which all ranks wait.
"""

import logging
import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler

import common
from jobs.model_parts import units_of
from libraries import deepspeed_engine

lightning = common.import_optional("lightning")
WHOLE = sd.StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)


class Task(lightning.LightningModule):
    """The methods that the Trainer calls, in the order of the calls."""

    def __init__(self, args, run, model, train_loader, eval_loader, sampler):
        super().__init__()
        self.args = args
        self.run = run
        self.model = model
        self.train_loader = train_loader
        self.eval_loader = eval_loader
        self.sampler = sampler
        self.fsdp = args.strategy == "fsdp"
        self.deepspeed = args.strategy == "deepspeed_stage_2"

    def configure_model(self):
        if not self.fsdp:
            return
        mesh = self.device_mesh["data_parallel"]
        for unit in units_of(self.model):  # FSDP: blocks, embedding, head: gathered one at a time
            fully_shard(unit, mesh=mesh)
        fully_shard(self.model, mesh=mesh)  # FSDP: the other parameters
        self.model.to_empty(device=self.run.device)  # FSDP: memory for this rank's shards
        classes = self.train_loader.dataset.classes
        common.init_weights(self.args, self.model, classes)  # FSDP: each rank fills its shards

    # 4. Optimizer and schedule
    def configure_optimizers(self):
        self.optimizer = common.make_optimizer(self.args, self.model)
        if self.deepspeed:  # DeepSpeed: without state yet, as it changes the parameters
            kind, options = common.optimizer_class(self.args)
            self.optimizer = kind(common.parameter_groups(self.args, self.model), **options)
        self.scheduler = common.make_scheduler(self.args, self.optimizer, len(self.train_loader))
        if self.deepspeed:  # DeepSpeed: steps the schedule, too
            return self.optimizer
        # Trainer: would step it once per epoch, and require one of its own metrics for a plateau
        schedule = {"scheduler": self.scheduler, "interval": "step", "reduce_on_plateau": False}
        return {"optimizer": self.optimizer, "lr_scheduler": schedule}

    def train_dataloader(self):
        return Batches(self)

    def on_train_start(self):  # Trainer: has set its SIGTERM handler; Run's replaces it
        if self.deepspeed:
            self.trainer.model.lr_scheduler = self.scheduler
            deepspeed_engine.resume_or_exit(self.run, self.trainer.model)
        else:
            self.trainer.model.broadcast_buffers = False  # DDP: broadcast before evaluation
            self.run.resume_or_exit(self.model, self.optimizer, self.scheduler)
        self.trainer.fit_loop.max_epochs -= self.run.epoch  # Trainer: counts from 0

    def save(self):
        if self.deepspeed:
            deepspeed_engine.save_then_exit_if_asked(self.run, self.trainer.model)
        else:
            self.run.save_then_exit_if_asked(self.model, self.optimizer, self.scheduler)

    # 5. Train
    def on_train_epoch_start(self):
        self.epoch = self.run.epoch
        self.sampler.set_epoch(self.epoch)  # DDP: a new order every epoch, the same on all ranks
        self.model.train()  # Trainer: leaves it in the mode that it finds

    def training_step(self, batch, batch_index):
        inputs, labels = batch
        logits = self.model(inputs)
        return self.run.train_set.loss(logits, labels)

    def optimizer_step(self, epoch, batch_index, optimizer, closure):
        if self.deepspeed:  # DeepSpeed: has its own step
            return super().optimizer_step(epoch, batch_index, optimizer, closure)
        closure()  # Trainer: zero_grad and backward. It would do them inside optimizer.step(),
        optimizer.step()  # after PyTorch's hooks of that step, which check gradients for --on-nan

    def configure_gradient_clipping(self, optimizer, **given):  # Trainer: would drop the norm
        if limit := given["gradient_clip_val"]:
            self.run.grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def on_train_batch_end(self, outputs, batch, batch_index):
        self.run.log(outputs["loss"])  # copied from the device only when it is printed
        if self.run.snapshot_is_due():  # every --snapshot-every steps, or when asked to stop
            self.save()

    # 6. Evaluate
    def on_train_epoch_end(self):  # Trainer: its validation would count repeated samples twice
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)  # DDP: BatchNorm saw different samples on each rank
        self.run.report(common.evaluate(self.model, self.eval_loader, self.run.device))
        self.save()

    # 7. Save and report
    def on_train_end(self):
        if self.deepspeed:  # DeepSpeed: the fp32 copy; names begin with "model."
            weights = deepspeed_engine.gather_weights(self.trainer.model)
            self.weights = {name.removeprefix("model."): w for name, w in weights.items()}
        else:  # FSDP: gathered on rank 0, on the CPU
            self.weights = sd.get_model_state_dict(self.model, options=WHOLE)


class DeepSpeed(lightning.pytorch.strategies.DeepSpeedStrategy):
    """Lightning's strategy, also on CPUs, which DeepSpeed supports but Lightning rejects."""

    @property
    def root_device(self):
        device = super().root_device
        return device if device.type == "cuda" else torch.device("cpu", 0)  # it requires an index

    def setup_environment(self):
        self.accelerator.setup_device(self.root_device)
        self.set_world_ranks()


class Batches:
    """The Trainer's loader: the batches of our Run."""

    def __init__(self, task):
        self.task = task

    def __iter__(self):
        yield from self.task.run.batches(self.task.train_loader, self.task.epoch)

    def __len__(self):
        # Trainer: without a length it fetches a batch ahead. With the true length it never reaches
        # the end, where Run stops the clock. Hence one more than there are.
        return len(self.task.train_loader) + 1


def make_trainer(args, epochs):
    """The Trainer without what Run does, or a one-line error if this machine cannot run it."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # Trainer: prints advertisements
    warnings.filterwarnings("ignore", message="`isinstance.treespec, LeafSpec")  # Trainer: its own
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # Trainer: or sets both
    strategies = lightning.pytorch.strategies
    if args.strategy == "fsdp":  # Trainer: its "fsdp" is FSDP1, and for GPUs only; this is FSDP2
        world_size = dist.get_world_size()
        strategy = strategies.ModelParallelStrategy(world_size, tensor_parallel_size=1)
    elif args.strategy == "deepspeed_stage_2":
        strategy = DeepSpeed(
            stage=2,
            reduce_bucket_size=10_000_000,  # DeepSpeed: as in config/zero_stage2_config.json
            logging_batch_size_per_gpu=args.batch_size // dist.get_world_size(),
            logging_level=logging.ERROR,
        )
    else:
        # DDP: no second copy of the gradients
        strategy = strategies.DDPStrategy(gradient_as_bucket_view=True)
    return lightning.Trainer(
        accelerator=args.device,
        devices=common.world().local_size,
        num_nodes=dist.get_world_size() // common.world().local_size,
        strategy=strategy,
        precision="64-true" if args.double and args.strategy == "ddp" else "32-true",
        max_epochs=epochs,  # Trainer: defaults to 1000
        gradient_clip_val=args.clip_grad,
        logger=False,  # Trainer: would write lightning_logs/ into the working directory,
        enable_checkpointing=False,  # and its checkpoints there: Run writes snapshots
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__)
    parser.add_argument("--strategy", choices=["ddp", "fsdp", "deepspeed_stage_2"], default="ddp",
                        help="Lightning's strategy (default: ddp)")  # fmt: skip
    args = common.parse_args(parser)
    common.prepare_process(args)
    if args.eval_every:
        common.fail(f"--eval-every {args.eval_every}: the Trainer's epochs are whole; leave it out")
    if args.double and args.strategy == "deepspeed_stage_2":
        common.fail("--double: DeepSpeed computes in float32 at most; leave it out")
    if "RANK" not in os.environ:  # torchrun: sets these; without it, there is one process
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = common.get_device(args, local_rank)  # DDP: one device per local rank
    if device.type == "cuda":
        torch.cuda.set_device(device)  # DDP: otherwise every rank also allocates memory on GPU 0
    # Trainer: would create the group, too, but without the store; it uses an existing one
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
    if args.strategy == "deepspeed_stage_2":
        config = {"train_batch_size": args.batch_size}
        deepspeed_engine.import_deepspeed(args, device, config)  # Trainer: imports it otherwise
    ddp = args.strategy == "ddp"
    fsdp = args.strategy == "fsdp"
    with torch.device("meta" if fsdp else "cpu"):  # FSDP: no rank holds the whole model
        model = common.make_model(args, train_set.classes, channels_last=ddp)
    run = common.Run(args, device, train_loader)
    task = Task(args, run, model, train_loader, eval_loader, sampler)
    make_trainer(args, run.epochs).fit(task)

    if rank == 0:
        common.save_model(args, task.weights)
    # DeepSpeed: has buffers of its own for gradients and optimizer
    run.finish(model, None if task.deepspeed else task.optimizer)
    # DDP: leave together. Not in a finally block: after an error on one rank, nccl would wait for
    # the others, which are in the middle of a collective, and the error would stay hidden.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
