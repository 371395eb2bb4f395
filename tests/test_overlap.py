"""The overlapped schedule: the update runs while trunks are drawn, and nothing else depends on whether it does."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import attnrl
from attnrl.config import RunConfig, load_config
from attnrl.errors import Interrupted, TrainingError
from attnrl.iteration import Outcome, Parts, first_state
from attnrl.run import open_run, read_metrics
from attnrl.schedules import on_policy, one_step_off_policy, overlapped
from attnrl.trainer import train
from attnrl.types import Rollout, Sample, State
from fakes import FakeBackend, fake_parts, told
from processes import LIMIT

SMALL = {"algo.prompts": 4, "sampling.max_response_tokens": 80, "algo.schedule": "overlapped"}


class Ahead(FakeBackend):
    """Draws in threads, each with the policy it began with. What is begun before an update is drawn only once that
    update has been made: a loop that waited for it first would not end before the limit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.updates = threading.Condition()
        self.begun = 0
        self.late = 0  # draws that no update came for

    def begin(self, requests: Sequence[Any], sampling: Any) -> Callable[[], list[Rollout]]:
        policy, version, last = FakeBackend(self.skill), self.version, self.begun % 2 == 1
        policy.version = version
        self.begun += 1
        self.calls.append(("begin", len(requests)))
        found: list[Rollout] = []

        def draw() -> None:
            if last:  # of two calls an iteration, the one for trunks
                with self.updates:
                    self.late += not self.updates.wait_for(lambda: self.version > version, LIMIT)
            found.extend(policy.generate(requests, sampling))

        thread = threading.Thread(target=draw, daemon=True)
        thread.start()

        def wait() -> list[Rollout]:
            self.calls.append(("wait", len(requests)))
            thread.join()
            return found

        return wait

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        with self.updates:
            metrics = super().update(samples)
            self.updates.notify_all()
        return metrics


def parts_of(backend: FakeBackend) -> Parts:
    return fake_parts(load_config("attnrl_1p5b", SMALL), backend)


def outcomes(schedule: Callable[[State, Parts], Outcome], backend: FakeBackend, n: int = 3) -> list[Outcome]:
    parts = parts_of(backend)
    state, found = first_state(parts, 0), []
    for _ in range(n):
        found.append(schedule(state, parts))
        state = found[-1].state
    return found


def versions(outcome: Outcome) -> tuple[set[int], set[int], set[int]]:
    """Of the trunks and the branches that were trained on, and of the trunks that wait."""
    trees = [tree for forest in outcome.forests for tree in forest.trees]
    waiting = {trunk.rollout.version for group in outcome.state.waiting for trunk in group.trunks}
    return {t.trunk.rollout.version for t in trees}, {b.rollout.version for t in trees for b in t.branches}, waiting


def test_the_update_is_made_while_trunks_are_drawn() -> None:
    backend = Ahead()
    outcomes(overlapped, backend, 2)
    verbs = [name for name, _ in backend.calls]
    first = ["generate", "score"]  # before the first iteration no trunks wait
    assert verbs == [*first, *["begin", "begin", "wait", "update", "wait", "score"] * 2]
    assert backend.late == 0


def test_nothing_depends_on_whether_an_engine_can_do_both_at_once() -> None:
    """Random numbers included: they are in the state. Scores of the fake engine depend on no policy, so that the
    paper's own schedule must give the same too.
    """
    at_once, in_turn = outcomes(overlapped, Ahead()), outcomes(overlapped, FakeBackend())
    paper = outcomes(one_step_off_policy, FakeBackend())
    assert [told(o) for o in at_once] == [told(o) for o in in_turn] == [told(o) for o in paper]
    assert len({told(o) for o in at_once}) == 3
    assert all(len(o.samples) > 10 for o in at_once)


@pytest.mark.parametrize("backend", [FakeBackend, Ahead])
def test_batch_m_has_trunks_of_policy_m_minus_1_and_branches_of_policy_m(backend: type[FakeBackend]) -> None:
    found = [versions(o) for o in outcomes(overlapped, backend())]
    assert found == [({0}, {0}, {0}), ({0}, {1}, {1}), ({1}, {2}, {2})]


