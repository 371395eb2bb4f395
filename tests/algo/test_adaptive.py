"""Adaptive sampling by hand: the filter (Eq. 8), tree numbers (Eq. 9), batch size (Eq. 10)."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnrl.algo import advantages, branching
from attnrl.algo.adaptive import (
    BUDGETS,
    FILTERS,
    all_trees,
    attention,
    choose_trunks,
    difficulty_trees,
    every_prompt,
    full_batch,
    has_spread,
    mean_fci,
    most_points,
    next_batch_size,
    not_all_right,
)
from attnrl.algo.parts import read_by
from attnrl.types import Group


def group_with(build, *scores, reward=1.0, uid="q"):
    """A group whose trunks have the given candidate scores; the first step of each scores 100 and never counts."""
    trunks = [build.trunk(len(s) + 1, reward, starts=range(1, len(s) + 1), fci=[100, *s]) for s in scores]
    return Group(build.prompt(uid), tuple(trunks))


class TestMeanFci:
    def test_mean_over_trunks_of_the_mean_over_steps(self, build):
        # trunk 1: (1 + 3) / 2 = 2; trunk 2: (2 + 4 + 9) / 3 = 5; the pooled mean over steps would be 19 / 5
        assert mean_fci(group_with(build, [1, 3], [2, 4, 9])) == pytest.approx(3.5)

    def test_the_sum_runs_in_doubles(self, build):
        assert mean_fci(group_with(build, [2.0**24, 1, 1])) == (2**24 + 2) / 3  # 2**24 + 1 is no float32

    def test_answer_steps_stay_out_or_count_as_zeros(self, build):
        trunk = build.trunk(8, 1.0, starts=(2, 4, 6), fci=[50, 3, 5, 70], thinking=6)
        group = Group(build.prompt(), (trunk,))
        assert mean_fci(group) == pytest.approx((3 + 5) / 2)
        assert mean_fci(group, mode="released") == pytest.approx((0 + 3 + 5 + 0) / 4)

    def test_a_trunk_of_one_step_counts_as_zero(self, build):
        group = Group(build.prompt(), (build.trunk(4, 1.0, fci=[9]), build.trunk(4, 1.0, starts=(2,), fci=[9, 6])))
        assert mean_fci(group) == pytest.approx((0 + 6) / 2)


def kept_of(groups, kept):
    return [g.prompt.uid for g, keep in zip(groups, kept.mask, strict=True) if keep]


class TestFilter:
    def test_eq8_by_hand(self, build):
        easy = [group_with(build, [v], uid=str(v)) for v in (1, 2, 6)]
        kept = attention(easy, {})
        assert kept_of(easy, kept) == ["6"]  # the mean is 3
        assert kept.memory == {"fci_sum": 9.0, "fci_count": 3}
        assert kept.reasons[2] == ""
        assert kept.reasons[0] == "mean FCI 1.0000 under the running mean 3.0000"

    def test_the_running_mean_goes_over_all_iterations(self, build):
        # 9 over 3 prompts so far; this batch adds 1 and 2: mean 12 / 5 = 2.4
        batch = [group_with(build, [v], uid=str(v)) for v in (1, 2)]
        kept = attention(batch, {"fci_sum": 9.0, "fci_count": 3})
        assert not any(kept.mask)
        assert kept.memory == {"fci_sum": 12.0, "fci_count": 5}

    def test_at_the_mean_a_prompt_is_kept(self, build):
        same = [group_with(build, [0.1, 0.3], uid=str(i)) for i in range(7)]
        assert all(attention(same, {}).mask)

    def test_where_nobody_is_attended_to_all_are_kept(self, build):
        assert all(attention([group_with(build, [0, 0], uid=str(i)) for i in range(3)], {}).mask)

    def test_scope_easy_leaves_other_prompts_alone(self, build):
        easy, hard = group_with(build, [1], uid="easy"), group_with(build, [0], reward=0.0, uid="hard")
        groups = [easy, hard, group_with(build, [9], uid="high")]
        kept = attention(groups, {}, scope="easy")
        assert kept_of(groups, kept) == ["hard", "high"]  # in order
        assert kept.memory == {"fci_sum": 10.0, "fci_count": 2}

    def test_scope_all_is_the_equation_as_printed(self, build):
        groups = [group_with(build, [v], reward=r, uid=str(v)) for v, r in ((1, 1.0), (2, 0.0), (6, 0.0))]
        kept = attention(groups, {}, scope="all")
        assert kept_of(groups, kept) == ["6"]
        assert kept.memory == {"fci_sum": 9.0, "fci_count": 3}

    def test_mode_reaches_the_mean(self, build):
        """With excluded steps as zeros the means are (0 + 6) / 2 and (0 + 1 + 1 + 1) / 4: sum 3.75."""
        groups = [group_with(build, [6], uid="a"), group_with(build, [1, 1, 1], uid="b")]
        assert attention(groups, {}, mode="released").memory["fci_sum"] == pytest.approx(3.75)
        assert attention(groups, {}).memory["fci_sum"] == pytest.approx(7.0)

    def test_no_filter_keeps_everything_and_remembers_nothing_new(self, build):
        groups = [group_with(build, [v]) for v in (1, 2)]
        kept = every_prompt(groups, {"x": 1})
        assert (kept.mask, kept.memory, kept.reasons) == ((True, True), {"x": 1}, ("", ""))

    def test_one_wrong_trunk_is_not_easy(self, build):
        low = [build.group(1, 1, 1, uid="easy"), build.group(1, 1, 0, uid="not")]
        kept = attention(low, {"fci_sum": 100.0, "fci_count": 1})
        assert kept.mask == (False, True)
        assert kept.memory["fci_count"] == 2

    def test_a_wrong_scope_is_refused(self, build):
        with pytest.raises(ValueError, match="'easy' or 'all'"):
            attention([], {}, scope="some")

    def test_not_all_right_and_has_spread(self, build):
        groups = [build.group(1, 1), build.group(1, 0), build.group(0, 0)]
        hard, spread = not_all_right(groups, {"x": 1}), has_spread(groups, {"x": 2})
        assert (hard.mask, hard.memory) == ((False, True, True), {"x": 1})
        assert hard.reasons == ("all trunks right", "", "")
        assert (spread.mask, spread.memory) == ((False, True, False), {"x": 2})
        assert spread.reasons == ("all trunks earn the same", "", "all trunks earn the same")

    def test_by_name_and_what_each_reads(self, build):
        groups = [group_with(build, [1], uid="low"), group_with(build, [9], uid="high"), build.group(1, 0, uid="mixed")]
        kept = {name: kept_of(groups, part(groups, {})) for name, part in FILTERS.items()}
        assert kept == {
            "all": ["low", "high", "mixed"],
            "attention": ["high", "mixed"],
            "not_all_right": ["mixed"],
            "has_spread": ["mixed"],
        }
        read = {name: set(read_by(part)) for name, part in FILTERS.items()}
        assert read == {"all": set(), "attention": {"fci"}, "not_all_right": set(), "has_spread": set()}

    def test_scores_that_are_no_numbers_keep_their_prompt_and_do_not_count(self, build):
        groups = [group_with(build, [v], uid=str(v)) for v in (1, math.nan, 5)]
        kept = attention(groups, {})
        assert kept.mask == (False, True, True)
        assert kept.memory == {"fci_sum": 6.0, "fci_count": 2}

    def test_spread_is_of_rewards_not_of_right_answers(self, build):
        assert has_spread([build.group(0.2, 0.4), build.group(0.9, 0.9)], {}).mask == (True, False)

    @given(batches=st.lists(st.lists(st.integers(0, 20), max_size=5), max_size=5))
    def test_batch_by_batch_equals_one_naive_pass(self, build, batches):
        """After each batch the threshold is the plain mean over every prompt seen."""
        memory, seen = {}, []
        for batch in batches:
            seen += batch
            groups = [group_with(build, [v], uid=str(v)) for v in batch]
            kept = attention(groups, memory)
            memory = kept.memory
            assert kept_of(groups, kept) == [str(v) for v in batch if v * len(seen) >= sum(seen)]
        assert memory.get("fci_count", 0) == len(seen)


class TestTreeNumber:
    def test_eq9_by_hand(self):
        # exp(-z) * 6: 6, 5.079, 4.299, 3.639, 3.081, 2.608, 2.207
        assert [difficulty_trees(c / 6, 6) for c in range(7)] == [6, 5, 4, 4, 3, 3, 2]

    def test_released_rounds_up(self):
        assert [difficulty_trees(c / 6, 6, rounding="ceil") for c in range(7)] == [6, 6, 5, 4, 4, 3, 3]

    def test_by_name(self):
        assert {name: budget(0.5, 6) for name, budget in BUDGETS.items()} == {"all": 6, "difficulty": 4}

    def test_all(self):
        assert [all_trees(a, 6) for a in (0.0, 0.5, 1.0)] == [6, 6, 6]

    @given(right=st.integers(0, 16), trees=st.integers(1, 16))
    def test_within_bounds_and_never_more_for_an_easier_prompt(self, right, trees):
        number = difficulty_trees(right / 16, trees)
        assert abs(number - math.exp(-right / 16) * trees) <= 0.5
        assert 0 <= number <= trees
        if right:
            assert number <= difficulty_trees((right - 1) / 16, trees)


class TestChooseTrunks:
    def test_minority_first_then_the_rest_at_random(self, build):
        group = build.group(1, 1, 0, 1, 1, 1)
        generator = np.random.default_rng(0)
        chosen = [choose_trunks(group, 2, generator) for _ in range(100)]
        assert all(2 in c and len(c) == 2 for c in chosen)
        assert {i for c in chosen for i in c} == {0, 1, 2, 3, 4, 5}

    def test_right_ones_first_where_they_are_few(self, build):
        assert choose_trunks(build.group(0, 1, 0, 0, 1, 0), 2, np.random.default_rng(1)) == [1, 4]

    def test_right_ones_first_where_both_are_equally_many(self, build):
        for seed in range(10):
            assert choose_trunks(build.group(0, 1, 0, 1), 2, np.random.default_rng(seed)) == [1, 3]

    @given(rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=8), trees=st.integers(0, 9))
    def test_as_many_as_asked_and_no_majority_before_the_minority_is_used_up(self, build, rewards, trees):
        chosen = choose_trunks(build.group(*rewards), trees, np.random.default_rng(trees))
        assert len(chosen) == min(trees, len(rewards)) == len(set(chosen))
        assert chosen == sorted(chosen)
        counts = {r: rewards.count(r) for r in (0.0, 1.0)}
        if counts[0.0] != counts[1.0]:
            few = min(counts, key=counts.__getitem__)
            taken = sum(rewards[i] == few for i in chosen)
            assert taken == min(counts[few], len(chosen))


class TestBatchSize:
    def test_eq10_by_hand(self):
        # 0.9 * 64 + 0.1 * (1920 / 960) * 64 = 57.6 + 12.8
        assert next_batch_size(64.0, target=1920, valid=960) == pytest.approx(70.4)
        # 0.9 * 64 + 0.1 * (1920 / 2400) * 64 = 57.6 + 5.12
        assert next_batch_size(64.0, target=1920, valid=2400) == pytest.approx(62.72)
        assert next_batch_size(64.0, target=1920, valid=1920, history=0.5) == pytest.approx(64.0)
        assert next_batch_size(64.0, target=1920, valid=960, history=0.5) == pytest.approx(96.0)

    def test_without_signal_it_stays(self):
        assert next_batch_size(64.5, target=1920, valid=0) == 64.5

    def test_bounds(self):
        assert next_batch_size(200.0, target=1920, valid=1, max_prompts=256) == 256
        assert next_batch_size(64.0, target=1920, valid=1) == 128.0  # it at most doubles
        assert next_batch_size(1.0, target=1, valid=1000) == 1.0

    def test_a_small_shortfall_still_moves_it(self):
        """The state is a float: rounded each time, a shortfall of 5 % at 64 prompts would never raise it (64.34)."""
        size = rounded = 64.0
        for _ in range(20):
            size = next_batch_size(size, target=1.0, valid=0.95)
            rounded = round(next_batch_size(rounded, target=1.0, valid=0.95))
        assert rounded == 64
        assert size == pytest.approx(64 * (0.9 + 0.1 / 0.95) ** 20)

    def test_the_target_is_what_the_parts_make(self):
        rule, tree = partial(branching.fci, points=2), partial(advantages.tree)
        sizes = {"prompts": 64, "group": 6, "width": 2}
        assert full_batch(rule, tree, **sizes) == 64 * 30
        assert full_batch(partial(branching.no_branches), partial(advantages.grpo), **sizes | {"group": 30}) == 64 * 30
        assert full_batch(partial(branching.no_branches), tree, **sizes) == 64 * 6
        vine = partial(branching.every_step, max_points=16)
        assert full_batch(vine, partial(advantages.chain), **sizes) == 64 * 6  # rollouts are not trained on
        assert full_batch(vine, tree, **sizes) == 64 * 6 * 33
        assert full_batch(rule, partial(advantages.treerl, train_leaves=16), **sizes) == 64 * 16
        assert full_batch(partial(branching.every_step, max_points=None), tree, **sizes) is None
        assert most_points(branching.every_step) is None

    def test_a_rule_may_declare_its_most_points(self):
        def own(prompt, trunk, rng, *, points=2, twice=False):
            return ()

        assert most_points(partial(own, points=3)) == 3
        assert most_points(own) is None
        own.most_points = 5
        assert most_points(partial(own, points=3)) == most_points(own) == 5
        own.most_points = lambda points=2, twice=False: points * (1 + twice)
        assert most_points(partial(own, points=3, twice=True)) == 6
        assert most_points(partial(branching.fixed_segments, max_points=4, points=9)) == 4

    def test_an_estimator_may_train_on_trunks_or_on_some_leaves(self):
        rule, sizes = partial(branching.fci, points=1), {"prompts": 10, "group": 4, "width": 3}
        assert full_batch(rule, advantages.tree, **sizes) == 10 * 16
        assert full_batch(rule, advantages.grpo, **sizes) == 10 * 4
        assert full_batch(rule, partial(advantages.treerl, train_leaves=99), **sizes) == 10 * 16
        assert full_batch(rule, partial(advantages.treerl, train_leaves=None), **sizes) == 10 * 16

    @given(share=st.floats(0.2, 1.0), start=st.floats(1.0, 500.0))
    def test_it_settles_where_the_valid_samples_meet_the_target(self, share, start):
        """With a fixed share of valid samples, B converges to target / share."""
        size = start
        for _ in range(400):
            size = next_batch_size(size, target=64.0, valid=size * share)
        assert size == pytest.approx(64.0 / share, rel=1e-6)
