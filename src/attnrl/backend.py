"""The one seam between the algorithm and the machines it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from attnrl.types import Request, Rollout, Sample, Sampling, ScoreRequest, Scores, Scoring


class Sampler(Protocol):
    """What draws responses; evaluation needs no more.

    `version` counts the policies since the start: 0 before the first call of `update`, one more after each call.
    """

    version: int

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """One rollout per request, in order, drawn by the current policy and marked with its version."""
        ...


class Backend(Sampler, Protocol):
    """An engine: seven verbs over one policy. `attnrl.local` is one machine; a cluster engine offers the same."""

    def score(self, requests: Sequence[ScoreRequest], scoring: Scoring) -> list[Scores]:
        """Log-probs, entropy and FCI of finished responses, from one forward pass each (Eq. 4-6)."""
        ...

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One pass over the samples in minibatches (Eq. 1); returns metrics `group/name` and raises the version."""
        ...

    def save(self, path: Path) -> None:
        """Write weights, optimizer and random states into the existing directory `path`."""
        ...

    def load(self, path: Path) -> None:
        """Restore exactly what `save` wrote."""
        ...

    def metrics(self) -> dict[str, float]:
        """What the engine did since it was last asked, as metrics `group/name`; they start anew."""
        ...

    def close(self) -> None:
        """Give back processes and memory; the engine is not used after it."""
        ...
