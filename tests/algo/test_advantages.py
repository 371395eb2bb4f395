"""Values and advantages by hand (Eq. 2-3, GRPO and the rivals'), and against an oracle that enumerates leaves.

The forest of the hand-computed numbers: tree A, whose trunk of six tokens is right, with two branches after two tokens
(one right) and two after four (none right); tree B, an unbranched wrong trunk of three tokens. Six leaves, two right:

    A  [0,2) --+-- [2,4) --+-- [4,6)  right          V(root) = 2/6
               |           +-- 1 token   wrong       V([0,2)) = 2/5, five leaves
               |           +-- 2 tokens  wrong       V([2,4)) = 1/3, three leaves
               +-- 3 tokens  right                   V([4,6)) = 1, one leaf
               +-- 2 tokens  wrong
    B  [0,3)  wrong                                  V(B) = 0
"""

from __future__ import annotations

from math import exp, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnrl.algo.advantages import (
    ESTIMATORS,
    chain,
    edge,
    fr3e,
    grpo,
    leaf_rewards,
    node_advantage,
    segments,
    tree,
    tree_grpo,
    treepo,
    treerl,
)

LEAF_TOKENS = [6, 5, 4, 5, 6, 3]


@pytest.fixture
def forest(build):
    a = build.tree(6, 1.0, (2, 3, 1.0), (2, 2, 0.0), (4, 1, 0.0), (4, 2, 0.0))
    return build.forest(a, build.tree(3, 0.0))


def rng():
    return np.random.default_rng(0)


def runs(*parts):
    """(value, tokens) pairs spread over tokens."""
    return np.repeat([v for v, _ in parts], [n for _, n in parts])


def check_advantages(samples, expected):
    assert len(samples) == len(expected)
    for sample, e in zip(samples, expected, strict=True):
        np.testing.assert_allclose(sample.advantages, e, atol=1e-6)


