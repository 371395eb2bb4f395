"""Updates made and left out, and the learning rate of the next one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attnrl.config import UpdateConfig
from attnrl.errors import TrainingError


@dataclass(slots=True)
class Counters:
    """Optimizer steps since the start of a run; part of its checkpoint."""

    updates: int = 0  # steps made
    skipped: int = 0  # steps left out for a non-finite loss or gradient, in all
    skipped_in_a_row: int = 0

    def made(self) -> None:
        self.updates += 1
        self.skipped_in_a_row = 0

    def skip(self, most: int) -> None:
        """One more is left out; raises at `most` in a row."""
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= most:
            raise TrainingError(
                f"{self.skipped_in_a_row} updates in a row had a non-finite loss or gradient norm; "
                "resume from an earlier checkpoint with a lower lr or float32"
            )


def learning_rate(options: UpdateConfig, updates: int) -> float:
    """The rate of the next update after `updates` were made: a linear rise over the warm-up, then constant, or down to
    0 after `lr_decay_updates` updates, on a line or on half a cosine.

    >>> linear = UpdateConfig(lr=1.0, lr_schedule="linear", lr_decay_updates=4)
    >>> [learning_rate(linear, n) for n in range(6)]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    warmup, end = options.lr_warmup_updates, options.lr_decay_updates
    if updates < warmup:
        return options.lr * ((updates + 1) / warmup)
    if options.lr_schedule == "constant":
        return options.lr
    assert end is not None, "the config was validated"
    left = max(0.0, (end - updates) / (end - warmup))
    return options.lr * (left if options.lr_schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left)))
