"""Run: time, log, snapshots and results of one training run."""

import argparse
import math
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from hangs import watch as hangs
from harness import result, state
from harness.cli import fail
from harness.clock import StepClock, describe_step
from harness.data import batches_of, share_of
from harness.display import Display
from harness.guard import Guard
from harness.meter import LossMeter
from harness.profile import closer_look
from harness.run_state import RunState
from harness.settings import identity_of
from harness.snapshots import SnapshotStore
from harness.stop import StopRequest
from harness.world import exit_all, print0, wait_for_gloo, world
from remote.mirror import open_snapshots


def total_steps(args: argparse.Namespace, steps_per_epoch: int) -> int:
    return min(args.epochs * steps_per_epoch, args.max_steps or sys.maxsize)


def stop_if_asked(run: "Run", saved: str | None) -> None:
    """End a run that was asked to stop by a signal. All ranks call it.

    Args:
        saved: the snapshot to resume from.
    """
    run.display.flush()
    if not run.stop.agreed:
        return
    run.display.close()
    when = f"by {signal.Signals(run.stop.agreed).name} after step {run.step} of {run.total_steps}"
    where = f"snapshot {saved}" if saved else "no snapshot was written"
    print0(f"stopped {when}: {where}; resume with --resume auto")
    exit_all(128 + run.stop.agreed)


def exit_done(store: SnapshotStore, at: str) -> NoReturn:
    """Exit if the resumed run had already finished. All ranks call it."""
    print0(
        f"nothing left to do: {store.resumed} is {at}; resume with more --epochs or --max-steps, "
        "or start from scratch with --resume none"
    )
    store.copy_results()
    exit_all(0)


