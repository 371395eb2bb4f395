"""Means by bootstrap with their intervals, and ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
LEVEL = 0.95


def bootstrap_means(
    values: Sequence[float] | NDArray[np.float64], *, seed: int = 0, resamples: int = RESAMPLES
) -> NDArray[np.float64]:
    """[resamples] means of the values, each over a resample with replacement of the same size.

    >>> set(bootstrap_means([0.5, 0.5, 0.5], resamples=10).tolist())
    {0.5}
    """
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0:
        raise ValueError("no values to resample")
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    block = max(1, 4_000_000 // data.size)  # bounds memory; the draws do not depend on it: rows come in order
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        means[start : start + rows] = data[rng.integers(data.size, size=(rows, data.size))].mean(axis=1)
    return means


def interval(means: NDArray[np.float64], level: float = LEVEL) -> tuple[float, float]:
    """The middle `level` of the bootstrap means (percentile interval)."""
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def mean_ranks(values: Any) -> NDArray[np.float64]:
    """The rank of each value, from 1; equal ones share their mean rank.

    >>> mean_ranks([0.5, 0.1, 0.5]).tolist()
    [2.5, 1.0, 2.5]
    """
    _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return ranks


def rank_correlation(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Spearman's rank correlation, ties by mean rank; nan where one side is constant.

    >>> rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0]))
    -1.0
    """
    x, y = (ranks - ranks.mean() for ranks in (mean_ranks(a), mean_ranks(b)))
    scale = np.sqrt((x * x).sum() * (y * y).sum())
    return float(np.round((x * y).sum() / scale, 12)) if scale > 0 else float("nan")
