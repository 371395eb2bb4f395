"""The real loop over a backend that records: what each schedule draws, asks for, passes on, trains on and tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from attnrl.algo.reasons import kind_of
from attnrl.config import load_config, presets
from attnrl.iteration import Outcome, Parts, first_state
from attnrl.schedules import SCHEDULES
from attnrl.types import Attempt, Group, Kept, Sample, Sampling, Scores, Scoring, State, Step, Verdict
from fakes import FakeBackend, decode, fake_parts, grade

SMALL = {"algo.prompts": 4, "algo.max_prompts": 24, "sampling.max_response_tokens": 200}
OFF, OVER, ON, FILL = "one_step_off_policy", "overlapped", "on_policy", "dynamic"
ALL = (OFF, OVER, ON, FILL)


def parts_of(
    preset: str = "attnrl_1p5b", backend: FakeBackend | None = None, *, adaptive: bool = True, **overrides: Any
) -> Parts:
    values = {**SMALL, **overrides}
    if not adaptive:
        values["algo.adaptive_batch"] = False
    return fake_parts(load_config(preset, values), backend)


def step(parts: Parts, schedule: str, state: State | None = None) -> Outcome:
    return SCHEDULES[schedule](state or first_state(parts, 0), parts)


class Filter:
    """Keeps what `keep` says of a prompt, counts its calls in its memory, and shows what it was given."""

    def __init__(self, keep: Callable[[Group], bool] = lambda group: True) -> None:
        self.keep = keep
        self.memories: list[Mapping[str, Any]] = []
        self.groups: list[list[str]] = []

    def __call__(self, groups: Sequence[Group], memory: Mapping[str, Any]) -> Kept:
        self.memories.append(memory)
        self.groups.append([g.prompt.uid for g in groups])
        mask = tuple(map(self.keep, groups))
        return Kept(mask, {"calls": memory.get("calls", 0) + 1}, tuple("" if k else "not wanted" for k in mask))


def number(group: Group) -> int:
    return int(group.prompt.uid[1:])


def uids(*numbers: int) -> list[str]:
    return [f"q{n}" for n in numbers]


# what is drawn


@pytest.mark.parametrize("schedule", ALL)
def test_round_b_prompts_are_drawn_and_not_the_first_batch(schedule: str) -> None:
    backend = FakeBackend()
    parts = parts_of(backend=backend)
    assert first_state(parts, 0).batch_size == 4.0
    outcome = step(parts, schedule, replace(first_state(parts, 0), batch_size=6.6))
    assert len(backend.requests[0]) == 7 * 6
    if schedule in (OFF, OVER):  # those that waited, and those that wait now
        assert outcome.state.stream == {"next": 14}
        assert [g.prompt.uid for g in outcome.state.waiting] == uids(*range(7, 14))
        branches = sum(len(t.branches) for f in outcome.forests for t in f.trees)
        drawn = [len(requests) for requests in backend.requests[1:]]
        assert drawn == ([branches + 7 * 6] if schedule == OFF else [branches, 7 * 6])
    else:
        assert outcome.state.waiting == ()
        assert outcome.state.stream["next"] % 7 == 0
    assert outcome.metrics["batch/size"] == 6.6


def test_every_request_says_its_prompt_its_limit_and_its_tree_and_has_a_seed_of_its_own() -> None:
    backend = FakeBackend()
    parts = parts_of("treerl_1p5b", backend, **{"sampling.temperature": 0.7, "sampling.max_response_tokens": 90})
    first = step(parts, ON)
    second = step(parts, ON, first.state)
    trunks, branches = backend.requests[0], backend.requests[1]
    assert [r.tree for r in trunks] == [f"q{i}/{n}" for i in range(4) for n in range(6)]
    assert all(r.max_tokens == 90 and r.context.tolist() == [int(r.tree[1]), 7] for r in trunks)
    expected = [
        (f"{f.prompt.uid}/{n}", b.point) for f in first.forests for n, tree in enumerate(f.trees) for b in tree.branches
    ]
    assert len(branches) == len(expected) == 4 * 6 * 2 * 2
    assert [(r.tree, len(r.context) - 2) for r in branches] == expected
    assert [r.max_tokens for r in branches] == [90 - point for _, point in expected]
    seeds = [r.seed for call in backend.requests for r in call]
    assert len(set(seeds)) == len(seeds) > 200
    assert set(backend.samplings) == {Sampling(0.7, 1.0, 0)}
    assert first.state.rng != second.state.rng


@pytest.mark.parametrize("schedule", ALL)
def test_the_same_state_asks_for_the_same_and_another_seed_for_other(schedule: str) -> None:
    def seeds(seed: int) -> list[int]:
        backend = FakeBackend()
        parts = parts_of(backend=backend)
        step(parts, schedule, first_state(parts, seed))
        return [r.seed for call in backend.requests for r in call]

    assert seeds(1) == seeds(1)
    assert not set(seeds(1)) & set(seeds(2))


def test_dynamic_sampling_draws_until_the_batch_is_full_and_leaves_the_surplus() -> None:
    backend, wanted = FakeBackend(), Filter(lambda group: number(group) % 2 == 0)
    parts = replace(parts_of("treerl_1p5b", backend, **{"algo.prompts": 3}), filter=wanted)
    outcome = step(parts, FILL)
    # two of 0 1 2 are kept, one of 3 4 5: full after two draws
    assert wanted.groups == [uids(0, 1, 2), uids(3, 4, 5)]
    assert wanted.memories == [{}, {"calls": 1}]
    assert outcome.state.memory == {"calls": 2}
    assert [f.prompt.uid for f in outcome.forests] == uids(0, 2, 4)
    assert [(f.prompt.uid, f.reason) for f in outcome.dropped] == [(u, "not wanted") for u in uids(1, 3, 5)]
    assert outcome.state.stream == {"next": 6}
    assert outcome.metrics["batch/prompts"] == 6
    assert outcome.metrics["batch/filtered_share"] == 0.5
    assert [name for name, _ in backend.calls] == ["generate", "generate", "generate", "update"]

    parts = replace(parts, filter=Filter(lambda group: number(group) != 1))
    outcome = step(parts, FILL)
    assert [f.prompt.uid for f in outcome.forests] == uids(0, 2, 3)
    assert [(f.prompt.uid, f.reason) for f in outcome.dropped] == [
        ("q1", "not wanted"),
        ("q4", "the batch was full"),
        ("q5", "the batch was full"),
    ]
    assert [len(f.trees) for f in outcome.dropped] == [6, 6, 6]
    assert not any(t.branches for f in outcome.dropped for t in f.trees)


def test_dynamic_sampling_gives_up_at_max_prompts_and_on_policy_draws_once() -> None:
    nothing = Filter(lambda group: False)
    backend = FakeBackend()
    parts = replace(parts_of(backend=backend, **{"algo.max_prompts": 10}), filter=nothing)
    outcome = step(parts, FILL)
    assert [len(groups) for groups in nothing.groups] == [4, 4, 4]  # 4 and 8 are under 10, 12 is not
    assert outcome.forests == []
    assert len(outcome.dropped) == 12
    assert backend.version == 0
    assert [size for name, size in backend.calls if name == "generate"] == [24, 24, 24]  # and none for no branches
    nothing.groups.clear()
    step(replace(parts, max_prompts=8), FILL)
    assert [len(groups) for groups in nothing.groups] == [4, 4]
    nothing.groups.clear()
    step(parts, ON)
    assert [len(groups) for groups in nothing.groups] == [4]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_that_says_it_does_not_fill_draws_one_batch(schedule: str) -> None:
    """What takes algo.max_prompts is decided by that; trunks that wait are the batch of the iteration before."""
    parts = replace(parts_of(adaptive=False), filter=Filter(lambda group: False))
    state = step(parts, schedule).state
    drawn = step(parts, schedule, state).state.stream["next"] - state.stream["next"]
    assert (drawn > 4) == getattr(SCHEDULES[schedule], "fills", True)


# what is passed on


@pytest.mark.parametrize("schedule", ALL)
def test_the_filter_gets_back_what_it_remembered(schedule: str) -> None:
    remembering = Filter()
    parts = replace(parts_of(), filter=remembering)
    state = first_state(parts, 0)
    for m in range(3):
        state = step(parts, schedule, state).state
        assert state.memory == {"calls": m + 1}
        assert state.iteration == m + 1
    assert remembering.memories == [{}, {"calls": 1}, {"calls": 2}]


def test_the_waiting_trunks_are_those_the_filter_sees_next() -> None:
    seen = Filter()
    parts = replace(parts_of(adaptive=False), filter=seen)
    state = first_state(parts, 0)
    for _ in range(3):
        state = step(parts, OFF, state).state
    assert seen.groups == [uids(0, 1, 2, 3), uids(4, 5, 6, 7), uids(8, 9, 10, 11)]
    assert state.stream == {"next": 16}


def test_the_running_mean_of_equation_8_runs_over_all_iterations() -> None:
    """With every trunk right, all prompts are in scope: the memory holds the sum and count of all their means."""
    parts = parts_of(backend=FakeBackend(skill=2.0), adaptive=False)
    state = first_state(parts, 0)
    total, seen = 0.0, 0
    for _ in range(3):
        outcome = step(parts, OFF, state)
        groups = [*outcome.forests, *outcome.dropped]
        means = [
            float(np.mean([t.trunk.scores.fci[1:].mean(dtype=np.float64) if len(t.trunk.steps) > 1 else 0.0
                           for t in f.trees]))
            for f in groups
        ]  # fmt: skip
        total, seen = total + sum(means), seen + len(means)
        bar = total / seen
        kept = {f.prompt.uid for f, mean in zip(groups, means, strict=True) if mean >= bar - 1e-9}
        assert {f.prompt.uid for f in outcome.forests} == kept
        state = outcome.state
        assert state.memory["fci_count"] == seen
        assert state.memory["fci_sum"] == pytest.approx(total, rel=1e-6)
    assert seen == 12


def test_options_of_the_filter_reach_it() -> None:
    def memory(**overrides: Any) -> dict[str, Any]:
        parts = parts_of(backend=FakeBackend(skill=0.6), adaptive=False, **overrides)
        return step(parts, OFF).state.memory

    easy, everything = memory(), memory(**{"algo.filter_options": {"scope": "all"}})
    assert easy["fci_count"] < everything["fci_count"] == 4
    released = memory(**{"algo.filter_options": {"scope": "all", "mode": "released"}})
    assert released["fci_count"] == 4
    assert released["fci_sum"] < everything["fci_sum"]  # zeros for the first steps


# what is asked for


NEEDS: dict[str, tuple[bool, ...]] = {  # of each rule, as every preset names it: () nothing, (fci,)
    **dict.fromkeys(("fci", "fci_mean", "fci_ratio", "fci_residual"), (True,)),
    **dict.fromkeys(("entropy", "step_entropy"), (False,)),
}


@pytest.mark.parametrize("preset", presets())
def test_a_preset_asks_for_what_its_rule_and_filter_read(preset: str) -> None:
    config = load_config(preset, SMALL)
    backend = FakeBackend()
    parts = fake_parts(config, backend)
    step(parts, config.algo.schedule)
    by_rule, by_filter = NEEDS.get(config.algo.rule, ()), (True,) if config.algo.filter == "attention" else ()
    asked = {s.fci for s in backend.scorings}
    assert asked == ({max(by_rule + by_filter)} if by_rule + by_filter else set())
    if asked:
        assert set(backend.scorings) == {
            Scoring(asked.pop(), config.algo.delta, config.algo.key_reduce, config.sampling.temperature)
        }


def test_whole_trunks_are_scored_with_their_steps() -> None:
    backend = FakeBackend()
    parts = parts_of(backend=backend, adaptive=False)
    outcome = step(parts, OFF)
    trunks = [t for g in outcome.state.waiting for t in g.trunks]
    assert len(backend.scored) == 2  # the first trunks, and those that wait now
    assert len(backend.scored[1]) == len(trunks) == 24
    for asked, trunk in zip(backend.scored[1], trunks, strict=True):
        assert asked.response is trunk.rollout.ids
        assert asked.steps == trunk.steps
        assert (asked.steps[0].start, asked.steps[-1].stop) == (0, len(trunk.rollout.ids))
    assert [r.prompt.tolist() for r in backend.scored[1]] == [[i, 7] for i in range(4, 8) for _ in range(6)]


def test_trunks_nobody_scores_keep_the_samplers_log_probs_and_no_numbers() -> None:
    parts = parts_of("treerl_1p5b")
    assert parts.scoring is None
    trunks = [t.trunk for f in step(parts, ON).forests for t in f.trees]
    assert max(len(t.steps) for t in trunks) > 3
    for trunk in trunks:
        assert trunk.scores.logprobs is trunk.rollout.logprobs
        assert trunk.scores.entropy.shape == trunk.rollout.ids.shape
        assert trunk.scores.fci.shape == (len(trunk.steps),)
        assert (trunk.scores.entropy.dtype, trunk.scores.fci.dtype) == (np.float32, np.float32)
        assert np.isnan(trunk.scores.entropy).all()
        assert np.isnan(trunk.scores.fci).all()


@pytest.mark.parametrize(
    ("preset", "temperature", "expected"),
    [
        ("attnrl_1p5b", 0.8, Scoring(False, 3, "mean", 0.8)),  # as trunks are scored, without FCI
        ("treerl_1p5b", 0.8, Scoring(False, 4, "mean", 0.8)),  # nothing else is scored
    ],
)
def test_credit_sees_the_samples_and_weighs_what_is_trained(preset: str, temperature: float, expected: Scoring) -> None:
    seen: list[tuple[list[Sample], list[Scores]]] = []

    def halve(samples: Sequence[Sample], scores: Sequence[Scores]) -> list[Any]:
        seen.append((list(samples), list(scores)))
        return [np.full(len(s.response), 0.5, np.float32) for s in samples]

    backend = FakeBackend()
    values = {"sampling.temperature": temperature} | ({"algo.delta": 3} if expected.delta == 3 else {})
    parts = replace(parts_of(preset, backend, **values), credit=halve)
    outcome = step(parts, ON)
    ((samples, scores),) = seen
    assert len(samples) == len(scores) == len(backend.trained[0]) > 10
    assert backend.scorings[-1] == expected
    for asked, before, after in zip(backend.scored[-1], samples, backend.trained[0], strict=True):
        assert asked.response is before.response
        assert asked.prompt is before.prompt
        assert asked.steps == (Step(0, len(before.response)),)
        np.testing.assert_array_equal(after.advantages, before.advantages * 0.5)
    assert outcome.samples == backend.trained[0]


def test_credit_is_not_asked_without_samples_and_may_take_all_signal_away() -> None:
    def none(samples: Sequence[Sample], scores: Sequence[Scores]) -> list[Any]:
        assert samples
        return [np.zeros(len(s.response), np.float32) for s in samples]

    backend = FakeBackend(skill=2.0)
    outcome = step(replace(parts_of("treerl_1p5b", backend), credit=none), ON)
    assert (outcome.samples, backend.scored, backend.version) == ([], [], 0)
    backend = FakeBackend()
    outcome = step(replace(parts_of("treerl_1p5b", backend), credit=none), ON)
    assert len(outcome.samples) > 10
    assert backend.version == 0
    assert outcome.metrics["train/valid_samples"] == 0, (
        "a run in which credit takes all away says that it learns nothing"
    )
    assert {kind_of(r.prompt) for r in outcome.reasons} == {"no_signal"}


# what is trained on


@pytest.mark.parametrize("schedule", ALL)
def test_without_signal_nothing_is_updated_even_where_nothing_is_dropped(schedule: str) -> None:
    backend = FakeBackend(skill=2.0)
    parts = parts_of(backend=backend, **{"algo.drop": "none"})
    outcome = step(parts, schedule)
    assert len(outcome.samples) > 10
    assert not any(s.has_signal for s in outcome.samples)
    assert backend.trained == []
    assert outcome.state.batch_size == 4.0
    assert "policy/loss" not in outcome.metrics
    assert {kind_of(r.prompt) for r in outcome.reasons[: len(outcome.forests)]} == {"all_right"}


def test_only_samples_with_signal_count_in_equation_10() -> None:
    values = {"algo.drop": "none", "algo.history": 0.6, "algo.filter": "all"}
    outcome = step(parts_of(backend=FakeBackend(skill=0.75), **values), OFF)
    valid = sum(s.has_signal for s in outcome.samples)
    assert 0 < valid < len(outcome.samples)
    assert outcome.state.batch_size == pytest.approx(0.6 * 4 + 0.4 * (4 * 30 / valid) * 4)
    assert outcome.metrics["train/valid_samples"] == valid
    bounded = replace(parts_of(backend=FakeBackend(skill=0.75), **values), max_prompts=5)
    assert step(bounded, OFF).state.batch_size == 5.0


@pytest.mark.parametrize("schedule", [OFF, OVER, ON])
def test_without_adaptive_batch_every_batch_has_as_many_prompts(schedule: str) -> None:
    sizes = {}
    for adaptive in (True, False):
        parts = parts_of(adaptive=adaptive)
        state = first_state(parts, 0)
        for _ in range(3):
            state = step(parts, schedule, state).state
        sizes[adaptive] = state.batch_size
    assert sizes[False] == 4.0
    assert sizes[True] != 4.0


def test_treerl_trains_16_leaves_drawn_at_random_and_not_the_first() -> None:
    backend = FakeBackend()
    parts = parts_of("treerl_original_1p5b", backend, **{"algo.prompts": 6})
    outcome = step(parts, ON)
    by_prompt: dict[str, list[bytes]] = {}
    for sample in backend.trained[0]:
        by_prompt.setdefault(sample.uid, []).append(sample.response.tobytes())
    first_only = 0
    for forest in outcome.forests:
        leaves = [
            np.concatenate([tree.trunk.rollout.ids[:point], ids]).tobytes()
            for tree in forest.trees
            for point, ids in [(0, tree.trunk.rollout.ids), *((b.point, b.rollout.ids) for b in tree.branches)]
        ]
        drawn = by_prompt.get(forest.prompt.uid, [])
        assert len(drawn) <= 16
        first_only += set(drawn) <= set(leaves[:16])
    assert len(by_prompt) > 2
    assert first_only < len(by_prompt)


# what is graded


def test_a_reward_is_shown_all_that_is_known_of_trunks_and_branches() -> None:
    shown: list[list[Attempt]] = []

    def watch(attempts: Sequence[Attempt]) -> list[Verdict]:
        shown.append(list(attempts))
        return grade(attempts)

    parts = replace(parts_of("treerl_1p5b", **{"sampling.max_response_tokens": 60}), grade=watch)
    outcome = step(parts, ON)
    trunks = [(f.prompt, t.trunk.rollout.ids, t.trunk) for f in outcome.forests for t in f.trees]
    branches = [
        (f.prompt, np.concatenate([t.trunk.rollout.ids[: b.point], b.rollout.ids]), b)
        for f in outcome.forests
        for t in f.trees
        for b in t.branches
    ]
    assert [len(call) for call in shown] == [len(trunks), len(branches)] == [24, 96]
    for attempts, responses in zip(shown, (trunks, branches), strict=True):
        assert {a.finish for a in attempts} == {"stop", "length"}
        for attempt, (prompt, ids, one) in zip(attempts, responses, strict=True):
            assert (attempt.problem, attempt.answers, attempt.row) == (prompt.problem, prompt.answers, prompt.row)
            assert (attempt.response, attempt.tokens, attempt.finish) == (decode(ids), len(ids), one.rollout.finish)
            assert one.verdict.answer == decode(ids)


def test_errors_are_counted_by_kind_and_a_prompt_of_errors_alone_is_left_out() -> None:
    def broken(attempts: Sequence[Attempt]) -> list[Verdict]:
        kinds = {"problem 1": "raised: ValueError: no", "problem 2": "timeout"}
        return [Verdict(0.5, "x", error=kinds.get(a.problem)) for a in attempts]

    parts = replace(parts_of("treerl_1p5b"), grade=broken, graded=lambda: {"reward/format": 0.25})
    outcome = step(parts, ON)
    assert [f.prompt.uid for f in outcome.forests] == uids(0, 3)
    assert outcome.metrics["verify/raised"] == outcome.metrics["verify/timeout"] == 6
    assert outcome.metrics["verify/errors"] == 12
    assert outcome.metrics["reward/format"] == 0.25
    assert outcome.metrics["batch/prompts"] == 2
    assert "verify/errors" in step(parts_of("treerl_1p5b"), ON).metrics


# what is told


@pytest.mark.parametrize("schedule", [OFF, OVER, ON])
def test_each_phase_is_timed_where_it_runs(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances by one a reading: each timed phase takes 1, and 1 lies between any two of them, before the
    first and after the last. A batch is graded in two: handed over, and waited for.
    """
    ticks = count()
    monkeypatch.setattr("attnrl.iteration.time.perf_counter", lambda: float(next(ticks)))
    metrics = step(parts_of(), schedule).metrics
    seconds = {k.removeprefix("seconds/"): v for k, v in metrics.items() if k.startswith("seconds/")}
    if schedule == OFF:  # the first iteration draws its trunks before
        assert seconds == {"generate": 2, "verify": 6, "score": 2, "update": 1, "other": 12, "iteration": 23}
    elif schedule == OVER:  # and waits for branches and trunks apart
        assert seconds == {"generate": 3, "verify": 6, "score": 2, "update": 1, "other": 13, "iteration": 25}
    else:
        assert seconds == {"generate": 2, "verify": 4, "score": 1, "update": 1, "other": 9, "iteration": 17}


