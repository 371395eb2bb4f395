"""One training iteration, in the words of the paper: plan, sample, score, update, adapt.

Two schedules over the same functions: one step off-policy (AttnRL, Sec. 3.3), and on-policy (GRPO, TreeRL).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np

from attnrl.algo.adaptive import Budget, Scope, attention_filter, next_batch_size
from attnrl.algo.advantages import Estimator
from attnrl.algo.branching import Rule
from attnrl.algo.forest import Plan, branch_requests, plan, plant, trunk_requests, whole_responses
from attnrl.algo.samples import Drop, with_signal
from attnrl.algo.statistics import forest_statistics, generation_statistics, group_statistics, sample_statistics
from attnrl.backend import Backend
from attnrl.types import (
    Forest,
    Group,
    Ids,
    Prompt,
    Request,
    Rollout,
    Sample,
    Sampling,
    ScoreRequest,
    Scores,
    State,
    Step,
    Trunk,
    Verdict,
)


class Stream(Protocol):
    """An endless, resumable source of prompts."""

    def draw(self, position: dict[str, Any], n: int) -> tuple[list[Prompt], dict[str, Any]]: ...


Grade = Callable[[Sequence[tuple[Ids, tuple[str, ...]]]], list[Verdict]]


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What an iteration is made of; the command line puts it together from a config."""

    backend: Backend
    stream: Stream
    segment: Callable[[Ids], tuple[Step, ...]]  # response -> steps
    grade: Grade  # (response, answers) -> verdict
    rule: Rule  # where to branch, Eq. 7
    budget: Budget  # trees per prompt, Eq. 9
    estimator: Estimator  # advantages, Eq. 2-3
    sampling: Sampling
    max_response_tokens: int
    prompts: int = 64  # first and target batch, in prompts
    group: int = 6
    points: int = 2
    width: int = 2
    filter: Scope = "easy"  # Eq. 8
    mode: Literal["paper", "released"] = "paper"
    needs_scores: bool = True
    adaptive_batch: bool = True  # Eq. 10
    history: float = 0.9
    max_prompts: int = 256
    drop: Drop = "samples"
    grade_truncated: bool = False
    activity: Callable[[], dict[str, float]] = dict  # the engine's own metrics since it was last asked

    @property
    def target_samples(self) -> int:
        """B': the samples a full batch has."""
        leaves = self.group * (1 + self.points * self.width)
        return self.prompts * leaves


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What an iteration leaves behind: the next state, its metrics, and its forests for the record."""

    state: State
    metrics: dict[str, float]
    forests: list[Forest]
    samples: list[Sample]


@dataclass(slots=True)
class Clock:
    """Seconds per phase, and verdicts that are errors by their kind."""

    seconds: dict[str, float] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        named = {f"seconds/{name}": spent for name, spent in self.seconds.items()}
        errors = {f"verify/{kind}": float(count) for kind, count in self.errors.items()}
        total = {"verify/errors": float(self.errors.total()), "seconds/iteration": sum(named.values())}
        return {**errors, **named, **total}


def one_step_off_policy(state: State, parts: Parts) -> Outcome:
    """An iteration with one generation call: branches of batch m and trunks of batch m + 1, both by policy m.

    Paper: Sec. 3.3, Fig. 7.
    """
    clock, rng = Clock(), restore(state.rng)
    primed: list[Rollout] = []
    if not state.waiting:  # before the first iteration no trunks wait yet
        state, primed = prime(state, parts, rng, clock)
    # plan
    kept, fci_sum, fci_count = attention_filter(
        state.waiting, scope=parts.filter, mode=parts.mode, fci_sum=state.fci_sum, fci_count=state.fci_count
    )
    plans = [plan(group, rule=parts.rule, budget=parts.budget, rng=rng) for group in kept]
    prompts, stream = parts.stream.draw(state.stream, round(state.batch_size))
    # sample
    branches, trunks = request_branches(plans, parts, rng), request_trunks(prompts, parts, rng)
    with clock.phase("generate"):
        rollouts = parts.backend.generate([*branches, *trunks], parts.sampling)
    with clock.phase("verify"):
        forests = grow(plans, rollouts[: len(branches)], parts, clock)
        verdicts = grade_trunks(prompts, rollouts[len(branches) :], parts, clock)
    # score
    with clock.phase("score"):
        waiting = score_trunks(prompts, rollouts[len(branches) :], verdicts, parts)
    # update
    with clock.phase("update"):
        samples, learned = update(forests, parts, rng)
    # adapt
    batch_size = adapt(state.batch_size, samples, parts)
    after = replace(
        state,
        iteration=state.iteration + 1,
        batch_size=batch_size,
        waiting=tuple(waiting),
        fci_sum=fci_sum,
        fci_count=fci_count,
        stream=stream,
        rng=dict(rng.bit_generator.state),
        generated_tokens=state.generated_tokens + sum(len(r.ids) for r in rollouts),
    )
    metrics = describe(state, state.waiting, forests, samples, [*primed, *rollouts], parts)
    metrics |= learned | parts.activity() | clock.metrics()
    return Outcome(after, metrics, forests, samples)


def on_policy(state: State, parts: Parts) -> Outcome:
    """An iteration with two generation calls, trunks and then branches, all by the policy that is updated."""
    clock, rng = Clock(), restore(state.rng)
    # plan
    prompts, stream = parts.stream.draw(state.stream, round(state.batch_size))
    # sample
    with clock.phase("generate"):
        first = parts.backend.generate(request_trunks(prompts, parts, rng), parts.sampling)
    with clock.phase("verify"):
        verdicts = grade_trunks(prompts, first, parts, clock)
    # score
    with clock.phase("score"):
        groups = score_trunks(prompts, first, verdicts, parts)
    # branch
    kept, fci_sum, fci_count = attention_filter(
        groups, scope=parts.filter, mode=parts.mode, fci_sum=state.fci_sum, fci_count=state.fci_count
    )
    plans = [plan(group, rule=parts.rule, budget=parts.budget, rng=rng) for group in kept]
    branches = request_branches(plans, parts, rng)
    with clock.phase("generate"):
        second = parts.backend.generate(branches, parts.sampling) if branches else []
    with clock.phase("verify"):
        forests = grow(plans, second, parts, clock)
    # update
    with clock.phase("update"):
        samples, learned = update(forests, parts, rng)
    # adapt
    after = replace(
        state,
        iteration=state.iteration + 1,
        batch_size=adapt(state.batch_size, samples, parts),
        fci_sum=fci_sum,
        fci_count=fci_count,
        stream=stream,
        rng=dict(rng.bit_generator.state),
        generated_tokens=state.generated_tokens + sum(len(r.ids) for r in [*first, *second]),
    )
    metrics = (
        describe(state, groups, forests, samples, [*first, *second], parts)
        | learned
        | parts.activity()
        | clock.metrics()
    )
    return Outcome(after, metrics, forests, samples)


SCHEDULES = {"one_step_off_policy": one_step_off_policy, "on_policy": on_policy}


def first_state(parts: Parts, seed: int) -> State:
    """The state before the first iteration."""
    return State(batch_size=float(parts.prompts), rng=dict(np.random.default_rng(seed).bit_generator.state))


def restore(state: dict[str, Any]) -> np.random.Generator:
    """The run's random generator, where the last iteration left it."""
    rng = np.random.default_rng(0)
    rng.bit_generator.state = state
    return rng


