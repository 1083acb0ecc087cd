"""RunState: the progress of a run, saved in a snapshot and restored from it."""

import dataclasses
import time

import torch
import torch.distributed as dist
from torch import Tensor

from harness.measure import local
from harness.world import gather_objects, world

METRICS = ("train_loss", "eval_loss", "eval_accuracy", "seconds")
OF_A_RANK = ("loss_sum", "samples")  # each rank has its own; all others are the same on every rank


@dataclasses.dataclass
class RunState:
    """The progress of a run. ``loss_sum`` and ``samples`` are those of this rank only. Losses are
    summed on the device, and fetched when they are shown.

    Args:
        loss_sum: of this epoch, weighted by samples: a float64 scalar on the device.
    """

    loss_sum: Tensor
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
        """Store the results of an epoch, and return them.

        Args:
            metrics: of the evaluation, see :meth:`Run.report`.
        """
        self.evaluated, self.eval_samples = self.step, metrics["samples"]
        figures = (train_loss, metrics["loss"], metrics["accuracy"], seconds)
        for name, value in zip(METRICS, figures, strict=True):
            self.history[name].append(value)
        return dict(zip(METRICS, figures, strict=True))

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
        loss_sum, samples = totals.tolist()
        return loss_sum, samples

    def begin_line(self) -> None:
        """What :meth:`line` returns next begins here."""
        self.shown = *self.totals(), time.perf_counter()

    def line(self) -> tuple[float, float] | None:
        """The mean loss and the samples per second since the last call, over all ranks; ``None``
        if all these steps were skipped. All ranks call it."""
        loss_sum, samples, then = self.shown
        self.begin_line()
        samples = self.shown[1] - samples
        if not samples:
            return None
        return (self.shown[0] - loss_sum) / samples, samples / (self.shown[2] - then)

    def state_dict(self) -> dict:
        """The state for a snapshot, with every rank's random state. All ranks call it."""
        device = self.loss_sum.device
        own = {"loss_sum": self.loss_sum.item(), "samples": self.samples}
        own["rng"] = {"cpu": torch.get_rng_state()}
        if device.type == "cuda":
            own["rng"]["cuda"] = torch.cuda.get_rng_state(device)
        names = [field.name for field in dataclasses.fields(self) if field.name not in OF_A_RANK]
        return {name: getattr(self, name) for name in names} | {"ranks": gather_objects(own)}

    def load_state_dict(self, state: dict, steps_per_epoch: int, total_steps: int) -> None:
        """Restore what :meth:`state_dict` returned. At another number of ranks, rank 0 gets the
        sums of all ranks, and the random numbers of dropout start from the seed.

        The history ends with the last complete epoch: an epoch whose steps are done may not be
        evaluated yet.
        """
        ranks, device = state["ranks"], self.loss_sum.device
        for name in state.keys() - {"ranks"}:
            setattr(self, name, state[name])
        if len(ranks) == world().size:
            own = ranks[world().rank]
            torch.set_rng_state(own["rng"]["cpu"])
            if "cuda" in own["rng"] and device.type == "cuda":
                torch.cuda.set_rng_state(own["rng"]["cuda"], device)
        else:
            mine = ranks if world().rank == 0 else []
            own = {name: sum(rank[name] for rank in mine) for name in OF_A_RANK}
        self.loss_sum, self.samples = self.loss_sum + own["loss_sum"], own["samples"]
        epochs = (self.step - (self.step > self.evaluated)) // steps_per_epoch
        if self.step == self.evaluated >= total_steps:
            epochs = -(-total_steps // steps_per_epoch)
        self.history = {name: values[:epochs] for name, values in self.history.items()}
