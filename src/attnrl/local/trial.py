"""A sampler tried on a few short texts: whether it draws by the log-probs that the model has."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from attnrl.attention.decoder import vocabulary_of
from attnrl.scoring import score
from attnrl.types import Request, Rollout, Sampling, ScoreRequest, as_ids

TRIED = 24  # tokens of a context, and drawn after it


class Draws(Protocol):
    def generate(self, requests: list[Request], sampling: Sampling, *, version: int) -> list[Rollout]: ...


def logprob_gaps(sampler: Draws, model: Any, longest: int | None = None) -> list[float]:
    """Mean gap of each text in nats; two of them begin alike, and two are shorter. `longest`: tokens that fit."""
    count = TRIED if longest is None else min(TRIED, longest // 2)
    context = as_ids(np.arange(count) * 7919 % vocabulary_of(model))
    requests = [Request(context[: count // n], max_tokens=count // n, seed=n) for n in (1, 1, 2, 3)]
    rollouts = sampler.generate(requests, Sampling(), version=0)
    asked = [ScoreRequest(r.context, x.ids, ()) for r, x in zip(requests, rollouts, strict=True)]
    scores = score(model, asked, fci=False)
    return [float(np.abs(x.logprobs - s.logprobs).mean()) for x, s in zip(rollouts, scores, strict=True)]
