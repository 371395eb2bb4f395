"""Minibatches hold every sample once and are even."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from attnrl.algo.minibatches import plan_minibatches


@settings(max_examples=50)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 6), st.integers(0, 3))
def test_minibatches_keep_prompts_together_and_even(uids: list[int], size: int, seed: int) -> None:
    names = [str(u) for u in uids]
    parts = plan_minibatches(names, prompts=size, samples=None, rng=np.random.default_rng(seed))
    assert sorted(i for part in parts for i in part) == list(range(len(uids)))
    prompts = [{names[i] for i in part} for part in parts]
    assert sum(len(p) for p in prompts) == len(set(names))
    assert len(parts) == -(-len(set(names)) // size)
    assert max(map(len, prompts)) - min(map(len, prompts)) <= 1


def test_minibatches_by_samples_and_their_order() -> None:
    uids = ["a"] * 5 + ["b"] * 5
    rng = np.random.default_rng
    parts = plan_minibatches(uids, prompts=32, samples=4, rng=rng([0, 7]))
    assert sorted(map(len, parts)) == [3, 3, 4]
    assert parts == plan_minibatches(uids, prompts=32, samples=4, rng=rng([0, 7]))
    assert parts != plan_minibatches(uids, prompts=32, samples=4, rng=rng([0, 8]))
    assert plan_minibatches([], prompts=2, samples=None, rng=rng(0)) == []
