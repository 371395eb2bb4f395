"""Token ids -> the texts of single tokens, which the segmenters read."""

from __future__ import annotations

from typing import Any

from attnrl.types import Ids


class TokenTexts:
    """Called with ids, the text of each token on its own; every id is decoded once.

    A token that is a part of a character reads as a replacement character; line breaks are never parts, so steps are
    cut in the right places all the same.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __call__(self, ids: Ids) -> list[str]:
        numbers = ids.tolist()
        for missing in set(numbers) - self._texts.keys():
            self._texts[missing] = self._tokenizer.decode([missing], skip_special_tokens=False)
        return [self._texts[n] for n in numbers]
