"""Two evaluations of the same problems, paired by problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnrl.algo.intervals import RESAMPLES, bootstrap_means, interval
from attnrl.errors import DataError
from attnrl.evaluation.results import load_problem_rows


@dataclass(frozen=True, slots=True)
class Comparison:
    """pass@1 of two evaluations on the problems both have, and their paired difference b - a.

    >>> Comparison("tasks", 10, 0.5, 0.7, 0.1, 0.3).difference.__round__(3)
    0.2
    """

    benchmark: str
    problems: int
    a: float
    b: float
    low: float  # 95 % bootstrap interval of the difference, problems resampled in pairs
    high: float

    @property
    def difference(self) -> float:
        return self.b - self.a


def compare(a: Path, b: Path, *, seed: int = 0, resamples: int = RESAMPLES) -> list[Comparison]:
    """One comparison per benchmark that both have, and "Avg." over several; problems pair by their text.

    Pairing matters: problems differ far more in difficulty than models do, and the paired interval leaves that out.
    A benchmark that one side has and the other lacks is an error only if nothing is left to compare; a benchmark whose
    problems differ is an error.
    """
    left, right = _by_problem(load_problem_rows(a)), _by_problem(load_problem_rows(b))
    shared = [name for name in left if name in right]
    if not shared:
        raise DataError(f"{a} has {', '.join(left)} and {b} has {', '.join(right)}: no benchmark in common")
    comparisons: list[Comparison] = []
    resampled = []
    for number, name in enumerate(shared):
        if left[name].keys() != right[name].keys():
            only = len(left[name].keys() ^ right[name].keys())
            raise DataError(
                f"benchmark {name}: {only} problems are in only one of {a} and {b}; evaluate both on the same problems"
            )
        pairs = np.array([(left[name][key], right[name][key]) for key in left[name]])
        means = bootstrap_means(pairs[:, 1] - pairs[:, 0], seed=seed + 1000 * number, resamples=resamples)
        before, after = (float(mean) for mean in pairs.mean(axis=0))
        comparisons.append(Comparison(name, len(pairs), before, after, *interval(means)))
        resampled.append(means)
    if len(shared) > 1:
        centre = [float(np.mean([getattr(c, side) for c in comparisons])) for side in ("a", "b")]
        total = sum(c.problems for c in comparisons)
        comparisons.append(Comparison("Avg.", total, centre[0], centre[1], *interval(np.mean(resampled, axis=0))))
    return comparisons


def _by_problem(rows: Sequence[dict[str, Any]]) -> dict[str, dict[tuple[str, int], float]]:
    """benchmark -> (uid, how many times that problem came before) -> pass@1."""
    found: dict[str, dict[tuple[str, int], float]] = {}
    for row in rows:
        problems = found.setdefault(row["benchmark"], {})
        repeat = sum(uid == row["uid"] for uid, _ in problems) if (row["uid"], 0) in problems else 0
        problems[row["uid"], repeat] = row["pass@1"]
    return found


def comparison_rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """The table people read, in percent; differences in points."""
    rows = [["benchmark", "problems", "A", "B", "B - A"]]
    for c in comparisons:
        points = f"{100 * c.difference:+.1f} [{100 * c.low:+.1f}, {100 * c.high:+.1f}]"
        rows.append([c.benchmark, str(c.problems), f"{100 * c.a:.1f}", f"{100 * c.b:.1f}", points])
    return rows
