"""Do the weights change, and do they arrive at the servers? Training that samples from old weights looks healthy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from attnrl.errors import TrainingError
from attnrl.types import Ids, Rollout, ScoreRequest, Scores

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
    drawn: list[Rollout] = field(default_factory=list)  # each server's answer to the probe, not compared yet
    answers: list[Rollout] = field(default_factory=list)  # those that were compared last
    moved: bool = False  # since then, weights have changed in the servers' dtype
    gap: float = 0.0  # the largest since `metrics` was last asked

    def updated(self, checksum: Checksum, *, update: int, lr: float) -> None:
        """Note the weights after an update; raises where none changed."""
        if checksum[0] == self.checksum[0] and lr > LEAST_LR:
            raise TrainingError(f"update {update} changed no weight: gradients do not reach the optimizer")
        self.moved |= checksum[1] != self.checksum[1]
        self.checksum = checksum

    def loaded(self, checksum: Checksum) -> None:
        """Note other weights that did not come from an update."""
        self.checksum, self.answers, self.moved = checksum, [], False

    def asked(self) -> list[ScoreRequest]:
        """What the learner is to score: what was drawn."""
        return [ScoreRequest(self.probe, answer.ids, ()) for answer in self.drawn if self.probe is not None]

    def arrived(self, scores: Sequence[Scores]) -> None:
        """Compare what was drawn with the learner's scores of it; raises where log-probs differ by more than rounding,
        and where a server answers to the last bit as it did before its weights should have changed.
        """
        answers, self.drawn = self.drawn, []
        gaps = [float(np.abs(s.logprobs - a.logprobs).mean()) for s, a in zip(scores, answers, strict=True)]
        worst = int(np.argmax(gaps))  # the first that is no number, where one is
        if not gaps[worst] <= ALLOWED_GAP[self.dtype]:
            raise TrainingError(
                f"server {worst} and learner disagree by {gaps[worst]:.3f} nats a token at version "
                f"{answers[0].version}: weights did not arrive whole"
            )
        before = self.answers if self.moved else []
        for server, (old, new) in enumerate(zip(before, answers, strict=False)):
            if old.ids.tobytes() == new.ids.tobytes() and old.logprobs.tobytes() == new.logprobs.tobytes():
                raise TrainingError(
                    f"server {server} answers as it did at version {old.version}: the weights of version "
                    f"{new.version} did not arrive"
                )
        self.answers, self.moved, self.gap = answers, False, max(self.gap, gaps[worst])

    def metrics(self) -> dict[str, float]:
        """The largest mean gap between a server's log-probs and the learner's since last asked, nats."""
        found, self.gap = {"sync/logprob_gap": self.gap}, 0.0
        return found