def prime(state: State, parts: Parts, rng: np.random.Generator, clock: Clock) -> tuple[State, list[Rollout]]:
    """The state with a batch's trunks waiting, and those trunks: the one extra generation call of a run."""
    prompts, stream = parts.stream.draw(state.stream, round(state.batch_size))
    with clock.phase("generate"):
        rollouts = parts.backend.generate(request_trunks(prompts, parts, rng), parts.sampling)
    with clock.phase("verify"):
        verdicts = grade_trunks(prompts, rollouts, parts, clock)
    with clock.phase("score"):
        waiting = score_trunks(prompts, rollouts, verdicts, parts)
    drawn = state.generated_tokens + sum(len(r.ids) for r in rollouts)
    return replace(state, waiting=tuple(waiting), stream=stream, generated_tokens=drawn), rollouts


def request_trunks(prompts: Sequence[Prompt], parts: Parts, rng: np.random.Generator) -> list[Request]:
    limit = parts.max_response_tokens
    return [r for p in prompts for r in trunk_requests(p.ids, group=parts.group, max_tokens=limit, rng=rng)]


def request_branches(plans: Sequence[Plan], parts: Parts, rng: np.random.Generator) -> list[Request]:
    limit = parts.max_response_tokens
    return [r for p in plans for r in branch_requests(p, width=parts.width, max_tokens=limit, rng=rng)]


