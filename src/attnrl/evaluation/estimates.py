"""Estimates from graded responses: pass@k and the summary of one benchmark. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from attnrl.algo.intervals import RESAMPLES, bootstrap_means, interval
from attnrl.errors import ConfigError
from attnrl.types import counted


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n responses, drawn without replacement, hold one of the c right ones.

    1 - C(n-c, k) / C(n, k), correctly rounded: numerator and denominator are exact integers. It is the unbiased
    estimate of pass@k from n samples; for k > n there is none, and it is refused.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 0, 4), pass_at_k(4, 1, 4)
    (0.25, 0.5, 0.0, 1.0)
    """
    if k < 1:
        raise ConfigError(f"pass@{k}: k must be at least 1")
    if k > n:
        raise ConfigError(
            f"pass@{k} cannot be estimated from {counted(n, 'sample')} per problem; draw at least {k} samples or "
            f"ask for a k of at most {n}"
        )
    if not 0 <= c <= n:
        raise ValueError(f"{c} right responses of {n}")
    draws = math.comb(n, k)
    return (draws - math.comb(n - c, k)) / draws


def summarize(
    right: Sequence[Sequence[bool]],
    truncated: Sequence[Sequence[bool]],
    lengths: Sequence[Sequence[int]],
    ks: Sequence[int] = (1,),
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> dict[str, float]:
    """The numbers of one benchmark, from one inner sequence per problem.

    For each k `pass@k`, its 95 % interval `pass@k_low` and `pass@k_high` by bootstrap over problems; then `truncated`
    (share of responses cut off by the length limit), `mean_tokens`, `problems` and `responses`. pass@1 is the mean over
    problems of the share of right responses. `truncated` and `mean_tokens` are NaN where nothing is known of them.

    >>> right, truncated = [[True, False], [True, True]], [[False, True], [False, False]]
    >>> table = summarize(right, truncated, [[10, 30], [20, 20]], ks=(1, 2))
    >>> table["pass@1"], table["pass@2"], table["truncated"], table["mean_tokens"]
    (0.75, 1.0, 0.25, 20.0)
    """
    if not right or not all(len(row) for row in right):
        raise ConfigError("nothing to summarize: every problem needs at least one graded response")
    table: dict[str, float] = {}
    for k in sorted(set(ks) | {1}):
        estimates = problem_estimates(right, k)
        low, high = interval(bootstrap_means(estimates, seed=seed, resamples=resamples))
        table |= {f"pass@{k}": float(np.mean(estimates)), f"pass@{k}_low": low, f"pass@{k}_high": high}
    return table | {
        "truncated": _mean(truncated),
        "mean_tokens": _mean(lengths),
        "problems": float(len(right)),
        "responses": float(sum(map(len, right))),
    }


def _mean(rows: Sequence[Sequence[float]]) -> float:
    """The mean over all entries of all rows; NaN of none."""
    entries = [entry for row in rows for entry in row]
    return float(np.mean(entries)) if entries else math.nan


def problem_estimates(right: Sequence[Sequence[bool]], k: int) -> list[float]:
    """pass@k of each problem."""
    return [pass_at_k(len(row), sum(row), k) for row in right]
