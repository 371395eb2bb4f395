"""Packs hold every sample once, with the right predictor of every loss token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnrl.attention.trie import bins_by_budget
from attnrl.policy.packing import input_length, microbatches, pack
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


@pytest.mark.parametrize("share", [True, False])
def test_what_must_not_share_a_pack_is_apart(share: bool) -> None:
    samples = [sample([1, 2], [3] * n) for n in (2, 9, 3, 8)]
    assert sorted(microbatches(samples, range(4), 99, share=share, lone=5)) == [[1], [2, 0], [3]]
    assert sorted(microbatches(samples, range(4), 99, share=share, lone=0)) == [[0], [1], [2], [3]]
    assert len(microbatches(samples, range(4), 99, share=share, lone=10)) == 1


def test_predictions_of_shared_tokens_are_made_once() -> None:
    def sample(response: list[int], advantage: float) -> Sample:
        values = as_floats(np.full(len(response), advantage))
        return Sample(as_ids([9, 8]), as_ids(response), values, -values, uid="q")

    p = pack([sample([1, 2, 3], 1.0), sample([1, 2, 4], 2.0)], [0, 1], "cpu", share_prefixes=True)
    assert p.ids_T.tolist() == [9, 8, 1, 2]  # 3 and 4 are only predicted
    assert p.expand_N is not None
    assert p.source_U[p.expand_N].tolist() == [1, 2, 3, 1, 2, 3]
    assert p.targets_U[p.expand_N].tolist() == [1, 2, 3, 1, 2, 4]
    assert len(p.source_U) == 4
    assert p.advantages_N.tolist() == [1, 1, 1, 2, 2, 2]
