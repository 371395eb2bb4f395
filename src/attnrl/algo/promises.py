"""Parts are asked here, and their answers held against what each kind of part promises.

A part of somebody's own would otherwise fail far from its cause, or train on nonsense. What breaks a promise raises
TrainingError with the key of the config, the part's name, and what is wrong; what a part raises itself is noted to be
its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import index
from typing import Any

import numpy as np

from attnrl.algo.adaptive import Budget, Filter
from attnrl.algo.advantages import Estimator
from attnrl.algo.branching import Rule
from attnrl.algo.credit import Credit
from attnrl.algo.steps import Segmenter
from attnrl.errors import Asked, TrainingError
from attnrl.types import Floats, Forest, Group, Kept, Prompt, Sample, Scores, Step, Trunk, as_floats, as_ids


def broken(kind: str, part: Callable[..., Any], said: str, section: str = "algo") -> TrainingError:
    """The error of a part that does not keep its promise.

    >>> raise broken("budget", max, "returned 0.5")
    Traceback (most recent call last):
    attnrl.errors.TrainingError: algo.budget: the budget max returned 0.5
    """
    return TrainingError(f"{section}.{kind}: the {kind} {_name(part)} {said}")


def asking(kind: str, part: Callable[..., Any]) -> Asked:
    return Asked(f"algo.{kind}", f"{kind} {_name(part)}")


def steps_by(segmenter: Segmenter, texts: Sequence[str]) -> tuple[Step, ...]:
    """The steps of a response: they follow each other from its first token to its last."""
    with asking("segmenter", segmenter):
        steps = segmenter(texts)
    if not _all_of(steps, Step):
        raise broken("segmenter", segmenter, f"must return a tuple of attnrl.types.Step, not {_shown(steps)}")
    starts, stops = [s.start for s in steps], [s.stop for s in steps]
    if [0, *stops] != [*starts, len(texts)] or any(s.tokens < 1 for s in steps):
        spans = _shown([(s.start, s.stop) for s in steps])
        raise broken("segmenter", segmenter, f"must cut {len(texts)} tokens into steps without gap or overlap: {spans}")
    return tuple(steps)


def kept_by(filter: Filter, groups: Sequence[Group], memory: Mapping[str, Any]) -> Kept:
    """What a filter decides, a mask and a reason for each group, and remembers, as JSON holds it."""
    with asking("filter", filter):
        kept = filter(groups, memory)
    if not isinstance(kept, Kept) or not len(kept.mask) == len(kept.reasons) == len(groups):
        want = f"must return an attnrl.types.Kept with a mask and reasons of {len(groups)}, one entry a group"
        raise broken("filter", filter, want)
    for name, values, kind in (
        ("mask", kept.mask, bool | np.bool_),
        ("reasons", kept.reasons, str),
        ("memory", [kept.memory], dict),
    ):
        if other := [value for value in values if not isinstance(value, kind)]:
            what = "a dict" if kind is dict else f"{'text' if kind is str else 'True or False'} for each group"
            raise broken("filter", filter, f"must return a Kept whose {name} is {what}, not {_shown(other[0])}")
    try:  # as a checkpoint gives it back: a run that goes on is the same run
        return replace(kept, memory=json.loads(json.dumps(kept.memory)))
    except (TypeError, ValueError) as error:
        raise broken("filter", filter, f"must remember what JSON can hold, for the checkpoint: {error}") from None


def trees_by(budget: Budget, accuracy: float, trees: int) -> int:
    """How many of a prompt's trunks become trees: a whole number from 0 on; those there are bound it."""
    with asking("budget", budget):
        found = budget(accuracy, trees)
    wanted = _whole(found)
    if wanted is None or wanted < 0:
        raise broken("budget", budget, f"must return a number of trees, a whole one from 0 on, not {_shown(found)}")
    return wanted


def points_by(rule: Rule, prompt: Prompt, trunk: Trunk, rng: np.random.Generator) -> tuple[int, ...]:
    """Where a trunk branches: inner token offsets in order; one named twice gets twice the branches."""
    tokens = len(trunk.rollout.ids)
    with asking("rule", rule):
        found = rule(prompt, trunk, rng)
    points = [_whole(p) for p in found] if isinstance(found, list | tuple | range | np.ndarray) else [None]
    inner = [p for p in points if p is not None and 0 < p < tokens]
    if inner != points or inner != sorted(inner):
        want = f"must return branch points p in order, whole numbers with 0 < p < {tokens}, the trunk's tokens"
        raise broken("rule", rule, f"{want}, not {_shown(found)}")
    return tuple(inner)


def samples_by(estimator: Estimator, forest: Forest, rng: np.random.Generator) -> list[Sample]:
    """The samples of a forest, each with a finite advantage and log-prob for every token of its response."""
    with asking("estimator", estimator):
        samples = estimator(forest, rng)
    if not _all_of(samples, Sample):
        raise broken("estimator", estimator, f"must return a list of attnrl.types.Sample, not {_shown(samples)}")
    for number, sample in enumerate(samples, start=1):
        shape = np.shape(sample.response)
        for name in ("advantages", "logprobs"):
            if wrong := _misfit(getattr(sample, name), shape):
                which = f"a sample ({number} of {len(samples)} of prompt {forest.prompt.uid})"
                raise broken("estimator", estimator, f"returned {which} whose {name} {wrong}")
        if sample.mask is not None and np.shape(sample.mask) != shape:
            masks = f"a mask of {np.shape(sample.mask)} for a response of {shape[0]} tokens"
            raise broken("estimator", estimator, f"returned a sample ({number} of {len(samples)}) with {masks}")
    return [
        replace(s, response=as_ids(s.response), advantages=as_floats(s.advantages), logprobs=as_floats(s.logprobs))
        for s in samples
    ]


def weights_by(credit: Credit, samples: Sequence[Sample], scores: Sequence[Scores]) -> list[Floats]:
    """The weights of each sample's tokens, finite ones."""
    with asking("credit", credit):
        weights = credit(samples, scores)
    if not isinstance(weights, list | tuple) or len(weights) != len(samples):
        found = f"{len(weights)} entries" if isinstance(weights, list | tuple) else _shown(weights)
        raise broken("credit", credit, f"must return a list of {len(samples)}, weights for each sample: {found}")
    for number, (sample, weight) in enumerate(zip(samples, weights, strict=True), start=1):
        if wrong := _misfit(weight, np.shape(sample.response)):
            raise broken("credit", credit, f"returned weights ({number} of {len(samples)}) that {wrong}")
    return [as_floats(weight) for weight in weights]


def _name(part: Callable[..., Any]) -> str:
    return str(getattr(getattr(part, "func", part), "__name__", part))


def _all_of(values: Any, kind: type) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, kind) for value in values)


def _whole(value: Any) -> int | None:
    """A whole number as Python's own; None for all else."""
    try:
        return index(value)
    except TypeError:
        return None


def _misfit(values: Any, shape: tuple[int, ...]) -> str:
    """How values differ from a finite one for each token; empty where they do not."""
    if np.shape(values) != shape:
        return f"are of shape {np.shape(values)}, where the response has {shape[0]} tokens"
    return "" if np.all(np.isfinite(values)) else "are not all finite"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
