"""Find the largest batch that fits in few trials: memory is about linear in the batch."""

import contextlib
from collections.abc import Callable, Generator
from functools import partial

from estimator import tables, techniques
from estimator.own_file import Found, fullest
from estimator.techniques import Prediction, Setup


def search(args, chosen: list[Setup], predict: Callable, at_once: int) -> list[Prediction]:
    """The prediction for the largest batch of each setup that fits; of batch 0 if none does."""
    found = [Prediction(setup, 0) for setup in chosen]
    searches = [trials(1) for _ in chosen]
    wanted = {i: next(search) for i, search in enumerate(searches)}
    while wanted:
        tasks = [partial(predict, chosen[i], chosen[i].unit * n) for i, n in wanted.items()]
        predictions = zip(wanted, techniques.side_by_side(tasks, at_once), strict=True)
        wanted = {}
        for i, prediction in predictions:
            failed = prediction.mistake
            if failed or tables.fits(args, prediction):
                found[i] = prediction
            if not failed:
                with contextlib.suppress(StopIteration):  # it is found
                    wanted[i] = searches[i].send(tables.filled(args, prediction))
    return found


def search_batch(args, unit: int, predict: Callable, ranks: list[int]) -> Found:
    """The prediction of a user's file for its largest BATCH that fits, a multiple of ``unit``; or
    of the smallest one, if that does not fit. ``ranks``: those of which one has the highest peak.
    """
    search = trials(1)
    found = {}
    n = next(search)
    while True:
        tasks = [partial(predict, batch=unit * n, rank=rank) for rank in ranks]
        found[n] = fullest(techniques.side_by_side(tasks, 2))
        if found[n].mistake:
            return found[n]
        try:
            n = search.send(tables.filled(args, found[n]))
        except StopIteration as end:
            return found[end.value or min(found)]


def trials(memory: float) -> Generator[int, float, int]:
    """Yield the number of units to try next, and expect from ``send()`` what they take, in the unit
    of ``memory``. Returns the largest number that fits; 0 if not even two do: BatchNorm needs two
    samples."""
    took = {}  # by number of units
    for n in (2, 8):
        took[n] = yield n
        if took[n] > memory:
            break
    while True:
        low = max((n for n, size in took.items() if size <= memory), default=0)
        high = min((n for n, size in took.items() if size > memory), default=float("inf"))
        if not low or high == low + 1:
            return low
        a, b = sorted(took)[-2:] if high == float("inf") else (low, high)
        slope = (took[b] - took[a]) / (b - a)
        guess = int(a + (memory - took[a]) / slope) if slope > 0 else 2 * low
        if high < float("inf") and len(took) % 3 == 0:  # it may bend between them
            guess = (low + high) // 2
        n = min(max(guess, low + 1), high - 1)
        took[n] = yield n