def test_of_a_batch_of_one_prompt_that_is_kept_nothing_was_filtered() -> None:
    parts = replace(parts_of("treerl_1p5b", **{"algo.prompts": 1}), filter=Filter(lambda group: True))
    assert step(parts, ON).metrics["batch/filtered_share"] == 0.0


def test_the_metrics_of_an_iteration_by_hand() -> None:
    backend = FakeBackend()
    parts = replace(parts_of(backend=backend, adaptive=False), filter=Filter(lambda group: number(group) % 4 != 1))
    first = step(parts, OFF)
    waiting = first.state.waiting
    assert first.metrics["policy/version"] == 1
    assert first.metrics["fake/calls"] == len(backend.calls) == 5
    outcome = step(parts, OFF, first.state)
    assert outcome.state.iteration == 2
    assert outcome.metrics["batch/prompts"] == len(waiting) == 4
    assert outcome.metrics["batch/size"] == 4.0
    assert outcome.metrics["batch/filtered_share"] == 0.25
    assert outcome.metrics["trees/most_points"] == 2
    assert outcome.metrics["policy/version"] == 2
    assert outcome.metrics["fake/calls"] == 3
    assert outcome.metrics["policy/loss"] == pytest.approx(
        float(np.mean([s.advantages.mean() for s in backend.trained[1]]))
    )
    assert outcome.metrics["trunks/accuracy"] == pytest.approx(
        np.mean([t.right for group in waiting for t in group.trunks])
    )
    assert outcome.metrics["trees/leaves"] == sum(1 + len(t.branches) for f in outcome.forests for t in f.trees)
    assert outcome.metrics["generate/rollouts"] == len(backend.requests[2])
    assert first.metrics["generate/rollouts"] == len(backend.requests[0]) + len(backend.requests[1])
    assert outcome.metrics["train/samples"] == len(outcome.samples)


