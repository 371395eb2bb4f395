"""The scorers of reasoning-gym (extra `gym`), found by a row's columns. They run in worker processes.

Some of them evaluate the response's text as an expression (sympy's parser, which runs it): the worker bounds time and
memory, nothing more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from attnrl.errors import MissingExtraError
from attnrl.types import Attempt, Verdict
from attnrl.verify import extract

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def gym(attempts: Sequence[Attempt], *, task: str | None = None) -> list[Verdict]:
    """The score of reasoning-gym's own scorer, within 0 and 1; right where it is 1.

    The row must hold the entry's `metadata` (a table, or its JSON text); the task's name is `metadata.source_dataset`,
    the row's `source_dataset`, or the option `task`.
    """
    return [_judge(attempt, task) for attempt in attempts]


def _judge(attempt: Attempt, task: str | None) -> Verdict:
    metadata = attempt.row.get("metadata", {})
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    name = task or metadata.get("source_dataset") or attempt.row.get("source_dataset")
    if name is None:
        raise ValueError("the row names no task of reasoning-gym: it needs the column metadata or source_dataset")
    entry = {"question": attempt.problem, "answer": attempt.answers[0] if attempt.answers else None}
    answer = _answer(attempt.response)
    score = float(_scorer(str(name))(answer, {**entry, "metadata": metadata}))
    return Verdict(score, f"gym:{name}", answer, right=score >= 1.0)


def _answer(response: str) -> str | None:
    """The last answer tag as it stands, since answers may have lines of their own; else what the verifier extracts."""
    tagged = _ANSWER.findall(response.rpartition("</think>")[2])
    return tagged[-1].strip() if tagged else extract(response).answer


@lru_cache(maxsize=256)
def _scorer(name: str) -> Callable[..., Any]:
    try:
        from reasoning_gym import get_score_answer_fn
    except ImportError as error:
        raise MissingExtraError('the reward "gym" needs the extra "gym": pip install "attnrl[gym]"') from error
    scorer: Callable[..., Any] = get_score_answer_fn(name)
    return scorer
