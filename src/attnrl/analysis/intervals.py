"""Intervals: of shares and their differences, of how much a branch point changed the value. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnrl.algo.intervals import mean_ranks

Array = np.ndarray[Any, np.dtype[np.float64]]
Z = 1.959964  # 95 %


def wilson(right: float, n: int, z: float = Z) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of which `right` of `n` were seen.

    >>> [round(x, 3) for x in wilson(1, 2)], [round(x, 3) for x in wilson(0, 10)]
    ([0.095, 0.905], [0.0, 0.278])
    """
    if n < 1:
        return 0.0, 1.0
    share = right / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = min(centre - half, share), max(centre + half, share)  # rounding must not leave the share outside
    return max(low, 0.0), min(high, 1.0)


def difference(a: float, n_a: int, b: float, n_b: int) -> tuple[float, float]:
    """Newcombe's 95 % interval of the difference a - b of two independent shares.

    Built from the two Wilson intervals; it holds for a handful of draws, where a normal one does not.

    >>> [round(x, 4) for x in difference(56 / 70, 70, 48 / 80, 80)]
    [0.0524, 0.3339]
    """
    low_a, high_a = wilson(a * n_a, n_a)
    low_b, high_b = wilson(b * n_b, n_b)
    low = a - b - math.hypot(a - low_a, high_b - b)
    high = a - b + math.hypot(high_a - a, b - low_b)
    return low, high


@dataclass(frozen=True, slots=True)
class Change:
    """The value before and after a branch point of a trunk, their difference, and its 95 % interval."""

    before: float  # mean reward of all leaves below the segment that ends at the point
    after: float  # of those below the trunk's own continuation
    redrawn: float  # of the branches drawn anew at the point
    delta: float  # after - before
    low: float | None  # None where rewards are no shares of 0 and 1
    high: float | None


def value_change(after: Sequence[float], redrawn: Sequence[float]) -> Change:
    """How the value changes where the trunk goes on as it did, instead of being drawn anew.

    The leaves before the point are those after it and the redrawn ones: the difference is that of the two, weighted
    by the redrawn ones' share; so is its interval (Newcombe's).

    >>> value_change([1.0, 1.0], [0.0, 1.0])
    Change(before=0.75, after=1.0, redrawn=0.5, delta=0.25, low=-0.1363, high=0.4527)
    """
    n_a, n_b = len(after), len(redrawn)
    a, b = sum(after) / n_a, sum(redrawn) / n_b
    before = (sum(after) + sum(redrawn)) / (n_a + n_b)
    if not all(0.0 <= reward <= 1.0 for reward in (*after, *redrawn)):
        return Change(before, a, b, a - before, None, None)
    share = n_b / (n_a + n_b)
    low, high = (round(share * bound, 4) for bound in difference(a, n_a, b, n_b))
    return Change(before, a, b, a - before, low, high)


def auc(scores: Sequence[float], positive: Sequence[bool]) -> float:
    """The chance that a positive case scores above a negative one, ties counted half; not a number without both.

    >>> auc([1, 2, 3, 3], [False, True, True, False])
    0.625
    """
    marks = np.asarray(positive, dtype=bool)
    above, below = int(marks.sum()), int((~marks).sum())
    if not above or not below:
        return math.nan
    return float((mean_ranks(scores)[marks].sum() - above * (above + 1) / 2) / (above * below))
