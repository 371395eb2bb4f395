"""The one seam between the algorithm and the machines it runs on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from attnrl.errors import Asked, ConfigError, DataError, TrainingError
from attnrl.types import (
    Request,
    Rollout,
    Sample,
    Sampling,
    ScoreRequest,
    Scores,
    Scoring,
    as_floats,
    as_ids,
    as_metrics,
)


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


@runtime_checkable
class Overlapping(Protocol):
    """What an engine that draws while it updates has beside: its sampler has weights of its own."""

    def begin(self, requests: Sequence[Request], sampling: Sampling) -> Callable[[], list[Rollout]]:
        """Start to draw by the policy of now; at once, what waits for the rollouts or raises what went wrong. Until
        that is called, `begin`, `score` and `update` may be: the draws stay those of the policy at the start.
        """
        ...


def check_ids(rows: Sequence[NDArray[Any]], vocabulary: int, name: str) -> None:
    """For engines. Raise where a row is empty or holds a token id outside the model's vocabulary; that would end a
    process on a GPU, and leave other ranks of a cluster waiting.
    """
    for index, row in enumerate(rows):
        if not len(row):
            raise DataError(f"{name} {index}: no token")
        if len(wrong := row[(row < 0) | (row >= vocabulary)]):
            known = f"the model's vocabulary of {vocabulary} tokens"
            raise DataError(f"{name} {index}: token id {wrong[0]} is outside {known}")


def check_requests(requests: Sequence[Request], vocabulary: int, limits: Mapping[str, int | None]) -> None:
    """For engines. Raise on the first request that cannot be drawn from; `limits` are those of context and response
    together, by what is said of one that is exceeded.
    """
    for index, request in enumerate(requests):
        length, most = len(request.context), request.max_tokens
        if most < 1:
            raise ConfigError(f"request {index}: max_tokens = {most}: must be at least 1")
        if length == 0:
            raise DataError(f"request {index}: empty context: give it at least one token, such as the start token")
        for what, limit in limits.items():
            if limit is not None and length + most > limit:
                raise ConfigError(
                    f"request {index}: {length} context tokens and max_tokens = {most} exceed {what.format(limit)}"
                )
    check_ids([request.context for request in requests], vocabulary, "request")


def generate_by(backend: Sampler, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
    """What an engine draws for some requests, by the policy of now."""
    with _asked(backend):
        rollouts = backend.generate(requests, sampling) if requests else []
    return _drawn(backend, "generate", requests, rollouts, backend.version)


def begin_by(backend: Sampler, requests: Sequence[Request], sampling: Sampling) -> Callable[[], list[Rollout]]:
    """What to call for the rollouts when they are needed, of the policy of now. An engine with the verb `begin` draws
    them meanwhile; any other has drawn them when this returns.
    """
    version = backend.version
    if not isinstance(backend, Overlapping) or not requests:
        rollouts = generate_by(backend, requests, sampling)
        return lambda: rollouts
    with _asked(backend):
        wait = backend.begin(requests, sampling)
    if not callable(wait):
        raise TrainingError(f"begin of the engine {_name(backend)} must return a function that gives the rollouts")

    def drawn() -> list[Rollout]:
        with _asked(backend):
            rollouts = wait()
        return _drawn(backend, "begin", requests, rollouts, version)

    return drawn


def _drawn(
    backend: Sampler, verb: str, requests: Sequence[Request], rollouts: list[Rollout], version: int
) -> list[Rollout]:
    """The rollouts. TrainingError where an engine does not keep its promise: one of somebody's own would otherwise
    train on log-probs of other tokens, or of another policy.
    """
    _counted(backend, verb, rollouts, Rollout, len(requests))
    for number, (request, rollout) in enumerate(zip(requests, rollouts, strict=True), start=1):
        wrong = ""
        if not 1 <= len(rollout.ids) <= request.max_tokens:
            wrong = f"{len(rollout.ids)} tokens, where 1 to {request.max_tokens} may be drawn"
        elif not _finite(rollout.logprobs, len(rollout.ids)):
            wrong = f"log-probs that are not one finite number for each of its {len(rollout.ids)} tokens"
        elif rollout.finish not in ("stop", "length"):
            wrong = f"finish {rollout.finish!r}; known: stop, length"
        elif rollout.version != version:
            wrong = f"version {rollout.version}, where the policy has {version}"
        if wrong:
            raise TrainingError(
                f"the engine {_name(backend)} returned a rollout ({number} of {len(rollouts)}) with {wrong}"
            )
    return [replace(r, ids=as_ids(r.ids), logprobs=as_floats(r.logprobs)) for r in rollouts]


def score_by(backend: Backend, requests: Sequence[ScoreRequest], scoring: Scoring) -> list[Scores]:
    """What an engine scores; TrainingError where a response's scores are not finite numbers for its tokens and steps.
    FCI that was not asked for may be left out; it is then no number.
    """
    with _asked(backend):
        scores = backend.score(requests, scoring)
    _counted(backend, "score", scores, Scores, len(requests))
    kept = []
    for number, (request, score) in enumerate(zip(requests, scores, strict=True), start=1):
        tokens, steps = len(request.response), len(request.steps)
        fci = score.fci if scoring.fci or np.shape(score.fci) == (steps,) else np.full(steps, np.nan)
        asked = [("log-probs", score.logprobs, tokens, "tokens"), ("entropies", score.entropy, tokens, "tokens")]
        for name, found, wanted, noun in [*asked, *([("FCI", fci, steps, "steps")] if scoring.fci else [])]:
            if not _finite(found, wanted):
                raise TrainingError(
                    f"the engine {_name(backend)} returned scores ({number} of {len(scores)}) with {name} of shape "
                    f"{np.shape(found)}, not all finite or not one for each of {wanted} {noun}"
                )
        kept.append(Scores(as_floats(score.logprobs), as_floats(score.entropy), as_floats(fci)))
    return kept


def update_by(backend: Backend, samples: Sequence[Sample]) -> dict[str, float]:
    """The metrics of an update; TrainingError where they are none, or where the version is not one higher after it."""
    before = backend.version
    with _asked(backend):
        said = backend.update(samples)
    metrics = _metrics(backend, "update", said)
    if backend.version != before + 1:
        raise TrainingError(
            f"update of the engine {_name(backend)} must raise its version by 1, from {before}: it is {backend.version}"
        )
    return metrics


def metrics_by(backend: Backend) -> dict[str, float]:
    """What an engine did since it was last asked, in Python's own floats."""
    with _asked(backend):
        said = backend.metrics()
    return _metrics(backend, "metrics", said)


