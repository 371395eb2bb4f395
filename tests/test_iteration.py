"""The schedules over a fake backend: who is asked for what, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attnrl import iteration
from attnrl.backend import generate_by
from attnrl.config import load_config
from attnrl.errors import TrainingError
from attnrl.iteration import Clock, Parts, first_state
from attnrl.schedules import SCHEDULES, on_policy, one_step_off_policy
from attnrl.types import Request, Rollout, Sampling, Scores, Verdict, as_floats, as_ids
from fakes import EOS, RIGHT, FakeBackend, decode, fake_parts, grade


def make_parts(preset: str = "attnrl_1p5b", backend: FakeBackend | None = None, **overrides: object) -> Parts:
    small = {"algo.prompts": 8, "sampling.max_response_tokens": 80, **overrides}
    return fake_parts(load_config(preset, small), backend)


def test_one_step_off_policy_makes_one_generation_call_for_branches_and_next_trunks() -> None:
    backend = FakeBackend()
    parts = make_parts(backend=backend)
    state = one_step_off_policy(first_state(parts, 0), parts).state  # the first has one call more: nothing waits yet
    waiting = state.waiting
    backend.calls.clear()
    outcome = one_step_off_policy(state, parts)
    assert [name for name, _ in backend.calls] == ["generate", "score", "update"]
    branches = sum(len(t.branches) for f in outcome.forests for t in f.trees)
    fresh = round(state.batch_size) * 6
    assert backend.calls[0] == ("generate", branches + fresh)
    assert {f.prompt.uid for f in outcome.forests} <= {g.prompt.uid for g in waiting}
    assert not {g.prompt.uid for g in outcome.state.waiting} & {g.prompt.uid for g in waiting}


def test_trunks_and_branches_carry_the_versions_that_drew_them() -> None:
    parts = make_parts()
    state = first_state(parts, 0)
    for m in range(3):
        outcome = one_step_off_policy(state, parts)
        state = outcome.state
        trunk_versions = {t.trunk.rollout.version for f in outcome.forests for t in f.trees}
        branch_versions = {b.rollout.version for f in outcome.forests for t in f.trees for b in t.branches}
        assert trunk_versions == {max(m - 1, 0)}
        assert branch_versions == {m}


def test_on_policy_makes_two_generation_calls_under_one_policy() -> None:
    backend = FakeBackend()
    parts = make_parts("treerl_1p5b", backend)
    outcome = on_policy(first_state(parts, 0), parts)
    assert [name for name, _ in backend.calls] == ["generate", "generate", "update"]
    assert outcome.state.waiting == ()
    assert {b.rollout.version for f in outcome.forests for t in f.trees for b in t.branches} == {0}


def test_grpo_never_scores_nor_branches() -> None:
    backend = FakeBackend()
    parts = make_parts("grpo_1p5b", backend)
    outcome = on_policy(first_state(parts, 0), parts)
    assert [name for name, _ in backend.calls] == ["generate", "update"]
    assert parts.target_samples is None  # every batch has as many prompts
    adaptive = make_parts("grpo_1p5b", **{"algo.adaptive_batch": True})
    assert adaptive.target_samples == 8 * 30
    assert "score/fci_mean" not in outcome.metrics


def test_filtered_prompts_are_neither_branched_nor_trained_on() -> None:
    parts = make_parts(backend=FakeBackend(skill=2.0))  # everything is right: all prompts are easy
    state = one_step_off_policy(first_state(parts, 0), parts).state
    outcome = one_step_off_policy(state, parts)
    kept = {f.prompt.uid for f in outcome.forests}
    assert 0 < len(kept) < len(state.waiting)
    assert outcome.metrics["batch/filtered_share"] == pytest.approx(1 - len(kept) / len(state.waiting))


def test_without_signal_the_policy_and_the_batch_size_stay() -> None:
    backend = FakeBackend(skill=2.0)
    parts = make_parts(backend=backend, **{"sampling.max_response_tokens": 200})  # nothing is cut off
    state = first_state(parts, 0)
    outcome = one_step_off_policy(state, parts)
    assert backend.version == 0
    assert outcome.samples == []
    assert outcome.state.batch_size == 8.0


def test_batch_size_follows_equation_10_by_hand() -> None:
    parts = make_parts()
    outcome = one_step_off_policy(first_state(parts, 0), parts)
    valid = sum(s.has_signal for s in outcome.samples)
    assert outcome.state.batch_size == pytest.approx(0.9 * 8 + 0.1 * (8 * 30 / valid) * 8)


def test_every_sample_that_is_trained_on_has_signal() -> None:
    backend = FakeBackend()
    parts = make_parts(backend=backend)
    state = first_state(parts, 0)
    for _ in range(3):
        state = one_step_off_policy(state, parts).state
    assert all(s.has_signal for batch in backend.trained for s in batch)
    assert sum(map(len, backend.trained)) > 0


def test_trap_a_verifier_error_spoils_only_its_own_answer() -> None:
    """An error is no evidence: that rollout is left out, its neighbours keep their verdicts."""

    def grade_with_errors(items: list) -> list[Verdict]:
        verdicts = grade(items)
        return [Verdict(0.0, "none", error="timeout") if i % 5 == 0 else v for i, v in enumerate(verdicts)]

    parts = replace(make_parts(), grade=grade_with_errors)
    sound = make_parts()
    state = one_step_off_policy(first_state(parts, 0), parts).state
    assert {len(g.trunks) for g in state.waiting} == {4, 5}
    outcome = one_step_off_policy(state, parts)
    assert outcome.metrics["verify/errors"] == outcome.metrics["verify/timeout"] > 0
    reference = {
        t.rollout.ids.tobytes(): t.reward
        for g in one_step_off_policy(first_state(sound, 0), sound).state.waiting
        for t in g.trunks
    }
    drawn = [t for g in state.waiting for t in g.trunks if t.rollout.ids.tobytes() in reference]
    assert drawn
    assert all(t.reward == float(decode(t.rollout.ids).endswith("right")) for t in drawn)


def test_trap_one_step_responses_end_the_plan_without_branches() -> None:
    class OneStep(FakeBackend):
        def _draw(self, request: object) -> Rollout:
            return Rollout(as_ids([RIGHT, EOS]), as_floats([-1.0, -0.1]), "stop", self.version)

    for preset in ("attnrl_1p5b", "attnrl_1p5b_released", "treerl_1p5b_off_policy"):
        parts = make_parts(preset, OneStep())
        outcome = one_step_off_policy(first_state(parts, 0), parts)
        trees = [tree for forest in outcome.forests for tree in forest.trees]
        assert len(trees) >= 6, "some prompt must have been kept, or nothing was looked at"
        assert all(not t.branches for t in trees)


def test_branches_are_graded_on_the_whole_response() -> None:
    parts = make_parts()
    state = one_step_off_policy(first_state(parts, 0), parts).state
    outcome = one_step_off_policy(state, parts)
    branches = [(tree, branch) for forest in outcome.forests for tree in forest.trees for branch in tree.branches]
    assert len(branches) > 20
    for tree, branch in branches:
        whole = np.concatenate([tree.trunk.rollout.ids[: branch.point], branch.rollout.ids])
        assert branch.verdict.answer == decode(whole)


def test_generated_tokens_are_counted() -> None:
    parts = make_parts()
    first = one_step_off_policy(first_state(parts, 0), parts)
    second = one_step_off_policy(first.state, parts)
    assert first.state.generated_tokens == first.metrics["generate/tokens"]  # the primed trunks included
    assert second.state.generated_tokens - first.state.generated_tokens == second.metrics["generate/tokens"]
    starved = replace(second.state, waiting=())
    third = one_step_off_policy(starved, parts)
    assert third.state.generated_tokens - starved.generated_tokens == third.metrics["generate/tokens"]


def replaced(**changes: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda rows: [*rows[:-1], replace(rows[-1], **{k: change(rows[-1]) for k, change in changes.items()})]


@pytest.mark.parametrize(
    ("verb", "change", "said"),
    [
        ("generate", lambda rows: rows[:-1], "generate of the engine Broken must return a list of 9, one a request: 8"),
        ("generate", lambda rows: None, "must return a list of 9, one a request: NoneType"),
        ("generate", replaced(version=lambda r: 7), r"\(9 of 9\) with version 7, where the policy has 0"),
        ("generate", replaced(finish=lambda r: "eos"), "with finish 'eos'; known: stop, length"),
        (
            "generate",
            replaced(logprobs=lambda r: r.logprobs[1:]),
            "log-probs that are not one finite number for each of its",
        ),
        (
            "generate",
            replaced(logprobs=lambda r: r.logprobs * np.nan),
            "log-probs that are not one finite number for each of its",
        ),
        ("generate", replaced(ids=lambda r: r.ids[:0]), "with 0 tokens, where 1 to 60 may be drawn"),
        ("score", lambda rows: rows[1:], "score of the engine Broken must return a list of 9"),
        ("generate", lambda rows: ["so", *rows[1:]], "must return attnrl.types.Rollout, not str"),
        ("generate", replaced(logprobs=lambda r: ["low"] * len(r.ids)), "are not one finite number for each"),
        ("generate", replaced(logprobs=lambda r: None), "are not one finite number for each"),
        ("score", lambda rows: [None, *rows[1:]], "must return attnrl.types.Scores, not NoneType"),
        ("score", replaced(fci=lambda s: s.fci[1:]), r"scores \(9 of 9\) with FCI of shape .* for each of \d+ steps$"),
        ("score", replaced(fci=lambda s: s.fci * np.nan), r"with FCI of shape .*, not all finite"),
        ("score", replaced(fci=lambda s: None), r"with FCI of shape \(\),"),
        ("score", replaced(logprobs=lambda s: s.logprobs * np.nan), "with log-probs of shape .*, not all finite"),
        ("score", replaced(logprobs=lambda s: s.logprobs[1:]), r"with log-probs of .* for each of \d+ tokens$"),
        (
            "score",
            replaced(entropy=lambda s: s.entropy * np.inf),
            r"with entropies of shape .*, not all finite .* \d+ tokens$",
        ),
        ("update", lambda metrics: None, "update of the engine Broken must return a dict of numbers .* not NoneType"),
        ("update", lambda metrics: {"mine/word": "high"}, "a number for each name: 'mine/word' is 'high'"),
        ("metrics", lambda metrics: [1.0], "metrics of the engine Broken must return a dict of numbers .*, not list"),
        ("metrics", lambda metrics: {3: 1.0}, "a number for each name: 3 is '1.0'"),
    ],
)
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_an_engine_that_breaks_its_promise_is_said(verb: str, change: Any, said: str, schedule: str) -> None:
    class Broken(FakeBackend):
        pass

    setattr(Broken, verb, lambda self, *asked: change(getattr(FakeBackend, verb)(self, *asked)))
    small = {"algo.prompts": 3, "algo.group": 3, "sampling.max_response_tokens": 60}
    parts = fake_parts(load_config("attnrl_1p5b", small), Broken())
    with pytest.raises(TrainingError, match=said):
        SCHEDULES[schedule](first_state(parts, 0), parts)


def test_a_rollout_may_have_one_token_and_as_many_as_were_asked_for() -> None:
    class Exact(FakeBackend):
        def generate(self, requests: Any, sampling: Any) -> list[Rollout]:
            lengths = (1, 7)
            return [Rollout(as_ids([RIGHT] * n), as_floats([-1.0] * n), "length", self.version) for n in lengths]

    requests = [Request(as_ids([5]), 7, seed, "q/0") for seed in (1, 2)]
    assert [len(rollout.ids) for rollout in generate_by(Exact(), requests, Sampling())] == [1, 7]


@pytest.mark.parametrize("raised", [0, 2])
def test_an_engine_whose_version_does_not_count_updates_is_said(raised: int) -> None:
    class Broken(FakeBackend):
        def update(self, samples: Any) -> dict[str, float]:
            metrics = super().update(samples)
            self.version += raised - 1
            return metrics

    parts = make_parts(backend=Broken())
    with pytest.raises(TrainingError, match=f"Broken must raise its version by 1, from 0: it is {raised}"):
        on_policy(first_state(parts, 0), parts)


class Numpy(FakeBackend):
    """Says its metrics in numpy's numbers and scores in lists, and leaves out what it was not asked for."""

    def score(self, requests: Any, scoring: Any) -> list[Scores]:
        found = super().score(requests, scoring)
        return [Scores(s.logprobs.tolist(), s.entropy.tolist(), s.fci if scoring.fci else None) for s in found]  # type: ignore[arg-type]

    def update(self, samples: Any) -> dict[str, float]:
        return {name: np.float32(value) for name, value in super().update(samples).items()}  # type: ignore[misc]

    def metrics(self) -> dict[str, float]:
        return {"mine/calls": np.int64(3), "mine/share": np.array(0.5), "mine/none": np.float32("nan")}  # type: ignore[dict-item]