def test_trunks_are_scored_by_the_policy_after_the_update() -> None:
    class Watched(FakeBackend):
        def score(self, requests: Any, scoring: Any) -> Any:
            self.calls.append(("scored by", self.version))
            return super().score(requests, scoring)

    backend = Watched()
    outcomes(overlapped, backend)
    assert [version for name, version in backend.calls if name == "scored by"] == [0, 1, 2, 3]


def test_an_engine_in_turn_draws_both_before_it_updates() -> None:
    backend = FakeBackend()
    outcomes(overlapped, backend, 1)
    assert [name for name, _ in backend.calls] == ["generate", "score", "generate", "generate", "update", "score"]


def test_without_branches_only_trunks_are_begun() -> None:
    backend = Ahead()
    parts = fake_parts(load_config("grpo_1p5b", SMALL | {"algo.prompts": 8}), backend)
    backend.begun = 1  # the next call is the one for trunks
    outcome = overlapped(first_state(parts, 0), parts)
    assert [call for call in backend.calls if call[0] == "begin"] == [("begin", 8 * parts.group)]
    assert versions(outcome) == ({0}, set(), {0})
    assert backend.version == 1


def test_rollouts_of_another_policy_are_refused_whoever_draws_them() -> None:
    class Late(FakeBackend):
        """Draws only when it is asked for the result, by the policy that is there then."""

        def begin(self, requests: Any, sampling: Any) -> Any:
            return lambda: self.generate(requests, sampling)

    parts = parts_of(Late())
    with pytest.raises(TrainingError, match=r"engine Late returned a rollout \(1 of 24\) with version 1, .* has 0"):
        overlapped(first_state(parts, 0), parts)


def test_begin_must_return_something_to_call() -> None:
    class Wrong(FakeBackend):
        def begin(self, requests: Any, sampling: Any) -> Any:
            return self.generate(requests, sampling)

    parts = parts_of(Wrong())
    with pytest.raises(TrainingError, match="begin of the engine Wrong must return a function that gives the rollouts"):
        overlapped(first_state(parts, 0), parts)


@pytest.mark.parametrize("schedule", [one_step_off_policy, overlapped])
def test_trunks_that_wait_are_one_update_old_at_most(schedule: Callable[[State, Parts], Outcome]) -> None:
    parts = parts_of(FakeBackend())
    state = schedule(first_state(parts, 0), parts).state
    assert parts.backend.version == 1
    aside = replace(state, waiting=())
    on_policy(aside, parts)  # the policy goes on without the trunks
    with pytest.raises(TrainingError, match=r"of prompt q4 wait that policy 0 drew, where the policy is 2: .* one upd"):
        schedule(state, parts)
    parts.backend.version = 0  # as an engine whose checkpoint does not know how far it was
    assert schedule(state, parts).state.iteration == 2  # of the same policy
    newer = replace(state, waiting=overlapped(aside, parts).state.waiting)
    parts.backend.version = 0
    with pytest.raises(TrainingError, match="that policy 1 drew, where the policy is 0"):
        schedule(newer, parts)


# the run


def run(path: Path, backend: FakeBackend, iterations: int, *, resume: bool = False) -> State:
    config = load_config("attnrl_1p5b", SMALL)
    limits = RunConfig(iterations=iterations, seed=3, checkpoint_every=2)
    opened = open_run(path, config.model_dump(mode="json"), resume=resume)
    return train(fake_parts(config, backend), overlapped, opened, limits, say=lambda text: None)


def record(path: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in m.items() if not k.startswith(("seconds/", "fake/"))} for m in read_metrics(path)]


