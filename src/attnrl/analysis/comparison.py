"""Runs compared at an equal budget: methods over seeds, paired by seed, with bootstrap intervals."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from attnrl.algo.intervals import bootstrap_means, interval
from attnrl.analysis.curves import axes, benchmarks
from attnrl.analysis.records import RunRecord
from attnrl.config import Config
from attnrl.errors import DataError

Axis = Literal["iterations", "updates", "tokens", "seconds"]
SEED_KEYS = (("run", "seed"), ("data", "tasks", "seed"))


@dataclass(frozen=True, slots=True, eq=False)
class Method:
    """The runs of one config, which differ in their seed alone."""

    name: str
    runs: tuple[RunRecord, ...]


@dataclass(frozen=True, slots=True)
class Numbers:
    """One run up to a budget. Accuracy is the mean over benchmarks; what cannot be said is not a number."""

    seed: int
    first: float
    final: float
    best: float
    area: float  # mean height of the accuracy curve over the budget
    to_target_tokens: float
    to_target_seconds: float
    iterations: float
    seconds: float
    valid_tokens: float
    by_benchmark: dict[str, float]  # final accuracy


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds and its 95 % interval; the interval is not a number for one seed."""

    mean: float
    low: float
    high: float


def group_methods(records: Sequence[RunRecord]) -> list[Method]:
    """The runs by method: those whose configs are the same but for the seed, in order of their first run."""
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        groups.setdefault(_identity(record.config), []).append(record)
    for runs in groups.values():
        seeds = [run.setting("run.seed", 0) for run in runs]
        if len(set(seeds)) < len(seeds):
            twice = next(run.name for i, run in enumerate(runs) if seeds[i] in seeds[:i])
            raise DataError(f"{twice}: the same config and seed as another run; name each run once")
    plain = [_plain_name(runs) for runs in groups.values()]
    names = [
        name if plain.count(name) == 1 else runs[0].name for name, runs in zip(plain, groups.values(), strict=True)
    ]
    return [Method(name, tuple(runs)) for name, runs in zip(names, groups.values(), strict=True)]


def _identity(config: dict[str, Any]) -> str:
    """A config as a text that methods differ in; of one that was written before a key existed, with its default."""
    try:
        stripped = Config.model_validate(config).model_dump(mode="json")
    except ValidationError:  # of another version: as it was written
        stripped = copy.deepcopy(config)
    stripped.pop("about", None)
    for *path, last in SEED_KEYS:
        section: Any = stripped
        for key in path:
            section = section.get(key, {}) if isinstance(section, dict) else {}
        if isinstance(section, dict):
            section.pop(last, None)
    return json.dumps(stripped, sort_keys=True)


def _plain_name(runs: Sequence[RunRecord]) -> str:
    """The preset, or what the run directories' names share without a seed at the end."""
    presets = {run.preset for run in runs}
    if len(presets) == 1 and (preset := presets.pop()):
        return preset
    return re.sub(r"[-_.]?(s|seed)?[-_]?\d+$", "", runs[0].name) or runs[0].name


def positions(record: RunRecord, axis: Axis) -> list[float]:
    """Where each logged row stands on an axis."""
    found = axes(record.metrics)
    if axis == "updates":
        return list(accumulate(float(row.get("policy/updates", 0.0)) for row in record.metrics))
    return found["iteration" if axis == "iterations" else axis]


def evaluated(record: RunRecord) -> list[int]:
    """The logged rows at which the run was evaluated; an error where there are none."""
    names = [name for name in benchmarks(record) if name != "average"]
    rows = [i for i, row in enumerate(record.metrics) if any(f"eval/{name}/pass@1" in row for name in names)]
    if not rows:
        raise DataError(f"{record.name}: no evaluation on record; evaluation.every was 0, or none has finished yet")
    return rows


def common_budget(records: Sequence[RunRecord], axis: Axis) -> float:
    """The furthest every run was evaluated: how good one is after its last evaluation is not known."""
    return min(positions(record, axis)[evaluated(record)[-1]] for record in records)