def test_what_an_engine_says_in_other_types_is_the_same() -> None:
    ours, theirs = (make_parts("treerl_1p5b", b, **{"algo.rule": "entropy"}) for b in (FakeBackend(), Numpy()))
    assert ours.scoring is not None
    assert not ours.scoring.fci
    mine, other = (on_policy(first_state(p, 0), p) for p in (ours, theirs))
    assert {type(value) for value in other.metrics.values()} == {float}
    assert (other.metrics["mine/calls"], other.metrics["mine/share"]) == (3.0, 0.5)
    assert np.isnan(other.metrics["mine/none"])
    assert other.metrics["policy/loss"] == np.float32(mine.metrics["policy/loss"]) != 0
    for a, b in zip(mine.forests, other.forests, strict=True):
        for ours_, theirs_ in zip(a.trees, b.trees, strict=True):
            np.testing.assert_array_equal(ours_.trunk.scores.entropy, theirs_.trunk.scores.entropy, strict=True)
            assert np.isnan(theirs_.trunk.scores.fci).tolist() == [True] * len(theirs_.trunk.steps)
            assert [x.point for x in ours_.branches] == [x.point for x in theirs_.branches]


def writes(pick: Callable[..., np.ndarray]) -> Callable[..., Any]:
    def part(*shown: Any) -> Any:
        pick(*shown)[:1] = 0

    return part


