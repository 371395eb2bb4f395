"""Do the weights change, and do they arrive at the servers? Training that samples from old weights looks healthy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from attnrl.errors import TrainingError
from attnrl.types import Ids, Rollout, Scores

TOKENS, SEED = 16, 20260  # of each server's answer to the probe
LEAST_LR = 1e-12  # below it, an update may well leave every weight as it is
ALLOWED_GAP = {"float32": 1e-3, "bfloat16": 0.2}  # mean gap of log-probs, nats, that rounding can explain

Checksum = tuple[float, float]  # of the weights as the optimizer has them, and as servers get them


@dataclass(slots=True)
class Arrival:
    """What is known of the weights on both sides. The probe is one context, the same for the whole run."""

    dtype: str  # of the servers
    checksum: Checksum
    probe: Ids | None = None
    answers: list[Rollout] = field(default_factory=list)  # of the servers, when they were last asked
    moved: bool = False  # since then, weights have changed in the servers' dtype

    def updated(self, checksum: Checksum, *, update: int, lr: float) -> None:
        """Note the weights after an update; raises where none changed."""
        if checksum[0] == self.checksum[0] and lr > LEAST_LR:
            raise TrainingError(f"update {update} changed no weight: gradients do not reach the optimizer")
        self.moved |= checksum[1] != self.checksum[1]
        self.checksum = checksum

    def loaded(self, checksum: Checksum) -> None:
        """Note other weights that did not come from an update."""
        self.checksum, self.answers, self.moved = checksum, [], False

    def arrived(self, answers: Sequence[Rollout], scores: Sequence[Scores]) -> float:
        """The largest mean gap between a server's log-probs of its answer to the probe and the learner's, nats.

        Raises where it is more than rounding, and where a server answers to the last bit as it did before its weights
        should have changed.
        """
        gaps = [float(np.abs(s.logprobs - a.logprobs).mean()) for s, a in zip(scores, answers, strict=True)]
        if not max(gaps) <= ALLOWED_GAP[self.dtype]:
            raise TrainingError(
                f"server {int(np.argmax(gaps))} and learner disagree by {max(gaps):.3f} nats a token at version "
                f"{answers[0].version}: weights did not arrive whole"
            )
        before = self.answers if self.moved else []
        for server, (old, new) in enumerate(zip(before, answers, strict=False)):
            if old.ids.tobytes() == new.ids.tobytes() and old.logprobs.tobytes() == new.logprobs.tobytes():
                raise TrainingError(
                    f"server {server} answers as it did at version {old.version}: the weights of version "
                    f"{new.version} did not arrive"
                )
        self.answers, self.moved = list(answers), False
        return max(gaps)