class TestByHand:
    def test_eq2_values_are_means_over_the_leaves_below(self, forest):
        cut = segments(forest.trees[0])
        assert cut.bounds.tolist() == [0, 2, 4, 6]
        assert cut.leaves.tolist() == [5, 3, 1]
        assert cut.values == pytest.approx([2 / 5, 1 / 3, 1])
        assert leaf_rewards(forest).tolist() == [1, 1, 0, 0, 0, 0]

    def test_eq3_on_one_node(self):
        # V 3/4, root 1/2, parent 5/8, four leaves: (1/4 + 1/8) / 2
        assert float(node_advantage(np.array(0.75), np.array(0.625), 0.5, np.array(4.0))) == pytest.approx(0.1875)

    def test_eq3_on_every_token_of_every_path(self, forest):
        first = (2 / 5 - 1 / 3 + 2 / 5 - 1 / 3) / sqrt(5)
        second = (1 / 3 - 1 / 3 + 1 / 3 - 2 / 5) / sqrt(3)
        check_advantages(
            tree(forest, rng()),
            [
                runs((first, 2), (second, 2), (1 - 1 / 3 + 1 - 1 / 3, 2)),
                runs((first, 2), (1 - 1 / 3 + 1 - 2 / 5, 3)),
                runs((first, 2), (0 - 1 / 3 + 0 - 2 / 5, 2)),
                runs((first, 2), (second, 2), (0 - 1 / 3 + 0 - 1 / 3, 1)),
                runs((first, 2), (second, 2), (0 - 1 / 3 + 0 - 1 / 3, 2)),
                runs((0 - 1 / 3 + 0 - 1 / 3, 3)),
            ],
        )

    def test_released_unbranched_trunks_count_in_the_root_only(self, forest):
        with_b, without_b = tree(forest, rng()), tree(forest, rng(), train_unbranched=False)
        assert len(without_b) == 5
        check_advantages(without_b, [s.advantages for s in with_b[:5]])

    def test_grpo(self, build):
        # rewards 1 0 0 0: mean 1/4, sample std 1/2, population std sqrt(3)/4
        forest = build.forest(*(build.tree(n, r) for n, r in [(2, 1.0), (3, 0.0), (1, 0.0), (4, 0.0)]))
        check_advantages(grpo(forest, rng()), [runs((1.5, 2)), runs((-0.5, 3)), runs((-0.5, 1)), runs((-0.5, 4))])
        check_advantages(
            grpo(forest, rng(), ddof=0), [runs((v, n)) for v, n in [(3**0.5, 2), *((-(3**-0.5), n) for n in (3, 1, 4))]]
        )

    def test_grpo_uses_trunks_only(self, forest):
        # trunks 1 and 0: mean 1/2, sample std sqrt(1/2)
        check_advantages(grpo(forest, rng()), [runs((sqrt(0.5), 6)), runs((-sqrt(0.5), 3))])

    def test_spo_tree_is_child_minus_parent(self, forest):
        check_advantages(
            edge(forest, rng()),
            [
                runs((1 / 15, 2), (-1 / 15, 2), (2 / 3, 2)),
                runs((1 / 15, 2), (3 / 5, 3)),
                runs((1 / 15, 2), (-2 / 5, 2)),
                runs((1 / 15, 2), (-1 / 15, 2), (-1 / 3, 1)),
                runs((1 / 15, 2), (-1 / 15, 2), (-1 / 3, 2)),
                runs((-1 / 3, 3)),
            ],
        )

    def test_treerl_leaves_the_own_leaf_out_of_the_root_and_centres_over_tokens(self, forest):
        # root without the own leaf: 1/5 on a right path, 2/5 on a wrong one
        def path(root, *nodes):
            return runs(*(((2 * v - root - p) / sqrt(n), t) for v, p, n, t in nodes))

        first, second = (2 / 5, 1 / 3, 5, 2), (1 / 3, 2 / 5, 3, 2)
        raw = [
            path(1 / 5, first, second, (1, 1 / 3, 1, 2)),
            path(1 / 5, first, (1, 2 / 5, 1, 3)),
            path(2 / 5, first, (0, 2 / 5, 1, 2)),
            path(2 / 5, first, second, (0, 1 / 3, 1, 1)),
            path(2 / 5, first, second, (0, 1 / 3, 1, 2)),
            path(2 / 5, (0, 1 / 3, 1, 3)),
        ]
        centre = np.concatenate(raw).mean()
        check_advantages(treerl(forest, rng(), train_leaves=None), [r - centre for r in raw])

    def test_treepo(self, forest):
        raw = np.array(
            [
                (2 / 3 + 3 / 5 + 2 / 3) / 3,  # 1 minus root, [0,2) and [2,4)
                (2 / 3 + 3 / 5) / 2,
                -(1 / 3 + 2 / 5) / 2,
                -(1 / 3 + 2 / 5 + 1 / 3) / 3,
                -(1 / 3 + 2 / 5 + 1 / 3) / 3,
                -1 / 3,
            ]
        )
        spread = sqrt(((raw - raw.mean()) ** 2).sum() / 6)
        check_advantages(treepo(forest, rng()), [runs((a / spread, n)) for a, n in zip(raw, LEAF_TOKENS, strict=True)])

    def test_tree_grpo_adds_within_and_across(self, forest):
        # across: mean 1/3, sample variance (2 * 4/9 + 4 * 1/9) / 5 = 4/15; within A: mean 2/5, (2*.36 + 3*.16) / 4 = .3
        right = (2 / 3) / sqrt(4 / 15) + (3 / 5) / sqrt(0.3)
        wrong = (-1 / 3) / sqrt(4 / 15) + (-2 / 5) / sqrt(0.3)
        alone = (-1 / 3) / sqrt(4 / 15)  # B has one leaf: nothing to compare with within it
        values = [right, right, wrong, wrong, wrong, alone]
        check_advantages(tree_grpo(forest, rng()), [runs((a, n)) for a, n in zip(values, LEAF_TOKENS, strict=True)])

    def test_vineppo_differences_of_rollout_means(self, forest):
        # V(start) = 1/2 (trunks), V(2) = 1/2, V(4) = 0, end: the trunk's reward 1; B: 1/2 to 0
        check_advantages(chain(forest, rng()), [runs((0, 2), (-0.5, 2), (1, 2)), runs((-0.5, 3))])

    def test_spo_chain_trains_unsure_tokens_only(self, forest):
        # p = exp(-i / 10): 1, 0.905, 0.819, 0.741 ...
        a, b = chain(forest, rng(), only_below=0.9)
        assert a.mask.tolist() == [False, False, True, True, True, True]
        assert b.mask.tolist() == [False, False, True]
        np.testing.assert_allclose(a.advantages, [0, 0, -0.5, -0.5, 1, 1])

    def test_fr3e_scales_each_anchor_by_the_change_of_value(self, build):
        # trunks 1 and 0: V(prompt) 1/2. Anchor 2: rewards 1 1 0 0, V 1/2; anchor 4: 1 0 0 0, V 1/4, so times e^(1/4)
        first = [(2, 1, 1.0), (2, 2, 1.0), (2, 1, 0.0), (2, 1, 0.0)]
        second = [(4, 3, 1.0), (4, 1, 0.0), (4, 1, 0.0), (4, 1, 0.0)]
        forest = build.forest(build.tree(6, 1.0, *second, *first), build.tree(3, 0.0))
        samples = fr3e(forest, rng())
        half, quarter = 0.5 / sqrt(1 / 3), sqrt(0.25)  # standard deviations over n - 1: sqrt(1/3) and 1/2
        late = exp(0.25) / quarter
        check_advantages(
            samples,
            [
                runs((sqrt(0.5), 6)),
                *(runs((a, 2 + n)) for a, n in ((half, 1), (half, 2), (-half, 1), (-half, 1))),
                *(
                    runs((a, 4 + n))
                    for a, n in ((0.75 * late, 3), (-0.25 * late, 1), (-0.25 * late, 1), (-0.25 * late, 1))
                ),
                runs((-sqrt(0.5), 3)),
            ],
        )
        assert samples[0].mask is None
        assert samples[2].mask.tolist() == [False, False, True, True]
        assert samples[5].mask.tolist() == [False] * 4 + [True] * 3


