"""Which samples reach the update."""

from __future__ import annotations

import numpy as np
import pytest

from attnrl.algo.samples import with_signal
from attnrl.types import Sample, as_floats, as_ids


def sample(uid, *advantages, mask=None):
    zeros = as_floats(np.zeros(len(advantages)))
    keep = None if mask is None else np.array(mask)
    return Sample(as_ids([1]), as_ids(range(len(advantages))), as_floats(advantages), zeros, uid, keep)


@pytest.fixture
def samples():
    return [sample("a", 0, 0), sample("b", 0, 0), sample("a", 0, -0.5), sample("c", 1, 1), sample("b", 0, 0)]


def test_paper_drops_every_sample_without_signal(samples):
    assert with_signal(samples) == [samples[2], samples[3]]


def test_released_drops_prompts_without_signal(samples):
    assert with_signal(samples, "prompts") == [samples[0], samples[2], samples[3]]


def test_none_keeps_all(samples):
    assert with_signal(samples, "none") == samples


def test_tokens_that_carry_no_loss_are_no_signal():
    assert with_signal([sample("a", 1, 0, mask=[False, True])]) == []
    assert len(with_signal([sample("a", 1, 0, mask=[True, False])])) == 1
