"""Grading beside the engine: what runs at the same time, what is waited for where, and what comes of errors."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnrl.config import RunConfig, load_config
from attnrl.errors import Interrupted, TrainingError
from attnrl.iteration import Clock, Grading, Outcome, Parts, draw_groups, first_state, restore
from attnrl.reward import build_rewards
from attnrl.run import open_run
from attnrl.schedules import SCHEDULES
from attnrl.trainer import train
from attnrl.types import Attempt, Prompt, Rollout, Sample, ScoreRequest, Scores, Scoring, Verdict, as_floats, as_ids
from fakes import FakeBackend, FakeStream, decode, fake_parts, grade, told
from processes import LIMIT, wait_until

PATIENCE = 3 * LIMIT  # two threads of one process that gets little of the machine

SMALL = {"algo.prompts": 4, "sampling.max_response_tokens": 80, "algo.filter": "all"}
OFF, OVER, ON, FILL = "one_step_off_policy", "overlapped", "on_policy", "dynamic"
BATCHES = {  # what is graded in a first iteration: until when each batch is not needed
    OFF: ["score 1", "score 2", "update 1"],  # the first trunks, branches, the next trunks
    OVER: ["score 1", "", "score 2"],
    ON: ["score 1", ""],
    FILL: ["score 1", ""],
}
FAILING = [(schedule, number) for schedule, batches in BATCHES.items() for number in range(len(batches))]


def graders() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("attnrl-grading_")]


class Moments:
    """What has happened, for those who wait for it. Without a lock, which a signal could leave behind."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.late: list[str] = []

    def note(self, moment: str) -> None:
        self.seen.append(moment)

    def wait(self, moment: str) -> None:
        if not wait_until(lambda: moment in self.seen, PATIENCE):
            self.late.append(moment)


class Engine(FakeBackend):
    """Notes when scoring and updating begin. `held`: each of these goes on only once a moment of grading has come."""

    def __init__(self, moments: Moments, held: dict[str, str] | None = None) -> None:
        super().__init__()
        self.moments, self.held = moments, held or {}
        self.threads: set[threading.Thread] = set()

    def generate(self, requests: Sequence[Any], sampling: Any) -> list[Rollout]:
        self.threads.add(threading.current_thread())
        return super().generate(requests, sampling)

    def score(self, requests: Sequence[ScoreRequest], scoring: Scoring) -> list[Scores]:
        self.arrive(f"score {len(self.scored) + 1}")
        return super().score(requests, scoring)

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        self.arrive(f"update {len(self.trained) + 1}")
        return super().update(samples)

    def arrive(self, moment: str) -> None:
        self.threads.add(threading.current_thread())
        self.moments.note(moment)
        if moment in self.held:
            self.moments.wait(self.held[moment])


class Reward:
    """A reward that holds back each batch until a moment of the engine has come, and fails on one of them."""

    def __init__(self, moments: Moments, until: Sequence[str], error: Exception | None = None, fails: int = -1) -> None:
        self.moments, self.until, self.error, self.fails = moments, until, error, fails
        self.batches: list[list[Attempt]] = []
        self.threads: set[threading.Thread] = set()

    def __call__(self, attempts: Sequence[Attempt]) -> list[Verdict]:
        number = len(self.batches)
        self.batches.append(list(attempts))
        self.threads.add(threading.current_thread())
        self.moments.note(f"grade {number}")
        if number < len(self.until) and self.until[number]:
            self.moments.wait(self.until[number])
        if self.error is not None and number == self.fails:
            raise self.error
        return grade(attempts)


def parts_of(backend: FakeBackend | None = None, **changes: Any) -> Parts:
    return replace(fake_parts(load_config("attnrl_1p5b", SMALL), backend), **changes)


def step(parts: Parts, schedule: str) -> Outcome:
    return SCHEDULES[schedule](first_state(parts, 0), parts)


@pytest.mark.parametrize("schedule", BATCHES)
def test_grading_begins_before_scoring_and_is_not_waited_for_before_it_is_needed(schedule: str) -> None:
    """Engine and reward wait for one another: a loop that did the one and then the other would not get on."""
    moments = Moments()
    held = {"score 1": "grade 0", "score 2": "grade 1" if schedule == OFF else "grade 2"}
    engine, reward = Engine(moments, held), Reward(moments, BATCHES[schedule])
    here: set[threading.Thread] = set()

    def decoded(ids: Any) -> str:
        here.add(threading.current_thread())
        return decode(ids)

    outcome = step(parts_of(engine, grade=reward, decode=decoded), schedule)
    assert moments.late == []
    assert engine.version == 1
    assert len(outcome.samples) > 10
    assert len(reward.batches) == len(BATCHES[schedule])
    assert engine.threads == here == {threading.current_thread()}
    assert threading.current_thread() not in reward.threads
    assert graders() == []


