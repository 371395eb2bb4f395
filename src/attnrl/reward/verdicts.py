"""Between a reward function and its caller: attempts and verdicts as JSON, and a number as a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from traceback import extract_tb
from types import TracebackType
from typing import Any

from attnrl.algo.parts import find
from attnrl.types import Attempt, Verdict

ATTEMPT = {field.name for field in fields(Attempt)}


def as_verdict(value: Any, rule: str) -> Verdict:
    """A function's value as a verdict: a finite number is the reward; a verdict is left as it is.

    >>> as_verdict(0.75, "judge").reward, as_verdict(True, "judge").right
    (0.75, True)
    """
    verdict = value if isinstance(value, Verdict) else Verdict(_number(value), rule)
    if not math.isfinite(verdict.reward):
        raise ValueError(f"a reward must be a finite number, not {verdict.reward}")
    if bad := [name for name, part in verdict.parts.items() if not math.isfinite(part)]:
        raise ValueError(f"a reward's parts must be finite numbers, not {bad[0]} = {verdict.parts[bad[0]]}")
    return verdict


def as_verdicts(values: Any, rule: str, count: int) -> list[Verdict]:
    """The values of one call for a batch of `count` attempts."""
    if wrong := misfit(values, count):
        raise ValueError(wrong)
    return [as_verdict(value, rule) for value in values]


def misfit(values: Any, count: int) -> str:
    """How the value of one call is not a list with an entry for each of `count` attempts; empty where it is."""
    unordered = isinstance(values, Mapping | Set)
    if unordered or isinstance(values, str | bytes | int | float | Verdict) or not hasattr(values, "__len__"):
        return f"a reward returns a list with one entry an attempt, not {type(values).__name__}"
    return "" if len(values) == count else f"a reward returns one entry an attempt: {len(values)} for {count} attempts"


def _number(value: Any) -> float:
    if value is None or isinstance(value, str | bytes):
        raise TypeError(f"a reward is a number or a Verdict, not {value!r}")
    return float(value)


def attempt_row(attempt: Attempt) -> dict[str, Any]:
    """An attempt as JSON holds it."""
    return {name: getattr(attempt, name) for name in ("problem", "answers", "response", "finish", "tokens")} | {
        "row": dict(attempt.row)
    }


def row_attempt(row: dict[str, Any]) -> Attempt:
    """The attempt that `attempt_row` wrote."""
    return Attempt(**{**row, "answers": tuple(row["answers"])})


def verdict_row(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON holds it."""
    return {
        "reward": float(verdict.reward),
        "rule": str(verdict.rule),
        "answer": None if verdict.answer is None else str(verdict.answer),
        "error": None if verdict.error is None else str(verdict.error),
        "right": bool(verdict.right),
        "parts": {str(name): float(value) for name, value in verdict.parts.items()},
    }


class Placed(AbstractContextManager["Placed"]):
    """Around a call of a user's function: what it raises carries the line of the user's file as a note."""

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        frames = extract_tb(trace)[1:]  # the first is the caller's
        own = [frame for frame in frames if frame.filename == frames[0].filename]
        if error is not None and own:
            one = isinstance(error, AttributeError) and isinstance(error.obj, list) and error.name in ATTEMPT
            hint = "; a plain function gets a list of attempts, an async one a single attempt" if one else ""
            error.add_note(f"({Path(own[-1].filename).name}, line {own[-1].lineno}{hint})")


def served(
    name: str, rule: str, options: dict[str, Any]
) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]] | str]:
    """What a worker serves: the reward function called `name`, from attempts to verdicts as JSON holds them; to a
    sentence where it does not answer for each attempt, which is no attempt's doing.
    """
    function = find({}, name)

    def grade(rows: list[dict[str, Any]]) -> list[dict[str, Any]] | str:
        with Placed():
            values = function([row_attempt(row) for row in rows], **options)
        if wrong := misfit(values, len(rows)):
            return wrong
        return [verdict_row(as_verdict(value, rule)) for value in values]

    return grade
