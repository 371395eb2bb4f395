"""The rewards that come with attnrl, in the shape of a user's own: a batch of attempts in, a verdict each out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attnrl.reward.declare import declare
from attnrl.reward.gym import gym
from attnrl.types import Attempt, Verdict
from attnrl.verify import Verifier, extract

BUFFER_SHARE = 5  # DAPO: a buffer of 4,096 tokens below a limit of 20,480


@declare(here=True)
def math(attempts: Sequence[Attempt], *, verifier: Verifier) -> list[Verdict]:
    """1 where the final answer is the gold, or one of them, as mathematics; else 0."""
    return verifier.grade([(attempt.response, attempt.answers) for attempt in attempts])


@declare(here=True)
def exact(attempts: Sequence[Attempt], *, whole: bool = False, ignore_case: bool = False) -> list[Verdict]:
    """1 where the answer is spelled like a gold, outer white space apart; else 0.

    The answer is what `attnrl.verify.extract` finds (a box, an answer tag, a closing statement); with `whole` it is the
    response after `</think>`.

    >>> [v.reward for v in exact([Attempt("", ("Paris",), r"\\boxed{ Paris }"), Attempt("", ("4",), r"\\boxed{4.0}")])]
    [1.0, 0.0]
    """

    def fold(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    def judge(attempt: Attempt) -> Verdict:
        golds = {fold(gold) for gold in attempt.answers if gold.strip()}
        if not golds:
            return Verdict(0.0, "empty_gold", None, "empty_gold")
        answer = attempt.response.rpartition("</think>")[2] if whole else extract(attempt.response).answer
        if answer is None:
            return Verdict(0.0, "no_answer")
        return Verdict(float(fold(answer) in golds), "string", answer.strip()[:200])

    return [judge(attempt) for attempt in attempts]


@declare(truncated=True, here=True)
def overlong(attempts: Sequence[Attempt], *, max_response_tokens: int, buffer: int | None = None) -> list[Verdict]:
    """The soft length penalty: 0 up to `buffer` tokens below the limit, from there down in a line to -1 at the limit.

    Paper: DAPO (arXiv 2503.14476), Eq. 13. The default buffer is a fifth of the limit, as there.

    >>> lengths = (50, 80, 90, 100)
    >>> [v.reward for v in overlong([Attempt("", (), "", tokens=n) for n in lengths], max_response_tokens=100)]
    [0.0, 0.0, -0.5, -1.0]
    """
    room = max(1, max_response_tokens // BUFFER_SHARE) if buffer is None else buffer
    if not 1 <= room <= max_response_tokens:
        raise ValueError(f"buffer = {buffer}: must be within 1 and the limit of {max_response_tokens} tokens")
    free = max_response_tokens - room

    def judge(attempt: Attempt) -> Verdict:
        if attempt.tokens <= 0 and attempt.response:
            return Verdict(0.0, "overlong", None, "no_tokens")  # whoever made the attempt did not count them
        over = min(max(0, attempt.tokens - free), room)
        return Verdict(-over / room if over else 0.0, "overlong")

    return [judge(attempt) for attempt in attempts]


@declare(truncated=True, here=True)
def required_tags(
    attempts: Sequence[Attempt], *, tags: Sequence[str] = ("think", "answer"), opened: bool = False
) -> list[Verdict]:
    """1 where the response is its required tags in order, each once, opened and closed, with text inside; else 0.

    `opened` says that the prompt already holds the first opening tag, as chat templates of thinking models do.

    >>> good, bad = "<think>a</think><answer>4</answer>", "<answer>4</answer><think>a</think>"
    >>> [v.reward for v in required_tags([Attempt("", (), good), Attempt("", (), bad)])]
    [1.0, 0.0]
    """
    if isinstance(tags, str) or not tags:
        raise ValueError(f"tags = {tags!r}: must be a list of names, such as ['think', 'answer']")
    wanted = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")][1 if opened else 0 :]
    marks = re.compile("|".join(f"</?{re.escape(tag)}>" for tag in tags))

    def judge(response: str) -> bool:
        found = list(marks.finditer(response))
        if [mark.group() for mark in found] != wanted:
            return False
        starts = ([0] if opened else []) + [mark.end() for mark in found if mark.group()[1] != "/"]
        stops = [mark.start() for mark in found if mark.group()[1] == "/"]
        return all(response[start:stop].strip() for start, stop in zip(starts, stops, strict=True))

    return [Verdict(float(judge(attempt.response)), "format") for attempt in attempts]


REWARDS: Mapping[str, Callable[..., Any]] = {
    "math": math,
    "exact": exact,
    "format": required_tags,
    "overlong": overlong,
    "gym": gym,
}
