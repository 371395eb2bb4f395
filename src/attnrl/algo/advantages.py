"""Values and advantages: from the outcomes of a forest to training samples (Eq. 2-3, GRPO and the rivals').

An estimator is any function `(forest, rng, ...) -> list[Sample]`; the ones here are named in `ESTIMATORS`.

A tree's trunk falls into segments between its branch points; segment i starts at point i (segment 0 at the start).
A branch at point i is a sibling of segment i: both are children of segment i - 1. The parent of segment 0 is the root.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray

from attnrl.algo.parts import Count, Share
from attnrl.types import Branch, Floats, Forest, Ids, Sample, Tree, as_floats

Estimator = Callable[[Forest, np.random.Generator], list[Sample]]
Values = NDArray[np.float64]
Ddof = Annotated[int, Ge(0), Le(1)]

ROUNDING = 1e-12  # differences of mean rewards below this are no signal but float rounding


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """The trunk of one tree cut at its branch points: bounds, leaves below each segment, and their mean reward.

    With T tokens and branches at points 3 and 5: segments [0, 3), [3, 5), [5, T).
    """

    bounds: NDArray[np.int64]  # [n + 1] token offsets, 0 first, T last
    leaves: Values  # [n] number of leaves below each segment, |L|
    values: Values  # [n] mean reward of those leaves, V
    index: dict[int, int]  # branch point -> segment that starts there

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.bounds)


def leaf_rewards(forest: Forest) -> Values:
    """Rewards of all leaves of a forest, each tree's trunk first, then its branches."""
    return np.array([r for tree in forest.trees for r in (tree.trunk.reward, *(b.reward for b in tree.branches))])


def segments(tree: Tree) -> Segments:
    """Segments of a tree's trunk with their values: the mean reward of the leaves below. Paper: Eq. 2."""
    points = sorted({b.point for b in tree.branches})
    bounds = np.array([0, *points, len(tree.trunk.rollout.ids)], dtype=np.int64)
    index = {point: i + 1 for i, point in enumerate(points)}
    leaves = np.zeros(len(points) + 1)
    rewards = np.zeros(len(points) + 1)
    leaves[-1], rewards[-1] = 1.0, tree.trunk.reward
    for branch in tree.branches:
        above = index[branch.point] - 1  # the segment the branch hangs from
        leaves[above] += 1.0
        rewards[above] += branch.reward
    leaves = np.cumsum(leaves[::-1])[::-1]
    return Segments(bounds, leaves, np.cumsum(rewards[::-1])[::-1] / leaves, index)


def node_advantage(value: Values, parent: Values, root: float, leaves: Values) -> Values:
    """[V - V(root) + V - V(parent)] / sqrt(leaves below): global plus local advantage. Paper: Eq. 3.

    >>> float(node_advantage(np.array(1.0), np.array(0.5), 0.25, np.array(4.0)))
    0.625
    """
    advantage: Values = _exact(2.0 * value - root - parent) / np.sqrt(leaves)
    return advantage


def tree(forest: Forest, rng: np.random.Generator, *, train_unbranched: bool = True) -> list[Sample]:
    """Samples with the tree advantage of every node they pass. Paper: Eq. 2-3.

    A trunk that was not branched is a tree of one leaf; released code lets it count in V(root) only
    (`train_unbranched = False`).
    """
    root = float(leaf_rewards(forest).mean())
    return node_samples(
        forest, lambda node, r: node_advantage(node.value, node.parent, root, node.leaves), train_unbranched
    )


def edge(forest: Forest, rng: np.random.Generator) -> list[Sample]:
    """Samples with V(child) - V(parent) on each edge of the tree (SPO tree)."""
    return node_samples(forest, lambda node, r: _exact(node.value - node.parent))


def treerl(forest: Forest, rng: np.random.Generator, *, train_leaves: Count | None = 16) -> list[Sample]:
    """TreeRL's own form of Eq. 3: V(root) leaves the path's own leaf out, advantages are centred over tokens, and
    `train_leaves` of the leaves, drawn at random, are trained on (None: all). A single leaf has no others: advantage 0.
    """
    rewards = leaf_rewards(forest)
    others = len(rewards) - 1
    total = float(rewards.sum())

    def advantage(node: Node, reward: float) -> Values:
        root = (total - reward) / others if others else reward
        return node_advantage(node.value, node.parent, root, node.leaves)

    samples = node_samples(forest, advantage)
    if train_leaves is not None and len(samples) > train_leaves:
        samples = [samples[i] for i in sorted(rng.permutation(len(samples))[:train_leaves])]
    if all(reward == rewards[0] for reward in rewards):
        return samples
    tokens = sum(len(s.advantages) for s in samples)
    mean = sum(float(np.sum(s.advantages, dtype=np.float64)) for s in samples) / tokens
    return [replace(s, advantages=s.advantages - np.float32(mean)) for s in samples]