class Run:
    """Logs, snapshots and results of one run. All ranks call it; rank 0 prints and writes.

    Args:
        train_loader: the batches of an epoch. Its dataset is a :class:`TaskData`.
        gpus: number of GPUs that this process computes on, if more than one.
    """

    def __init__(self, args: argparse.Namespace, device, train_loader: DataLoader, gpus: int = 1):
        self.args, self.device, self.train_set = args, device, train_loader.dataset
        self.steps_per_epoch, self.start_epoch = len(train_loader), 0
        self.total_steps = total_steps(args, self.steps_per_epoch)
        self.epochs = math.ceil(self.total_steps / self.steps_per_epoch)
        self.state = RunState(torch.zeros((), dtype=torch.float64, device=device))
        devices = [torch.device("cuda", gpu) for gpu in range(gpus)] if gpus > 1 else [device]
        look = closer_look(args, self.total_steps, self.steps_per_epoch)
        self.clock = StepClock(devices, self.train_set.bytes_on_gpu, look)
        identity = identity_of(args) | {"dataset": self.train_set.name}
        self.store = open_snapshots(args, identity)
        self.display = Display(self.store.output_dir, self.train_set.unit)
        self.guard = Guard(args.on_nan, self.state, self.store.newest, self.display.close)
        self.stop = StopRequest()
        self.meter = LossMeter(self.state)

    @property
    def step(self) -> int:
        """Number of optimizer steps so far."""
        return self.state.step

    # ------------------------------------------------------------------------------- snapshots

    def load_snapshot(self, model: nn.Module, optimizer, scheduler, **others) -> None:
        """Resume from the snapshot that ``--resume`` selects, or start from scratch.

        Args:
            model: may be wrapped by DDP.
            others: other objects with ``state_dict()`` and ``load_state_dict()``, by name.
        """
        snapshot = self.store.find("model")
        if snapshot:
            state.load_plain(self.store.resumed, snapshot, model, optimizer, **others)
            if isinstance(model, DistributedDataParallel) and self.args.deterministic:
                state.rebuild_buckets(model, self.train_set.example(2).to(self.device))
        self.start(model, optimizer, scheduler, snapshot, scaler=others.get("scaler"))

    def save_snapshot(self, model: nn.Module, optimizer, scheduler, apart=None, **others) -> None:
        """Write a snapshot for ``--resume``. Rank 0 writes it, and all ranks call this.

        It is the folder ``snapshots/step-*`` in ``--output-dir``. The last two are kept.

        Args:
            apart: if each rank has its own optimizer state: whether the weights differ, too.
        """
        parts = {"model": state.plain(model), "optimizer": optimizer, "scheduler": scheduler}
        if apart is None:
            return self.write_snapshot(**parts, **others)
        write, size = state.own_files(parts["model"], optimizer)
        self.write_snapshot(write, size, apart=apart, **parts, **others)

    def load_sharded_snapshot(self, model: nn.Module, optimizer, scheduler) -> None:
        """:meth:`load_snapshot` of a sharded model: each rank reads its shards."""
        snapshot = self.store.find("param_groups")
        if snapshot:
            state.load_sharded(self.store.resumed, snapshot, model, optimizer)
        self.start(model, optimizer, scheduler, snapshot)

    def save_sharded_snapshot(self, model: nn.Module, optimizer, scheduler) -> None:
        """:meth:`save_snapshot` of a sharded model: each rank writes its shards."""
        write, size, parts = state.sharded_parts(model, optimizer)
        self.write_snapshot(write, size, scheduler=scheduler, **parts)

    def write_snapshot(self, write_files: Callable | None = None, size: int = 0, **parts) -> None:
        """Write a snapshot; then end the run if it was asked to stop. All ranks call it.

        Args:
            write_files: puts further files into the folder that it is given; all ranks call it.
            size: how many bytes, of all ranks.
            parts: other entries of ``state.pt``, by name.
        """
        name, parts = self.state.snapshot_name, self.state_dict() | parts
        saved, failure = self.store.save(name, parts, write_files, size)
        if failure and self.args.on_save_error == "stop":
            fail(f"step {self.step}: {failure}, then resume with --resume auto", code=3)
        if failure:
            print0(f"step {self.step}: {failure}; training continues (--on-save-error continue)")
        stop_if_asked(self, saved)

    def state_dict(self) -> dict:
        """The state of the run for a snapshot, after a check of model and optimizer for NaN."""
        self.guard.check_snapshot()
        parts = {"run": self.state, "clock": self.clock, "scheduler": self.scheduler}
        return {name: part and part.state_dict() for name, part in parts.items()}

    def snapshot_is_due(self) -> bool:
        """Whether to save a snapshot after this step: at every ``--snapshot-every``-th step, and
        when the run was asked to stop, in addition to the end of each epoch."""
        last = self.step == self.total_steps or self.step % self.steps_per_epoch == 0
        every = self.step % self.args.snapshot_every == 0
        if not self.stop.agreed and (last or not every):
            return False
        self.clock.pause()
        return True

    # --------------------------------------------------------------------------------- begin

    def start(
        self, model, optimizer, scheduler, snapshot: dict | None, scaler=None, engine=None
    ) -> None:
        """Start, or resume from a snapshot that is already loaded, and open TensorBoard's file.

        Args:
            model: that the loop calls; may be wrapped by DDP.
            scheduler: ``None`` if a library handles it.
            scaler: see :meth:`Guard.attach`.
            engine: a library's wrapper of the model, if it steps the optimizer itself. The library
                then tells the clock and the guard of its steps.
        """
        if snapshot and scheduler:
            scheduler.load_state_dict(snapshot["scheduler"])
            scheduler.last_epoch -= 1
            scheduler.step()  # to this run's learning rate: --epochs may have changed
        if snapshot:
            self.clock.load_state_dict(snapshot["clock"])
            self.state.load_state_dict(snapshot["run"], self.steps_per_epoch, self.total_steps)
            self.start_epoch = self.state.epochs
            done = self.start_epoch >= self.epochs
            if done and self.store.has_result():
                exit_done(self.store, f"at step {self.step} of {self.total_steps}")
            at = f"epoch {self.start_epoch + 1}, step {self.step + 1}"
            print0(f"resumed from {self.store.resumed} at {'the end' if done else at}")
        self.optimizer, self.scheduler = optimizer, scheduler
        self.guard.attach(state.plain(model), optimizer, scaler)
        watched = (model, optimizer) if engine is None else (engine, None)
        self.clock.attach(*watched)
        if world().rank == 0:
            self.store.archive_previous_run()
        self.display.open(self.step + 1)
        self.stop.listen()
        hangs.listen(self.args.timeout)

    # ---------------------------------------------------------------------------------- steps

    def batches(self, loader: DataLoader, epoch: int, dtype=None) -> Iterator[tuple]:
        """This rank's batches of an epoch, on its device: see :meth:`TaskData.prepare`."""
        begin = self.step - epoch * self.steps_per_epoch  # 0, unless --max-steps had cut it short
        end = min(self.steps_per_epoch, self.total_steps - epoch * self.steps_per_epoch)
        loader.batch_sampler.begin = begin
        share = share_of(loader)
        copies = world().size // share[1]  # ranks that have the same batch
        self.meter.begin()
        title = f"epoch {epoch + 1}/{self.epochs}"
        self.display.start_epoch(title, begin * self.args.batch_size, end * self.args.batch_size)
        self.clock.start()
        for index, batch in zip(range(begin, end), batches_of(loader), strict=False):
            self.state.step += 1
            self.clock.begin_step(self.total_steps - self.step)
            self.batch = len(batch[-1]) / copies  # summed over all ranks
            self.lr = self.optimizer.param_groups[0]["lr"]
            place = self.args.seed, epoch, index
            batch = self.train_set.prepare(batch, self.device, *place, dtype, share)
            self.clock.has_data()
            yield batch
            self.clock.tick()
            self.display.bar.update(self.args.batch_size)
        self.display.bar.close()
        self.clock.end_epoch()

    def log(self, loss: Tensor) -> None:
        """Add the loss of a step.

        Args:
            loss: mean over this rank's batch, a scalar. It stays on the device. Only every
                ``--print-freq``-th step prints the mean since the last time, over all ranks.
        """
        if not self.guard.left_out:
            self.meter.add(loss, self.batch)
        self.stop.vote(self.step)
        if self.step % self.args.print_freq and self.step != self.total_steps:
            return
        if shown := self.meter.read():
            mean, speed = shown
            self.guard.check_loss(mean)
            figures = {**self.train_set.rates(speed), "learning_rate": self.lr}
            self.display.step(self.step, loss=mean, **figures)

    # ----------------------------------------------------------------------- epochs and the end

    def report(self, metrics: dict[str, float]) -> None:
        """End an epoch: print a line, and add a point to each TensorBoard curve.

        Args:
            metrics: what :func:`common.evaluate` returned.
        """
        loss_sum, samples = self.meter.totals()
        if samples:
            self.guard.check_loss(loss_sum / samples)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(metrics["loss"])
        mean = loss_sum / samples if samples else math.nan
        epoch = self.state.end_epoch(mean, metrics, self.clock.epoch_seconds)
        self.display.epoch(f"epoch {self.state.epochs}/{self.epochs}", self.step, epoch)
        if self.step % self.steps_per_epoch == 0:  # not cut short by --max-steps
            self.state.clear_sums()
            self.clock.epoch_seconds = 0.0

    def finish(self, model: nn.Module, optimizer, **held: Iterable[Tensor]) -> None:
        """Write ``result.json`` and TensorBoard's HPARAMS, and print the last lines.

        Args:
            model, optimizer: of this rank, with the gradients of the last step; their tensors are
                counted for ``state_bytes``.
            held: see :func:`result.count_state_bytes`.
        """
        figures = result.gather_figures(self.clock, model, optimizer, held)
        if world().rank == 0:
            found = result.describe(self.args, self.train_set, self.state, self.clock, model)
            found |= figures
            result.write_result(found, self.store.output_dir)
            self.display.close(result.hparams(self.args, found))
            print0(describe_step(found))
            print0(f"{result.describe_end(found)}, files in {self.store.output_dir}")
        self.store.copy_results()
        wait_for_gloo()
