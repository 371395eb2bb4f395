"""Packs hold every sample once, with the right predictor of every loss token."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from attnrl.local.packing import input_length, pack, plan_minibatches
from attnrl.scoring.scorer import bins_by_budget
from attnrl.types import Sample, as_floats, as_ids


def sample(prompt: list[int], response: list[int], mask: list[bool] | None = None, uid: str = "q") -> Sample:
    t = len(response)
    keep = None if mask is None else np.array(mask)
    values = as_floats(np.arange(t) + 1.0)
    return Sample(as_ids(prompt), as_ids(response), values, -values, uid=uid, mask=keep)


def test_pack_by_hand() -> None:
    samples = [sample([10, 11], [1, 2, 3]), sample([20], [4, 5, 6], mask=[True, False, False])]
    p = pack(samples, [0, 1], "cpu")
    # the last loss token is never read; of the second sample only the prompt is
    assert p.ids_T.tolist() == [10, 11, 1, 2, 20]
    assert p.positions_T.tolist() == [0, 1, 2, 3, 0]
    assert p.lengths == (4, 1)
    assert p.source_U.tolist() == [1, 2, 3, 4]
    assert p.targets_U.tolist() == [1, 2, 3, 4]
    assert p.advantages_N.tolist() == [1, 2, 3, 1]
    assert p.behaviour_N.tolist() == [-1, -2, -3, -1]
    assert p.counts == (3, 1)


def test_filling_is_a_sequence_without_loss() -> None:
    p = pack([sample([10], [1, 2])], [0], "cpu", multiple=8)
    assert p.lengths == (2, 6)
    assert p.source_U.max() < 2


def test_a_sample_without_loss_tokens_has_nothing_to_read() -> None:
    assert input_length(sample([1], [2, 3], mask=[False, False])) == 0
    assert input_length(sample([1], [])) == 0


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(5, 60))
def test_bins_partition_within_budget(lengths: list[int], budget: int) -> None:
    bins = bins_by_budget(lengths, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    for b in bins:
        assert len(b) == 1 or sum(lengths[i] for i in b) <= budget
    # first fit: no two bins could be one
    totals = [sum(lengths[i] for i in b) for b in bins]
    assert all(a + b > budget for i, a in enumerate(totals) for b in totals[i + 1 :])


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
