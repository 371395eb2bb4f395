"""Adaptive sampling: which prompts, how many trees, how many prompts next time (Eq. 8-10)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from attnrl.algo.branching import candidates
from attnrl.types import Group

Scope = Literal["none", "easy", "all"]
Budget = Callable[[float, int], int]


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


def in_scope(group: Group, scope: Scope) -> bool:
    """Whether the filter looks at this prompt: "easy" those with all trunks right, "all" every one."""
    return scope == "all" or (scope == "easy" and group.accuracy == 1.0)


def attention_filter(
    groups: Sequence[Group],
    *,
    scope: Scope = "easy",
    mode: Literal["paper", "released"] = "paper",
    fci_sum: float = 0.0,
    fci_count: int = 0,
) -> tuple[list[Group], float, int]:
    """The prompts to branch and train on, and the running sum and count of mean FCI.

    A prompt in scope is kept if its mean FCI is at least the running mean over the prompts in scope seen so far, the
    current batch included; a prompt out of scope is kept.

    Paper: Eq. 8. Deviation: scope "easy" (what Fig. 6 shows) is the default, "all" is the equation as printed.
    """
    means = [mean_fci(g, mode=mode) if in_scope(g, scope) else math.nan for g in groups]
    scored = [m if math.isfinite(m) else None for m in means]  # a broken score must not poison the running mean
    seen = [s for s in scored if s is not None]
    fci_sum, fci_count = fci_sum + sum(seen), fci_count + len(seen)
    mean = fci_sum / fci_count if fci_count else 0.0
    slack = 1e-9 * abs(mean)  # a prompt exactly at the mean must not fall to rounding
    kept = [g for g, s in zip(groups, scored, strict=True) if s is None or s >= mean - slack]
    return kept, fci_sum, fci_count


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
    rewards = np.array([t.reward for t in group.trunks])
    right = rewards > 0.5
    minority = right if right.sum() * 2 <= len(right) else ~right
    order = rng.permutation(len(rewards))
    ranked = sorted(order.tolist(), key=lambda i: not minority[i])  # stable: random within each outcome
    return sorted(ranked[:trees])


def next_batch_size(
    batch_size: float, *, target: float, valid: float, history: float = 0.9, max_prompts: float = math.inf
) -> float:
    """Prompts to sample next time, from how many samples had signal (`valid`, B'') and how many should (`target`, B').

    Paper: Eq. 10. Deviation: the size stays a float and is rounded only when prompts are drawn; a rounded state
    sticks wherever the change is under half a prompt. Without any signal the size stays.

    >>> next_batch_size(64.0, target=1920, valid=960)
    70.4
    """
    if valid <= 0:
        return batch_size
    size = history * batch_size + (1.0 - history) * (target / valid) * batch_size
    return float(min(max(size, 1.0), max_prompts))
