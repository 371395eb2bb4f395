"""The scorers of reasoning-gym, by the columns that its records carry, in worker processes."""

from __future__ import annotations

import json

import pytest

from attnrl.data.gym import gym_records
from attnrl.reward import Rewards, build_rewards
from attnrl.types import Attempt

pytest.importorskip("reasoning_gym", reason="extra gym is not installed")


@pytest.fixture(scope="module")
def rewards() -> Rewards:
    with build_rewards([("gym", 1.0, {})], workers=1, timeout_s=20.0, max_error_share=1.0) as shared:
        yield shared


def test_an_answer_that_is_not_the_reference_but_solves_the_task_is_right(rewards: Rewards) -> None:
    (record,) = gym_records("countdown", "train", 1, seed=3, numbers_only=False)
    (reference,) = record.answers
    said = [
        f"<answer>{reference}</answer>",
        f"<answer>0 + {reference}</answer>",
        f"<answer>({reference})</answer>",
        "no",
    ]
    verdicts = rewards.grade([Attempt(record.problem, record.answers, one, row=record.info) for one in said])
    assert [v.right for v in verdicts] == [True, False, True, False]  # a number more than given; brackets are free
    assert [v.reward for v in verdicts] == [1.0, 0.05, 1.0, 0.01]
    assert {v.rule for v in verdicts} == {"gym:countdown"}
    assert [v.error for v in verdicts] == [None] * 4


@pytest.mark.parametrize("task", ["chain_sum", "sudoku", "basic_arithmetic", "word_sorting"])
def test_references_are_right_whatever_the_task(rewards: Rewards, task: str) -> None:
    records = gym_records(task, "train", 3, numbers_only=False)
    right = [Attempt(r.problem, r.answers, f"<answer>{r.answers[0]}</answer>", row=r.info) for r in records]
    wrong = [Attempt(r.problem, r.answers, "<answer>nonsense</answer>", row=r.info) for r in records]
    assert [v.right for v in rewards.grade(right + wrong)] == [True] * 3 + [False] * 3


def test_the_metadata_may_be_text_and_the_name_an_option(rewards: Rewards) -> None:
    (record,) = gym_records("chain_sum", "train", 1)
    said = rf"\boxed{{{record.answers[0]}}}"
    as_text = Attempt(record.problem, record.answers, said, row={"metadata": json.dumps(record.info["metadata"])})
    assert [v.reward for v in rewards.grade([as_text])] == [1.0]
    bare = Attempt(record.problem, record.answers, said)
    (verdict,) = rewards.grade([bare])
    assert str(verdict.error).startswith("ValueError: the row names no task of reasoning-gym")
    with build_rewards([("gym", 1.0, {"task": "chain_sum"})], workers=1, timeout_s=20.0) as named:
        assert [v.reward for v in named.grade([bare])] == [1.0]
