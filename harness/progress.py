"""The progress of a run: its state, which a snapshot has; progress bar, lines and TensorBoard."""

import atexit
import itertools
import math
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from harness.measure import local
from harness.world import gather_objects, print0, world

METRICS = ("eval_step", "train_loss", "eval_loss", "eval_accuracy", "seconds")
OF_A_RANK = ("loss_sum", "samples")  # each rank has its own; all others are the same on every rank


@dataclass
class RunState:
    """The progress of a run. Losses are summed on the device, and fetched when they are shown."""

    loss_sum: Tensor  # since the last evaluation, by samples: a float64 scalar on the device
    samples: float = 0.0  # since the last evaluation
    step: int = 0  # number of optimizer steps
    eval_samples: int = 0
    history: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in METRICS})

    @property
    def evaluated(self) -> int:
        """The step after which the model was last evaluated; 0: it was not."""
        return (self.history["eval_step"] or [0])[-1]

    @property
    def best(self) -> tuple[int, float]:
        """The step and the loss of the evaluation with the lowest loss."""
        found = zip(self.history["eval_step"], self.history["eval_loss"], strict=True)
        return min(found, key=lambda one: (math.isnan(one[1]), one[1]), default=(0, math.inf))

    @property
    def snapshot_name(self) -> str:
        """The name of a snapshot of this step."""
        name = f"step-{self.step:08}"
        return f"{name}-evaluated" if self.evaluated == self.step else name

    def name_best(self) -> str:
        """The name of the snapshot of the best evaluation."""
        return f"step-{self.best[0]:08}-evaluated"

    def add_evaluation(self, train_loss: float, metrics: dict, seconds: float) -> dict[str, float]:
        """Store, and return, the metrics of :func:`common.evaluate` and of the training before."""
        self.eval_samples = metrics["samples"]
        figures = (self.step, train_loss, metrics["loss"], metrics["accuracy"], seconds)
        found = dict(zip(METRICS, figures, strict=True))
        for name, value in found.items():
            self.history[name].append(value)
        return found

    def add(self, loss: Tensor, samples: float) -> None:
        """Add the mean loss of a number of samples. It stays on the device."""
        self.loss_sum += local(loss.detach()) * samples
        self.samples += samples

    def totals(self) -> tuple[float, float]:
        """Sum of losses, and number of samples, since the last evaluation. All ranks call it."""
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
        device = self.loss_sum.device
        own = {"loss_sum": self.loss_sum.item(), "samples": self.samples}
        own["seed"] = torch.initial_seed()
        own["rng"] = {"cpu": torch.get_rng_state()}
        if device.type == "cuda":
            own["rng"]["cuda"] = torch.cuda.get_rng_state(device)
        names = [each.name for each in fields(self) if each.name not in OF_A_RANK]
        return {name: getattr(self, name) for name in names} | {"ranks": gather_objects(own)}

    def load_state_dict(self, state: dict, is_due: Callable[[int], bool]) -> None:
        """Restore what :meth:`state_dict` returned. If the ranks' seeds differ from the snapshot's,
        which are the same among ranks of tensor parallelism, dropout starts from the seeds, and
        rank 0 gets the sums of all ranks. The history keeps only evaluations that are due, as
        --max-steps may have cut an epoch short. All ranks call it."""
        ranks = state["ranks"]
        device = self.loss_sum.device
        for name in state.keys() - {"ranks"}:
            setattr(self, name, state[name])
        if [rank["seed"] for rank in ranks] == gather_objects(torch.initial_seed()):
            own = ranks[world().rank]
            torch.set_rng_state(own["rng"]["cpu"])
            if "cuda" in own["rng"] and device.type == "cuda":
                torch.cuda.set_rng_state(own["rng"]["cuda"], device)
        else:
            print0("dropout starts from --seed: the snapshot is of other ranks, or another mesh")
            counted = ranks if world().rank == 0 else []
            own = {"loss_sum": sum(rank["loss_sum"] for rank in counted)}
            own["samples"] = sum(rank["samples"] for rank in counted)
        self.loss_sum = self.loss_sum + own["loss_sum"]
        self.samples = own["samples"]
        due = list(map(is_due, self.history["eval_step"]))
        self.history = {n: list(itertools.compress(v, due)) for n, v in self.history.items()}


class Display:
    """Progress output of rank 0; on other ranks every method does nothing. In TensorBoard, points
    of earlier runs after the first step are purged."""

    def __init__(self, folder: Path, unit: str, first_step: int):
        self.unit = unit
        self.writer = None
        if world().rank == 0:
            from torch.utils.tensorboard import SummaryWriter  # slow, and only one rank needs it

            self.writer = SummaryWriter(str(folder), purge_step=first_step)
            atexit.register(self.writer.close)  # however the run ends

    def start_epoch(self, title: str, done: int, total: int) -> None:
        """A progress bar for an epoch, of which some samples may be done already."""
        hide = None if world().rank == 0 else True  # None: shown if there is a terminal
        options = {"unit": self.unit, "unit_scale": True, "leave": False, "disable": hide}
        self.bar = tqdm(desc=title, initial=done, total=total, **options)

    def step(self, step: int, loss: float, **values: float) -> None:
        shown = {"loss": loss} | {n: v for n, v in values.items() if n == "gradient_norm"}
        self.bar.set_postfix({n: f"{v:.3f}" for n, v in shown.items()}, refresh=False)
        self.add_scalars("step", step, loss=loss, **values)

    def evaluation(self, title: str, eval_step: int, **found: float) -> None:
        self.add_scalars("epoch", eval_step, **found)
        loss = f"loss {found['train_loss']:.4f}, evaluation loss {found['eval_loss']:.4f}"
        accuracy = f"accuracy {found['eval_accuracy']:.2%}"
        print0(f"{title}: {loss}, {accuracy}, {found['seconds']:.1f} s")

    def add_scalars(self, group: str, step: int, **values: float) -> None:
        for name, value in values.items() if self.writer else ():
            self.writer.add_scalar(f"{group}/{name}", value, step)

    def flush(self) -> None:
        if self.writer:
            self.writer.flush()

    def close(self, hparams: tuple[dict, dict]) -> None:
        """Close TensorBoard's file, with an entry of HPARAMS and its metrics."""
        if self.writer:
            self.writer.add_hparams(*hparams, run_name=".")
            self.writer.close()