def _metrics(backend: Sampler, verb: str, found: Any) -> dict[str, float]:
    try:
        return as_metrics(found)
    except TypeError as error:
        raise TrainingError(f"{verb} of the engine {_name(backend)} must return {error}") from None


def _counted(backend: Sampler, verb: str, values: Any, kind: type, wanted: int) -> None:
    if not isinstance(values, list | tuple) or len(values) != wanted:
        got = len(values) if isinstance(values, list | tuple) else type(values).__name__
        raise TrainingError(
            f"{verb} of the engine {_name(backend)} must return a list of {wanted}, one a request: {got}"
        )
    if other := [type(value).__name__ for value in values if not isinstance(value, kind)]:
        raise TrainingError(
            f"{verb} of the engine {_name(backend)} must return attnrl.types.{kind.__name__}, not {other[0]}"
        )


def _finite(values: Any, wanted: int) -> bool:
    """Whether they are finite numbers, as many as wanted."""
    try:
        return np.shape(values) == (wanted,) and bool(np.all(np.isfinite(values)))
    except (TypeError, ValueError):  # no numbers at all
        return False


def _asked(backend: Sampler) -> Asked:
    return Asked("engine.name", f"engine {_name(backend)}")


def _name(backend: Sampler) -> str:
    return type(backend).__name__
