"""What a reward function says of itself, as attributes of the function: nothing is decided by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

TRUNCATED = "sees_truncated"
WHOLE = "whole_batch"
HERE = "runs_here"


def declare(
    *, truncated: bool = False, whole_batch: bool = False, here: bool = False
) -> Callable[[Function], Function]:
    """A decorator for a reward function.

    `truncated`: it is also asked about responses cut off by the length limit, which otherwise earn 0.
    `whole_batch`: it is called once with the whole batch, because rewards depend on each other; otherwise in pieces.
    `here`: it runs in the training process, without limits; only for what is fast and cannot fail.

    >>> @declare(truncated=True)
    ... def short(attempts):
    ...     return [float(attempt.tokens < 100) for attempt in attempts]
    >>> declared(short, TRUNCATED), declared(short, WHOLE)
    (True, False)
    """

    def mark(function: Function) -> Function:
        for name, value in ((TRUNCATED, truncated), (WHOLE, whole_batch), (HERE, here)):
            setattr(function, name, value)
        return function

    return mark


def declared(function: Callable[..., Any], name: str) -> bool:
    """What the function declares; False where it says nothing."""
    return bool(getattr(function, name, False))
