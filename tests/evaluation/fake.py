"""A backend that answers made-up tasks by its own random stream; run as a script, it evaluates until it is killed."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attnrl.config import TaskConfig
from attnrl.data.tasks import make_tasks
from attnrl.evaluation import Report, evaluate
from attnrl.types import Attempt, Ids, Prompt, Request, Rollout, Sampling, Verdict, as_floats, as_ids, content_hash
from attnrl.verify import Verifier

SPEC = TaskConfig(operations=(2, 4))


def encode(text: str) -> Ids:
    return as_ids(list(text.encode()))


def decode(ids: Ids) -> str:
    return bytes(ids.tolist()).decode()


def prompts(count: int, seed: int) -> list[Prompt]:
    tasks = make_tasks(SPEC, "test", count, seed)
    return [Prompt(content_hash(t.problem), encode(t.problem), (t.answer,), t.problem, "tasks") for t in tasks]


class FakeBackend:
    """Answers with the right number or a wrong one, by the request's seed alone; cuts off what is too long."""

    version = 0

    def __init__(self, skill: float = 0.6, calls: float = math.inf) -> None:
        self.answers = {t.problem: t.answer for seed in (0, 1) for t in make_tasks(SPEC, "test", 30, seed)}
        self.skill = skill
        self.calls = calls  # after so many it hangs
        self.requests = 0

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        self.calls -= 1
        if self.calls < 0:
            time.sleep(600)
        self.requests += len(requests)
        return [self._one(request) for request in requests]

    def _one(self, request: Request) -> Rollout:
        rng = random.Random(request.seed)
        right = rng.random() < self.skill
        answer = int(self.answers[decode(request.context)]) + (not right)
        ids = encode("hm " * rng.randrange(20) + f"so \\boxed{{{answer}}}.")
        kept = ids[: request.max_tokens]
        return Rollout(kept, as_floats(np.zeros(len(kept))), "stop" if len(kept) == len(ids) else "length", 0)


def grade(attempts: Sequence[Attempt], verifier: Verifier, grade_truncated: bool = False) -> list[Verdict]:
    """The verifier's verdicts; a response that was cut off is wrong."""
    verdicts = verifier.grade([(a.response, a.answers) for a in attempts])
    cut = Verdict(0.0, "truncated")
    return [cut if a.finish == "length" and not grade_truncated else v for a, v in zip(attempts, verdicts, strict=True)]


def run(out_dir: Path | None, backend: FakeBackend, **changes: object) -> Report:
    settings = {
        "samples": {"easy": 4, "hard": 2},
        "sampling": Sampling(0.6, 0.95),
        "max_tokens": 60,
        "seed": 7,
        "ks": (1, 2),
        "chunk": 8,
        "resamples": 500,
    } | changes
    with Verifier(workers=1) as verifier:
        return evaluate(
            backend,
            {"easy": prompts(30, 0), "hard": prompts(20, 1)},
            decode=decode,
            grade=lambda attempts: grade(attempts, verifier),
            out_dir=out_dir,
            **settings,
        )


if __name__ == "__main__":
    run(Path(sys.argv[1]), FakeBackend(calls=int(sys.argv[2])))
