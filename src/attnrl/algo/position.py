"""Branching rules that separate attention from position: controls for FCI, and variants of it.

FCI sums over all later steps, so an early step gets more for being early. The rules here branch by position alone
(`first_steps`, `position`), by FCI with that advantage taken out (`fci_residual`, `fci_ratio`, `fci_mean`), by entropy
of steps, or at steps that the data row names as decisive (`oracle`, the ceiling of any rule). None is in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Annotated

import numpy as np
from annotated_types import Ge, Lt
from numpy.typing import NDArray

from attnrl.algo import branching
from attnrl.algo.parts import Count, Share, reads
from attnrl.errors import ConfigError
from attnrl.types import Floats, Prompt, Step, Trunk, as_floats

Values = NDArray[np.float64]


def position_null(prompt_tokens: int, steps: Sequence[Step], delta: int) -> Values:
    """The FCI of every step if each token attended alike to all tokens before it and itself; 0 near the end.

    A prompt of one token, three steps of one token, delta 1: the queries at positions 2 and 3 see 3 and 4 tokens.

    >>> position_null(1, [Step(0, 1), Step(1, 2), Step(2, 3)], 1).tolist()
    [0.5833333333333333, 0.25, 0.0]
    """
    seen = [np.arange(prompt_tokens + s.start + 1, prompt_tokens + s.stop + 1) for s in steps]
    share = np.array([np.mean(1.0 / tokens) for tokens in seen])  # of one key token, mean over a step's queries
    below = np.append(np.cumsum(share[::-1])[::-1], 0.0)
    return np.array([below[min(k + delta, len(steps))] for k in range(len(steps))])


def residual(scores: Floats, null: Values, among: Sequence[int]) -> Values:
    """What is left of the scores after a straight line in the null, fitted by least squares to the steps `among` whose
    null is positive; minus infinity for other steps. With fewer than three steps to fit: the scores themselves.
    """
    left = np.full(len(scores), -np.inf)
    fitted = [k for k in among if null[k] > 0.0]
    y, x = np.asarray(scores, dtype=np.float64)[fitted], null[fitted]
    if len(fitted) < 3 or np.ptp(x) == 0.0:
        left[fitted] = y
        return left
    slope = np.sum((x - x.mean()) * (y - y.mean())) / np.sum((x - x.mean()) ** 2)
    left[fitted] = y - y.mean() - slope * (x - x.mean())
    return left


def _best(scores: Values, steps: Sequence[Step], points: int) -> tuple[int, ...]:
    """Starts of the `points` best-scoring candidate steps, ties to the earlier."""
    ranked = sorted(branching.candidates(steps), key=lambda k: (-scores[k], k))[:points]
    return tuple(sorted(steps[k].start for k in ranked))


@reads()
def first_steps(prompt: Prompt, trunk: Trunk, rng: np.random.Generator, *, points: Count = 2) -> tuple[int, ...]:
    """Starts of the first steps that may be branch points, whatever their FCI."""
    allowed = branching.candidates(trunk.steps)[:points]
    return tuple(trunk.steps[k].start for k in allowed)


@reads()
def position(
    prompt: Prompt,
    trunk: Trunk,
    rng: np.random.Generator,
    *,
    points: Count = 2,
    shares: Sequence[Annotated[float, Ge(0), Lt(1)]] = (0.04, 0.10),
) -> tuple[int, ...]:
    """Starts of the steps nearest to these shares of the response, one step a share: where FCI branches on average,
    without looking. The default shares are those of FCI with a 135M model on real solutions.
    """
    if len(shares) < points or not all(0.0 <= share < 1.0 for share in shares):
        raise ConfigError(f"algo.rule_options.shares = {list(shares)}: give {points} shares of at least 0 and below 1")
    left = branching.candidates(trunk.steps)
    chosen: list[int] = []
    for share in islice(shares, min(points, len(left))):
        spot = share * len(trunk.rollout.ids)
        nearest = min(left, key=lambda k: (abs(trunk.steps[k].start - spot), k))
        left.remove(nearest)
        chosen.append(nearest)
    return tuple(sorted(trunk.steps[k].start for k in chosen))


@reads("fci")
def fci_residual(
    prompt: Prompt, trunk: Trunk, rng: np.random.Generator, *, points: Count = 2, delta: Count = 4
) -> tuple[int, ...]:
    """Starts of the steps whose FCI is furthest above the line that fits it to its position null in this trunk."""
    null = position_null(len(prompt.ids), trunk.steps, delta)
    left = residual(trunk.scores.fci, null, branching.candidates(trunk.steps))
    return _best(left, trunk.steps, points)


@reads("fci")
def fci_ratio(
    prompt: Prompt, trunk: Trunk, rng: np.random.Generator, *, points: Count = 2, delta: Count = 4
) -> tuple[int, ...]:
    """Starts of the steps whose FCI is the most times its position null: late ones too, whose FCI is small."""
    null = position_null(len(prompt.ids), trunk.steps, delta)
    times = np.divide(trunk.scores.fci, null, out=np.full(len(null), -np.inf), where=null > 0.0)
    return _best(times, trunk.steps, points)


@reads("fci")
def fci_mean(
    prompt: Prompt,
    trunk: Trunk,
    rng: np.random.Generator,
    *,
    points: Count = 2,
    top_fraction: Share = 0.2,
    min_gap_tokens: Annotated[int, Ge(0)] = 0,
    delta: Count = 4,
) -> tuple[int, ...]:
    """As the paper's rule (Eq. 7), with the mean over the later steps in place of their sum (Eq. 5)."""
    later = np.maximum(len(trunk.steps) - delta - np.arange(len(trunk.steps)), 1)
    per_step = replace(trunk, scores=replace(trunk.scores, fci=as_floats(trunk.scores.fci / later)))
    return branching.fci(prompt, per_step, rng, points=points, top_fraction=top_fraction, min_gap_tokens=min_gap_tokens)


@reads("entropy")
def step_entropy(prompt: Prompt, trunk: Trunk, rng: np.random.Generator, *, points: Count = 2) -> tuple[int, ...]:
    """Starts of the steps whose tokens were drawn at the highest mean entropy."""
    means = np.array([np.mean(trunk.scores.entropy[s.start : s.stop], dtype=np.float64) for s in trunk.steps])
    return _best(means, trunk.steps, points)


@reads()
def oracle(prompt: Prompt, trunk: Trunk, rng: np.random.Generator, *, points: Count = 2) -> tuple[int, ...]:
    """Starts of the steps that the row's column `decisive` names by number, from 0, each as often as it takes to make
    `points` points: what a rule could reach that knew where responses are decided. A response that ends before them
    is not branched.
    """
    named = prompt.row.get("decisive")
    if named is None:
        raise ConfigError(
            f"algo.rule = 'oracle': the row of problem {prompt.uid} has no column 'decisive'; add step numbers"
        )
    numbers = [named] if isinstance(named, int) else [int(k) for k in named]
    allowed = set(branching.candidates(trunk.steps))
    known = [k for k in numbers if k in allowed][:points]
    return tuple(sorted(trunk.steps[k].start for k in islice(cycle(known), points if known else 0)))


RULES = {
    "first_steps": first_steps,
    "position": position,
    "fci_residual": fci_residual,
    "fci_ratio": fci_ratio,
    "fci_mean": fci_mean,
    "step_entropy": step_entropy,
    "oracle": oracle,
}
