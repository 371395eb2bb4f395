"""Parts that return nonsense: the loop stops at once and says which part, under which key, and what it returned."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from attnrl.algo.credit import no_credit
from attnrl.algo.promises import steps_by
from attnrl.algo.reasons import Reasons
from attnrl.config import load_config
from attnrl.errors import TrainingError
from attnrl.iteration import Outcome, Parts, first_state
from attnrl.schedules import SCHEDULES, outcome_by
from attnrl.types import Forest, Kept, Sample, State, Step, as_floats
from fakes import fake_parts

SMALL = {"algo.prompts": 3, "algo.group": 3, "sampling.max_response_tokens": 60}


def parts_with(**changes: Any) -> Parts:
    return replace(fake_parts(load_config("attnrl_1p5b", SMALL)), **changes)


def run(parts: Parts, schedule: str) -> None:
    """Two iterations: trunks that wait are branched and trained on in the second."""
    state = first_state(parts, 0)
    for _ in range(2):
        state = outcome_by(SCHEDULES[schedule], state, parts).state


def spoiled(change: Callable[[Sample], Sample]) -> Callable[..., list[Sample]]:
    """The paper's estimator, with the last sample of a forest changed."""
    ours = parts_with().estimator

    def mine(forest: Forest, rng: np.random.Generator) -> list[Sample]:
        *rest, last = ours(forest, rng)
        return [*rest, change(last)]

    return mine


def mine(*asked: Any, answer: Any) -> Any:
    """A part that answers as it is told to."""
    return answer(*asked) if callable(answer) else answer


def infinite(values: Any) -> Any:
    return as_floats([*values[:-1], np.inf])


POINTS = r"algo\.rule: the rule mine must return branch points p in order, whole numbers with 0 < p < \d+, .*, not "
KEPT = r"algo\.filter: the filter mine must return an attnrl.types.Kept with a mask and reasons of 3, one entry a group"
TREES = r"algo\.budget: the budget mine must return a number of trees, a whole one from 0 on, not "


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize(
    ("kind", "answer", "said"),
    [
        ("budget", 2.0, TREES + "2.0"),
        ("budget", -1, TREES + "-1"),
        ("budget", None, TREES + "None"),
        ("rule", None, POINTS + "None"),
        ("rule", (0,), POINTS + r"\(0,\)"),
        ("rule", lambda prompt, trunk, rng: (len(trunk.rollout.ids),), POINTS + r"\(\d+,\)"),
        ("rule", (1.5,), POINTS + r"\(1.5,\)"),
        ("rule", lambda prompt, trunk, rng: (2, 1) if len(trunk.rollout.ids) > 2 else (), POINTS + r"\(2, 1\)"),
        ("rule", {1: 2}, POINTS + "{1: 2}"),
        ("filter", None, KEPT),
        ("filter", lambda groups, memory: [True] * len(groups), KEPT),
        ("filter", lambda groups, memory: Kept((True,) * 2, {}, ("",) * 3), KEPT),
        ("filter", lambda groups, memory: Kept((True,) * 3, {}, ("",) * 4), KEPT),
        (
            "filter",
            lambda groups, memory: Kept(("no", True, True), {}, ("",) * 3),  # type: ignore[arg-type]
            r"algo\.filter: the filter mine must return a Kept whose mask is True or False for each group, not 'no'",
        ),
        ("filter", lambda groups, memory: Kept((True,) * 3, None, ("",) * 3), "whose memory is a dict, not None"),  # type: ignore[arg-type]
        (
            "filter",
            lambda groups, memory: Kept((True,) * 3, {}, ("", 1, "")),  # type: ignore[arg-type]
            "whose reasons is text for each group, not 1",
        ),
        (
            "filter",
            lambda groups, memory: Kept((True,) * 3, {"seen": {1}}, ("",) * 3),
            r"algo\.filter: the filter mine must remember what JSON can hold, for the checkpoint: .*set",
        ),
        ("estimator", None, r"algo\.estimator: the estimator mine must return a list of attnrl.types.Sample, not None"),
        ("estimator", [1.0], r"must return a list of attnrl.types.Sample, not \[1.0\]"),
        ("credit", None, r"algo\.credit: the credit mine must return a list of \d+, weights for each sample: None"),
        ("credit", [], r"must return a list of \d+, weights for each sample: 0 entries"),
        (
            "credit",
            lambda samples, scores: [w[1:] for w in no_credit(samples, scores)],
            r"the credit mine returned weights \(1 of \d+\) that are of shape \(\d+,\), where the response has \d+ tok",
        ),
        (
            "credit",
            lambda samples, scores: [w * np.nan for w in no_credit(samples, scores)],
            r"the credit mine returned weights \(1 of \d+\) that are not all finite",
        ),
    ],
)
def test_a_part_that_returns_nonsense_is_named(kind: str, answer: Any, said: str, schedule: str) -> None:
    """A part with its options bound is named like itself."""
    with pytest.raises(TrainingError, match=said):
        run(parts_with(**{kind: partial(mine, answer=answer)}), schedule)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda s: replace(s, advantages=s.advantages[1:]),
            r"whose advantages are of shape \(\d*,\), where",
        ),
        (lambda s: replace(s, advantages=s.advantages * np.nan), "whose advantages are not all finite"),
        (
            lambda s: replace(s, logprobs=s.logprobs[1:]),
            r"whose logprobs are of shape \(\d*,\), where",
        ),
        (lambda s: replace(s, logprobs=infinite(s.logprobs)), "whose logprobs are not all finite"),
        (lambda s: replace(s, mask=np.ones(len(s.response) + 1, bool)), r"with a mask of \(\d+,\) for a response of"),
    ],
)
def test_an_estimator_whose_samples_do_not_fit_is_named(change: Any, said: str, schedule: str) -> None:
    with pytest.raises(
        TrainingError, match=r"algo\.estimator: the estimator mine returned a sample \(\d+ of \d+.*" + said
    ):
        run(parts_with(estimator=spoiled(change)), schedule)


