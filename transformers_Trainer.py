"""Train on several devices with DistributedDataParallel through the Trainer of transformers.

Differs     from pytorch_torchrun_DDP.py: Trainer creates the process group, wraps the model in DDP
            and runs the loop, with batches from this script. Most of its arguments below switch off
            its other features. Lines tagged "# Trainer:".
Command:    torchrun --nproc_per_node=4 transformers_Trainer.py --dataset reviews --data-dir PATH
Use it      to fine-tune a model of transformers, with its tokenizers, metrics and checkpoints. Not
            to change what happens in a step.
Holds       what pytorch_torchrun_DDP.py holds, and a copy of the gradients in DDP's buckets.
Sends       what pytorch_torchrun_DDP.py sends.
"""

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DistributedSampler

import common

transformers = common.import_optional("transformers")


class Steps:
    """Trainer: used as the DataLoader, with all steps as one epoch."""

    def __init__(self, batches: Iterator[dict], length: int):
        self.batches = batches
        self.length = length

    def __iter__(self) -> Iterator[dict]:
        return self.batches

    def __len__(self) -> int:
        return self.length


class Trainer(transformers.Trainer):
    """Trainer: with our batches, and a loss computed from logits, as our models return none."""

    def __init__(self, steps: Steps, **options):
        super().__init__(**options)
        self.steps = steps

    def get_train_dataloader(self) -> Steps:
        return self.steps

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(inputs["inputs"])
        labels = inputs["targets"]
        total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
        self.loss = total / labels.numel() / inputs["density"]
        return self.loss


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__)
    args = common.parse_args(parser)
    common.prepare_process(args)
    if "RANK" not in os.environ:  # torchrun: sets these; without it, there is one process
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = common.get_device(args, local_rank)  # DDP: one device per local rank
    options = transformers.TrainingArguments(  # Trainer: init_process_group() and set_device()
        output_dir=common.local_folder(args.output_dir),
        use_cpu=device.type == "cpu",
        ddp_backend="nccl" if device.type == "cuda" else "gloo",
        ddp_timeout=args.timeout,
        ddp_find_unused_parameters=False,  # Trainer: would search for them at every step
        max_grad_norm=args.clip_grad or 0.0,  # Trainer: would clip at 1
        logging_nan_inf_filter=False,  # Trainer: would hide a NaN, and wait for each step's loss
        num_train_epochs=1,  # Trainer: see Steps
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
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

    # 4. Optimizer and schedule
    optimizer = common.make_optimizer(args, model)
    scheduler = common.make_scheduler(args, optimizer, len(train_loader))
    run = common.Run(args, device, train_loader)

    # 5. Train
    def batches():
        ddp = trainer.model_wrapped  # Trainer: has wrapped the model by now
        ddp.broadcast_buffers = False  # DDP: broadcast before evaluation, not at every step
        run.resume_or_exit(ddp, optimizer, scheduler)
        for epoch in run.epochs_left():
            sampler.set_epoch(epoch)  # DDP: a new order every epoch, the same on all ranks
            for inputs, labels in run.batches(train_loader, epoch):
                batch = {"inputs": inputs, "targets": labels, "density": train_set.density}
                yield batch  # Trainer: returns after the step
                run.log(trainer.loss)  # copied from the device only when it is printed
                if run.snapshot_is_due():  # every --snapshot-every steps, or when asked to stop
                    run.save_then_exit_if_asked(model, optimizer, scheduler)

            # 6. Evaluate
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)  # DDP: BatchNorm saw different samples on each rank
            run.report(common.evaluate(model, eval_loader, device))  # DDP: on every rank
            run.save_then_exit_if_asked(model, optimizer, scheduler)

    transformers.logging.set_verbosity_error()  # Trainer: warns of a run without steps
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus):  # Trainer: reseeds, identically on every rank
        trainer = Trainer(
            # Trainer: fetches this many batches. The code after the last step runs in one more.
            Steps(batches(), run.total_steps + 1),
            args=options,
            model=model,
            optimizers=(optimizer, scheduler),
        )
    trainer.remove_callback(transformers.PrinterCallback)
    clip = trainer.accelerator.clip_grad_norm_

    def clip_and_keep(*args):  # Trainer: would drop the norm
        run.grad_norm = clip(*args)
        return run.grad_norm

    if args.clip_grad:
        trainer.accelerator.clip_grad_norm_ = clip_and_keep
    trainer.train()

    # 7. Save and report
    run.load_best_weights()  # with --eval-every; otherwise the last ones stay
    if rank == 0:
        common.save_model(args, model.state_dict())
    # Trainer: frees the gradients after each step; they are as large as the parameters
    run.finish(model, optimizer, gradients=model.parameters())
    # DDP: leave together. Not in a finally block: after an error on one rank, nccl would wait for
    # the others, which are in the middle of a collective, and the error would stay hidden.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