class TestNoSignal:
    """Groups of one outcome must give advantages of exactly zero: rounding would make them "valid"."""

    @pytest.mark.parametrize("name", sorted(ESTIMATORS))
    @pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.7])
    def test_one_outcome_has_no_signal(self, build, name, reward):
        branched = build.tree(6, reward, (2, 3, reward), (2, 2, reward), (4, 1, reward))
        forest = build.forest(branched, build.tree(3, reward), build.tree(2, reward))
        assert [s.has_signal for s in ESTIMATORS[name](forest, rng())].count(True) == 0

    @pytest.mark.parametrize("name", sorted(ESTIMATORS))
    def test_a_single_leaf_has_nothing_to_compare_with(self, build, name):
        assert not ESTIMATORS[name](build.forest(build.tree(3, 1.0)), rng())[0].has_signal

    def test_a_node_midway_between_root_and_parent_is_exactly_zero(self, build):
        # V([2,4)) = 1/2, parent 1/3, root 4/6: 1 - 2/3 - 1/3 is 3e-17 in floats
        forest = build.forest(build.tree(6, 1.0, (2, 1, 0.0), (4, 1, 0.0)), *(build.tree(2, 1.0) for _ in range(3)))
        assert tree(forest, rng())[0].advantages[2:4].tolist() == [0, 0]


@st.composite
def forests(draw):
    """Trees as (trunk tokens, reward, branches as (point, tokens, reward))."""
    reward = st.sampled_from([0.0, 1.0])
    trees = []
    for _ in range(draw(st.integers(1, 4))):
        tokens = draw(st.integers(1, 12))
        spots = st.tuples(st.integers(1, max(tokens - 1, 1)), st.integers(1, 5), reward)
        trees.append((tokens, draw(reward), draw(st.lists(spots, max_size=5)) if tokens > 1 else []))
    return trees


def grow(build, trees):
    return build.forest(*(build.tree(tokens, reward, *branches) for tokens, reward, branches in trees))