class Inline:
    """An executor that does what it is given before it goes on."""

    def __init__(self, *options: Any) -> None: ...

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*args))
        return done

    def shutdown(self) -> None: ...


@pytest.mark.parametrize("schedule", BATCHES)
def test_what_is_graded_meanwhile_is_what_would_be_graded_first(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcomes(name: str) -> list[str]:
        with build_rewards(
            [("exact", 1.0, {"whole": True}), ("overlong", 0.1, {})], knobs={"max_response_tokens": 80}
        ) as rewards:
            parts = parts_of(grade=rewards.grade, graded=rewards.metrics)
            state, found = first_state(parts, 0), []
            for _ in range(3):
                outcome = SCHEDULES[schedule](state, parts)
                state = outcome.state
                found.append(told(outcome))
                assert outcome.metrics["reward/overlong"] < 0 < outcome.metrics["seconds/reward_exact"], name
        return found

    meanwhile = outcomes("meanwhile")
    monkeypatch.setattr("attnrl.iteration.ThreadPoolExecutor", Inline)
    assert meanwhile == outcomes("first")
    assert len(set(meanwhile)) == 3


# errors


@pytest.mark.parametrize(("schedule", "number"), FAILING)
def test_an_error_of_grading_arrives_as_it_is_and_no_further_batch_is_begun(schedule: str, number: int) -> None:
    moments, error = Moments(), LookupError("no judge answers")
    reward = Reward(moments, BATCHES[schedule], error, number)
    with pytest.raises(LookupError, match="no judge answers") as raised:
        step(parts_of(Engine(moments), grade=reward), schedule)
    assert raised.value is error
    assert not hasattr(error, "__notes__")
    assert moments.late == []
    assert len(reward.batches) == number + 1
    assert graders() == []


def test_an_error_of_branches_comes_before_the_update_and_one_of_the_next_trunks_after_it() -> None:
    for number, version in ((1, 0), (2, 1)):
        engine = Engine(Moments())
        with pytest.raises(ValueError, match="broken"):
            step(parts_of(engine, grade=Reward(engine.moments, [], ValueError("broken"), number)), OFF)
        assert engine.version == version


class Broken(Engine):
    """Raises in one call of a verb, once a moment has come."""

    def __init__(self, moments: Moments, at: str, after: str) -> None:
        super().__init__(moments, {at: after})
        self.at = at

    def arrive(self, moment: str) -> None:
        super().arrive(moment)
        if moment == self.at:
            raise TrainingError("the engine broke")


@pytest.mark.parametrize(
    ("schedule", "at", "number"),
    [(OFF, "score 1", 0), (OFF, "score 2", 1), (OFF, "update 1", 2), (OVER, "score 2", 2), (ON, "score 1", 0)],
)
def test_an_error_of_the_engine_gives_up_what_is_graded(schedule: str, at: str, number: int) -> None:
    """The reward would hold its batch until it is told to let go; that is told more than once if need be."""
    moments = Moments()
    until = [""] * number + ["given up twice"]
    reward, asked = Reward(moments, until), []

    def give_up() -> None:
        asked.append(threading.current_thread())
        if len(asked) == 2:
            moments.note("given up twice")

    parts = parts_of(Broken(moments, at, f"grade {number}"), grade=reward, give_up=give_up)
    with pytest.raises(TrainingError, match="the engine broke") as raised:
        step(parts, schedule)
    assert not hasattr(raised.value, "__notes__")
    assert moments.late == []
    assert set(asked) == {threading.current_thread()}
    assert len(asked) >= 2
    assert len(reward.batches) == number + 1, "what had not begun was not begun any more"
    assert graders() == []


def test_where_both_fail_the_error_of_grading_is_told_with_that_of_the_engine() -> None:
    reward = Reward(Moments(), [], TrainingError("no judge answers"), 0)
    broken = ValueError("the engine broke")
    both = Grading(parts_of(grade=reward), Clock())

    def fail() -> None:
        with both:
            begin(both, "a")
            begin(both, "b")
            assert wait_until(both.begun[0].done, PATIENCE)
            raise broken

    with pytest.raises(ValueError, match="the engine broke") as raised:
        fail()
    assert raised.value is broken
    assert broken.__notes__ == ["Grading had failed too: TrainingError: no judge answers"]
    assert len(reward.batches) == 1
    assert graders() == []


def test_too_many_errors_in_a_batch_end_the_iteration_with_the_words_of_the_reward() -> None:
    class Goldless(FakeStream):
        def draw(self, position: dict[str, Any], n: int) -> tuple[list[Prompt], dict[str, Any]]:
            prompts, after = super().draw(position, n)
            return [replace(p, answers=("",)) for p in prompts], after

    with build_rewards([("exact", 1.0, {})]) as rewards:
        said = (
            "22 of 24 rewards of a batch are errors, a larger share than verify.max_error_share = 0.5; "
            "the most frequent, of the reward 'exact' (22 times): empty_gold"
        )  # two of 24 are cut off by the limit
        for schedule in SCHEDULES:
            with pytest.raises(TrainingError) as raised:
                step(parts_of(grade=rewards.grade, graded=rewards.metrics, stream=Goldless()), schedule)
            assert str(raised.value) == said
            assert graders() == []


# the block itself


def begin(grading: Grading, text: str) -> Callable[[], list[Verdict]]:
    ids = as_ids([2, 0])
    rollout = Rollout(ids, as_floats([-1.0, -1.0]), "stop", 0)
    return grading.begin([ids], [rollout], [Prompt(text, ids, ("right",), text)])


def test_batches_are_graded_one_at_a_time_in_order_and_a_block_that_ends_well_ends_after_them() -> None:
    seen: list[str] = []
    busy = threading.Lock()
    moments = Moments()

    def slow(attempts: Sequence[Attempt]) -> list[Verdict]:
        assert busy.acquire(blocking=False), "two batches at a time"
        moments.wait("all begun")
        seen.extend(a.problem for a in attempts)
        busy.release()
        return grade(attempts)

    clock = Clock()
    with Grading(parts_of(grade=slow), clock) as grading:
        waits = [begin(grading, text) for text in "abc"]
        assert graders() == ["attnrl-grading_0"]
        moments.note("all begun")
        assert waits[2]()[0].reward == 1.0
        assert seen == ["a", "b", "c"]
        begin(grading, "d")
    assert seen == ["a", "b", "c", "d"], "nobody waited for it, but it was graded"
    assert moments.late == []
    assert graders() == []


def test_a_reward_sees_the_context_of_the_loop() -> None:
    """As a client that traces its calls reads it, whatever thread it is called in."""
    trace: ContextVar[str] = ContextVar("trace", default="none")
    seen: list[str] = []

    def traced(attempts: Sequence[Attempt]) -> list[Verdict]:
        seen.append(trace.get())
        return grade(attempts)

    parts = parts_of(grade=traced)
    for name in ("one", "two"):
        trace.set(name)
        prompts, _ = parts.stream.draw({}, 2)
        draw_groups(prompts, parts, restore(first_state(parts, 0).rng), Clock())
    assert seen == ["one", "two"]


def test_a_batch_that_was_handed_over_when_a_signal_came_is_given_up_too() -> None:
    """The signal arrives before the loop knows what it could wait for."""
    moments = Moments()
    reward = Reward(moments, ["given up"])
    parts = parts_of(grade=reward, give_up=lambda: moments.note("given up"))
    grading = Grading(parts, Clock())

    class Interrupting(list[Any]):
        def append(self, batch: Any) -> None:
            moments.wait("grade 0")
            raise Interrupted("", signal.SIGINT)

    grading.begun = Interrupting()

    def stopped() -> None:
        with grading:
            begin(grading, "a")

    with pytest.raises(Interrupted):
        stopped()
    assert moments.late == []
    assert len(reward.batches) == 1
    assert graders() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_wait_for_verdicts(number: signal.Signals, tmp_path: Path) -> None:
    moments, main = Moments(), threading.get_ident()
    reward = Reward(moments, ["score 1", "given up"])

    def signalled(attempts: Sequence[Attempt]) -> list[Verdict]:
        if len(reward.batches) == 1:  # branches: the loop waits for them once the next trunks are scored
            moments.wait("score 2")
            signal.pthread_kill(main, number)
            moments.wait("said")
            signal.pthread_kill(main, number)
        return reward(attempts)

    config = load_config("attnrl_1p5b", SMALL)
    parts = parts_of(Engine(moments), grade=signalled, give_up=lambda: moments.note("given up"))
    run = open_run(tmp_path, config.model_dump(mode="json"), resume=False)
    with pytest.raises(Interrupted, match=r"^$") as stop:
        train(parts, SCHEDULES[OFF], run, RunConfig(iterations=3), say=lambda text: moments.note("said"))
    assert stop.value.number == number
    assert moments.late == []
    assert graders() == []
    assert not (tmp_path / "checkpoints").exists() or not any((tmp_path / "checkpoints").iterdir())
