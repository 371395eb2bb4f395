"""pass@k against enumeration of all subsets; bootstrap on data whose answer is known."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnrl.algo.intervals import bootstrap_means, interval
from attnrl.errors import ConfigError
from attnrl.evaluation import pass_at_k, summarize


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_equals_enumeration_of_all_subsets(n: int) -> None:
    for c in range(n + 1):
        right = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(right, k))
            assert pass_at_k(n, c, k) == float(Fraction(sum(map(any, subsets)), len(subsets)))


def test_pass_at_k_refuses_k_above_n_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"pass@8 cannot be estimated from 4 samples.*at least 8 samples.*at most 4"):
        pass_at_k(4, 2, 8)
    with pytest.raises(ConfigError, match="at least 1"):
        pass_at_k(4, 2, 0)
    with pytest.raises(ValueError, match="5 right responses of 4"):
        pass_at_k(4, 5, 1)


@given(st.integers(1, 2000), st.data())
def test_pass_at_k_is_stable_for_many_samples(n: int, data: st.DataObject) -> None:
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    missed = Fraction(1)
    for i in range(k):
        missed *= Fraction(max(0, n - c - i), n - i)
    assert pass_at_k(n, c, k) == pytest.approx(float(1 - missed), rel=1e-15, abs=0)


def test_the_interval_of_a_coin_is_the_binomial_one() -> None:
    values = [1.0] * 300 + [0.0] * 100
    low, high = interval(bootstrap_means(values, seed=1))
    half = 1.96 * math.sqrt(0.75 * 0.25 / 400)  # normal approximation of the mean of 400 draws
    assert low == pytest.approx(0.75 - half, abs=0.004)
    assert high == pytest.approx(0.75 + half, abs=0.004)


def test_bootstrap_means_have_the_distribution_of_two_values() -> None:
    means = bootstrap_means([0.0, 1.0], seed=0, resamples=40_000)
    shares = [float(np.mean(means == value)) for value in (0.0, 0.5, 1.0)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.01)


def test_bootstrap_depends_on_its_seed_alone() -> None:
    values = np.random.default_rng(0).random(5000)  # large: several blocks
    assert np.array_equal(
        bootstrap_means(values, seed=3, resamples=2000), bootstrap_means(values, seed=3, resamples=2000)
    )
    assert not np.array_equal(
        bootstrap_means(values, seed=3, resamples=50), bootstrap_means(values, seed=4, resamples=50)
    )


def test_summary_by_hand() -> None:
    rewards = [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    truncated = [[False] * 4, [True, True, True, False], [False] * 4]
    lengths = [[10, 20, 30, 40], [100, 100, 100, 100], [1, 1, 1, 1]]
    table = summarize(rewards, truncated, lengths, ks=(2, 4))
    assert table["pass@1"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert table["pass@2"] == pytest.approx(((1 - 1 / 6) + 0 + 1) / 3)  # C(2,2)/C(4,2) = 1/6
    assert table["pass@4"] == pytest.approx(2 / 3)
    assert table["truncated"] == 0.25
    assert table["mean_tokens"] == pytest.approx(504 / 12)
    assert (table["problems"], table["responses"]) == (3, 12)
    assert (table["pass@1_low"], table["pass@1_high"]) == (0.0, 1.0)  # 1/27 of resamples hold one problem alone


def test_problems_count_alike_whatever_their_number_of_samples() -> None:
    table = summarize([[1] * 9, [0]], [[False] * 9, [False]], [[], []])
    assert table["pass@1"] == 0.5
    assert math.isnan(table["mean_tokens"])
    with pytest.raises(ConfigError, match="pass@2"):
        summarize([[1] * 9, [0]], [[False] * 9, [False]], [[], []], ks=(2,))
    with pytest.raises(ConfigError, match="nothing to summarize"):
        summarize([], [], [])
