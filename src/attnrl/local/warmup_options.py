"""What a warm-up may spend, how its learning rate goes, and when it has learned enough."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from attnrl.config import Section


class WarmupOptions(Section):
    """Budget, schedule and checks of a warm-up."""

    seconds: float | None = Field(None, gt=0)
    """Time budget, from the first batch on; the learning rate reaches its end exactly then."""
    tokens: int | None = Field(None, gt=0)
    """Token budget (prompts included); with both budgets the first one to run out ends it."""
    target_accuracy: float | None = None
    """Stop once held-out accuracy reaches this share."""
    target_loss: float | None = None
    """Stop once the loss since the last check is at most this; with both targets, once both are reached: an accuracy
    can be there before all is learned that it does not need."""
    batch_tokens: int | None = Field(None, gt=0)
    """Packed tokens per update; by default 32,768 on CUDA and 4,096 elsewhere."""
    microbatch_tokens: int | None = Field(None, gt=0)
    """Tokens per forward and backward; by default all of a batch on CUDA and 1,024 elsewhere."""
    lr: float = Field(2e-3, gt=0)
    """Highest learning rate."""
    final_lr: float = 0.02
    """Share of `lr` at the end of the budget."""
    schedule: Literal["cosine", "linear"] = "cosine"
    """How the learning rate falls."""
    warmup_updates: int = 100
    """Updates of linear rise at the start."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's averages."""
    weight_decay: float = 0.05
    """AdamW's weight decay, on matrices."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    evaluations: int = 8
    """Held-out checks, spread evenly over the budget; the last one after the end."""
    evaluation_tasks: int = Field(256, gt=0)
    """Held-out tasks, or prompts of your own, in each check."""
    temperature: float = 1.0
    """Sampling temperature of the checks."""
    workers: int | None = None
    """Processes that make tasks; by default all cores but one, at most 14; 0: none."""
    seed: int = 0
    """Seed of weights and tasks."""
    save_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Weights in the saved model."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.seconds is None and self.tokens is None:
            raise ValueError("a warm-up needs a budget: --seconds, --tokens or both")
        return self

    def reached(self, accuracy: float, loss: float) -> bool:
        """Whether there is a target, and all that there are have been reached.

        >>> options = WarmupOptions(tokens=9, target_accuracy=0.4, target_loss=0.2)
        >>> options.reached(0.5, 0.7), options.reached(0.5, 0.1), WarmupOptions(tokens=9).reached(1.0, 0.0)
        (False, True, False)
        """
        accurate = self.target_accuracy is None or accuracy >= self.target_accuracy
        low = self.target_loss is None or loss <= self.target_loss
        return accurate and low and (self.target_accuracy, self.target_loss) != (None, None)

    def learning_rate(self, share: float, updates: int) -> float:
        """After `updates` updates and this share of the budget.

        >>> options = WarmupOptions(seconds=60, lr=1.0, final_lr=0.1, warmup_updates=10, schedule="linear")
        >>> [round(options.learning_rate(s, u), 3) for s, u in ((0.0, 4), (0.0, 99), (0.5, 99), (1.0, 99))]
        [0.5, 1.0, 0.55, 0.1]
        """
        rise = min(1.0, (updates + 1) / self.warmup_updates) if self.warmup_updates else 1.0
        left = 1.0 - min(1.0, share)
        fall = left if self.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))
        return self.lr * rise * (self.final_lr + (1 - self.final_lr) * fall)
