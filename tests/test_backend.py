"""What every engine asks before it draws, scores or learns: bad rows are named, good ones at the border pass."""

from __future__ import annotations

import numpy as np
import pytest

from attnrl.backend import begin_by, check_ids, check_requests, generate_by, metrics_by, score_by, update_by
from attnrl.errors import ConfigError, DataError, TrainingError
from attnrl.types import Request, Rollout, Sampling, ScoreRequest, Scores, Scoring, Step, as_floats, as_ids
from fakes import FakeBackend

VOCABULARY = 7


def test_ids_from_the_first_to_the_last_of_the_vocabulary_pass() -> None:
    check_ids([as_ids([0]), as_ids([VOCABULARY - 1, 0, 3])], VOCABULARY, "row")
    check_ids([], VOCABULARY, "row")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "^prompt 1: no token$"),
        ([2, -1], "^prompt 1: token id -1 is outside the model's vocabulary of 7 tokens$"),
        ([VOCABULARY, 2, -3], "^prompt 1: token id 7 is outside"),
        ([2, VOCABULARY + 5], "^prompt 1: token id 12 is outside"),
    ],
)
def test_a_row_with_no_token_or_a_foreign_one_is_named(row: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_ids([as_ids([1]), np.array(row, dtype=np.int64)], VOCABULARY, "prompt")


def test_requests_that_just_fit_pass() -> None:
    limits = {"a limit of {}": 5, "no limit": None}
    check_requests([Request(as_ids([1]), 1, 0), Request(as_ids([1, 2]), 3, 0)], VOCABULARY, limits)


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (Request(as_ids([1]), 0, 0), ConfigError, "^request 1: max_tokens = 0: must be at least 1$"),
        (Request(as_ids([]), 1, 0), DataError, "^request 1: empty context: give it at least one token"),
        (
            Request(as_ids([1, 2]), 4, 0),
            ConfigError,
            "^request 1: 2 context tokens and max_tokens = 4 exceed a limit of 5$",
        ),
        (Request(as_ids([1, 9]), 1, 0), DataError, "^request 1: token id 9 is outside"),
    ],
)
def test_a_request_that_cannot_be_drawn_from_is_named(request_: Request, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_requests([Request(as_ids([1]), 1, 0), request_], VOCABULARY, {"a limit of {}": 5, "no limit": None})


@pytest.mark.parametrize(("fci", "kept"), [([0.5, 0.25], [0.5, 0.25]), ([0.5], [np.nan, np.nan])])
def test_fci_that_was_not_asked_for_is_kept_where_it_has_a_number_for_each_step(
    fci: list[float], kept: list[float]
) -> None:
    class Scorer(FakeBackend):
        def score(self, requests: object, scoring: object) -> list[Scores]:
            return [Scores(as_floats([-1.0, -2.0, -3.0]), as_floats([1.0, 1.0, 1.0]), as_floats(fci))]

    request = ScoreRequest(as_ids([1]), as_ids([2, 3, 4]), (Step(0, 2), Step(2, 3)))
    (scores,) = score_by(Scorer(), [request], Scoring(fci=False))
    assert np.array_equal(scores.fci, kept, equal_nan=True)


class Lost(FakeBackend):
    """An engine whose server has gone, whatever it is asked."""

    def generate(self, *args: object) -> list:  # type: ignore[override]
        raise ConnectionError("engine lost")

    def begin(self, requests: object, sampling: object) -> object:
        return (lambda: self.generate()) if sampling == Sampling(0.5) else self.generate()

    score = update = metrics = generate  # type: ignore[assignment]


def test_what_an_engine_raises_is_noted_to_be_its_own() -> None:
    engine, requests = Lost(), [Request(as_ids([1]), 1, 0)]
    for ask in (
        lambda: generate_by(engine, requests, Sampling()),
        lambda: begin_by(engine, requests, Sampling()),
        lambda: begin_by(engine, requests, Sampling(0.5))(),
        lambda: score_by(engine, [], Scoring()),
        lambda: update_by(engine, []),
        lambda: metrics_by(engine),
    ):
        with pytest.raises(ConnectionError, match="engine lost") as raised:
            ask()
        assert raised.value.__notes__ == ["engine.name: raised by the engine Lost"]


def test_an_engine_that_ends_the_process_or_says_what_to_do() -> None:
    class Leaves(FakeBackend):
        def generate(self, *args: object) -> list:  # type: ignore[override]
            raise SystemExit(3)

    class Says(FakeBackend):
        def generate(self, *args: object) -> list:  # type: ignore[override]
            raise ConfigError("lower rows")

    requests = [Request(as_ids([1]), 1, 0)]
    with pytest.raises(TrainingError, match=r"^engine.name: the engine Leaves called sys.exit\(3\); let it raise$"):
        generate_by(Leaves(), requests, Sampling())
    with pytest.raises(ConfigError, match="lower rows") as raised:
        generate_by(Says(), requests, Sampling())
    assert not hasattr(raised.value, "__notes__")


def test_what_is_begun_is_held_to_the_promise_under_its_own_verb() -> None:
    class Short(FakeBackend):
        def begin(self, requests: object, sampling: object) -> object:
            return list

    with pytest.raises(TrainingError, match=r"^begin of the engine Short must return a list of 1, one a request: 0$"):
        begin_by(Short(), [Request(as_ids([1]), 1, 0)], Sampling())()


def test_what_an_engine_answers_is_for_reading() -> None:
    class Keeps(FakeBackend):
        def generate(self, requests: object, sampling: object) -> list[Rollout]:  # type: ignore[override]
            self.kept = Rollout(np.array([1, 2], np.int32), np.zeros(2, np.float32), "stop", 0)
            return [self.kept]

        def score(self, requests: object, scoring: object) -> list[Scores]:  # type: ignore[override]
            return [Scores(np.zeros(1, np.float32), np.zeros(1, np.float32), np.zeros(1, np.float32))]

    engine = Keeps()
    (rollout,) = generate_by(engine, [Request(as_ids([1]), 2, 0)], Sampling())
    (scores,) = score_by(engine, [ScoreRequest(as_ids([1]), as_ids([2]), (Step(0, 1),))], Scoring())
    for array in (rollout.ids, rollout.logprobs, scores.logprobs, scores.entropy, scores.fci):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 3
    engine.kept.ids[0] = 5  # an engine may use its buffers again