def test_what_keeps_its_promise_in_other_types_is_taken() -> None:
    def rule(prompt: Any, trunk: Any, rng: Any) -> Any:
        return np.array([1, 1, 2]) if len(trunk.rollout.ids) > 2 else []

    def keep(groups: Any, memory: Any) -> Kept:
        return Kept(tuple(np.ones(len(groups), bool)), {}, ("",) * len(groups))

    parts = parts_with(rule=rule, filter=keep, budget=lambda accuracy, trees: np.int64(99))
    outcome = SCHEDULES["on_policy"](first_state(parts, 0), parts)
    branched = [[b.point for b in t.branches] for f in outcome.forests for t in f.trees]
    assert [1, 1, 1, 1, 2, 2] in branched
    assert {tuple(points) for points in branched} <= {(1, 1, 1, 1, 2, 2), ()}


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (None, "must return a tuple of attnrl.types.Step, not None"),
        ([(0, 4)], r"must return a tuple of attnrl.types.Step, not \[\(0, 4\)\]"),
        ((), r"must cut 4 tokens into steps without gap or overlap: \[\]"),
        ((Step(0, 3),), r"must cut 4 tokens .*: \[\(0, 3\)\]"),
        ((Step(0, 5),), r"must cut 4 tokens .*: \[\(0, 5\)\]"),
        ((Step(1, 4),), r"must cut 4 tokens .*: \[\(1, 4\)\]"),
        ((Step(0, 2), Step(3, 4)), "without gap"),
        ((Step(0, 3), Step(2, 4)), "or overlap"),
        ((Step(2, 4), Step(0, 2)), "without gap"),
        ((Step(0, 2), Step(2, 2), Step(2, 4)), "without gap"),
    ],
)
def test_a_segmenter_that_does_not_cut_the_whole_response_is_named(steps: Any, said: str) -> None:
    with pytest.raises(TrainingError, match=r"algo\.segmenter: the segmenter mine .*" + said):
        steps_by(partial(mine, answer=steps), ["a", "b", "c", "d"])
    assert steps_by(lambda texts: [Step(0, 1), Step(1, 4)], ["a", "b", "c", "d"]) == (Step(0, 1), Step(1, 4))


def outcome_with(**changes: Any) -> Any:
    def mine(state: State, parts: Parts) -> Outcome:
        outcome = SCHEDULES["on_policy"](state, parts)
        return replace(outcome, **{name: change(outcome) for name, change in changes.items()})

    return mine


def test_numbers_of_any_kind_are_metrics_of_a_schedule() -> None:
    parts = parts_with()
    mine = outcome_with(metrics=lambda o: {"mine/a": np.float32(0.5), "mine/b": 2, "mine/c": np.True_})
    metrics = outcome_by(mine, first_state(parts, 0), parts).metrics
    assert json.dumps(metrics) == '{"mine/a": 0.5, "mine/b": 2.0, "mine/c": 1.0}'


def stands_still(state: State, parts: Parts) -> Outcome:
    return replace(SCHEDULES["on_policy"](state, parts), state=state)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (lambda state, parts: None, r"the schedule <lambda> .* not NoneType"),
        (lambda state, parts: state, r"not State"),
        (
            stands_still,
            r"algo\.schedule: the schedule stands_still must .*Outcome whose state has iteration 1, not 0",
        ),
        (outcome_with(reasons=lambda o: o.reasons[1:]), r"algo\.schedule: .* must return as reasons 3 attnrl"),
        (outcome_with(reasons=lambda o: [Reasons("taught", ())] * 3), "of the dropped, each with its trees'"),
        (outcome_with(reasons=lambda o: None), "must return as reasons 3 attnrl"),
        (outcome_with(reasons=lambda o: ["why"] * 3), "must return as reasons 3 attnrl"),
        (outcome_with(metrics=lambda o: None), "must return as metrics a dict of numbers by their name"),
        (outcome_with(metrics=lambda o: {"mine/list": [1.0]}), r"a number for each name: 'mine/list' is '\[1.0\]'"),
    ],
)
def test_a_schedule_without_an_outcome_is_named(schedule: Any, said: str) -> None:
    parts = parts_with()
    with pytest.raises(TrainingError, match=said):
        outcome_by(schedule, first_state(parts, 0), parts)


def test_a_filter_s_memory_is_at_once_what_a_checkpoint_would_give_back():
    def mine(groups: Any, memory: Any) -> Kept:
        return Kept((True,) * len(groups), {1: (2, 0.1)}, ("",) * len(groups))  # type: ignore[dict-item]

    parts = parts_with(filter=mine)
    assert outcome_by(SCHEDULES["on_policy"], first_state(parts, 0), parts).state.memory == {"1": [2, 0.1]}
