"""The parts of [algo] tried before training: iterations over responses that were drawn once, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from attnrl.algo.parts import find
from attnrl.config import Config
from attnrl.iteration import Outcome, first_state
from attnrl.launch.parts import build_parts
from attnrl.policy.metrics import UpdateMetrics
from attnrl.schedules import SCHEDULES, outcome_by
from attnrl.types import (
    Attempt,
    Ids,
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
)

# The rewards of each iteration's responses, in turn: half right as often as trunks could wait too long, all right, all
# wrong; the last iteration is for trunks that waited.
REWARDS = (*((1.0, 0.0),) * 4, (1.0,), (0.0,), (1.0, 0.0))


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """A few responses, scored."""

    prompts: list[Prompt]  # of each rollout
    rollouts: list[Rollout]
    requests: list[ScoreRequest]
    scores: list[Scores]
    scoring: Scoring
    rate: float  # tokens drawn a second

    @property
    def tokens(self) -> int:
        """Of prompts and responses together."""
        return sum(len(p.ids) + len(r.ids) for p, r in zip(self.prompts, self.rollouts, strict=True))


@dataclass(slots=True, eq=False)
class Replay:
    """An engine that draws, scores and learns nothing: a response goes on as one of those drawn did from there."""

    drawn: Drawn
    version: int = 0
    asked: int = field(default=0, init=False)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        return [self._rest(request) for request in requests]

    def score(self, requests: Sequence[ScoreRequest], scoring: Scoring) -> list[Scores]:
        return [self._scores(request) for request in requests]

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        self.version += 1
        return UpdateMetrics().summary(lr=0.0, samples=len(samples))

    def metrics(self) -> dict[str, float]:
        return {}

    def save(self, path: Path) -> None:
        pass

    def load(self, path: Path) -> None:
        pass

    def close(self) -> None:
        pass

    def _rest(self, request: Request) -> Rollout:
        """The next in turn of the drawn responses that go on from this context; of all, where none does."""
        context, rows = request.context, list(zip(self.drawn.prompts, self.drawn.rollouts, strict=True))
        rests = [
            replace(rollout, ids=rollout.ids[at:], logprobs=rollout.logprobs[at:])
            for prompt, rollout in rows
            if 0 <= (at := len(context) - len(prompt.ids)) < len(rollout.ids)
            and np.array_equal(context, np.concatenate([prompt.ids, rollout.ids[:at]]))
        ] or self.drawn.rollouts
        self.asked += 1
        rest, most = rests[self.asked % len(rests)], request.max_tokens
        finish = rest.finish if len(rest.ids) <= most else "length"
        return Rollout(rest.ids[:most], rest.logprobs[:most], finish, self.version)

    def _scores(self, request: ScoreRequest) -> Scores:
        """The scores of the drawn response that begins like this one, as far as they reach; else zeros."""
        tokens, steps = len(request.response), len(request.steps)
        for known, scores in zip(self.drawn.requests, self.drawn.scores, strict=True):
            same = np.array_equal(known.prompt, request.prompt)
            if same and np.array_equal(known.response[:tokens], request.response):
                fci = scores.fci if known.steps == request.steps else np.zeros(steps, np.float32)
                return Scores(scores.logprobs[:tokens], scores.entropy[:tokens], fci)
        return Scores(*(np.zeros(size, np.float32) for size in (tokens, tokens, steps)))


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """The same prompts again and again."""

    prompts: Sequence[Prompt]

    def draw(self, position: dict[str, Any], n: int) -> tuple[list[Prompt], dict[str, Any]]:
        return list(islice(cycle(self.prompts), n)), position


def try_parts(
    config: Config,
    bound: dict[str, partial[Any]],
    drawn: Drawn,
    segment: Callable[[Ids], tuple[Step, ...]],
    decode: Callable[[Ids], str],
) -> list[Outcome]:
    """What some iterations of the config's schedule make of responses drawn before, with verdicts made up so that
    there is something to learn from some and nothing from others. What a part returns is held to its promise
    as in training; no engine and no reward is asked.
    """
    prompts = list({prompt.uid: prompt for prompt in drawn.prompts}.values())
    small = {"prompts": len(prompts), "max_prompts": len(prompts), "adaptive_batch": False}
    config = config.model_copy(update={"algo": config.algo.model_copy(update=small)})
    rewards = cycle(REWARDS[0])

    def grade(attempts: Sequence[Attempt]) -> list[Verdict]:
        return [Verdict(reward, "made up") for reward in islice(rewards, len(attempts))]

    parts = build_parts(config, bound, Replay(drawn), Round(prompts), segment, decode, grade, dict)
    schedule, state, outcomes = find(SCHEDULES, config.algo.schedule), first_state(parts, config.run.seed), []
    for values in REWARDS:
        rewards = cycle(values)
        outcomes.append(outcome_by(schedule, state, parts))
        state = outcomes[-1].state
    return outcomes
