"""Rules that separate attention from position: by hand, against the scorer's own null, and at their edges."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnrl.algo.branching import candidates
from attnrl.algo.position import RULES as OURS
from attnrl.algo.position import (
    fci_mean,
    fci_ratio,
    fci_residual,
    first_steps,
    oracle,
    position,
    position_null,
    residual,
    step_entropy,
)
from attnrl.algo.rules import RULES
from attnrl.errors import ConfigError
from attnrl.types import Step


def rng():
    return np.random.default_rng(0)


def named(build, decisive):
    return replace(build.prompt(), row={"decisive": decisive})


class TestPositionNull:
    def test_by_hand(self):
        # prompt of 2 tokens, steps of 2, 1, 1 tokens: queries see 3, 4 | 5 | 6 tokens; delta 1
        steps = [Step(0, 2), Step(2, 3), Step(3, 4)]
        np.testing.assert_allclose(position_null(2, steps, 1), [1 / 5 + 1 / 6, 1 / 6, 0])
        np.testing.assert_allclose(position_null(2, steps, 2), [1 / 6, 0, 0])

    @given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 30), st.integers(1, 5))
    def test_is_eq5_of_a_uniform_attention_matrix(self, sizes, prompt_tokens, delta):
        ends = np.cumsum(sizes)
        steps = [Step(int(b - n), int(b)) for n, b in zip(sizes, ends, strict=True)]
        tokens = prompt_tokens + int(ends[-1])
        attention = np.tril(np.ones((tokens, tokens))) / np.arange(1, tokens + 1)[:, None]
        rows = [slice(prompt_tokens + s.start, prompt_tokens + s.stop) for s in steps]
        expected = [sum(attention[j, rows[k]].mean() for j in rows[k + delta :]) for k in range(len(rows))]
        np.testing.assert_allclose(position_null(prompt_tokens, steps, delta), expected, rtol=1e-9)


class TestResidual:
    def test_a_line_in_the_null_leaves_nothing_and_a_step_above_it_stands_out(self):
        null = np.array([4.0, 3.0, 2.0, 1.0, 0.0])
        np.testing.assert_allclose(residual(np.array([9, 7, 5, 3, 0.0]), null, [0, 1, 2, 3])[:4], 0, atol=1e-12)
        left = residual(
            np.array([0, 7, 9, 3, 0.0]), null, [1, 2, 3]
        )  # line through 7, 9, 3 over 3, 2, 1: mean 19/3, slope 2
        np.testing.assert_allclose(left[1:4], [7 - 19 / 3 - 2, 9 - 19 / 3, 3 - 19 / 3 + 2])
        assert left[0] == left[4] == -np.inf  # not a candidate; too close to the end for an FCI

    def test_the_rule_finds_a_late_hub_that_the_sum_puts_behind_early_steps(self, build):
        # ten steps of one token; FCI falls with position but for a bump at step 5
        starts = range(1, 10)
        null = position_null(2, [Step(k, k + 1) for k in range(10)], 4)
        scores = null * 10
        scores[5] = scores[1] * 0.9
        trunk = build.trunk(10, 1.0, starts=tuple(starts), fci=scores)
        assert RULES["fci"](build.prompt(), trunk, rng(), points=1) == (1,)
        assert fci_residual(build.prompt(), trunk, rng(), points=1) == (5,)

    def test_the_ratio_finds_one_so_late_that_its_fci_is_below_every_other(self, build):
        null = position_null(2, [Step(k, k + 1) for k in range(12)], 4)
        scores = null * 10
        scores[7] *= 1.5  # the last with an FCI: still the smallest of the eight
        scores[2] *= 1.2  # more in height, less in times
        trunk = build.trunk(12, 1.0, starts=tuple(range(1, 12)), fci=scores)
        assert scores[7] == scores[:8].min()
        assert fci_residual(build.prompt(), trunk, rng(), points=1) == (2,)
        assert fci_ratio(build.prompt(), trunk, rng(), points=1) == (7,)
        assert fci_ratio(build.prompt(), trunk, rng(), points=9)[:7] == (1, 2, 3, 4, 5, 6, 7)  # then those without one


def test_fci_mean_divides_by_the_number_of_later_steps(build):
    # seven steps, delta 2: steps 1..4 have 4, 3, 2, 1 later steps; sums 8, 3, 6, 2 are means 2, 1, 3, 2
    trunk = build.trunk(7, 1.0, starts=(1, 2, 3, 4, 5, 6), fci=[99, 8, 3, 6, 2, 0, 0])
    assert fci_mean(build.prompt(), trunk, rng(), points=1, delta=2, top_fraction=0.1) == (3,)  # threshold 2.5
    assert RULES["fci"](build.prompt(), trunk, rng(), points=1, top_fraction=0.1) == (1,)  # threshold 7


def test_first_steps_are_the_first_that_may_branch(build):
    trunk = build.trunk(12, 1.0, starts=(3, 6, 9), fci=[0, 1, 2, 3])
    assert first_steps(build.prompt(), trunk, rng()) == (3, 6)
    assert first_steps(build.prompt(), build.trunk(12, 1.0, starts=(3, 6), thinking=6), rng()) == (3,)


def test_position_takes_the_nearest_step_of_each_share_once(build):
    trunk = build.trunk(20, 1.0, starts=(4, 8, 12, 16))
    assert position(build.prompt(), trunk, rng(), shares=(0.4, 0.8)) == (8, 16)
    assert position(build.prompt(), trunk, rng(), shares=(0.1, 0.15)) == (
        4,
        8,
    )  # both nearest to 4: the second moves on
    assert position(build.prompt(), trunk, rng(), points=1, shares=(0.5, 0.8)) == (8,)  # 10 is between: the earlier
    with pytest.raises(ConfigError, match=r"shares"):
        position(build.prompt(), trunk, rng(), points=3)


def test_step_entropy_is_a_mean_not_a_sum(build):
    # steps [0,2) [2,6) [6,7) [7,9): means 9, 1, 2, 1.5; sums 18, 4, 2, 3
    trunk = build.trunk(9, 1.0, starts=(2, 6, 7), entropy=[9, 9, 1, 1, 1, 1, 2, 1, 2])
    assert step_entropy(build.prompt(), trunk, rng()) == (6, 7)
    assert step_entropy(build.prompt(), trunk, rng(), points=1) == (6,)


class TestOracle:
    def test_one_step_gets_the_branches_of_all_points(self, build):
        trunk = build.trunk(12, 1.0, starts=(3, 6, 9))
        assert oracle(named(build, 2), trunk, rng()) == (6, 6)
        assert oracle(named(build, [3, 1]), trunk, rng()) == (3, 9)
        assert oracle(named(build, [1, 2, 3]), trunk, rng()) == (3, 6)

    def test_steps_that_a_response_does_not_have_are_left_out(self, build):
        trunk = build.trunk(12, 1.0, starts=(3, 6, 9))
        assert oracle(named(build, [7]), trunk, rng()) == ()
        assert oracle(named(build, [0, 1]), trunk, rng()) == (3, 3)  # branching the first step is resampling the prompt

    def test_a_row_without_the_column_is_said(self, build):
        with pytest.raises(ConfigError, match="decisive"):
            oracle(build.prompt(), build.trunk(12, 1.0, starts=(3,)), rng())


@pytest.mark.parametrize("name", sorted(OURS))
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=9), points=st.integers(1, 2), seed=st.integers(0, 99))
def test_points_are_starts_of_candidates(name, sizes, points, seed):
    from tests.algo.conftest import Build

    build, ends, draw = Build(), np.cumsum(sizes), np.random.default_rng(seed)
    trunk = build.trunk(
        int(ends[-1]), 1.0, starts=tuple(ends[:-1]), fci=draw.random(len(sizes)), entropy=draw.random(int(ends[-1]))
    )
    found = RULES[name](named(build, 1), trunk, rng(), points=points)
    allowed = {trunk.steps[k].start for k in candidates(trunk.steps)}
    assert set(found) <= allowed
    assert list(found) == sorted(found)
    wanted = points if name == "oracle" and allowed else min(points, len(allowed))
    assert len(found) == wanted
