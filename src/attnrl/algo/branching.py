"""Where to branch: rules from a scored trunk to branch points (Eq. 7 and the rivals').

A branch point is a token offset p of the response, 0 < p < T: a branch keeps the tokens before p and draws the rest
anew. A rule is any function `(prompt, trunk, rng, *, points, ...) -> tuple[int, ...]`; a point named twice gets twice
the branches. The rules here are named in `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge

from attnrl.algo.parts import Count, Share, reads
from attnrl.types import Floats, Prompt, Step, Trunk

Rule = Callable[[Prompt, Trunk, np.random.Generator], tuple[int, ...]]


def candidates(steps: Sequence[Step]) -> list[int]:
    """Steps that may be branch points: not the first (that is resampling the prompt), none from `</think>` on.

    >>> candidates([Step(0, 3), Step(3, 5), Step(5, 9, thinking=False)])
    [1]
    """
    return [k for k in range(1, len(steps)) if steps[k].thinking]


def top_steps(
    fci: Floats, steps: Sequence[Step], *, top_fraction: float = 0.2, mode: Literal["paper", "released"] = "paper"
) -> list[int]:
    """The candidate set C: steps whose FCI is at or above the (1 - top_fraction) quantile, in order.

    If that quantile is 0, the threshold is the smallest positive score; without a positive score C is empty.
    Mode "released" keeps the excluded steps in the quantile, as zeros.

    Paper: Eq. 7. Deviation: as printed it compares the step's index with the quantile; its score is meant.

    >>> steps = [Step(i, i + 1) for i in range(6)]
    >>> top_steps(np.array([9, 1, 5, 2, 4, 3], dtype=np.float32), steps, top_fraction=0.4)
    [2, 4]
    """
    allowed = candidates(steps)
    if not allowed:
        return []
    scores = np.asarray(fci, dtype=np.float64)
    if mode == "released":
        pool = np.zeros(len(steps))
        pool[allowed] = scores[allowed]
    else:
        pool = scores[allowed]
    threshold = float(np.quantile(pool, 1.0 - top_fraction))
    if threshold <= 0.0:
        positive = pool[pool > 0.0]
        if not positive.size:
            return []
        threshold = float(positive.min())
    slack = 1e-9 * threshold  # the interpolation must not round a step at the quantile out of C
    return [k for k in allowed if scores[k] >= threshold - slack]


@reads("fci")
def fci(
    prompt: Prompt,
    trunk: Trunk,
    rng: np.random.Generator,
    *,
    points: Count = 2,
    top_fraction: Share = 0.2,
    min_gap_tokens: Annotated[int, Ge(0)] = 0,
    mode: Literal["paper", "released"] = "paper",
) -> tuple[int, ...]:
    """Starts of the earliest `points` steps of high FCI, at least `min_gap_tokens` from the start and each other.

    Too few: filled up with the best-scoring remaining steps that keep the gap (mode "paper"), or with the earliest
    steps and then duplicates, the gap counted from the prompt's start (mode "released").

    Paper: Sec. 3.1.3, "Attention-based Tree Branching", Eq. 7.
    """
    steps, scores = trunk.steps, trunk.scores.fci
    allowed = candidates(steps)
    lead = len(prompt.ids) if mode == "released" else 0
    chosen: list[int] = []

    def fits(step: int) -> bool:
        start = steps[step].start
        return start + lead >= min_gap_tokens and all(abs(start - steps[c].start) >= min_gap_tokens for c in chosen)

    def take(order: Sequence[int]) -> None:
        for step in order:
            if len(chosen) < points and step not in chosen and fits(step):
                chosen.append(step)

    take(top_steps(scores, steps, top_fraction=top_fraction, mode=mode))
    if mode == "released":
        chosen += [k for k in allowed if k not in chosen][: points - len(chosen)]
        chosen += [chosen[i % len(chosen)] for i in range(points - len(chosen))] if chosen else []
    elif len(chosen) < points:
        take(sorted(allowed, key=lambda k: (-scores[k], k)))
    return tuple(sorted(steps[k].start for k in chosen))


# Whether steps are left out by the quantile of Eq. 7, which reasons then say; a rule that does not say has other ways.
fci.by_quantile = True  # type: ignore[attr-defined]


def _top_tokens(scores: Floats, points: int) -> tuple[int, ...]:
    """The `points` highest-scoring token offsets, the first and the last token left out; ties to the earlier."""
    inner = scores[1:-1]
    best = np.argsort(-inner, kind="stable")[:points] + 1
    return tuple(sorted(int(p) for p in best))


@reads()
def surprisal(prompt: Prompt, trunk: Trunk, rng: np.random.Generator, *, points: Count = 2) -> tuple[int, ...]:
    """The tokens of highest surprisal, -log p of the drawn token (TreeRL's rule)."""
    return _top_tokens(-trunk.rollout.logprobs, points)


@reads("entropy")
def entropy(prompt: Prompt, trunk: Trunk, rng: np.random.Generator, *, points: Count = 2) -> tuple[int, ...]:
    """The tokens drawn at highest full entropy (TreeRL's variant; FR3E's anchors)."""
    return _top_tokens(trunk.scores.entropy, points)


@reads()
def random_steps(prompt: Prompt, trunk: Trunk, rng: np.random.Generator, *, points: Count = 2) -> tuple[int, ...]:
    """Starts of steps drawn at random without repetition (Tree-GRPO's random nodes; the ablation of FCI)."""
    allowed = candidates(trunk.steps)
    drawn = rng.permutation(len(allowed))[:points]
    return tuple(sorted(trunk.steps[allowed[i]].start for i in drawn))


@reads()
def uniform(prompt: Prompt, trunk: Trunk, rng: np.random.Generator, *, points: Count = 2) -> tuple[int, ...]:
    """Evenly spaced token offsets.

    Of ten tokens and two points: offsets 3 and 7.
    """
    length = len(trunk.rollout.ids)
    spots = {round(length * (i + 1) / (points + 1)) for i in range(points)}
    return tuple(sorted(p for p in spots if 0 < p < length))


def _spread(cuts: Sequence[int], most: int | None) -> tuple[int, ...]:
    """All cuts, or `most` of them such that the segments between them hold about as many of all cuts each.

    >>> _spread(range(10, 100, 10), 2), _spread([10, 20], 2), _spread([10, 20], None)
    ((30, 70), (10, 20), (10, 20))
    """
    if most is None or len(cuts) <= most:
        return tuple(cuts)
    segments = len(cuts) + 1  # that all cuts would make; cut number i ends segment number i
    return tuple(cuts[round(segments * (i + 1) / (most + 1)) - 1] for i in range(most))


@reads()
def every_step(
    prompt: Prompt, trunk: Trunk, rng: np.random.Generator, *, max_points: Count | None = None
) -> tuple[int, ...]:
    """The start of every step but the first, at most `max_points` of them, evenly spread (VinePPO)."""
    return _spread([step.start for step in trunk.steps[1:]], max_points)


@reads()
def fixed_segments(
    prompt: Prompt,
    trunk: Trunk,
    rng: np.random.Generator,
    *,
    segment_tokens: Count = 512,
    max_points: Count | None = None,
) -> tuple[int, ...]:
    """Every `segment_tokens` tokens, at most `max_points` of these cuts, evenly spread (TreePO, SPO tree)."""
    return _spread(range(segment_tokens, len(trunk.rollout.ids), segment_tokens), max_points)


@reads()
def low_probability(
    prompt: Prompt,
    trunk: Trunk,
    rng: np.random.Generator,
    *,
    below: Share = 0.9,
    per_segment: Count = 5,
    max_points: Count | None = None,
) -> tuple[int, ...]:
    """Cut points after every `per_segment` tokens drawn with probability under `below`, at most `max_points` of them,
    evenly spread (SPO chain).
    """
    unsure = np.flatnonzero(trunk.rollout.logprobs < np.log(below))
    return _spread(unsure[per_segment::per_segment].tolist(), max_points)


@reads()
def no_branches(prompt: Prompt, trunk: Trunk, rng: np.random.Generator) -> tuple[int, ...]:
    """No points: trunks alone (GRPO)."""
    return ()


no_branches.most_points = 0  # type: ignore[attr-defined]

RULES: dict[str, Callable[..., tuple[int, ...]]] = {
    "fci": fci,
    "surprisal": surprisal,
    "entropy": entropy,
    "random_steps": random_steps,
    "uniform": uniform,
    "every_step": every_step,
    "fixed_segments": fixed_segments,
    "low_probability": low_probability,
    "none": no_branches,
}