def numbers(record: RunRecord, axis: Axis, budget: float, target: float) -> Numbers:
    """One run up to the budget. Between two evaluations accuracy is read off the straight line: runs seldom stop, and
    are seldom evaluated, at exactly the same place.
    """
    x = positions(record, axis)
    names = [name for name in benchmarks(record) if name != "average"]
    rows = evaluated(record)
    if x[rows[0]] > budget:
        raise DataError(f"{record.name}: no evaluation within {budget:g} {axis}; evaluation.every was too large")

    def height(i: int) -> float:
        found = [record.metrics[i][key] for name in names if (key := f"eval/{name}/pass@1") in record.metrics[i]]
        return float(np.mean(found))

    where, heights = [x[i] for i in rows], [height(i) for i in rows]
    final = float(np.interp(budget, where, heights))
    within = [n for n in range(len(rows)) if where[n] <= budget]
    curve = ([where[n] for n in within] + [budget], [heights[n] for n in within] + [final])
    at = axes(record.metrics)
    costs = {name: _first_reach([at[name][i] for i in rows], heights, target) for name in ("tokens", "seconds")}
    last = max(i for i in range(len(x)) if x[i] <= budget * (1 + 1e-9))
    valid = float(sum(row.get("train/valid_tokens", 0.0) for row in record.metrics[: last + 1]))
    spent = {"iterations": at["iteration"][last], "seconds": at["seconds"][last], "valid_tokens": valid}
    if budget and not spent["iterations"]:  # within the first iteration: what it had spent by then is not on record
        spent = dict.fromkeys(spent, math.nan)
    return Numbers(
        seed=int(record.setting("run.seed", 0)),
        first=heights[0],
        final=final,
        best=max(curve[1]),
        area=_area(*curve),
        to_target_tokens=costs["tokens"],
        to_target_seconds=costs["seconds"],
        by_benchmark={name: _benchmark_at(record, name, x, budget) for name in names},
        **spent,
    )


def _benchmark_at(record: RunRecord, name: str, x: Sequence[float], budget: float) -> float:
    rows = [(x[i], row[f"eval/{name}/pass@1"]) for i, row in enumerate(record.metrics) if f"eval/{name}/pass@1" in row]
    return float(np.interp(budget, [at for at, _ in rows], [value for _, value in rows]))


def _first_reach(x: Sequence[float], heights: Sequence[float], target: float) -> float:
    """Where the straight lines between the points first reach the target; not a number where they never do.

    >>> _first_reach([0, 10, 20], [0.2, 0.4, 0.8], 0.5), _first_reach([0, 10], [0.2, 0.4], 0.9)
    (12.5, nan)
    """
    if heights[0] >= target:
        return x[0]
    for a, b, low, high in zip(x, x[1:], heights, heights[1:], strict=False):
        if high >= target:
            return a + (b - a) * (target - low) / (high - low)
    return math.nan


def _area(x: Sequence[float], heights: Sequence[float]) -> float:
    """Mean height under the straight lines between the points.

    >>> _area([0, 1, 3], [0.0, 1.0, 1.0])
    0.8333333333333334
    """
    if len(x) < 2 or x[-1] == x[0]:
        return heights[-1]
    steps = zip(x, x[1:], heights, heights[1:], strict=False)
    return sum((b - a) * (p + q) / 2 for a, b, p, q in steps) / (x[-1] - x[0])


def estimate(values: Sequence[float]) -> Estimate:
    """Mean over seeds with its bootstrap interval.

    >>> estimate([0.5]).mean, math.isnan(estimate([0.5]).low)
    (0.5, True)
    """
    if any(math.isnan(v) for v in values) or not values:
        return Estimate(math.nan, math.nan, math.nan)
    low, high = interval(bootstrap_means(values)) if len(values) > 1 else (math.nan, math.nan)
    return Estimate(float(np.mean(values)), low, high)


def paired(a: Sequence[Numbers], b: Sequence[Numbers]) -> Estimate:
    """The difference of final accuracy b - a over the seeds both have, resampled in pairs."""
    before, after = {n.seed: n.final for n in a}, {n.seed: n.final for n in b}
    return estimate([after[seed] - before[seed] for seed in before if seed in after])


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Methods at one budget, each with the numbers of its runs."""

    axis: Axis
    budget: float
    target: float
    methods: tuple[Method, ...]
    numbers: tuple[tuple[Numbers, ...], ...]
    baseline: int  # which method the differences are against


def compare_runs(
    records: Sequence[RunRecord], *, axis: Axis = "iterations", target: float | None = None, baseline: str | None = None
) -> Comparison:
    """The comparison of these runs at the budget up to which all of them were evaluated.

    The target is by default the worst final accuracy of a method: every method reaches it.
    """
    methods = group_methods(records)
    names = [method.name for method in methods]
    if baseline is not None and baseline not in names:
        raise DataError(f"--baseline {baseline}: the methods are {', '.join(names)}")
    budget = common_budget(records, axis)
    first = [[numbers(run, axis, budget, math.inf) for run in method.runs] for method in methods]
    goal = min(float(np.mean([n.final for n in rows])) for rows in first) if target is None else target
    found = tuple(tuple(numbers(run, axis, budget, goal) for run in method.runs) for method in methods)
    return Comparison(axis, budget, goal, tuple(methods), found, names.index(baseline) if baseline else 0)
