"""What is wrong, in one sentence: an answer compared with the reference, on 1, 2 and more ranks."""

import itertools
from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

CLOSE = 1e-9  # of float64 results, relative to the largest value
NOT_BEGUN = "not begun"
TO_WRITE = "is not written"


class Finding(NamedTuple):
    """One comparison on one rank: right, or a factor, or a sentence that follows ``what``."""

    what: str
    why: str = ""
    factor: float | None = None  # of the reference, if the same in every element

    @property
    def is_right(self) -> bool:
        return not self.why and self.factor is None


def is_close(found: Tensor, expected: Tensor) -> bool:
    scale = (expected.abs().max().item() if expected.numel() else 0) or 1
    alike = partial(torch.allclose, rtol=0, atol=CLOSE * scale)
    return found.shape == expected.shape and alike(found.double(), expected.double())


def compare(what: str, found, expected: Tensor, guesses=()) -> Finding:
    """Compare a result with the reference.

    Args:
        what: the result, as the subject of a sentence.
        found: a tensor, if the answer is right.
        expected: the reference, of one process.
        guesses: results of typical mistakes, by the predicate that explains the mistake: a dict,
            or pairs.
    """
    if not isinstance(found, Tensor):
        kind = "None" if found is None else f"a {type(found).__name__}"
        return Finding(what, f"is {kind} instead of a tensor")
    found = found.detach()
    if is_close(found, expected):
        return Finding(what)
    for why, guess in guesses.items() if isinstance(guesses, dict) else guesses:
        if is_close(found, guess):
            return Finding(what, why)
    if found.shape != expected.shape:
        return Finding(what, f"has shape {list(found.shape)} instead of {list(expected.shape)}")
    if not found.isfinite().all():
        return Finding(what, "has NaN or Inf: an overflow, or memory that nothing has filled")
    factor = (found * expected).sum().item() / expected.square().sum().clamp(min=1e-300).item()
    if abs(factor) > CLOSE and is_close(found, factor * expected):
        return Finding(what, factor=factor)
    most = (found - expected).abs().argmax()
    place = [int(i) for i in torch.unravel_index(most, expected.shape)]
    values = f"{found.flatten()[most]:.6g} instead of {expected.flatten()[most]:.6g}"
    return Finding(what, f"differs from the reference, most at {place}: {values}")


def expect(what: str, is_so: bool, why: str) -> Finding:
    """A finding that is right if something holds."""
    return Finding(what, "" if is_so else why)


def counted(sizes: Iterable[int]) -> str:
    """1 rank; 2 ranks; 1, 2 and 3 ranks."""
    *first, last = sizes
    listed = f"{', '.join(map(str, first))} and {last}" if first else str(last)
    return f"{listed} rank{'' if [*first, last] == [1] else 's'}"


def judge(outcomes: Mapping[int, object]) -> str:
    """The sentence for outcomes by number of ranks; empty if all are right. It is about the first
    comparison that fails on the fewest ranks."""
    right = []
    for ranks, outcome in outcomes.items():
        but = f"right on {counted(right)}, but " if right else ""
        wrong = first_wrong(outcome)
        if wrong and outcome.end in ("", "raises an error", TO_WRITE):  # it comes before this end
            return but + explain(wrong.what, outcomes)
        if outcome.end == TO_WRITE:
            is_begun = any(outcome.findings.values())
            _, _, why = outcome.why.partition(", ")  # on rank 0, as on any other
            return f"{'right so far' if is_begun else NOT_BEGUN}: {why}"
        if outcome.end:
            return f"{but}{outcome.end} on {counted([ranks])}: {outcome.why}"
        right.append(ranks)
    return ""


def first_wrong(outcome, what: str = "") -> Finding | None:
    """The first finding that is not right, in the order of the checks; of ``what``, if given."""
    for findings in itertools.zip_longest(*(outcome.findings[r] for r in sorted(outcome.findings))):
        for finding in findings:
            if finding and not finding.is_right and what in ("", finding.what):
                return finding
    return None


def explain(what: str, outcomes: Mapping[int, object]) -> str:
    """All that is known of a comparison that fails."""
    wrong = {ranks: first_wrong(outcome, what) for ranks, outcome in outcomes.items()}
    wrong = {ranks: finding for ranks, finding in wrong.items() if finding}
    factors = {ranks: finding.factor for ranks, finding in wrong.items() if finding.factor}
    if not factors:
        why = next(iter(wrong.values())).why
        same = [ranks for ranks, finding in wrong.items() if finding.why == why]
        on = f"on {counted(same)} " if len(outcomes) > 1 else ""
        return f"{on}{what} {why}"
    times = [f"{factor:.3g} times the reference on {counted([n])}" for n, factor in factors.items()]
    several = [(ranks, factor) for ranks, factor in factors.items() if ranks > 1]
    reason = ""
    if several and all(abs(factor - ranks) < CLOSE for ranks, factor in several):
        reason = ": summed over the ranks, not averaged"
    elif several and all(abs(factor * ranks - 1) < CLOSE for ranks, factor in several):
        reason = ": divided by the number of ranks once too often"
    return f"{what} is {', '.join(times)}{reason}"
