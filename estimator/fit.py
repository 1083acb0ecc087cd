"""Find the largest batch that fits in few trials: memory is about linear in the batch."""

from collections.abc import Generator


def trials(memory: float) -> Generator[int, float, int]:
    """Yield the number of units to try next, and expect its bytes from ``send()``. Returns the
    largest number that fits ``memory``, in bytes; 0 if not even two do: BatchNorm needs two
    samples."""
    took = {}  # bytes, by number of units
    for n in (2, 8):
        took[n] = yield n
        if took[n] > memory:
            break
    while True:
        low = max((n for n, size in took.items() if size <= memory), default=0)
        high = min((n for n, size in took.items() if size > memory), default=float("inf"))
        if not low or high == low + 1:
            return low
        a, b = sorted(took, key=lambda n: abs(took[n] - memory))[:2]
        slope = (took[a] - took[b]) / (a - b)
        guess = int(a + (memory - took[a]) / slope) if slope > 0 else 2 * low
        n = min(max(guess, low + 1), high - 1)
        took[n] = yield n