def test_a_resumed_run_leaves_the_record_of_one_that_was_left_alone(tmp_path: Path) -> None:
    """Whatever engine went on with it: one that draws meanwhile, or one that does not."""
    run(tmp_path / "whole", Ahead(), 6)
    run(tmp_path / "parts", Ahead(), 2)
    run(tmp_path / "parts", FakeBackend(), 4, resume=True)
    run(tmp_path / "parts", Ahead(), 6, resume=True)
    whole = record(tmp_path / "whole")
    assert record(tmp_path / "parts") == whole
    assert [m["policy/version"] for m in whole] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("call", [0, 1, 2, 3], ids=["branches", "trunks", "next branches", "next trunks"])
def test_what_goes_wrong_in_the_background_ends_the_run_with_its_cause(call: int, tmp_path: Path) -> None:
    class Failing(Ahead):
        def begin(self, requests: Any, sampling: Any) -> Any:
            number, wait = self.begun, super().begin(requests, sampling)

            def fail() -> list[Rollout]:
                wait()
                raise TrainingError("server 1 is gone")

            return fail if number == call else wait

    backend = Failing()
    with pytest.raises(TrainingError, match="server 1 is gone"):
        run(tmp_path, backend, 5)
    recorded = tmp_path / "metrics.jsonl"
    lines = recorded.read_text().count("\n") if recorded.exists() else 0
    assert lines == call // 2  # the iterations before are on record
    assert backend.version == (call + 1) // 2  # trunks are missed after the update alone


class Signalled(Ahead):
    """Sends itself a signal in the update, and with `again` one more while it waits for trunks that never come."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        if not self.trained:
            os.kill(os.getpid(), signal.SIGINT)
        return super().update(samples)

    def begin(self, requests: Any, sampling: Any) -> Any:
        trunks, wait = self.begun % 2 == 1, super().begin(requests, sampling)

        def stuck() -> list[Rollout]:
            os.kill(os.getpid(), signal.SIGINT)
            assert not threading.Event().wait(LIMIT), "the second signal did not end the wait"
            return wait()

        return stuck if trunks and self.again else wait


def test_a_signal_lets_the_iteration_end_and_a_second_one_ends_the_wait(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match="stopped after iteration 1"):
        run(tmp_path / "once", Signalled(again=False), 3)
    assert (tmp_path / "once/checkpoints/000001").is_dir()
    run(tmp_path / "once", Ahead(), 3, resume=True)
    run(tmp_path / "whole", Ahead(), 3)
    assert record(tmp_path / "once") == record(tmp_path / "whole")
    with pytest.raises(Interrupted, match=r"^$"):
        run(tmp_path / "twice", Signalled(again=True), 3)
    assert not (tmp_path / "twice/checkpoints/000001").exists()
    assert signal.getsignal(signal.SIGINT) is handler


# over a model

DEMO = {
    "data.train_tasks": 60,
    "algo.prompts": 3,
    "algo.group": 3,
    "algo.max_prompts": 4,
    "algo.schedule": "overlapped",
    "evaluation.every": 0,
    "run.checkpoint_every": 1,
}


def test_the_demo_model_learns_the_same_whether_updates_run_ahead_or_not(tmp_path: Path) -> None:
    """A second model draws in a thread while the first learns; what one model does in turn is the same to the bit."""
    for name, engine in (("in_turn", "local"), ("at_once", "apart:build")):
        overrides = {**DEMO, "run.iterations": 2, "engine.name": engine}
        attnrl.train("demo", tmp_path / name, overrides=overrides, say=lambda text: None)
    in_turn, at_once = (read_metrics(tmp_path / name) for name in ("in_turn", "at_once"))
    assert at_once[-1]["apart/updates_ahead"] == at_once[-1]["policy/version"] == 2
    clocks = ("seconds/", "score/seconds", "score/overhead", "apart/")
    for one, other in zip(in_turn, at_once, strict=True):
        assert {k: v for k, v in one.items() if not k.startswith(clocks)} == {
            k: v for k, v in other.items() if not k.startswith(clocks)
        }
    for pattern in ("checkpoints/000002/model/*.safetensors", "forests/*.parquet"):
        one, other = (sorted((tmp_path / name).glob(pattern)) for name in ("in_turn", "at_once"))
        assert len(one) > 0
        assert [p.read_bytes() for p in one] == [p.read_bytes() for p in other], pattern
