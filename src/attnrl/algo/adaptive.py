"""Adaptive sampling: which prompts, how many trees, how many prompts next time (Eq. 8-10)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from attnrl.algo.branching import candidates
from attnrl.algo.parts import reads
from attnrl.types import Group, Kept

Budget = Callable[[float, int], int]
Filter = Callable[[Sequence[Group], Mapping[str, Any]], Kept]

MOST_GROWTH = 2.0  # of the batch size in one iteration


def mean_fci(group: Group, *, mode: Literal["paper", "released"] = "paper") -> float:
    """Mean over the trunks of the mean FCI of their steps: left side of Eq. 8.

    Steps that cannot be branch points are left out; in mode "released" they count as zeros. A trunk without such
    steps counts as 0.
    """
    means = []
    for trunk in group.trunks:
        allowed = candidates(trunk.steps)
        total = float(np.sum(trunk.scores.fci[allowed], dtype=np.float64))
        count = len(trunk.steps) if mode == "released" else len(allowed)
        means.append(total / count if count else 0.0)
    return float(np.mean(means))


@reads()
def every_prompt(groups: Sequence[Group], memory: Mapping[str, Any]) -> Kept:
    """No filter: every prompt is branched and trained on."""
    return Kept((True,) * len(groups), dict(memory), ("",) * len(groups))


@reads("fci")
def attention(
    groups: Sequence[Group],
    memory: Mapping[str, Any],
    *,
    scope: Literal["easy", "all"] = "easy",
    mode: Literal["paper", "released"] = "paper",
) -> Kept:
    """The prompts whose trunks are attended to enough, and the running sum and count of mean FCI.

    A prompt in scope is kept if its mean FCI is at least the running mean over the prompts in scope seen so far, the
    current batch included; a prompt out of scope is kept. Scope "easy" are those with all trunks right.

    Paper: Eq. 8. Deviation: scope "easy" (what Fig. 7 shows) is the default, "all" is the equation as printed.
    """
    if scope not in ("easy", "all"):
        raise ValueError(f"scope must be 'easy' or 'all', not {scope!r}")
    looked_at = [scope == "all" or g.accuracy == 1.0 for g in groups]
    means = [mean_fci(g, mode=mode) if look else math.nan for g, look in zip(groups, looked_at, strict=True)]
    seen = [m for m in means if math.isfinite(m)]  # a broken score must not poison the running mean
    total, count = memory.get("fci_sum", 0.0) + sum(seen), memory.get("fci_count", 0) + len(seen)
    bar = total / count if count else 0.0
    slack = 1e-9 * abs(bar)  # a prompt exactly at the mean must not fall to rounding
    mask = tuple(not math.isfinite(m) or m >= bar - slack for m in means)
    reasons = tuple(
        "" if kept else f"mean FCI {m:.4f} under the running mean {bar:.4f}"
        for kept, m in zip(mask, means, strict=True)
    )
    return Kept(mask, {"fci_sum": total, "fci_count": count}, reasons)


@reads()
def not_all_right(groups: Sequence[Group], memory: Mapping[str, Any]) -> Kept:
    """Without the prompts whose trunks are all right. Paper: Sec. 4.3."""
    mask = tuple(g.accuracy < 1.0 for g in groups)
    return Kept(mask, dict(memory), tuple("" if kept else "all trunks right" for kept in mask))


@reads()
def has_spread(groups: Sequence[Group], memory: Mapping[str, Any]) -> Kept:
    """The prompts whose trunks earn different rewards (DAPO's dynamic sampling keeps these)."""
    mask = tuple(len({t.reward for t in g.trunks}) > 1 for g in groups)
    return Kept(mask, dict(memory), tuple("" if kept else "all trunks earn the same" for kept in mask))


FILTERS: dict[str, Callable[..., Kept]] = {
    "all": every_prompt,
    "attention": attention,
    "not_all_right": not_all_right,
    "has_spread": has_spread,
}


def all_trees(accuracy: float, trees: int) -> int:
    """Every trunk becomes a tree."""
    return trees


def difficulty_trees(accuracy: float, trees: int, *, rounding: Literal["round", "ceil"] = "round") -> int:
    """Number of trees of a prompt: exp(-accuracy) * trees, rounded half up (released: rounded up).

    Paper: Eq. 9.

    >>> [difficulty_trees(c / 6, 6) for c in range(7)]
    [6, 5, 4, 4, 3, 3, 2]
    >>> [difficulty_trees(c / 6, 6, rounding="ceil") for c in range(7)]
    [6, 6, 5, 4, 4, 3, 3]
    """
    exact = math.exp(-accuracy) * trees
    return math.ceil(exact) if rounding == "ceil" else math.floor(exact + 0.5)


BUDGETS: dict[str, Callable[..., int]] = {"all": all_trees, "difficulty": difficulty_trees}


def choose_trunks(group: Group, trees: int, rng: np.random.Generator) -> list[int]:
    """Which trunks become trees, as sorted indices: all of the minority outcome first, the rest at random.

    Of five right and one wrong trunk, two trees are the wrong one and a right one drawn at random.
    """
    right = np.array([t.right for t in group.trunks])
    minority = right if right.sum() * 2 <= len(right) else ~right
    order = rng.permutation(len(right))
    ranked = sorted(order.tolist(), key=lambda i: not minority[i])  # stable: random within each outcome
    return sorted(ranked[:trees])


def most_points(rule: Callable[..., Any]) -> int | None:
    """The most branch points a bound rule gives a trunk: what it declares as `most_points`, or its keyword
    `max_points`, or `points`; None where it does not say.
    """
    bound = rule.keywords if isinstance(rule, partial) else {}
    declared = getattr(getattr(rule, "func", rule), "most_points", None)
    if declared is not None:
        return int(declared(**bound)) if callable(declared) else int(declared)
    return next((int(bound[name]) for name in ("max_points", "points") if bound.get(name) is not None), None)


def full_batch(
    rule: Callable[..., Any], estimator: Callable[..., Any], *, prompts: int, group: int, width: int
) -> int | None:
    """B' of Eq. 10: the samples of a batch of `prompts` in which every sample has signal, as rule and estimator make
    them; None where the rule does not say how many points it gives.

    An estimator trains on every leaf, unless it declares `trains = "trunks"` or has a keyword `train_leaves`.
    """
    if getattr(getattr(estimator, "func", estimator), "trains", "leaves") == "trunks":
        return prompts * group
    points = most_points(rule)
    if points is None:
        return None
    leaves = group * (1 + points * width)
    bound = estimator.keywords.get("train_leaves") if isinstance(estimator, partial) else None
    return prompts * (leaves if bound is None else min(leaves, int(bound)))


def next_batch_size(
    batch_size: float, *, target: float, valid: float, history: float = 0.9, max_prompts: float = math.inf
) -> float:
    """Prompts to sample next time, from how many samples had signal (`valid`, B'') and how many should (`target`, B').

    Paper: Eq. 10. Deviation: the size stays a float and is rounded only when prompts are drawn; a rounded state
    sticks wherever the change is under half a prompt. Without any signal the size stays, and it never more than
    doubles: a handful of valid samples says that little has signal, not how much a larger batch would have.

    >>> next_batch_size(64.0, target=1920, valid=960)
    70.4
    """
    if valid <= 0:
        return batch_size
    size = history * batch_size + (1.0 - history) * (target / valid) * batch_size
    return float(min(max(size, 1.0), MOST_GROWTH * batch_size, max_prompts))
