"""FCI of problems: do prompts that end without signal have a lower mean FCI, and does it say more than accuracy?

Paper: Sec. 3.2.1, Fig. 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnrl.algo.intervals import bootstrap_means, interval
from attnrl.algo.reasons import kind_of
from attnrl.analysis.forests import Row, grouped, read_rows, thinks
from attnrl.analysis.intervals import auc

COLUMNS = ("uid", "tree", "kind", "reward", "fci", "step_texts", "prompt_reason", "right")


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt of one iteration: mean FCI of its trunks (the left side of Eq. 8), their accuracy, what came of it."""

    iteration: int
    uid: str
    fci: float
    accuracy: float  # of the trunks
    signal: bool  # some leaves right, some wrong
    dropped: bool  # by the filter: what its branches would have said is unknown


def problems(files: Sequence[Path]) -> list[Problem]:
    """Every prompt on record whose trunks were scored."""
    found = []
    for file in files:
        for rows in grouped(read_rows(file, COLUMNS)):
            trunks = [row for row in rows if row["kind"] == "trunk"]
            means = [candidate_mean(row) for row in trunks]
            if not all(map(math.isfinite, means)):
                continue
            rewards = [row["reward"] for row in rows]
            accuracy = sum(row["right"] for row in trunks) / len(trunks)
            dropped = kind_of(rows[0].get("prompt_reason") or "") == "filtered"
            mean = sum(means) / len(means)
            found.append(Problem(int(file.stem), rows[0]["uid"], mean, accuracy, len(set(rewards)) > 1, dropped))
    return found


def candidate_mean(trunk: Row) -> float:
    """Mean FCI of the steps of a trunk that may be branch points, 0 without any, as the filter reads it (Eq. 8)."""
    scores = [y for k, (y, thinking) in enumerate(zip(trunk["fci"], thinks(trunk), strict=True)) if k and thinking]
    return sum(scores) / len(scores) if scores else 0.0


@dataclass(frozen=True, slots=True)
class Separation:
    """How well a score tells prompts without signal from the others."""

    without: int  # prompts without signal
    others: int
    mean_without: float
    mean_others: float
    difference: float  # of mean FCI, without signal minus the others, and its 95 % interval; of one prompt none
    low: float
    high: float
    auc_fci: float  # chance that a prompt without signal has the lower FCI
    auc_accuracy: (
        float  # the same with trunk accuracy alone: without signal is the one nearer to all right or all wrong
    )


def separation(cases: Sequence[Problem], scope: str) -> Separation | None:
    """The comparison over "all" prompts, or over the "easy" ones, with all trunks right; None where one side is empty.

    Prompts the filter dropped are left out: their branches were never drawn.
    """
    kept = [case for case in cases if not case.dropped and (scope == "all" or case.accuracy == 1.0)]
    a, b = [c.fci for c in kept if not c.signal], [c.fci for c in kept if c.signal]
    if not a or not b:
        return None
    rng = np.random.default_rng(0)
    means = [np.asarray(side)[rng.integers(len(side), size=(4000, len(side)))].mean(axis=1) for side in (a, b)]
    low, high = np.quantile(means[0] - means[1], [0.025, 0.975]) if min(len(a), len(b)) > 1 else (np.nan, np.nan)
    none = [not c.signal for c in kept]
    return Separation(
        without=len(a),
        others=len(b),
        mean_without=float(np.mean(a)),
        mean_others=float(np.mean(b)),
        difference=float(np.mean(a) - np.mean(b)),
        low=float(low),
        high=float(high),
        auc_fci=auc([-c.fci for c in kept], none),
        auc_accuracy=auc([abs(c.accuracy - 0.5) for c in kept], none),
    )


def means_by_iteration(
    cases: Sequence[Problem], signal: bool
) -> tuple[list[int], list[float], list[float], list[float]]:
    """Iterations, and the mean FCI of their prompts with or without signal, with its interval; none of one prompt."""
    rows: dict[int, list[float]] = {}
    for case in cases:
        if case.signal == signal and not case.dropped:
            rows.setdefault(case.iteration, []).append(case.fci)
    at = sorted(rows)
    means = [rows[i] for i in at]
    bounds = [interval(bootstrap_means(m, resamples=1000)) if len(m) > 1 else (math.nan, math.nan) for m in means]
    return at, [float(np.mean(m)) for m in means], [low for low, _ in bounds], [high for _, high in bounds]
