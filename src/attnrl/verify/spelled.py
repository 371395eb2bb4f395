"""Whole numbers in words: twelve, twenty-one, one hundred and five, a dozen."""

from __future__ import annotations

import re

from attnrl.verify.tokens import MAGNITUDES, NUMBER_WORDS, UNIT_WORDS

_SMALL = {word: value for value, word in enumerate(NUMBER_WORDS)}
_TENS = {
    f"{stem}ty": 10 * value
    for value, stem in enumerate(("twen", "thir", "for", "fif", "six", "seven", "eigh", "nine"), start=2)
}
_PHRASE = re.compile(r"[A-Za-z]+(?:[ -]{1,3}[A-Za-z]+){0,11}")
MAX_CHARS = 100


def spelled(text: str) -> int | None:
    """The number a phrase spells, units after it left out; None where it is anything else.

    >>> spelled("Twenty-one"), spelled("one hundred and five dollars"), spelled("one two")
    (21, 105, None)
    """
    if len(text) > MAX_CHARS or not _PHRASE.fullmatch(text):
        return None
    words = re.split(r"[ -]+", text.casefold())
    while len(words) > 1 and words[-1] in UNIT_WORDS:
        words.pop()
    if words[0] == "a" and len(words) > 1 and words[1] in MAGNITUDES:
        words[0] = "one"
    total, group, smallest = 0, None, 10**15
    for at, word in enumerate(words):
        if word == "and" and 0 < at < len(words) - 1 and words[at - 1] in MAGNITUDES:
            continue
        size = MAGNITUDES.get(word)
        if size is None or word in ("hundred", "dozen"):
            group = _extended(group, word)
            if group is None:
                return None
        elif group and size < smallest:
            total, group, smallest = total + group * size, None, size
        else:
            return None
    return total + (group or 0)


def _extended(group: int | None, word: str) -> int | None:
    """The number below one thousand with one more word; None where the word does not fit."""
    if word in ("hundred", "dozen"):
        return group * MAGNITUDES[word] if group and group < 100 else None
    value = _SMALL.get(word, _TENS.get(word))
    if value is None or group is None:
        return value
    fits = (group % 100 == 0 and value > 0) or (group % 100 >= 20 and group % 10 == 0 and 0 < value < 10)
    return group + value if group and fits else None
