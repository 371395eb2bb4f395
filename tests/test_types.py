"""The nouns: frozen, slotted, with the few derived values they carry."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest

from attnrl import types
from attnrl.types import Group, Prompt, Rollout, Sample, Scores, Step, Trunk, Verdict, as_floats, as_ids, content_hash

RECORDS = [c for _, c in inspect.getmembers(types, dataclasses.is_dataclass)]


@pytest.mark.parametrize("record", RECORDS, ids=lambda c: c.__name__)
def test_records_are_frozen_slotted_and_inherit_nothing(record):
    assert record.__dataclass_params__.frozen
    assert "__slots__" in vars(record)
    assert record.__mro__ == (record, object)
    assert record.__doc__


def test_arrays_take_their_dtype():
    assert as_ids([1, 2**31 - 1]).dtype == np.int32
    assert as_floats([0.1, 2]).dtype == np.float32


def test_ids_that_do_not_fit_are_refused():
    with pytest.raises(OverflowError):
        as_ids([2**31])


def test_identity_by_content():
    assert len(content_hash("x")) == 16
    assert content_hash("ab", "c") != content_hash("a", "bc")
    assert content_hash("\ud800")  # a lone surrogate out of a broken file


def trunk(reward):
    rollout = Rollout(as_ids([1, 2]), as_floats([-1, -1]), "stop", 0)
    scores = Scores(rollout.logprobs, rollout.logprobs, as_floats([0]))
    return Trunk(rollout, Verdict(reward, "number"), (Step(0, 2),), scores)


def test_accuracy_is_the_share_of_right_trunks():
    prompt = Prompt("q", as_ids([1]), ("1",))
    assert Group(prompt, tuple(trunk(r) for r in (1.0, 0.0, 0.0, 1.0, 1.0, 0.0))).accuracy == 0.5


@pytest.mark.parametrize(
    ("advantages", "mask", "signal"),
    [
        ([0, 0], None, False),
        ([0, -1e-7], None, True),
        ([1, 0], [False, True], False),
        ([1, 0], [True, True], True),
    ],
)
def test_signal_is_a_non_zero_advantage_on_a_token_that_carries_loss(advantages, mask, signal):
    keep = None if mask is None else np.array(mask)
    sample = Sample(as_ids([1]), as_ids([2, 3]), as_floats(advantages), as_floats([0, 0]), "q", keep)
    assert sample.has_signal is signal
