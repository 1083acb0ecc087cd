"""Run: the clock and the record of one run, and what it calls at each step and epoch."""

import argparse
import math
import sys
import time
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from harness import breakdown, checkpoint, result
from harness.clock import StepClock
from harness.display import Display
from harness.guard import Guard
from harness.loaders import batches_of
from harness.measure import local
from harness.mirror import make_store
from harness.ranks import RANK, WORLD_SIZE, exit_all, max_over_ranks, print0, wait_for_gloo
from harness.stop import StopRequest
from harness.trace import closer_look


def total_steps(args: argparse.Namespace, steps_per_epoch: int) -> int:
    return min(args.epochs * steps_per_epoch, args.max_steps or sys.maxsize)


class Run:
    """The meter and the files of one run. All ranks call it alike; rank 0 prints and writes.

    Args:
        train_loader: what an epoch consists of.
        gpus: how many of them this process computes on, if it is more than ``device``.
    """

    def __init__(self, args: argparse.Namespace, device, train_loader: DataLoader, gpus: int = 1):
        self.args, self.device, self.train_set = args, device, train_loader.dataset
        self.steps_per_epoch = len(train_loader)
        self.total_steps = total_steps(args, self.steps_per_epoch)
        self.epochs = math.ceil(self.total_steps / self.steps_per_epoch)
        self.start_epoch = self.eval_samples = self.step = 0  # step: of the optimizer, in all
        self.evaluated = 0  # the step after which the model was last evaluated
        self.history = {"train_loss": [], "eval_loss": [], "eval_accuracy": [], "seconds": []}
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)  # of this epoch
        self.images = 0  # of this epoch and rank
        devices = [torch.device("cuda", gpu) for gpu in range(gpus)] if gpus > 1 else [device]
        look = closer_look(args, self.total_steps, self.steps_per_epoch)
        self.clock = StepClock(devices, self.train_set.bytes_on_gpu, look)
        self.display = Display(args.output_dir, self.train_set.unit)
        self.store = make_store(args)
        self.guard = Guard(args, self.store.newest)
        self.stop = StopRequest()

    # ------------------------------------------------------------------------------- snapshots

    def load_snapshot(self, model: nn.Module, optimizer, scheduler, **others) -> None:
        """Go on from the snapshot that ``--resume`` means. If there is none, begin.

        Args:
            model: also in DDP's wrapper.
            others: what else has a ``state_dict()`` and a ``load_state_dict()``, by name.
        """
        snapshot = self.store.find("model")
        if snapshot:
            checkpoint.load_plain(self.store.resumed, snapshot, model, optimizer, **others)
            if isinstance(model, DistributedDataParallel) and self.args.deterministic:
                checkpoint.rebuild_buckets(model, self.train_set.example(2).to(self.device))
        scaler = others.get("scaler")
        self.start(model, optimizer, scheduler, snapshot, scaler=scaler)

    def save_snapshot(self, model: nn.Module, optimizer, scheduler, **others) -> None:
        """Write a snapshot, from which ``--resume`` goes on: rank 0 does, and all ranks call it.

        It is the folder ``snapshots/step-*`` in ``--output-dir``. The last two are kept.
        """
        parts = {"optimizer": optimizer, "scheduler": scheduler, **others}
        checkpoint.write(self, model=checkpoint.plain(model), **parts)

    def load_sharded_snapshot(self, model: nn.Module, optimizer, scheduler) -> None:
        """:meth:`load_snapshot` of a sharded model: each rank reads its shards."""
        snapshot = self.store.find("param_groups")
        if snapshot:
            checkpoint.load_sharded(self.store.resumed, snapshot, model, optimizer)
        self.start(model, optimizer, scheduler, snapshot)

    def save_sharded_snapshot(self, model: nn.Module, optimizer, scheduler) -> None:
        """:meth:`save_snapshot` of a sharded model: each rank writes its shards."""
        write, size, parts = checkpoint.sharded_parts(model, optimizer)
        checkpoint.write(self, write, size, scheduler=scheduler, **parts)

    def snapshot_is_due(self) -> bool:
        """Whether to save a snapshot after this step: one is, besides that of the end of an epoch,
        at every ``--snapshot-every``-th step, and when the run was asked to stop."""
        last = self.step == self.total_steps or self.step % self.steps_per_epoch == 0
        every = self.step % self.args.snapshot_every == 0
        if not self.stop.agreed and (last or not every):
            return False
        self.clock.pause()
        return True

    # --------------------------------------------------------------------------------- begin

    def start(self, model, optimizer, scheduler, snapshot: dict | None, **skips_by) -> None:
        """Begin, or go on from a snapshot that is loaded already, and open TensorBoard's file.

        Args:
            model: what the loop calls: also in DDP's wrapper.
            scheduler: ``None`` if a library looks after it.
            skips_by: see :meth:`Guard.attach`.
        """
        result_file, path = self.args.output_dir / "result.json", self.store.resumed
        if snapshot and scheduler:
            scheduler.load_state_dict(snapshot["scheduler"])
            scheduler.last_epoch -= 1
            scheduler.step()  # to the rate of this run's schedule: --epochs may have changed
        if snapshot:
            checkpoint.restore_run(self, snapshot)
        done = self.start_epoch >= self.epochs
        if max_over_ranks([RANK == 0 and result_file.exists()])[0] and done:
            print0(
                f"nothing left to do: {path} is at step {self.step} of {self.total_steps}; go on "
                "with more --epochs or --max-steps, or begin again with --resume none"
            )
            self.store.copy_results()
            exit_all(0)
        if snapshot:
            at = f"epoch {self.start_epoch + 1}, step {self.step + 1}"
            print0(f"resumed from {path} at {'the end' if done else at}")
        self.optimizer, self.scheduler = optimizer, scheduler
        self.guard.attach(self, checkpoint.plain(model), optimizer, **skips_by)
        self.clock.phases.attach(
            skips_by.get("engine") or model, optimizer, len(self.clock.devices)
        )
        if RANK == 0:
            if snapshot:
                result_file.unlink(missing_ok=True)  # it comes back when this run ends
            self.store.archive_previous_run()
        self.display.open(self.step + 1)
        self.stop.listen()

    # ---------------------------------------------------------------------------------- steps

    def batches(self, loader: DataLoader, epoch: int, dtype=None) -> Iterator[tuple]:
        """This rank's batches of an epoch, on its device, as ``prepare`` of the dataset makes
        them: of images, cropped, flipped and normalized, in the default dtype or another."""
        begin = self.step - epoch * self.steps_per_epoch  # 0, unless --max-steps had cut it short
        end = min(self.steps_per_epoch, self.total_steps - epoch * self.steps_per_epoch)
        loader.batch_sampler.begin = begin
        self.shown = *self.totals(), self.step, time.perf_counter()  # what was shown last, and when
        title = f"epoch {epoch + 1}/{self.epochs}"
        self.display.start_epoch(title, begin * self.args.batch_size, end * self.args.batch_size)
        self.clock.start()
        for index, batch in zip(range(begin, end), batches_of(loader), strict=False):
            self.step += 1
            self.clock.begin_step(self.total_steps - self.step)
            self.batch = len(batch[-1]) / self.train_set.copies  # those of all ranks add up
            self.lr = self.optimizer.param_groups[0]["lr"]
            batch = self.train_set.prepare(batch, self.device, self.args.seed, epoch, index, dtype)
            self.clock.phases.has_data()
            yield batch
            self.clock.tick()
            self.display.bar.update(self.args.batch_size)
        self.display.bar.close()
        self.clock.read()
        self.clock.pause()

    def log(self, loss: Tensor) -> None:
        """Count the loss of a step.

        Args:
            loss: mean over this rank's batch, a scalar. It stays on the device; only at every
                ``--print-freq``-th step is the mean since the last time, over all ranks, shown.
        """
        self.guard.after_step()
        if not self.guard.left_out:
            self.loss_sum += local(loss.detach()) * self.batch
            self.images += self.batch
        if self.step % self.args.print_freq and self.step != self.total_steps:
            return self.stop.vote_between_prints(self.step)
        loss_sum, images, step, then = self.shown
        pace = (time.perf_counter() - then) / max(1, self.step - step)
        self.shown = *self.totals(pace), self.step, time.perf_counter()
        images = self.shown[1] - images
        if images:  # else all of these steps were left out
            mean, speed = (self.shown[0] - loss_sum) / images, images / (self.shown[3] - then)
            self.guard.check_loss(mean)
            figures = {**self.train_set.rates(speed), "learning_rate": self.lr}
            self.display.step(self.step, loss=mean, **figures)

    def totals(self, pace: float = 0.0) -> tuple[float, float]:
        """This epoch's sum of losses and number of images so far, over all ranks. With these, the
        ranks learn whether one of them was asked to stop, and the pace: seconds of a step."""
        self.stop.finish_vote()
        own = self.loss_sum.new_tensor([self.images, pace, *self.stop.own_votes()])
        totals = torch.cat([self.loss_sum[None], own])
        if dist.is_initialized():
            dist.all_reduce(totals)
        loss_sum, images, pace, *votes = totals.tolist()
        self.stop.count_votes(votes)
        if pace:
            self.stop.set_pace(pace / WORLD_SIZE)
        return loss_sum, images

    # ----------------------------------------------------------------------- epochs and the end

    def report(self, metrics: dict[str, float]) -> None:
        """End an epoch: a line on the screen, a point on each curve.

        Args:
            metrics: what :func:`common.evaluate` returned.
        """
        loss_sum, images = self.totals()
        if images:
            self.guard.check_loss(loss_sum / images)
        self.evaluated, self.eval_samples = self.step, metrics["samples"]
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(metrics["loss"])
        epoch = {
            "train_loss": loss_sum / images if images else math.nan,
            "eval_loss": metrics["loss"],
            "eval_accuracy": metrics["accuracy"],
            "seconds": self.clock.epoch_seconds,
        }
        for name, value in epoch.items():
            self.history[name].append(value)
        self.display.epoch(f"epoch {len(self.history['seconds'])}/{self.epochs}", self.step, epoch)
        if self.step % self.steps_per_epoch == 0:  # and not cut short by --max-steps
            self.loss_sum, self.images = torch.zeros_like(self.loss_sum), 0
            self.clock.epoch_seconds = 0.0

    def finish(self, model: nn.Module, optimizer, **held: Iterable[Tensor]) -> None:
        """Write ``result.json`` and TensorBoard's HPARAMS, and print the last lines.

        Args:
            model, optimizer: as this rank holds them, with the gradients of the last step; the
                tensors are counted for ``state_bytes``.
            held: see :func:`result.count_state_bytes`.
        """
        figures = result.gather_figures(self, model, optimizer, held)
        if RANK == 0:
            written = result.write_result(self, model, figures)
            result.add_hparams(self.display.writer, self.args, written)
            self.display.close()
            print0(breakdown.in_a_line(written))
            print0(f"{result.in_a_line(written)}, files in {self.args.output_dir}")
        self.store.copy_results()
        wait_for_gloo()
