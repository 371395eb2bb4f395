"""Where to branch: Eq. 7 by hand, the rivals' rules, and what every rule must keep."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attnrl.algo.adaptive import most_points
from attnrl.algo.branching import RULES, candidates, fci, low_probability, top_steps, uniform
from attnrl.algo.parts import read_by
from attnrl.types import Step


def rng():
    return np.random.default_rng(0)


class TestCandidateSet:
    """Eq. 7: C = {k : y_k >= quantile(y, 1 - rho)}."""

    def test_eq7_by_hand(self, build):
        # steps 1..6 are candidates, scores 1 2 3 4 5 6: position 0.8 * 5 = 4 of the sorted scores, which is 5
        steps = build.steps(1, 2, 3, 4, 5, 6, tokens=7)
        assert top_steps(np.array([99, 1, 6, 2, 5, 3, 4]), steps, top_fraction=0.2) == [2, 4]

    def test_between_two_scores_the_quantile_is_interpolated(self, build):
        # candidates 10, 20, 30: position 0.8 * 2 = 1.6, threshold 20 + 0.6 * 10 = 26
        steps = build.steps(1, 2, 3, tokens=4)
        assert top_steps(np.array([0, 10, 30, 20]), steps, top_fraction=0.2) == [2]
        assert top_steps(np.array([0, 10, 26, 30]), steps, top_fraction=0.2) == [3]  # threshold 26 + 0.6 * 4
        assert top_steps(np.array([0, 10, 30, 30]), steps, top_fraction=0.2) == [2, 3]

    def test_first_step_and_answer_stay_out_of_the_quantile(self, build):
        # paper: pool 1 2 (threshold 1.8); with the first step and the answer's score it would be far higher
        steps = build.steps(1, 2, 3, tokens=5, thinking=3)
        assert [s.thinking for s in steps] == [True, True, True, False]
        assert top_steps(np.array([50, 1, 2, 70]), steps) == [2]

    def test_released_counts_excluded_steps_as_zeros(self, build):
        # pool 0 1 2 0: position 0.6 * 3 = 1.8 of 0 0 1 2, threshold 0.8: both steps pass; paper: pool 1 2, 1.6
        steps = build.steps(1, 2, 3, tokens=5, thinking=3)
        scores = np.array([50, 1, 2, 70])
        assert top_steps(scores, steps, top_fraction=0.4, mode="released") == [1, 2]
        assert top_steps(scores, steps, top_fraction=0.4, mode="paper") == [2]

    def test_a_quantile_of_zero_falls_to_the_smallest_positive_score(self, build):
        steps = build.steps(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, tokens=11)
        scores = np.array([9, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0])
        assert top_steps(scores, steps, top_fraction=0.2) == [9]
        scores[[4, 6]] = 1, 2  # sorted: seven zeros, 1 2 3; position 0.8 * 9 = 7.2, threshold 1 + 0.2 * 1
        assert top_steps(scores, steps, top_fraction=0.2) == [6, 9]
        assert top_steps(scores, steps, top_fraction=0.5) == [4, 6, 9]  # position 4.5: quantile 0

    @pytest.mark.parametrize("scale", [1e-7, 0.01, 1.0, 1e6])
    def test_the_scale_of_the_scores_does_not_matter(self, build, scale):
        # 1..6: the threshold is 5, as by hand above; well under 1 and well above
        steps = build.steps(1, 2, 3, 4, 5, 6, tokens=7)
        assert top_steps(scale * np.array([99, 1, 6, 2, 5, 3, 4]), steps, top_fraction=0.2) == [2, 4]
        assert top_steps(scale * np.array([99, 1, 6, 2, 4.999, 3, 4]), steps, top_fraction=0.1) == [2]

    def test_between_two_neighbours_in_float32_lies_a_quantile(self, build):
        # position 0.3 of two candidates: 0.3 of the way from 1 to the next float32, which only the higher one reaches
        scores = np.array([0, 1, np.nextafter(np.float32(1), np.float32(2))], dtype=np.float32)
        assert top_steps(scores, build.steps(1, 2, tokens=3), top_fraction=0.7) == [2]

    def test_without_a_positive_score_it_is_empty(self, build):
        assert top_steps(np.zeros(4), build.steps(1, 2, 3, tokens=4)) == []

    def test_without_candidates_it_is_empty(self, build):
        assert top_steps(np.array([1.0]), build.steps(tokens=4)) == []

    @given(
        scores=st.lists(st.integers(0, 50), min_size=2, max_size=60),
        percent=st.sampled_from([5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 80, 90, 100]),
    )
    @example(scores=list(range(22)), percent=70)  # position 0.3 * 20 = 6, but 6.000000000000001 in floats
    def test_equals_exact_arithmetic(self, scores, percent):
        """The quantile in fractions: rounding must not push a step at the threshold out."""
        steps = [Step(i, i + 1) for i in range(len(scores))]
        pool = sorted(Fraction(s) for s in scores[1:])
        position = (len(pool) - 1) * (1 - Fraction(percent, 100))
        low = int(position)
        high = min(low + 1, len(pool) - 1)
        threshold = pool[low] + (position - low) * (pool[high] - pool[low])
        if threshold == 0:
            threshold = min((s for s in pool if s > 0), default=Fraction(10**9))
        expected = [k for k in range(1, len(scores)) if scores[k] >= threshold]
        assert top_steps(np.array(scores, dtype=np.float32), steps, top_fraction=percent / 100) == expected


class TestFci:
    def points(self, build, trunk, **options):
        return fci(build.prompt(), trunk, rng(), **options)

    def test_the_earliest_of_the_high_steps(self, build):
        # ten candidates, rho 0.3: position 0.7 * 9 = 6.3 of 1..10, threshold 7.3: scores 8 9 10 at steps 2, 5, 9
        scores = [0, 1, 9, 2, 3, 8, 4, 5, 6, 10, 7]
        trunk = build.trunk(33, 1.0, starts=range(3, 33, 3), fci=scores)
        assert self.points(build, trunk, points=2, top_fraction=0.3) == (6, 15)
        assert self.points(build, trunk, points=3, top_fraction=0.3) == (6, 15, 27)

    def test_filled_up_with_the_best_of_the_rest(self, build):
        # five candidates at rho 0.2: position 3.2 of 1 2 3 4 9, threshold 5: only step 4; the next best is step 2
        trunk = build.trunk(18, 1.0, starts=(3, 6, 9, 12, 15), fci=[0, 1, 4, 3, 9, 2])
        assert self.points(build, trunk) == (6, 12)

    def test_scores_all_zero_take_the_earliest_steps(self, build):
        assert self.points(build, build.trunk(12, 1.0, starts=(3, 6, 9))) == (3, 6)

    def test_gap_from_the_start_and_between_points(self, build):
        trunk = build.trunk(20, 1.0, starts=(2, 8, 10, 16), fci=[0, 9, 9, 9, 9])
        assert self.points(build, trunk, min_gap_tokens=0) == (2, 8)
        assert self.points(build, trunk, min_gap_tokens=4) == (8, 16)
        assert self.points(build, trunk, min_gap_tokens=8) == (8, 16)  # exactly as far as asked
        assert self.points(build, trunk, min_gap_tokens=9) == (10,)  # 16 is but 6 away: the gap also binds the filling

    def test_released_counts_the_gap_with_the_prompt_and_fills_with_the_earliest(self, build):
        trunk = build.trunk(20, 1.0, starts=(2, 8, 10, 16), fci=[0, 9, 9, 9, 9])
        assert self.points(build, trunk, min_gap_tokens=4, mode="released") == (2, 8)  # the prompt has two tokens
        assert self.points(build, trunk, min_gap_tokens=512, mode="released") == (2, 8)  # none fits: the earliest
        one = build.trunk(20, 1.0, starts=(2, 8, 10, 16), fci=[0, 0, 9, 0, 0])
        assert self.points(build, one, points=3, mode="released") == (
            2,
            8,
            10,
        )  # the high one, then the earliest others

    def test_released_takes_its_own_candidate_set(self, build):
        # as in test_released_counts_excluded_steps_as_zeros: C is {1, 2} there and {2} in the paper
        trunk = build.trunk(5, 1.0, starts=(1, 2, 3), fci=[50, 1, 2, 70], thinking=3)
        assert self.points(build, trunk, points=1, top_fraction=0.4, mode="released") == (1,)
        assert self.points(build, trunk, points=1, top_fraction=0.4, mode="paper") == (2,)

    def test_released_duplicates_where_steps_run_out(self, build):
        trunk = build.trunk(6, 1.0, starts=(2,), fci=[0, 1])
        assert self.points(build, trunk, points=3, mode="released") == (2, 2, 2)
        assert self.points(build, trunk, points=3, mode="paper") == (2,)

    def test_the_answer_is_never_a_branch_point(self, build):
        trunk = build.trunk(12, 1.0, starts=(3, 6, 9), fci=[9, 1, 9, 9], thinking=6)
        assert self.points(build, trunk, points=3) == (3,)
        assert self.points(build, trunk, points=3, mode="released") == (3, 3, 3)


class TestRivals:
    def test_surprisal_takes_the_least_likely_inner_tokens(self, build):
        trunk = build.trunk(6, 1.0, logprobs=[-9, -1, -4, -2, -4, -9])
        assert RULES["surprisal"](build.prompt(), trunk, rng(), points=2) == (2, 4)
        assert RULES["surprisal"](build.prompt(), trunk, rng(), points=1) == (2,)  # a tie goes to the earlier
        assert RULES["surprisal"](build.prompt(), trunk, rng(), points=99) == (1, 2, 3, 4)  # never first, never last
        tied = build.trunk(300, 1.0, logprobs=[-(i % 3) for i in range(300)])  # many enough for an unstable sort
        assert RULES["surprisal"](build.prompt(), tied, rng(), points=3) == (2, 5, 8)

    def test_entropy_reads_the_full_entropy(self, build):
        trunk = build.trunk(5, 1.0, entropy=[9, 0.1, 0.3, 0.2, 9])
        assert RULES["entropy"](build.prompt(), trunk, rng(), points=2) == (2, 3)

    def test_random_steps_draws_each_candidate_and_no_other(self, build):
        trunk = build.trunk(15, 1.0, starts=(3, 6, 9, 12), thinking=12)
        generator = rng()
        seen = [RULES["random_steps"](build.prompt(), trunk, generator, points=2) for _ in range(200)]
        assert {p for points in seen for p in points} == {3, 6, 9}
        assert all(len(set(points)) == 2 and points == tuple(sorted(points)) for points in seen)

    def test_uniform(self, build):
        assert uniform(build.prompt(), build.trunk(10, 1.0), rng(), points=2) == (3, 7)
        assert uniform(build.prompt(), build.trunk(2, 1.0), rng(), points=5) == (1,)

    def test_every_step(self, build):
        trunk = build.trunk(9, 1.0, starts=(2, 4, 7))
        assert RULES["every_step"](build.prompt(), trunk, rng()) == (2, 4, 7)
        assert RULES["every_step"](build.prompt(), trunk, rng(), max_points=2) == (2, 7)
        assert RULES["every_step"](build.prompt(), trunk, rng(), max_points=1) == (4,)
        assert RULES["every_step"](build.prompt(), trunk, rng(), max_points=3) == (2, 4, 7)
        assert RULES["every_step"](build.prompt(), trunk, rng(), max_points=9) == (2, 4, 7)

    def test_fixed_segments(self, build):
        assert RULES["fixed_segments"](build.prompt(), build.trunk(9, 1.0), rng(), segment_tokens=4) == (4, 8)
        assert RULES["fixed_segments"](build.prompt(), build.trunk(8, 1.0), rng(), segment_tokens=4) == (4,)
        # cuts at 2, 4, ..., 18: the two that leave about a third of the response before, between and after them
        spread = RULES["fixed_segments"](build.prompt(), build.trunk(20, 1.0), rng(), segment_tokens=2, max_points=2)
        assert spread == (6, 14)

    def test_low_probability_counts_unsure_tokens_not_tokens(self, build):
        # p = 0.5 at offsets 1 2 5 6 8, else 0.95; two unsure tokens a segment: cuts before the third and the fifth
        logprobs = np.log([0.95, 0.5, 0.5, 0.95, 0.95, 0.5, 0.5, 0.95, 0.5, 0.95])
        trunk = build.trunk(10, 1.0, logprobs=logprobs)
        assert low_probability(build.prompt(), trunk, rng(), per_segment=2) == (5, 8)
        assert low_probability(build.prompt(), trunk, rng(), per_segment=2, max_points=1) == (8,)
        assert low_probability(build.prompt(), trunk, rng(), per_segment=1, below=0.1) == ()
        certain = build.trunk(6, 1.0, logprobs=[-1, 0, -1, 0, -1, 0])  # probability 1 is not under 1
        assert low_probability(build.prompt(), certain, rng(), per_segment=1, below=1.0) == (2, 4)

    def test_none(self, build):
        assert RULES["none"](build.prompt(), build.trunk(10, 1.0, starts=(2, 4)), rng()) == ()


def test_what_a_rule_gives_where_only_its_name_is_said(build):
    """Two points (N of the paper), the upper fifth of steps, no gap; 512 tokens a segment; five tokens under 0.9."""
    # eleven steps: of the ten candidates the quantile at 0.8 is 8.2, so 9 and 10 are high; with 0.3, 8 as well
    trunk = build.trunk(
        22, 1.0, starts=range(2, 22, 2), fci=[0, 1, 2, 8, 9, 3, 10, 4, 5, 6, 7], entropy=range(22),
        logprobs=np.log([0.85] * 11 + [0.95] * 11),
    )  # fmt: skip
    found = {name: rule(build.prompt(), trunk, rng()) for name, rule in RULES.items()}
    drawn = found.pop("random_steps")
    assert len(set(drawn)) == 2
    assert set(drawn) <= set(range(2, 22, 2))
    assert found == {
        "fci": (8, 12),
        "surprisal": (1, 2),
        "entropy": (19, 20),
        "uniform": (7, 15),
        "every_step": tuple(range(2, 22, 2)),
        "fixed_segments": (),
        "low_probability": (5, 10),
        "none": (),
    }
    assert RULES["fixed_segments"](build.prompt(), build.trunk(1100, 1.0), rng()) == (512, 1024)


def test_what_each_rule_reads_of_a_scoring_forward():
    read = {name: set(read_by(rule)) for name, rule in RULES.items()}
    assert {name: what for name, what in read.items() if what} == {"fci": {"fci"}, "entropy": {"entropy"}}
    assert read_by(lambda prompt, trunk, rng: ()) == {"fci", "entropy", "logprobs"}  # a rule that does not say


def test_a_rule_without_branches_says_so():
    assert most_points(RULES["none"]) == 0


@pytest.mark.parametrize("most", [1, 2, 3, 7, 16])
def test_fewer_cuts_than_there_are_lie_evenly(build, most):
    """Never the same cut twice, and no gap holds more than two cuts more than another."""
    for cuts in range(most + 1, 60):
        trunk = build.trunk(cuts + 1, 1.0)
        chosen = RULES["fixed_segments"](build.prompt(), trunk, rng(), segment_tokens=1, max_points=most)
        assert len(set(chosen)) == len(chosen) == most
        gaps = np.diff([0, *chosen, cuts + 1])
        assert gaps.max() - gaps.min() <= 2


def test_candidates(build):
    assert candidates(build.steps(2, 4, 6, tokens=8, thinking=6)) == [1, 2]
    assert candidates(build.steps(tokens=8)) == []


@st.composite
def trunks(draw):
    """Lengths, step starts and scores of a random trunk."""
    tokens = draw(st.integers(1, 60))
    starts = sorted(draw(st.sets(st.integers(1, tokens - 1), max_size=12))) if tokens > 1 else []
    scores = draw(st.lists(st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0, 3.5]), min_size=len(starts) + 1, max_size=20))
    logprobs = draw(st.lists(st.sampled_from([-0.01, -0.3, -2.0, -5.0]), min_size=tokens, max_size=tokens))
    thinking = draw(st.none() | st.integers(0, tokens))
    return tokens, starts, scores[: len(starts) + 1], logprobs, thinking


@given(data=trunks(), name=st.sampled_from(sorted(RULES)), points=st.integers(1, 4), mode=st.sampled_from([0, 1]))
def test_every_rule_gives_sorted_inner_points(build, data, name, points, mode):
    tokens, starts, scores, logprobs, thinking = data
    trunk = build.trunk(tokens, 1.0, starts=starts, fci=scores, logprobs=logprobs, entropy=logprobs, thinking=thinking)
    options = {
        "fci": {"points": points, "mode": ("paper", "released")[mode], "min_gap_tokens": 3 * mode},
        "every_step": {},
        "fixed_segments": {"segment_tokens": points},
        "low_probability": {"per_segment": points},
        "none": {},
    }.get(name, {"points": points})
    found = RULES[name](build.prompt(), trunk, rng(), **options)
    assert all(0 < p < tokens for p in found)
    assert list(found) == sorted(found)
    if not (name == "fci" and mode):
        assert len(set(found)) == len(found)
    if name in ("fci", "random_steps"):
        allowed = {s.start for s in trunk.steps[1:] if s.thinking}
        assert set(found) <= allowed
        assert len(found) == (points if mode and name == "fci" and allowed else min(points, len(allowed)))
    elif "points" in options:
        assert len(found) <= points


@pytest.mark.parametrize("mode", ["paper", "released"])
def test_rules_do_not_depend_on_state(build, mode):
    """Pure: the same trunk twice gives the same points, and the trunk's arrays are left alone."""
    trunk = build.trunk(30, 1.0, starts=(5, 10, 15, 20, 25), fci=[0, 3, 1, 2, 5, 4])
    before = trunk.scores.fci.copy()
    first = fci(build.prompt(), trunk, rng(), mode=mode)
    assert fci(build.prompt(), trunk, rng(), mode=mode) == first
    assert np.array_equal(trunk.scores.fci, before)
