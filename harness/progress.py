"""The progress of a run: its state, which is saved in a snapshot, and what is shown of it: a
progress bar on a terminal, lines, and TensorBoard's curves."""

import dataclasses
import operator
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from harness.measure import local
from harness.world import gather_objects, print0, world

METRICS = ("train_loss", "eval_loss", "eval_accuracy", "seconds")
OF_A_RANK = ("loss_sum", "samples")  # each rank has its own; all others are the same on every rank


@dataclasses.dataclass
class RunState:
    """The progress of a run. ``loss_sum`` and ``samples`` are those of this rank only. Losses are
    summed on the device, and fetched when they are shown."""

    loss_sum: Tensor  # of this epoch, weighted by samples: a float64 scalar on the device
    samples: float = 0.0  # of this epoch
    step: int = 0  # number of optimizer steps
    evaluated: int = 0  # the step after which the model was last evaluated
    eval_samples: int = 0
    history: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: {name: [] for name in METRICS}
    )

    @property
    def epochs(self) -> int:
        """Number of evaluated epochs; the last one may have been cut short."""
        return len(self.history["seconds"])

    @property
    def snapshot_name(self) -> str:
        """The name of a snapshot of this step."""
        return f"step-{self.step:08}" + ("-evaluated" if self.evaluated == self.step else "")

    def end_epoch(self, train_loss: float, metrics: dict, seconds: float) -> dict[str, float]:
        """Store the results of an epoch, with those of :func:`common.evaluate`, and return them."""
        self.evaluated, self.eval_samples = self.step, metrics["samples"]
        figures = (train_loss, metrics["loss"], metrics["accuracy"], seconds)
        for name, value in (epoch := dict(zip(METRICS, figures, strict=True))).items():
            self.history[name].append(value)
        return epoch

    def clear_sums(self) -> None:
        """Reset the sums for a new epoch."""
        self.loss_sum, self.samples = torch.zeros_like(self.loss_sum), 0.0

    def add(self, loss: Tensor, samples: float) -> None:
        """Add the mean loss of a number of samples. It stays on the device."""
        self.loss_sum += local(loss.detach()) * samples
        self.samples += samples

    def totals(self) -> tuple[float, float]:
        """Sum of losses and number of samples of this epoch so far. All ranks call it."""
        totals = torch.stack([self.loss_sum, self.loss_sum.new_tensor(self.samples)])
        if dist.is_initialized():
            dist.all_reduce(totals)
        return tuple(totals.tolist())

    def begin_line(self) -> None:
        """What :meth:`line` returns next begins here."""
        self.shown = *self.totals(), time.perf_counter()

    def line(self) -> tuple[float, float] | None:
        """The mean loss and the samples per second since the last call, over all ranks; ``None``
        if all these steps were skipped. All ranks call it."""
        before = self.shown
        self.begin_line()
        loss_sum, samples, seconds = map(operator.sub, self.shown, before)
        return (loss_sum / samples, samples / seconds) if samples else None

    def state_dict(self) -> dict:
        """The state for a snapshot, with every rank's random state. All ranks call it."""
        device, seed = self.loss_sum.device, torch.initial_seed()
        own = {"loss_sum": self.loss_sum.item(), "samples": self.samples, "seed": seed}
        own["rng"] = {"cpu": torch.get_rng_state()}
        if device.type == "cuda":
            own["rng"]["cuda"] = torch.cuda.get_rng_state(device)
        names = [field.name for field in dataclasses.fields(self) if field.name not in OF_A_RANK]
        return {name: getattr(self, name) for name in names} | {"ranks": gather_objects(own)}

    def load_state_dict(self, state: dict, steps_per_epoch: int, total_steps: int) -> None:
        """Restore what :meth:`state_dict` returned. If the ranks' seeds differ from the snapshot's,
        which are the same among ranks of tensor parallelism, dropout starts from the seeds, and
        rank 0 gets the sums of all ranks. The history ends with the last complete epoch: one whose
        steps are done may not be evaluated yet. All ranks call it."""
        ranks, device = state["ranks"], self.loss_sum.device
        for name in state.keys() - {"ranks"}:
            setattr(self, name, state[name])
        if [rank["seed"] for rank in ranks] == gather_objects(torch.initial_seed()):
            own = ranks[world().rank]
            torch.set_rng_state(own["rng"]["cpu"])
            if "cuda" in own["rng"] and device.type == "cuda":
                torch.cuda.set_rng_state(own["rng"]["cuda"], device)
        else:
            print0("dropout starts from --seed: the snapshot is of other ranks, or another mesh")
            own = {name: sum(r[name] for r in ranks if world().rank == 0) for name in OF_A_RANK}
        self.loss_sum, self.samples = self.loss_sum + own["loss_sum"], own["samples"]
        epochs = (self.step - (self.step > self.evaluated)) // steps_per_epoch
        if self.step == self.evaluated >= total_steps:
            epochs = -(-total_steps // steps_per_epoch)
        self.history = {name: values[:epochs] for name, values in self.history.items()}


class Display:
    """Progress output of rank 0; on other ranks every method does nothing."""

    def __init__(self, folder: Path, unit: str):
        self.folder, self.unit, self.writer, self.bar = folder, unit, None, None

    def open(self, first_step: int) -> None:
        """Open TensorBoard's file; points of earlier runs after the first step are purged."""
        if world().rank == 0:
            from torch.utils.tensorboard import SummaryWriter  # slow, and only one rank needs it

            self.writer = SummaryWriter(str(self.folder), purge_step=first_step)

    def start_epoch(self, title: str, done: int, total: int) -> None:
        """A progress bar for an epoch, of which some samples may be done already."""
        hide = None if world().rank == 0 else True  # None: shown if there is a terminal
        options = {"unit": self.unit, "unit_scale": True, "leave": False, "disable": hide}
        self.bar = tqdm(desc=title, initial=done, total=total, **options)

    def step(self, step: int, loss: float, **values: float) -> None:
        self.bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        self.add_scalars("step", step, loss=loss, **values)

    def epoch(self, title: str, step: int, epoch: dict[str, float]) -> None:
        self.add_scalars("epoch", step, **{k: v for k, v in epoch.items() if v is not None})
        loss = f"loss {epoch['train_loss']:.4f}, evaluation loss {epoch['eval_loss']:.4f}"
        right = "" if (share := epoch["eval_accuracy"]) is None else f", accuracy {share:.2%}"
        print0(f"{title}: {loss}{right}, {epoch['seconds']:.1f} s")

    def add_scalars(self, group: str, step: int, **values: float) -> None:
        for name, value in values.items() if self.writer else ():
            self.writer.add_scalar(f"{group}/{name}", value, step)

    def flush(self) -> None:
        if self.writer:
            self.writer.flush()

    def close(self, hparams: tuple[dict, dict] | None = None) -> None:
        """Close TensorBoard's file, with an entry of HPARAMS, if there is one, and its metrics."""
        if self.writer:
            if hparams:
                self.writer.add_hparams(*hparams, run_name=".")
            self.writer.close()