def grpo(forest: Forest, rng: np.random.Generator, *, ddof: Ddof = 1) -> list[Sample]:
    """Samples of the trunks with (R - mean) / std of the group; a group of one outcome gives 0.

    `ddof` 1 is the sample standard deviation (what the common trainers use), 0 the population's.
    Paper: Sec. 2.2, "Outcome-Supervised RL".
    """
    trunks = Forest(forest.prompt, tuple(Tree(t.trunk) for t in forest.trees))
    return leaf_samples(trunks, _standardize(leaf_rewards(trunks), ddof))


def treepo(forest: Forest, rng: np.random.Generator) -> list[Sample]:
    """Per leaf: reward minus the mean of each ancestor's leaves, averaged over the ancestors, then divided by the
    standard deviation over the prompt's leaves (TreePO).
    """
    root = float(leaf_rewards(forest).mean())

    raw = []
    for t in forest.trees:
        cut = segments(t)
        for branch in (None, *t.branches):
            inner = len(cut.values) - 1 if branch is None else cut.index[branch.point]
            reward = t.trunk.reward if branch is None else branch.reward
            raw.append(float(np.mean(reward - np.array([root, *cut.values[:inner]]))))
    return leaf_samples(forest, _whiten(np.array(raw)))


def tree_grpo(forest: Forest, rng: np.random.Generator, *, ddof: Ddof = 1) -> list[Sample]:
    """Per leaf: group-relative advantage within its tree plus the one across all trees (Tree-GRPO)."""
    across = _standardize(leaf_rewards(forest), ddof)
    within = np.concatenate([_standardize(leaf_rewards(Forest(forest.prompt, (t,))), ddof) for t in forest.trees])
    return leaf_samples(forest, across + within)


def chain(forest: Forest, rng: np.random.Generator, *, only_below: Share | None = None) -> list[Sample]:
    """Trunks with V(next point) - V(point) on each segment, a point's value being the mean of the rollouts from it.

    The value of the start is the mean reward of the trunks, that of the end the trunk's own reward; the rollouts
    themselves are not trained on. With `only_below`, only tokens drawn with a probability under it carry loss.
    VinePPO with rule "every_step"; SPO chain with "low_probability" and only_below = 0.9.
    """
    start = float(np.mean([t.trunk.reward for t in forest.trees]))
    samples = []
    for t in forest.trees:
        outcomes: dict[int, list[float]] = {}
        for b in t.branches:
            outcomes.setdefault(b.point, []).append(b.reward)
        points = sorted(outcomes)
        gains = _exact(np.diff([start, *(np.mean(outcomes[p]) for p in points), t.trunk.reward]))
        rollout = t.trunk.rollout
        lengths = np.diff([0, *points, len(rollout.ids)])
        mask = None if only_below is None else rollout.logprobs < np.log(only_below)
        samples.append(_sample(forest, rollout.ids, rollout.logprobs, _spread(gains, lengths), mask))
    return samples


def fr3e(forest: Forest, rng: np.random.Generator, *, ddof: Ddof = 1) -> list[Sample]:
    """Every rollout with (R - mean) / std among those from the same state, over exp(V(state) - V(state before)).

    A trunk's states are the prompt, from which all trunks start, and its anchors in order; V is the mean reward of the
    rollouts from a state. Where an anchor is worth more than the one before, its rollouts count less; where it is worth
    less, more. A rollout from an anchor carries loss behind it only (FR3E, arXiv 2507.07017).

    Deviation: nothing comes before the prompt, so trunks are not scaled (released: by exp(1 - V)).
    """
    rewards = np.array([t.trunk.reward for t in forest.trees])
    samples = []
    for t, advantage in zip(forest.trees, _standardize(rewards, ddof), strict=True):
        trunk, before = t.trunk.rollout, float(rewards.mean())
        samples.append(_sample(forest, trunk.ids, trunk.logprobs, _constant(len(trunk.ids), advantage)))
        for point in sorted({b.point for b in t.branches}):
            branches = [b for b in t.branches if b.point == point]
            outcomes = np.array([b.reward for b in branches])
            value = float(outcomes.mean())
            scaled = _standardize(outcomes, ddof) / np.exp(value - before)
            before = value
            for branch, a in zip(branches, scaled, strict=True):
                tokens = point + len(branch.rollout.ids)
                whole = _branch_sample(forest, t, branch, _constant(tokens, a))
                samples.append(replace(whole, mask=np.arange(tokens) >= point))
    return samples


