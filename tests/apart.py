"""An engine that draws while it updates: two local ones; one learns and scores, the other draws in a thread.

The thread has weights of its own, as servers on other GPUs have; it gets the learner's when nothing is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attnrl.config import Config
from attnrl.local.backend import LocalBackend
from attnrl.local.backend import build as build_local
from attnrl.types import Request, Rollout, Sample, Sampling, ScoreRequest, Scores, Scoring


class Apart:
    def __init__(self, learner: LocalBackend, sampler: LocalBackend) -> None:
        self.learner, self.sampler = learner, sampler
        self.pool = ThreadPoolExecutor(1)
        self.under_way: list[Future[list[Rollout]]] = []
        self.ahead = 0  # updates that were made while something was drawn

    @property
    def version(self) -> int:
        return self.learner.version

    def begin(self, requests: Sequence[Request], sampling: Sampling) -> Callable[[], list[Rollout]]:
        if self.sampler.version != self.version:
            assert not self.under_way, "weights would change under a rollout"
            self.sampler.model.load_state_dict(self.learner.model.state_dict())
            self.sampler.sampler.sync()
            self.sampler.version = self.version
        drawing = self.pool.submit(self.sampler.generate, requests, sampling)
        self.under_way.append(drawing)

        def wait() -> list[Rollout]:
            self.under_way.remove(drawing)
            return drawing.result()

        return wait

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        return self.begin(requests, sampling)()

    def score(self, requests: Sequence[ScoreRequest], scoring: Scoring) -> list[Scores]:
        return self.learner.score(requests, scoring)

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        self.ahead += bool(self.under_way)
        return self.learner.update(samples)

    def metrics(self) -> dict[str, float]:
        drawn = self.sampler.sampler.metrics()
        return {**self.learner.metrics(), **drawn, "apart/updates_ahead": float(self.ahead)}

    def save(self, path: Path) -> None:
        self.learner.save(path)

    def load(self, path: Path) -> None:
        self.learner.load(path)

    def close(self) -> None:
        self.pool.shutdown()
        self.learner.close()
        self.sampler.close()


def build(config: Config, *, model: str, tokenizer: Any, learn: bool = True) -> Apart:
    sampler = build_local(config, model=model, tokenizer=tokenizer, learn=False)
    return Apart(build_local(config, model=model, tokenizer=tokenizer, learn=learn), sampler)
