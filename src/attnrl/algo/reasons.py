"""Why: for a step, why it is no branch point; for a tree, why it was not branched; for a prompt, why it taught nothing.

A reason is written `kind` or `kind: detail`. The kinds are the keys of `STEP_REASONS`, `TREE_REASONS` and
`PROMPT_REASONS`, whose values say them in words. The loop records those of prompts and trees with the forests; those
of steps follow from the trunk and the knobs of the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from attnrl.algo.branching import candidates, top_steps
from attnrl.algo.parts import read_by
from attnrl.types import Branch, Forest, Tree, Trunk, counted

STEP_REASONS = {
    "point": "branch point",
    "first": "first step: branching there would draw the whole response anew",
    "answer": "at or after </think>: not thinking any more",
    "near_end": "fewer than delta steps follow: FCI is 0 by definition (Eq. 5)",
    "low": "FCI under the quantile of this trunk (Eq. 7)",
    "gap": "nearer than min_gap_tokens to the start or to another branch point",
    "later": "FCI is high enough, but earlier steps came first (Eq. 7)",
    "unscored": "the steps of this run were not scored",
    "rule": "the run's rule chose other places",
    "not_branched": "the tree was not branched",
}
TREE_REASONS = {
    "branched": "branched",
    "filtered": "the prompt was dropped by the filter (Eq. 8)",
    "budget": "other trunks of the prompt were branched: the tree number was used up (Eq. 9)",
    "no_candidate": "no step can be a branch point",
    "rule": "the rule found no place",
    "no_rule": "the run's rule makes no branches",
    "error": "every branch ended in an error of the verifier and was left out",
}
PROMPT_REASONS = {
    "taught": "some sample had a non-zero advantage",
    "filtered": "dropped by the filter (Eq. 8)",
    "all_right": "every response is right: all advantages are 0",
    "all_wrong": "every response is wrong: all advantages are 0",
    "all_cut_off": "every response was cut off by the length limit",
    "error": "every trunk ended in an error of the verifier",
    "no_signal": "the rewards differ, but every advantage is 0",
}
Mode = Literal["paper", "released"]


@dataclass(frozen=True, slots=True)
class Reasons:
    """Why a prompt taught or not, and why each of its trees was branched or not.

    >>> Reasons("taught", ("branched", "budget: 1 of 2")).trees[1]
    'budget: 1 of 2'
    """

    prompt: str
    trees: tuple[str, ...]


def kind_of(reason: str) -> str:
    """The kind of a reason, without its detail.

    >>> kind_of("filtered: mean FCI 0.012 under 0.015")
    'filtered'
    """
    return reason.partition(":")[0]


def explain(
    forest: Forest,
    *,
    planned: Sequence[Collection[int]] | None,
    taught: bool,
    chosen: Collection[int] | None = None,
    branching: bool = True,
    dropped: str | None = None,
) -> Reasons:
    """The reasons of one prompt and its trees.

    planned: the branch points of each trunk (`Plan.points`), None where nothing is known of them; chosen: the trunks
    that were to become trees (Eq. 9), where known; taught: whether a sample of the prompt had signal; branching:
    whether the run's rule makes branches at all; dropped: the filter's words for a prompt it dropped, else None.
    """
    if dropped is not None:
        return Reasons(said("filtered", dropped), ("filtered",) * len(forest.trees))
    grown = sum(bool(t.branches) for t in forest.trees)
    trees = []
    for i, tree in enumerate(forest.trees):
        points = planned[i] if planned is not None else ()
        picked = None if chosen is None else i in chosen
        trees.append(_tree_reason(tree, len(points), picked, branching, f"{grown} of {len(forest.trees)} branched"))
    return Reasons(prompt_reason(forest, taught=taught), tuple(trees))


def _tree_reason(tree: Tree, points: int, chosen: bool | None, branching: bool, grown: str) -> str:
    trunk = tree.trunk
    cut_off = ", and the trunk was cut off" if trunk.rollout.finish == "length" else ""
    if tree.branches:
        return "branched"
    if not branching:
        return "no_rule"
    if points:
        return said("error", f"{points} points were planned")
    if not candidates(trunk.steps):
        return said("no_candidate", f"{counted(len(trunk.steps), 'step')}{cut_off}")
    return said("rule", f"no place fits{cut_off}") if chosen else said("budget", grown)


def prompt_reason(forest: Forest, *, taught: bool) -> str:
    """Why a prompt that the filter kept taught, or did not."""
    leaves: list[Trunk | Branch] = []
    for tree in forest.trees:
        leaves += [tree.trunk, *tree.branches]
    if taught:
        return "taught"
    if not leaves:
        return "error"
    if all(leaf.rollout.finish == "length" for leaf in leaves):
        return said("all_cut_off", counted(len(leaves), "response"))
    right = sum(leaf.right for leaf in leaves)
    if len({leaf.reward for leaf in leaves}) > 1:
        return said("no_signal", f"{right} of {len(leaves)} right")
    return said("all_right" if right else "all_wrong", counted(len(leaves), "response"))


def declared_by(rule: Callable[..., Any]) -> dict[str, Any]:
    """What a rule declares of itself that the reasons of steps rest on; it is recorded with the run.

    >>> from attnrl.algo.branching import fci
    >>> declared_by(fci)
    {'reads': ['fci'], 'by_quantile': True}
    """
    plain = getattr(rule, "func", rule)
    return {"reads": sorted(read_by(plain)), "by_quantile": bool(getattr(plain, "by_quantile", False))}


def step_reasons(
    trunk: Trunk,
    points: Collection[int],
    *,
    by_fci: bool = True,
    by_quantile: bool = True,
    delta: int = 4,
    top_fraction: float = 0.2,
    min_gap_tokens: int = 0,
    mode: Mode = "paper",
    prompt_tokens: int = 0,
) -> tuple[str, ...]:
    """For each step of a trunk whether it is a branch point, and if not, why not. `points`: those of its tree.

    A point inside a step makes that step a branch point. Where the rule does not read FCI (`by_fci`), the steps no
    rule may take keep their reason, and the others say that the rule chose other places; so do those of a rule that
    reads it and does not go by the quantile of Eq. 7 (`by_quantile`), but for the steps whose FCI is 0 by definition.
    """
    steps, scores, by_quantile = trunk.steps, trunk.scores.fci, by_fci and by_quantile
    scored = bool((scores == scores).all())
    high = set(top_steps(scores, steps, top_fraction=top_fraction, mode=mode)) if by_quantile and scored else set()
    allowed = set(candidates(steps))
    lead = prompt_tokens if mode == "released" else 0

    def why(k: int) -> str:
        start = steps[k].start
        if any(start <= p < steps[k].stop for p in points):
            return "point"
        if k == 0:
            return "first"
        if k not in allowed:
            return "answer"
        if by_fci and not scored:
            return "unscored"
        if by_fci and k > len(steps) - 1 - delta:
            return said("near_end", f"{len(steps) - 1 - k} of {delta} steps follow")
        if not points:
            return "not_branched"
        if not by_quantile:
            return "rule"
        if k not in high:
            return "low"
        near = start + lead < min_gap_tokens or any(abs(start - p) < min_gap_tokens for p in points)
        return "gap" if near else "later"

    return tuple(why(k) for k in range(len(steps)))


def said(kind: str, detail: str) -> str:
    """A reason in its written form."""
    return f"{kind}: {detail}" if detail else kind
