"""Credit: weights on the advantages of tokens, from what a scoring forward says of the samples.

A credit is any function `(samples, scores, ...) -> list of [T] weights`; those here are named in `CREDITS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from attnrl.types import Floats, Sample, Scores, as_floats

Credit = Callable[[Sequence[Sample], Sequence[Scores]], list[Floats]]


def weigh(samples: Sequence[Sample], weights: Sequence[Floats]) -> list[Sample]:
    """The samples with each token's advantage multiplied by its weight."""
    return [replace(s, advantages=s.advantages * as_floats(w)) for s, w in zip(samples, weights, strict=True)]


CREDITS: dict[str, Callable[..., list[Floats]]] = {}
