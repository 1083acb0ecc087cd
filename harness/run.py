"""Run: time, log, snapshots and results of one training run."""

import contextlib
import itertools
import json
import math
import signal
import sys
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

import hangs
from harness import flops, result, state
from harness.cli import fail, reachable
from harness.clock import StepClock, describe_step
from harness.data import batches_of, share_of
from harness.guard import Guard
from harness.measure import whole
from harness.progress import Display, RunState
from harness.settings import as_words, values_of
from harness.snapshots import SnapshotStore, delivery, read_snapshot
from harness.stop import StopRequest
from harness.world import Failed, exit_all, print0, this_script, together, wait_for_gloo, world


def total_steps(args, steps_per_epoch: int) -> int:
    return min(args.epochs * steps_per_epoch, args.max_steps or sys.maxsize)


class Resumable:
    """The parts of a run, and how they are saved in a snapshot and resumed from it."""

    def __init__(self, args, device, train_loader: DataLoader, gpus: int = 1):
        self.args = args
        self.device = device
        self.train_set = train_loader.dataset
        self.steps_per_epoch = len(train_loader)
        self.total_steps = total_steps(args, self.steps_per_epoch)
        self.epochs = math.ceil(self.total_steps / self.steps_per_epoch)
        self.state = RunState(torch.zeros((), dtype=torch.float64, device=device))
        devices = [torch.device("cuda", gpu) for gpu in range(gpus)] if gpus > 1 else [device]
        look = None
        if args.trace or args.profile_memory:
            from harness.profile import closer_look  # which other runs do not need

            look = closer_look(args, self.total_steps, self.steps_per_epoch)
        self.clock = StepClock(devices, self.train_set.bytes_on_gpu, look)
        identity = values_of(args, "identity") | self.train_set.describe()
        self.store = SnapshotStore(args, identity, self.state.name_best if args.eval_every else str)
        self.stop = StopRequest()
        self.load = None  # set by resume_or_exit()
        self.model_step = 0  # whose weights model.pt has; 0: of the last one
        self.grad_norm = self.shown_norm = None  # before clipping: of this step, as last shown

    @property
    def step(self) -> int:
        """Number of optimizer steps so far."""
        return self.state.step

    @property
    def is_done(self) -> bool:
        """Whether the last step is done and evaluated."""
        return self.step == self.state.evaluated >= self.total_steps

    @property
    def epoch(self) -> int:
        """The epoch, from 0, in which training continues. It may only lack its evaluation."""
        only = self.step > self.state.evaluated
        return self.epochs if self.is_done else (self.step - only) // self.steps_per_epoch

    def divides(self, step: int) -> bool:
        """Whether an epoch ends with this step, or a part of it: see ``--eval-every``."""
        every = self.args.eval_every or self.steps_per_epoch
        return 0 in (step % self.steps_per_epoch, step % every)

    def is_due(self, step: int) -> bool:
        """Whether the model is evaluated after this step."""
        return self.divides(step) or step >= self.total_steps

    @property
    def ends_now(self) -> bool:
        """Whether the run ends after this step: with its last step, or because it was asked to."""
        return bool(self.stop.agreed) or self.step == self.total_steps

    def resume_or_exit(self, model, optimizer, scheduler, read=None, engine=None, **others) -> None:
        """Resume from the snapshot that ``--resume`` selects, of any technique and number of ranks,
        or start from scratch; exit if its run has ended. All ranks call this.

        Args:
            read: gets a snapshot's folder and the content of ``state.pt``, and returns whether it
                has read model and optimizer, as ``write`` of :meth:`save_then_exit_if_asked` wrote
                them.
            others: objects that also have a state, by name.
        """

        def load(folder, snapshot: dict) -> None:
            if not (read and read(folder, snapshot)):
                state.load(folder, snapshot, model, optimizer)

        self.load = load
        if snapshot := self.store.find():
            self.load(self.store.resumed, snapshot)
            state.load_others(self.store.resumed, snapshot, others)
            if isinstance(model, DistributedDataParallel) and self.args.deterministic:
                state.rebuild_buckets(model, self.train_set.example(2).to(self.device))
        self.start(model, optimizer, scheduler, snapshot, others.get("scaler"), engine)

    def start(self, model, optimizer, scheduler, snapshot, scaler=None, engine=None) -> None:
        """Start, or resume from a snapshot that is already loaded. The ``scheduler`` is ``None`` if
        a library handles it; ``engine`` is a library's wrapper that steps the optimizer, and tells
        clock and guard of it."""
        self.stop.listen()
        if snapshot and scheduler:
            own = {k: v for k, v in scheduler.state_dict().items() if isinstance(v, list)}
            scheduler.load_state_dict(snapshot["scheduler"] | own)  # lists: by parameter group
            scheduler.last_epoch -= 1
            scheduler.step()  # to this run's learning rate: --epochs may have changed
        if snapshot:
            self.clock.load_state_dict(snapshot["clock"])
            self.state.load_state_dict(snapshot["run"], self.is_due)
            self.exit_if_done()
            at = "the end" if self.is_done else f"epoch {self.epoch + 1}, step {self.step + 1}"
            print0(f"resumed from {self.store.resumed} at {at}")
            before = snapshot.get("total_steps", self.total_steps)
            if scheduler and self.args.schedule == "cosine" and before != self.total_steps:
                now = f"the learning-rate schedule now ends at step {self.total_steps}"
                print0(f"{now}; that of the snapshot's run ended at step {before}")
        self.optimizer = optimizer
        self.scheduler = scheduler
        if world().rank == 0:
            self.store.archive_previous_run()
        self.display = Display(self.store.output_dir, self.train_set.unit, self.step + 1)
        self.guard = Guard(self, state.plain(model), optimizer, scaler)
        self.clock.attach(*((model, optimizer) if engine is None else (engine, None)))
        hangs.listen(self.args.timeout)  # to the groups of a mesh, too

    @reachable("--output-dir")
    def exit_if_done(self) -> None:
        """Exit if this run resumes from the end of one that had written its result, on rank 0."""
        if self.is_done and together(self.store.has_ended, here=world().rank == 0)[0]:
            at = f"{self.store.resumed} is at step {self.step} of {self.total_steps}"
            use = "resume with more --epochs or --max-steps, or start from scratch with"
            print0(f"nothing left to do: {at}; {use} --resume none")
            exit_all(0)

    def snapshot_is_due(self) -> bool:
        """Whether to save a snapshot after this step: at every ``--snapshot-every``-th step, and
        when the run was asked to stop, in addition to that after an evaluation."""
        every = self.step % self.args.snapshot_every == 0 and not self.is_due(self.step)
        if due := bool(self.stop.agreed) or every:
            self.clock.pause()
        return due

    def save_then_exit_if_asked(
        self, model: nn.Module | None, optimizer, scheduler, write=None, **others
    ) -> None:
        """Write a snapshot for ``--resume``; then end the run if it was asked to stop. All ranks
        call this, and each writes its part of the model and of the optimizer's state. ``write``
        writes further files into the folder that it is given; or all of it, and the model is
        ``None``. ``others``, objects with a ``state_dict()`` or plain data, are in ``state.pt``."""
        parts = self.state_dict()
        writers = [write] if write else []
        for name, other in {"scheduler": scheduler, **others}.items():
            parts[name] = other.state_dict() if hasattr(other, "state_dict") else other
        if model:
            tensors, parts["param_groups"] = state.gather(model, optimizer)
            writers.append(partial(state.save, tensors))
        saved, failure = self.store.save(self.state.snapshot_name, parts, writers)
        if failure:
            self.report_failure(failure)
        self.exit_if_asked(saved)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Where a script writes a snapshot by itself: if it fails, which it must on all ranks, end
        the run or let it continue, as ``--on-save-error`` says."""
        try:
            with state.original_error():
                yield
        except (OSError, RuntimeError, Failed) as error:
            why = f"a checkpoint could not be written ({error})"
            self.report_failure(f"{why}; free some disk space")

    def report_failure(self, failure: str) -> None:
        """Report a snapshot that could not be written, and end the run if the flags say so."""
        if self.args.on_save_error == "stop":
            fail(f"step {self.step}: {failure}, then resume with --resume auto", code=3)
        print0(f"step {self.step}: {failure}; training continues (--on-save-error continue)")

    def state_dict(self) -> dict:
        """The state of the run for a snapshot, after a check for NaN. All ranks call it."""
        self.guard.check_snapshot()
        parts = {"run": self.state, "clock": self.clock, "scheduler": self.scheduler}
        about = {"technique": this_script(), "settings": as_words(self.args)}
        about["total_steps"] = self.total_steps
        about["source"] = getattr(self.args, "source", None)
        return self.store.about | about | {n: p and p.state_dict() for n, p in parts.items()}

    def exit_if_asked(self, saved: str | None) -> None:
        """End the run if a signal asked it to stop; ``saved`` is the snapshot to resume from."""
        self.display.flush()
        if signum := self.stop.agreed:
            when = f"{signal.Signals(signum).name} after step {self.step} of {self.total_steps}"
            where = f"snapshot {saved}" if saved else "no snapshot was written"
            print0(f"stopped by {when}: {where}; resume with --resume auto")
            exit_all(128 + signum)


class Run(Resumable):
    """Logs, snapshots and results of one run. All ranks call it; rank 0 prints and writes. The
    dataset of ``train_loader`` is a :class:`TaskData`; this process computes on ``gpus`` GPUs."""

    def epochs_left(self) -> Iterator[int]:
        """The number of each epoch that is not done; with ``--eval-every`` once for each of its
        parts."""
        while not self.is_done:
            yield self.epoch

    def load_best_weights(self) -> None:
        """With ``--eval-every``: give the model the weights of the best evaluation, from its
        snapshot. All ranks call it."""
        if not self.args.eval_every:
            return
        step, loss = self.state.best
        found = f"best evaluation: step {step}, loss {loss:.4f}"
        if step < self.step:
            path = self.store.find_kept() if self.load else None
            if not (snapshot := path and read_snapshot(path, None, named=False)):
                which = f"its snapshot does not exist; model.pt has the weights of step {self.step}"
                return print0(f"{found}; {which}")
            self.load(path, snapshot)
        self.model_step = step
        print0(f"{found}; model.pt has its weights")

    def batches(self, loader: DataLoader, epoch: int, dtype=None) -> Iterator[tuple]:
        """This rank's batches up to the next evaluation: see :meth:`TaskData.prepare`."""
        first = epoch * self.steps_per_epoch
        begin = self.step - first  # 0, unless an evaluation or a snapshot divides the epoch
        todo = itertools.count(self.step + (self.step <= self.state.evaluated))
        end = next(filter(self.is_due, todo)) - first
        last = min(self.steps_per_epoch, self.total_steps - first)
        loader.batch_sampler.begin = begin
        share = share_of(loader)
        copies = max(1, world().size // share[1])  # ranks that have the same batch
        self.state.begin_line()
        title = f"epoch {epoch + 1}/{self.epochs}"
        self.display.start_epoch(title, begin * self.args.batch_size, last * self.args.batch_size)
        self.clock.start()
        for index, batch in zip(range(begin, end), batches_of(loader), strict=False):
            self.state.step += 1
            self.clock.begin_step(self.total_steps - self.step)
            self.batch = len(batch[-1]) / copies  # summed over all ranks
            self.lr = self.optimizer.param_groups[0]["lr"]
            place = self.args.seed, epoch, index
            batch = self.train_set.prepare(batch, self.device, *place, dtype, share)
            self.clock.mark(self.clock.after_data)
            yield batch
            self.clock.tick()
            self.display.bar.update(self.args.batch_size)
        self.display.bar.close()
        self.clock.end_epoch()

    def log(self, loss: Tensor) -> None:
        """Add the loss of a step: the mean over this rank's batch, a scalar. It stays on the
        device. Every ``--print-freq``-th step prints the mean of those since, over all ranks."""
        if not self.guard.left_out:
            self.state.add(loss, self.batch)
        self.stop.vote(self.step)
        if self.step % self.args.print_freq and self.step != self.total_steps:
            return
        if shown := self.state.line():
            mean, speed = shown
            self.guard.check_loss(mean)
            figures = {**self.train_set.rates(speed), "learning_rate": self.lr}
            if self.grad_norm is not None:
                figures["gradient_norm"] = self.shown_norm = float(whole(self.grad_norm))
            self.display.step(self.step, loss=mean, **figures)

    def report(self, metrics: dict[str, float]) -> None:
        """Report the metrics of :func:`common.evaluate`: a line, and TensorBoard's curves."""
        loss_sum, samples = self.state.totals()
        mean = loss_sum / samples if samples else math.nan  # if all steps were skipped
        if samples:
            self.guard.check_loss(mean)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(metrics["loss"])
        inside = self.step % self.steps_per_epoch and self.step < self.total_steps
        title = f"epoch {self.epoch + 1}/{self.epochs}"
        if inside:
            title += f", step {self.step}"
        found = self.state.add_evaluation(mean, metrics, self.clock.epoch_seconds)
        self.display.evaluation(title, **found)
        if self.divides(self.step):  # not cut short by --max-steps
            self.state.loss_sum = torch.zeros_like(self.state.loss_sum)
            self.state.samples = 0.0
            self.clock.epoch_seconds = 0.0

    def finish(self, model: nn.Module, optimizer, **held: Iterable[Tensor]) -> None:
        """Write ``result.json`` and TensorBoard's HPARAMS, and print the last lines. Gradients are
        those of the last step; for ``held``, see :func:`result.count_state_bytes`."""
        figures = result.gather_figures(self.clock, model, optimizer, held)
        counted = flops.count_flops(self.args, self.train_set, model, self.device)
        if world().rank == 0:
            found = result.describe(self.args, self.train_set, self.state, self.clock, model)
            found |= figures | {"epochs": math.ceil(self.step / self.steps_per_epoch)}
            found |= {"best_step": self.state.best[0], "model_step": self.model_step or self.step}
            found |= {"gradient_norm": self.shown_norm}
            found |= flops.utilization(counted, found)
            path = self.store.output_dir / "result.json"
            with delivery(path):
                path.write_text(json.dumps(found, indent=2) + "\n")
            self.display.close(result.hparams(self.args, found))
            print0(describe_step(found))
            print0(f"{result.describe_end(found)}, files in {self.store.output_dir}")
        self.store.copy_results()
        wait_for_gloo()
