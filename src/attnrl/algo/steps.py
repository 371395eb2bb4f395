"""Response -> steps: half-open token ranges that partition a response.

Segmenters work on the texts of single tokens, so any tokenizer will do. A segmenter is any function
`texts -> tuple[Step, ...]`; the ones here are named in `SEGMENTERS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np

from attnrl.algo.parts import Count
from attnrl.types import Step

Segmenter = Callable[[Sequence[str]], tuple[Step, ...]]

THINK_END = "</think>"
BLANK_LINE = re.compile(r"\n\r?\n")
LINE = re.compile(r"\n")
SENTENCE = re.compile(r"[.!?]+[\"')\]}*]*(?=\s|$)|\n")


def blank_lines(texts: Sequence[str]) -> tuple[Step, ...]:
    """Steps cut at blank lines; without any blank line, at line breaks; without those, one step.

    A step ends with the token whose text completes the blank line, whether one token or several spell it.
    Paper: Sec. 3.1.1, step 1.

    >>> [(s.start, s.stop) for s in blank_lines(["One", ".\\n\\n", "Two", "\\n", "\\n", "\\n", "Three"])]
    [(0, 2), (2, 5), (5, 7)]
    """
    text = "".join(texts)
    pattern = BLANK_LINE if BLANK_LINE.search(text) else LINE
    return _cut(texts, text, pattern)


def lines(texts: Sequence[str]) -> tuple[Step, ...]:
    """Steps cut at line breaks."""
    return _cut(texts, "".join(texts), LINE)


def sentences(texts: Sequence[str]) -> tuple[Step, ...]:
    """Steps cut at sentence ends and line breaks.

    >>> [(s.start, s.stop) for s in sentences(["It", " is", " 3.5", ".", " So", " what", "?"])]
    [(0, 4), (4, 7)]
    """
    return _cut(texts, "".join(texts), SENTENCE)


def every_n_tokens(texts: Sequence[str], *, tokens: Count = 512) -> tuple[Step, ...]:
    """Steps of `tokens` tokens each, the last one shorter (TreePO, SPO tree).

    >>> [(s.start, s.stop) for s in every_n_tokens(["a"] * 5, tokens=2)]
    [(0, 2), (2, 4), (4, 5)]
    """
    return _mark_thinking(range(tokens, len(texts), tokens), texts, "".join(texts))


SEGMENTERS: dict[str, Callable[..., tuple[Step, ...]]] = {
    "blank_lines": blank_lines,
    "lines": lines,
    "sentences": sentences,
    "every_n_tokens": every_n_tokens,
}


def _offsets(texts: Sequence[str]) -> np.ndarray:
    """[T + 1] character offset of each token in the joined text."""
    offsets = np.zeros(len(texts) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, texts), dtype=np.int64, count=len(texts)), out=offsets[1:])
    return offsets


def _cut(texts: Sequence[str], text: str, pattern: re.Pattern[str]) -> tuple[Step, ...]:
    """Steps that end with the token holding the last character of each match; no step is white space alone."""
    offsets = _offsets(texts)
    last_characters = [match.end() - 1 for match in pattern.finditer(text)]
    ends = np.unique(np.searchsorted(offsets, last_characters, side="right"))
    cuts: list[int] = []
    start = 0
    for stop in ends.tolist():
        if text[offsets[start] : offsets[stop]].strip():
            cuts.append(stop)
            start = stop
    if cuts and not text[offsets[cuts[-1]] :].strip():
        cuts.pop()  # what is left is white space: it stays with the last step
    return _mark_thinking(cuts, texts, text)


def _mark_thinking(cuts: Iterable[int], texts: Sequence[str], text: str) -> tuple[Step, ...]:
    """Steps between the cuts; from the step in which `</think>` begins on, they are not thinking."""
    if not texts:
        return ()
    bounds = [0, *cuts, len(texts)]
    found = text.find(THINK_END)
    end_of_thinking = len(texts)
    if found >= 0:
        end_of_thinking = int(np.searchsorted(_offsets(texts), found, side="right")) - 1
    return tuple(Step(a, b, thinking=b <= end_of_thinking) for a, b in pairwise(bounds))
