"""reasoning-gym tasks as records."""

from __future__ import annotations

import sys

import pytest

from attnrl.data.gym import gym_names, gym_records
from attnrl.errors import ConfigError, DataError, MissingExtraError


def test_without_the_package_the_message_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingExtraError, match=r"attnrl\[gym\]"):
        gym_records("chain_sum", "train", 1)


def test_chain_sums_have_their_own_answers_and_splits_are_disjoint() -> None:
    pytest.importorskip("reasoning_gym", reason="extra gym is not installed")
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # few problems: seeds meet
    found = {
        (s, seed): gym_records("chain_sum", s, 3 if s == "test" else 60, seed, **settings)
        for s in ("train", "test")
        for seed in (0, 1)
    }
    for records in found.values():
        for record in records:
            first, sign, second = record.problem.split(": ")[1].removesuffix(" =").split()
            assert int(record.answers[0]) == int(first) + (1 if sign == "+" else -1) * int(second)
    problems = {key: {record.problem for record in records} for key, records in found.items()}
    assert problems["train", 0] & problems["train", 1]
    assert not (problems["train", 0] | problems["train", 1]) & (problems["test", 0] | problems["test", 1])


def test_unknown_names_settings_and_many_answers_are_refused() -> None:
    pytest.importorskip("reasoning_gym", reason="extra gym is not installed")
    assert "gcd" in gym_names()
    with pytest.raises(ConfigError, match="has no task 'gdc'"):
        gym_records("gdc", "train", 1)
    with pytest.raises(ConfigError, match="refuses these settings"):
        gym_records("gcd", "train", 1, wrong=1)
    with pytest.raises(DataError, match="no plain number"):
        gym_records("countdown", "train", 3)