def leaf_tables(trees):
    """Naive view of a forest: per leaf its reward and, per token, the set of leaves that share that token."""
    leaves, rewards = [], []
    for t, (tokens, reward, branches) in enumerate(trees):
        rewards.append(reward)
        leaves.append([(t, "trunk", i) for i in range(tokens)])
        for b, (point, drawn, outcome) in enumerate(branches):
            rewards.append(outcome)
            leaves.append([(t, "trunk", i) for i in range(point)] + [(t, b, i) for i in range(drawn)])
    below = [[frozenset(j for j, other in enumerate(leaves) if token in other) for token in path] for path in leaves]
    return rewards, below


def parent_sets(path, everyone):
    """For each token of a path, the leaves below its node's parent: the last different set before it, or the root."""
    parents, above = [], everyone
    for i, node in enumerate(path):
        if i and path[i - 1] != node:
            above = path[i - 1]
        parents.append(above)
    return parents


def value(rewards, leaves):
    return sum(rewards[i] for i in leaves) / len(leaves)


@given(trees=forests())
def test_tree_advantages_equal_enumeration_of_leaves(build, trees):
    rewards, below = leaf_tables(trees)
    everyone = frozenset(range(len(rewards)))
    root = value(rewards, everyone)
    expected = [
        [
            (value(rewards, node) - root + value(rewards, node) - value(rewards, up)) / sqrt(len(node))
            for node, up in zip(path, parent_sets(path, everyone), strict=True)
        ]
        for path in below
    ]
    check_advantages(tree(grow(build, trees), rng()), expected)


@given(trees=forests())
def test_edge_advantages_equal_enumeration_and_add_up_along_the_path(build, trees):
    rewards, below = leaf_tables(trees)
    everyone = frozenset(range(len(rewards)))
    samples = edge(grow(build, trees), rng())
    for sample, path, reward in zip(samples, below, rewards, strict=True):
        ups = parent_sets(path, everyone)
        np.testing.assert_allclose(
            sample.advantages,
            [value(rewards, n) - value(rewards, u) for n, u in zip(path, ups, strict=True)],
            atol=1e-6,
        )
        firsts = [i for i in range(len(path)) if i == 0 or path[i] != path[i - 1]]
        telescoped = sum(float(sample.advantages[i]) for i in firsts)
        assert telescoped == pytest.approx(reward - value(rewards, everyone), abs=1e-5)


@given(trees=forests())
def test_treepo_equals_enumeration_of_ancestors(build, trees):
    rewards, below = leaf_tables(trees)
    raw = []
    for leaf, path in enumerate(below):
        ancestors = [frozenset(range(len(rewards)))]
        ancestors += [n for i, n in enumerate(path) if len(n) > 1 and (i == 0 or path[i - 1] != n)]
        raw.append(sum(rewards[leaf] - value(rewards, a) for a in ancestors) / len(ancestors))
    spread = np.std(raw)
    expected = [np.full(len(p), r / spread if spread > 1e-12 else 0.0) for p, r in zip(below, raw, strict=True)]
    check_advantages(treepo(grow(build, trees), rng()), expected)


@given(trees=forests())
def test_treerl_averaged_over_the_leaves_of_a_node_is_the_tree_advantage_with_a_wider_global_part(build, trees):
    """Leave-one-out per leaf: averaged over n leaves, V - V(root without me) is (V - V(root)) * n / (n - 1)."""
    rewards, below = leaf_tables(trees)
    n = len(rewards)
    if n < 2 or len(set(rewards)) == 1:
        return
    everyone = frozenset(range(n))
    root = value(rewards, everyone)
    samples = treerl(grow(build, trees), rng(), train_leaves=None)
    tokens = np.concatenate([s.advantages for s in samples])
    assert tokens.mean(dtype=np.float64) == pytest.approx(0.0, abs=1e-5)
    expected = [
        ((value(rewards, node) - root) * n / (n - 1) + value(rewards, node) - value(rewards, up)) / sqrt(len(node))
        for path in below
        for node, up in zip(path, parent_sets(path, everyone), strict=True)
    ]
    # a sum over all paths' tokens weighs each node by its leaves, so the centres agree
    expected = np.array(expected) - np.mean(expected)
    gathered: dict[tuple, list[float]] = {}
    position = 0
    for path in below:
        for i, node in enumerate(path):
            gathered.setdefault((node, i), []).append((float(tokens[position]), float(expected[position])))
            position += 1
    for pairs in gathered.values():
        got, want = np.mean(pairs, axis=0)
        assert got == pytest.approx(want, abs=1e-5)


