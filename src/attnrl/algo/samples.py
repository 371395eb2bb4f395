"""Which samples reach the update: those with signal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from attnrl.types import Sample

Drop = Literal["samples", "prompts", "none"]


def with_signal(samples: Sequence[Sample], drop: Drop = "samples") -> list[Sample]:
    """The samples to train on: without those whose advantages are all zero (paper), without prompts of which no
    sample has signal (released), or all of them.

    Paper: Sec. 3.2.2, "responses with zero advantages are discarded".
    """
    if drop == "none":
        return list(samples)
    if drop == "samples":
        return [s for s in samples if s.has_signal]
    useful = {s.uid for s in samples if s.has_signal}
    return [s for s in samples if s.uid in useful]
