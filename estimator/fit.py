"""Find the largest batch that fits in few trials: memory is about linear in the batch."""


class LargestBatch:
    """Call :meth:`next` for the batch to try, then :meth:`tell` its memory, until it is None.

    Args:
        memory: available bytes.
        unit: batches are multiples of this many samples.
    """

    def __init__(self, memory: float, unit: int):
        self.memory, self.unit = memory, unit
        self.took: dict[int, int] = {}  # bytes, by batches in units
        self.given_up = False

    @property
    def best(self) -> int:
        """Samples of the largest batch so far that fits; 0 if none does."""
        return self.unit * max(
            (n for n, size in self.took.items() if size <= self.memory), default=0
        )

    def tell(self, batch_size: int, size: int) -> None:
        self.took[batch_size // self.unit] = size

    def give_up(self) -> None:
        self.given_up = True

    def next(self) -> int | None:
        """Samples to try next; ``None`` when the largest batch is found."""
        if self.given_up:
            return None
        for first in (2, 8):  # BatchNorm needs two samples
            if first not in self.took:
                return first * self.unit
            if self.took[first] > self.memory:
                break
        fits = [n for n, size in self.took.items() if size <= self.memory]
        high = min((n for n, size in self.took.items() if size > self.memory), default=None)
        if not fits or high == max(fits) + 1:
            return None
        low = max(fits)
        a, b = sorted(self.took, key=lambda n: abs(self.took[n] - self.memory))[:2]
        slope = (self.took[a] - self.took[b]) / (a - b)
        guess = int(a + (self.memory - self.took[a]) / slope) if slope > 0 else 2 * low
        guess = max(guess, low + 1)
        return self.unit * (guess if high is None else min(guess, high - 1))
