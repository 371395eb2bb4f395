"""Credit: weights worked out by hand, and against a sort over the whole batch."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnrl.algo.credit import CREDITS, no_credit, top_entropy, weigh
from attnrl.algo.parts import bind, read_by
from attnrl.types import Sample, Scores, as_floats, as_ids


def scored(*rows: list[float], masks: dict[int, list[bool]] | None = None) -> tuple[list[Sample], list[Scores]]:
    """Samples of advantages 1, 2, ... with these entropies."""
    samples, scores = [], []
    for i, entropy in enumerate(rows):
        t = len(entropy)
        mask = (masks or {}).get(i)
        keep = None if mask is None else np.array(mask)
        samples.append(
            Sample(as_ids([1]), as_ids(range(t)), as_floats(np.arange(t) + 1), as_floats([0] * t), "q", keep)
        )
        scores.append(Scores(as_floats([0] * t), as_floats(entropy), as_floats([0])))
    return samples, scores


def lists(weights: list[np.ndarray]) -> list[list[float]]:
    return [w.tolist() for w in weights]


def test_the_top_fifth_of_the_batch_by_hand() -> None:
    """Ten tokens, two of them are the top fifth: both in the second sample, though the first has its own highest."""
    samples, scores = scored([0.1, 0.5, 0.2, 0.3], [0.9, 0.0, 0.1, 0.2, 0.8, 0.3])
    weights = top_entropy(samples, scores)
    assert lists(weights) == [[0, 0, 0, 0], [1, 0, 0, 0, 1, 0]]
    assert [s.advantages.tolist() for s in weigh(samples, weights)] == [[0, 0, 0, 0], [1, 0, 0, 0, 5, 0]]
    assert all(w.dtype == np.float32 for w in weights)


def test_ties_with_the_last_one_all_count() -> None:
    samples, scores = scored([0.5, 0.5, 0.5, 0.1, 0.1])
    assert lists(top_entropy(samples, scores)) == [[1, 1, 1, 0, 0]]
    assert lists(top_entropy(samples, scores, fraction=0.8)) == [[1, 1, 1, 1, 1]]


def test_tokens_without_loss_neither_count_nor_are_counted() -> None:
    """The masked-out 9.0 is not the highest of anything; five loss tokens make one chosen."""
    for first in (9.0, np.nan):  # nobody needs it
        samples, scores = scored([first, 0.4, 0.3], [0.2, 0.1, 0.0], masks={0: [False, True, True]})
        assert lists(top_entropy(samples, scores)) == [[0, 1, 0], [0, 0, 0]]


def test_a_loss_token_without_entropy_is_an_error() -> None:
    samples, scores = scored([0.4, math.nan])
    with pytest.raises(ValueError, match="not scored"):
        top_entropy(samples, scores)


def test_none_leaves_every_advantage() -> None:
    samples, scores = scored([0.4, 0.1], [0.3])
    assert [s.advantages.tolist() for s in weigh(samples, no_credit(samples, scores))] == [[1, 2], [1]]


def test_a_batch_without_loss_tokens_has_no_weights() -> None:
    samples, scores = scored([0.4, 0.1], masks={0: [False, False]})
    assert lists(top_entropy(samples, scores)) == [[0, 0]]
    assert top_entropy([], []) == []


@given(
    rows=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=12), min_size=1, max_size=5),
    percent=st.integers(1, 100),
)
def test_equals_a_sort_of_the_whole_batch(rows: list[list[int]], percent: int) -> None:
    """Small integers as entropies, so that ties are common; k by exact arithmetic."""
    samples, scores = scored(*([float(x) for x in row] for row in rows))
    every = sorted((x for row in rows for x in row), reverse=True)
    k = math.ceil(Fraction(percent, 100) * len(every))
    expected = [[float(x >= every[k - 1]) for x in row] for row in rows]
    assert lists(top_entropy(samples, scores, fraction=percent / 100)) == expected
    assert k <= sum(map(sum, expected))


def test_each_says_what_it_reads() -> None:
    assert {name: sorted(read_by(credit)) for name, credit in CREDITS.items()} == {
        "none": [],
        "top_entropy": ["entropy"],
    }
    assert bind(CREDITS, "top_entropy", {"fraction": 0.5}, {})(*scored([0.1, 0.2]))[0].tolist() == [0, 1]