def grade(
    responses: Sequence[Ids], rollouts: Sequence[Rollout], prompts: Sequence[Prompt], parts: Parts, clock: Clock
) -> list[Verdict]:
    """Verdicts of whole responses; one cut off by the length limit is wrong without being read."""
    verdicts = [Verdict(0.0, "truncated")] * len(responses)
    read = [i for i, r in enumerate(rollouts) if r.finish == "stop" or parts.grade_truncated]
    for i, verdict in zip(read, parts.grade([(responses[i], prompts[i].answers) for i in read]), strict=True):
        verdicts[i] = verdict
    clock.errors.update(v.error for v in verdicts if v.error is not None)
    return verdicts


def grade_trunks(prompts: Sequence[Prompt], rollouts: Sequence[Rollout], parts: Parts, clock: Clock) -> list[Verdict]:
    """Verdicts of the trunks of these prompts."""
    owners = [p for p in prompts for _ in range(parts.group)]
    return grade([r.ids for r in rollouts], rollouts, owners, parts, clock)


def grow(plans: Sequence[Plan], rollouts: Sequence[Rollout], parts: Parts, clock: Clock) -> list[Forest]:
    """The forests that the plans and the branches drawn for them make; all branches are graded in one call."""
    bounds = np.cumsum([0, *(len(p.spots) * parts.width for p in plans)]).tolist()
    spans = [slice(a, b) for a, b in pairwise(bounds)]
    responses = [r for p, s in zip(plans, spans, strict=True) for r in whole_responses(p, rollouts[s], parts.width)]
    owners = [p.group.prompt for p, s in zip(plans, spans, strict=True) for _ in rollouts[s]]
    verdicts = grade(responses, rollouts, owners, parts, clock)
    return [plant(p, rollouts[s], verdicts[s], parts.width) for p, s in zip(plans, spans, strict=True)]


def score_trunks(
    prompts: Sequence[Prompt], rollouts: Sequence[Rollout], verdicts: Sequence[Verdict], parts: Parts
) -> list[Group]:
    """The groups of trunks, cut into steps and scored. A trunk whose verdict is an error is left out: an error is no
    evidence; a prompt that loses all of its trunks so is left out as well.
    """
    owners = [p for p in prompts for _ in range(parts.group)]
    steps = [parts.segment(r.ids) for r in rollouts]
    if parts.needs_scores:
        asked = [ScoreRequest(p.ids, r.ids, s) for p, r, s in zip(owners, rollouts, steps, strict=True)]
        scores = parts.backend.score(asked)
    else:
        scores = [unscored(r, s) for r, s in zip(rollouts, steps, strict=True)]
    trunks = [Trunk(*row) for row in zip(rollouts, verdicts, steps, scores, strict=True)]
    groups = []
    for i, prompt in enumerate(prompts):
        sound = [t for t in trunks[i * parts.group : (i + 1) * parts.group] if t.verdict.error is None]
        if sound:
            groups.append(Group(prompt, tuple(sound)))
    return groups


def unscored(rollout: Rollout, steps: Sequence[Step]) -> Scores:
    """Scores of a trunk nobody asked a forward pass for: the sampler's log-probs, the rest not a number."""
    missing = np.full(len(rollout.ids), np.nan, dtype=np.float32)
    return Scores(rollout.logprobs, missing, missing[: len(steps)])


def update(forests: Sequence[Forest], parts: Parts, rng: np.random.Generator) -> tuple[list[Sample], dict[str, float]]:
    """The samples with signal, after the policy learned from them, and what the learner says of it."""
    every = [sample for forest in forests for sample in parts.estimator(forest, rng)]
    samples = with_signal(every, parts.drop)
    metrics = sample_statistics(every, samples)
    if any(sample.has_signal for sample in samples):
        metrics |= parts.backend.update(samples)
    return samples, metrics


def adapt(batch_size: float, samples: Sequence[Sample], parts: Parts) -> float:
    """The next batch size. Paper: Eq. 10."""
    if not parts.adaptive_batch:
        return batch_size
    valid = sum(s.has_signal for s in samples)
    return next_batch_size(
        batch_size, target=parts.target_samples, valid=valid, history=parts.history, max_prompts=parts.max_prompts
    )


def describe(
    state: State,
    groups: Sequence[Group],
    forests: Sequence[Forest],
    samples: Sequence[Sample],
    rollouts: Sequence[Rollout],
    parts: Parts,
) -> dict[str, float]:
    """The iteration's metrics, after the paper's figures."""
    return {
        "iteration": float(state.iteration + 1),
        "batch/prompts": float(len(groups)),
        "batch/size": state.batch_size,
        "batch/filtered_share": 1.0 - len(forests) / max(len(groups), 1),
        "policy/version": float(parts.backend.version),
        **group_statistics(groups),
        **forest_statistics(forests),
        **generation_statistics(rollouts),
    }