@pytest.mark.parametrize(
    ("kind", "pick"),
    [
        ("rule", lambda prompt, trunk, rng: prompt.ids),
        ("rule", lambda prompt, trunk, rng: trunk.rollout.ids),
        ("rule", lambda prompt, trunk, rng: trunk.scores.fci),
        ("filter", lambda groups, memory: groups[0].trunks[0].rollout.logprobs),
        ("estimator", lambda forest, rng: forest.trees[0].trunk.rollout.ids),
        ("estimator", lambda forest, rng: next(b for t in forest.trees for b in t.branches).rollout.ids),
        ("credit", lambda samples, scores: samples[-1].response),
        ("credit", lambda samples, scores: samples[-1].advantages),
        ("credit", lambda samples, scores: scores[0].entropy),
    ],
)
def test_a_part_that_writes_into_what_it_is_shown_is_named(kind: str, pick: Any) -> None:
    parts = replace(make_parts(), **{kind: writes(pick)})
    with pytest.raises(ValueError, match="read-only") as raised:
        one_step_off_policy(first_state(parts, 0), parts)
    assert raised.value.__notes__ == [f"algo.{kind}: raised by the {kind} part"]


def test_an_iteration_takes_its_phases_and_what_lies_between(monkeypatch) -> None:
    moments = iter([10.0, 11.0, 14.0, 15.0, 17.0, 17.5])  # begins; generate, 3 s; update, 2 s; the end
    monkeypatch.setattr(iteration.time, "perf_counter", lambda: next(moments))
    clock = Clock()
    for phase in ("generate", "update"):
        with clock.phase(phase):
            pass
    expected = {"seconds/generate": 3.0, "seconds/update": 2.0, "seconds/other": 2.5, "seconds/iteration": 7.5}
    assert clock.metrics() == {"verify/errors": 0.0, **expected}