grpo.trains = chain.trains = "trunks"  # type: ignore[attr-defined]

ESTIMATORS: dict[str, Callable[..., list[Sample]]] = {
    "tree": tree,
    "grpo": grpo,
    "treerl": treerl,
    "edge": edge,
    "treepo": treepo,
    "tree_grpo": tree_grpo,
    "chain": chain,
    "fr3e": fr3e,
}


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """Values, parent values and leaf counts of the nodes along a path."""

    value: Values
    parent: Values
    leaves: Values


def node_samples(
    forest: Forest, advantage: Callable[[Node, float], Values], train_unbranched: bool = True
) -> list[Sample]:
    """One sample per leaf; each token carries the advantage of the node it lies in."""
    root = float(leaf_rewards(forest).mean())
    samples = []
    for t in forest.trees:
        if not t.branches and not train_unbranched:
            continue
        cut, trunk = segments(t), t.trunk.rollout
        parents = np.concatenate([[root], cut.values[:-1]])
        on_trunk = advantage(Node(cut.values, parents, cut.leaves), t.trunk.reward)
        samples.append(_sample(forest, trunk.ids, trunk.logprobs, _spread(on_trunk, cut.lengths)))
        for branch in t.branches:
            inner = cut.index[branch.point]
            node = Node(
                np.append(cut.values[:inner], branch.reward),
                np.append(parents[:inner], cut.values[inner - 1]),
                np.append(cut.leaves[:inner], 1.0),
            )
            lengths = np.append(cut.lengths[:inner], len(branch.rollout.ids))
            samples.append(_branch_sample(forest, t, branch, _spread(advantage(node, branch.reward), lengths)))
    return samples


def leaf_samples(forest: Forest, advantages: Values) -> list[Sample]:
    """One sample per leaf, the same advantage on all of its tokens."""
    samples = []
    leaves = ((t, b) for t in forest.trees for b in (None, *t.branches))
    for (t, branch), a in zip(leaves, advantages, strict=True):
        if branch is None:
            rollout = t.trunk.rollout
            samples.append(_sample(forest, rollout.ids, rollout.logprobs, _constant(len(rollout.ids), a)))
        else:
            samples.append(_branch_sample(forest, t, branch, _constant(branch.point + len(branch.rollout.ids), a)))
    return samples


def _branch_sample(forest: Forest, tree: Tree, branch: Branch, advantages: Floats) -> Sample:
    """A path that leaves the trunk: each token keeps the log-prob of the policy that drew it."""
    trunk, point = tree.trunk.rollout, branch.point
    ids = np.concatenate([trunk.ids[:point], branch.rollout.ids])
    return _sample(forest, ids, np.concatenate([trunk.logprobs[:point], branch.rollout.logprobs]), advantages)


def _sample(
    forest: Forest, ids: Ids, logprobs: Floats, advantages: Floats, mask: NDArray[np.bool_] | None = None
) -> Sample:
    return Sample(forest.prompt.ids, ids, advantages, logprobs, forest.prompt.uid, mask)


def _spread(per_node: Values, lengths: NDArray[np.int64]) -> Floats:
    """[T] each node's value on all of its tokens; rounded to float32 first, half the memory to write."""
    return np.repeat(as_floats(per_node), lengths)


def _constant(tokens: int, value: float) -> Floats:
    return np.full(tokens, value, dtype=np.float32)


def _exact(differences: Values) -> Values:
    """The differences with those of rounding size set to 0: a token counts as valid by its advantage not being 0."""
    return np.where(np.abs(differences) < ROUNDING, 0.0, differences)


def _standardize(rewards: Values, ddof: int) -> Values:
    """(R - mean) / std, 0 where the std is 0 or undefined."""
    std = float(rewards.std(ddof=ddof)) if len(rewards) > ddof else 0.0
    return (rewards - rewards.mean()) / std if std > ROUNDING else np.zeros(len(rewards))


def _whiten(values: Values) -> Values:
    """Values over their standard deviation, 0 where that is 0. They are differences: their centre is left alone."""
    std = float(values.std())
    return values / std if std > ROUNDING else np.zeros(len(values))
