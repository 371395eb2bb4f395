"""A backend without a model: draws token ids from the request's own stream, right more often as it is updated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnrl.algo.promises import steps_by
from attnrl.config import Config
from attnrl.iteration import Outcome, Parts
from attnrl.launch.parts import build_parts, check_parts
from attnrl.types import (
    Attempt,
    Prompt,
    Request,
    Rollout,
    Sample,
    Sampling,
    ScoreRequest,
    Scores,
    Scoring,
    Step,
    Verdict,
    as_floats,
    as_ids,
)

EOS, BLANK, RIGHT, WRONG, FIRST_WORD = 0, 1, 2, 3, 4
TEXTS = ["", ".\n\n", "right", "wrong", *(f" w{i}" for i in range(16))]


class FakeBackend:
    """Responses of 1 to 24 steps that end in RIGHT or WRONG; what it was asked to do is kept in its lists."""

    def __init__(self, skill: float = 0.4) -> None:
        self.version = 0
        self.skill = skill
        self.calls: list[tuple[str, int]] = []
        self.trained: list[list[Sample]] = []
        self.scorings: list[Scoring] = []
        self.requests: list[list[Request]] = []
        self.samplings: list[Sampling] = []
        self.scored: list[list[ScoreRequest]] = []
        self.closed = False
        self.told = 0

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        self.calls.append(("generate", len(requests)))
        self.requests.append(list(requests))
        self.samplings.append(sampling)
        return [self._draw(r) for r in requests]

    def _draw(self, request: Request) -> Rollout:
        rng = np.random.default_rng([request.seed, len(request.context), self.version])
        ids: list[int] = []
        for _ in range(int(rng.integers(0, 24))):
            ids += [*rng.integers(FIRST_WORD, len(TEXTS), size=int(rng.integers(1, 5))).tolist(), BLANK]
        hard = request.context[0] % 10 / 10  # a prompt's first token says how hard it is
        ids += [RIGHT if rng.random() < self.skill + 0.01 * self.version + 0.4 - hard else WRONG, EOS]
        cut = len(ids) > request.max_tokens
        ids = ids[: request.max_tokens]
        logprobs = as_floats(np.log(rng.uniform(0.05, 1.0, size=len(ids))))
        return Rollout(as_ids(ids), logprobs, "length" if cut else "stop", self.version)

    def score(self, requests: Sequence[ScoreRequest], scoring: Scoring) -> list[Scores]:
        self.calls.append(("score", len(requests)))
        self.scorings.append(scoring)
        self.scored.append(list(requests))
        scores = []
        for r in requests:
            rng = np.random.default_rng([len(r.response), int(r.response.sum())])
            fci = rng.random(len(r.steps))
            fci[max(len(r.steps) - 4, 0) :] = 0.0
            entropy = rng.random(len(r.response))
            fci = fci if scoring.fci else np.full(len(r.steps), np.nan)
            scores.append(Scores(as_floats(-entropy), as_floats(entropy), as_floats(fci)))
        return scores

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        self.calls.append(("update", len(samples)))
        self.trained.append(list(samples))
        self.version += 1
        return {"policy/loss": float(np.mean([s.advantages.mean() for s in samples]))}

    def save(self, path: Path) -> None:
        (path / "fake.json").write_text(json.dumps({"version": self.version}))

    def load(self, path: Path) -> None:
        self.version = json.loads((path / "fake.json").read_text())["version"]

    def metrics(self) -> dict[str, float]:
        """How many calls of the engine since it was last asked."""
        new, self.told = len(self.calls) - self.told, len(self.calls)
        return {"fake/calls": float(new)}

    def close(self) -> None:
        self.closed = True


class FakeStream:
    """An endless stream of prompts 0, 1, 2, ..."""

    def draw(self, position: dict[str, Any], n: int) -> tuple[list[Prompt], dict[str, Any]]:
        start = position.get("next", 0)
        numbers = range(start, start + n)
        row = {"decisive": [2]}  # for the rule that knows
        return [Prompt(f"q{i}", as_ids([i, 7]), ("right",), f"problem {i}", row=row) for i in numbers], {
            "next": start + n
        }


def texts(ids: Any) -> list[str]:
    return [TEXTS[i] for i in ids.tolist()]


def decode(ids: Any) -> str:
    return "".join(texts(ids))


def grade(attempts: Sequence[Attempt]) -> list[Verdict]:
    """Right where the response ends in the answer; the verdict repeats what it was shown, so that a test can see
    whether that was the whole response.
    """
    return [
        Verdict(float(a.finish == "stop" and a.response.endswith(a.answers[0])), "fake", a.response) for a in attempts
    ]


def fake_parts(config: Config, backend: FakeBackend | None = None) -> Parts:
    """The parts that a config names, over a fake backend."""
    bound = check_parts(config)

    def segment(ids: Any) -> tuple[Step, ...]:
        return steps_by(bound["segmenter"], texts(ids))

    return build_parts(config, bound, backend or FakeBackend(), FakeStream(), segment, decode, grade, dict)


def told(outcome: Outcome) -> str:
    """All of an outcome but its clock and the engine's own count of its calls."""
    metrics = {k: v for k, v in outcome.metrics.items() if not k.startswith(("seconds/", "fake/"))}
    return repr((outcome.state, sorted(metrics.items()), outcome.forests, outcome.samples, outcome.reasons))
