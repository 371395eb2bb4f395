"""The disruption experiment: which step to hide from later text, and what hiding it did to accuracy. Pure.

Paper: Sec. 3.1.2, Fig. 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attnrl.algo.intervals import interval
from attnrl.analysis.intervals import Array, wilson
from attnrl.types import Step

TYPES = {
    "fci_top": "FCI top 20 %",
    "fci_rest": "FCI other 80 %",
    "entropy_top": "entropy top 20 %",
    "matched": "other 80 %, at the place of the first",
}
BINS = 5
FEWEST = 5  # steps to choose from: with fewer, a fifth of them is less than one


def choose_steps(
    fci: Sequence[float], entropy: Sequence[float], steps: Sequence[Step], rng: np.random.Generator, share: float = 0.2
) -> dict[str, int]:
    """For each type the step to hide; nothing where too few steps can be hidden.

    Steps of thinking that something follows can be hidden. `fci_top` is drawn from the highest fifth of them by FCI,
    `fci_rest` from the others, `entropy_top` from the highest fifth by mean entropy; `matched` is the one of the others
    that starts nearest to where `fci_top` starts. Paper: Sec. 3.1.2. Deviation: `matched` is added, since early steps
    have a higher FCI whatever they say.
    """
    pool = [k for k in range(len(steps) - 1) if steps[k].thinking]
    if len(pool) < FEWEST or not all(math.isfinite(fci[k]) for k in pool):
        return {}
    count = max(1, round(share * len(pool)))
    top = sorted(pool, key=lambda k: (-fci[k], k))[:count]
    rest = [k for k in pool if k not in top]
    unsure = sorted(pool, key=lambda k: (-entropy[k], k))[:count]
    first = int(rng.choice(top))
    near = min(rest, key=lambda k: (abs(steps[k].start - steps[first].start), k))
    drawn = {"fci_rest": int(rng.choice(rest)), "entropy_top": int(rng.choice(unsure))}
    return {"fci_top": first, **drawn, "matched": near}


@dataclass(frozen=True, slots=True)
class Trial:
    """One response with one step hidden, and the same continuation drawn with nothing hidden."""

    prompt: str
    response: int
    type: str
    step: int
    position: float  # start of the step over the length of the original response
    original: bool  # whether the original response is right
    intact: bool  # the continuation from after the step, nothing hidden
    disrupted: bool  # the same, by the same random stream, the step hidden


@dataclass(frozen=True, slots=True)
class Effect:
    """What hiding steps of one type did; intervals are 95 %, by bootstrap over prompts."""

    type: str
    trials: int
    position: float  # mean
    intact: float
    disrupted: float
    disrupted_low: float
    disrupted_high: float
    drop: float  # intact - disrupted, paired
    drop_low: float
    drop_high: float

    @property
    def normalized(self) -> float:
        """Accuracy with the step hidden over accuracy with nothing hidden."""
        return self.disrupted / self.intact if self.intact else math.nan


def effects(trials: Sequence[Trial], resamples: int = 4000) -> list[Effect]:
    """The effect of each type that has trials, in the order of `TYPES`."""
    found = []
    for kind in TYPES:
        rows = [trial for trial in trials if trial.type == kind]
        if not rows:
            continue
        names = ("position", "intact", "disrupted")
        position, intact, disrupted = (float(np.mean([getattr(t, name) for t in rows])) for name in names)
        bounds = clustered(rows, resamples, lambda t: float(t.disrupted))
        drops = clustered(rows, resamples, lambda t: float(t.intact) - float(t.disrupted))
        found.append(Effect(kind, len(rows), position, intact, disrupted, *bounds, intact - disrupted, *drops))
    return found


def clustered(rows: Sequence[Trial], resamples: int, value: Callable[[Trial], float]) -> tuple[float, float]:
    """The 95 % interval of a mean over trials, whole prompts resampled: trials of one prompt are not independent."""
    sums: dict[str, list[float]] = {}
    for trial in rows:
        total = sums.setdefault(trial.prompt, [0.0, 0.0])
        total[0] += value(trial)
        total[1] += 1.0
    table: Array = np.array(list(sums.values()))
    chosen = np.random.default_rng(0).integers(len(table), size=(resamples, len(table)))
    means = table[chosen, 0].sum(axis=1) / table[chosen, 1].sum(axis=1)
    return interval(means)


def contrast(trials: Sequence[Trial], a: str, b: str, resamples: int = 4000) -> tuple[float, float, float]:
    """How much more accuracy hiding type `a` costs than hiding type `b`, over the responses that have both, with its
    interval.
    """
    by_type: dict[str, dict[int, Trial]] = {a: {}, b: {}}
    for trial in trials:
        if trial.type in by_type:
            by_type[trial.type][trial.response] = trial
    shared = [i for i in by_type[a] if i in by_type[b]]
    if not shared:
        return math.nan, math.nan, math.nan

    def drop(trial: Trial) -> float:
        return float(trial.intact) - float(trial.disrupted)

    differences = {i: drop(by_type[a][i]) - drop(by_type[b][i]) for i in shared}
    low, high = clustered([by_type[a][i] for i in shared], resamples, lambda t: differences[t.response])
    return float(np.mean(list(differences.values()))), low, high


def by_position(trials: Sequence[Trial], types: Sequence[str] = tuple(TYPES)) -> list[tuple[int, float, float, float]]:
    """For each of five bins of position: trials, accuracy with the step hidden, and its 95 % interval (Wilson's)."""
    found = []
    for number in range(BINS):
        rows = [t for t in trials if t.type in types and min(int(BINS * t.position), BINS - 1) == number]
        right = sum(t.disrupted for t in rows)
        low, high = wilson(right, len(rows))
        found.append((len(rows), right / len(rows) if rows else math.nan, low, high))
    return found


def summary(trials: Sequence[Trial]) -> dict[str, object]:
    """All numbers of the experiment, as JSON holds them."""
    first: Mapping[int, bool] = {t.response: t.original for t in trials}
    contrasts = {other: contrast(trials, "fci_top", other) for other in TYPES if other != "fci_top"}
    return {
        "responses": len(first),
        "original_accuracy": float(np.mean(list(first.values()))) if first else math.nan,
        "types": [{**{k: getattr(e, k) for k in e.__slots__}, "normalized": e.normalized} for e in effects(trials)],
        "fci_top_costs_more_than": {
            k: dict(zip(("points", "low", "high"), v, strict=True)) for k, v in contrasts.items()
        },
        "by_position": [
            dict(zip(("trials", "accuracy", "low", "high"), row, strict=True)) for row in by_position(trials)
        ],
    }
