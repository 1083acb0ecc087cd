"""What a run shows: a progress bar on a terminal, lines, and TensorBoard's curves."""

from pathlib import Path

from tqdm import tqdm

from harness.world import print0, world


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
        self.bar = tqdm(
            desc=title,
            initial=done,
            total=total,
            unit=self.unit,
            unit_scale=True,
            leave=False,
            disable=None if world().rank == 0 else True,  # None: shown if there is a terminal
        )

    def step(self, step: int, loss: float, **values: float) -> None:
        if world().rank == 0:
            self.bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        self.add_scalars("step", step, loss=loss, **values)

    def epoch(self, title: str, step: int, epoch: dict[str, float]) -> None:
        self.add_scalars("epoch", step, **epoch)
        print0(
            f"{title}: loss {epoch['train_loss']:.4f}, evaluation loss {epoch['eval_loss']:.4f}, "
            f"accuracy {epoch['eval_accuracy']:.2%}, {epoch['seconds']:.1f} s"
        )

    def add_scalars(self, group: str, step: int, **values: float) -> None:
        if self.writer:
            for name, value in values.items():
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
