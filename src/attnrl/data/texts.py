"""What a tokenizer says of single tokens: their texts, which the segmenters read, and those that end a response."""

from __future__ import annotations

from typing import Any

from attnrl.algo.steps import THINK_END
from attnrl.errors import ConfigError
from attnrl.types import Ids

THINK_MARKS = ("<think>", THINK_END)  # text to us, also where a tokenizer calls them special


class TokenTexts:
    """Called with ids, the text of each token on its own; every id is decoded once.

    A special token, such as the one that ends a text, has no text: it counts as white space and makes no step. A token
    that is a part of a character reads as a replacement character; line breaks are never parts, so steps are cut in
    the right places all the same.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        ask = getattr(tokenizer, "get_added_tokens_decoder", None)  # a bare `tokenizers.Tokenizer` has it
        added = ask() if ask else tokenizer.added_tokens_decoder
        special = {*getattr(tokenizer, "all_special_ids", ()), *(i for i, token in added.items() if token.special)}
        self._texts = {int(i): "" for i in special if self._decode(int(i)).strip() not in THINK_MARKS}

    def __call__(self, ids: Ids) -> list[str]:
        numbers = ids.tolist()
        for missing in set(numbers) - self._texts.keys():
            self._texts[missing] = self._decode(missing)
        return [self._texts[n] for n in numbers]

    def _decode(self, number: int) -> str:
        text: str = self._tokenizer.decode([number], skip_special_tokens=False)
        return text


def stop_token_ids(generation: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a response: the tokenizer's end token and those of a model's generation config, if any."""
    found: set[int] = set()
    for source in (getattr(generation, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)):
        if isinstance(source, int):
            found.add(source)
        elif source is not None:
            found.update(int(i) for i in source)
    if not found:
        raise ConfigError("the tokenizer has no end token and the generation config names none: responses cannot end")
    return tuple(sorted(found))