@pytest.mark.parametrize("schedule", ALL)
def test_tokens_are_counted_from_the_start_of_the_run(schedule: str) -> None:
    parts = parts_of()
    first = step(parts, schedule)
    second = step(parts, schedule, first.state)
    drawn = [o.metrics["generate/tokens"] for o in (first, second)]
    assert first.state.generated_tokens == drawn[0]
    assert second.state.generated_tokens == sum(drawn)


def test_reasons_stand_beside_the_forests_and_then_the_dropped() -> None:
    backend = FakeBackend()
    parts = replace(parts_of(backend=backend), filter=Filter(lambda group: number(group) != 2))
    outcome = step(parts, OFF)
    assert [f.prompt.uid for f in outcome.forests] == uids(0, 1, 3)
    assert [f.prompt.uid for f in outcome.dropped] == ["q2"]
    assert len(outcome.reasons) == 4
    taught = {s.uid for s in outcome.samples}
    assert len(taught) > 0
    for forest, why in zip(outcome.forests, outcome.reasons[:3], strict=True):
        assert (why.prompt == "taught") == (forest.prompt.uid in taught)
        kinds = [kind_of(w) for w in why.trees]
        assert [k == "branched" for k in kinds] == [bool(t.branches) for t in forest.trees]
        assert set(kinds) <= {"branched", "budget", "no_candidate", "rule"}
    assert outcome.reasons[3].prompt.startswith("filtered")
    assert "not wanted" in outcome.reasons[3].prompt
    assert {kind_of(w) for w in outcome.reasons[3].trees} == {"filtered"}
    alone = step(parts_of("grpo_1p5b", **{"algo.group": 4}), ON)
    assert {w for r in alone.reasons for w in r.trees} == {"no_rule"}


def test_a_forest_holds_the_branches_drawn_for_it_in_order() -> None:
    backend = FakeBackend()
    parts = replace(parts_of("treerl_1p5b", backend, **{"algo.width": 3, "algo.points": 1}))
    outcome = step(parts, ON)
    requests = iter(backend.requests[1])
    for forest in outcome.forests:
        for name, tree in enumerate(forest.trees):
            assert len(tree.branches) in (0, 3)
            for branch in tree.branches:
                request = next(requests)
                assert request.tree == f"{forest.prompt.uid}/{name}"
                expected = backend._draw(request)
                if backend.version == branch.rollout.version:
                    np.testing.assert_array_equal(branch.rollout.ids, expected.ids)
                prefix = tree.trunk.rollout.ids[: branch.point]
                np.testing.assert_array_equal(request.context, [*forest.prompt.ids, *prefix])
    assert next(requests, None) is None