@given(trees=forests(), leaves=st.integers(1, 6), seed=st.integers(0, 3))
def test_treerl_trains_the_asked_number_of_leaves_in_order(build, trees, leaves, seed):
    forest = grow(build, trees)
    order = [s.response.tolist() for s in tree(forest, rng())]
    drawn = treerl(forest, np.random.default_rng(seed), train_leaves=leaves)
    assert len(drawn) == min(leaves, len(order))
    remaining = iter(order)
    assert all(s.response.tolist() in remaining for s in drawn)  # a subsequence


@given(trees=forests())
def test_chain_equals_naive_means(build, trees):
    start = np.mean([reward for _, reward, _ in trees])
    expected = []
    for tokens, reward, branches in trees:
        points = sorted({p for p, _, _ in branches})
        at = {0: start, tokens: reward, **{p: np.mean([r for q, _, r in branches if q == p]) for p in points}}
        marks = [0, *points, tokens]
        expected.append(
            [at[min(m for m in marks if m > i)] - at[max(m for m in marks if m <= i)] for i in range(tokens)]
        )
    check_advantages(chain(grow(build, trees), rng()), expected)


@given(trees=forests())
def test_segments_lengths_add_up_to_the_trunk(build, trees):
    for t, (tokens, _, branches) in zip(grow(build, trees).trees, trees, strict=True):
        cut = segments(t)
        assert cut.lengths.sum() == tokens
        assert (cut.lengths > 0).all()
        assert cut.leaves[0] == 1 + len(branches)


@given(trees=forests(), name=st.sampled_from(["tree", "edge", "treepo", "tree_grpo"]))
def test_tokens_are_conserved_and_come_from_who_drew_them(build, trees, name):
    """One sample per leaf, in leaf order; prefix ids and log-probs from the trunk, the tail's from the branch."""
    forest = grow(build, trees)
    samples = ESTIMATORS[name](forest, rng())
    lengths = [n for tokens, _, bs in trees for n in (tokens, *(p + drawn for p, drawn, _ in bs))]
    assert [len(s.response) for s in samples] == lengths
    assert sum(len(s.advantages) for s in samples) == sum(lengths)
    left = iter(samples)
    for t in forest.trees:
        trunk = next(left)
        assert trunk.response.tolist() == t.trunk.rollout.ids.tolist()
        assert trunk.logprobs.tolist() == t.trunk.rollout.logprobs.tolist()
        for b in t.branches:
            s = next(left)
            assert s.response[: b.point].tolist() == t.trunk.rollout.ids[: b.point].tolist()
            assert s.logprobs[: b.point].tolist() == t.trunk.rollout.logprobs[: b.point].tolist()
            assert s.response[b.point :].tolist() == b.rollout.ids.tolist()
            assert s.logprobs[b.point :].tolist() == b.rollout.logprobs.tolist()
    assert all(s.prompt is forest.prompt.ids and s.uid == forest.prompt.uid for s in samples)
    assert all(s.advantages.dtype == np.float32 and s.response.dtype == np.int32 for s in samples)


@given(rewards=st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=8))
def test_grpo_is_standardized(build, rewards):
    a = np.array([s.advantages[0] for s in grpo(build.forest(*(build.tree(2, r) for r in rewards)), rng())], np.float64)
    assert a.sum() == pytest.approx(0.0, abs=1e-5)
    if len(set(rewards)) > 1:
        assert (a**2).sum() / (len(a) - 1) == pytest.approx(1.0, rel=1e-4)
        assert np.array_equal(np.argsort(np.argsort(a, kind="stable")), np.argsort(np.argsort(rewards, kind="stable")))
