"""What an iteration is made of, in the words of the paper: plan, sample, score, update, adapt.

`attnrl.schedules` puts these functions in order; so may a schedule of your own.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from attnrl.algo.adaptive import Budget, Filter, most_points, next_batch_size
from attnrl.algo.advantages import Estimator
from attnrl.algo.branching import Rule
from attnrl.algo.credit import Credit, weigh
from attnrl.algo.forest import Plan, branch_requests, plan, plant, trunk_requests, unscored, untrained, whole_responses
from attnrl.algo.promises import kept_by, samples_by, weights_by
from attnrl.algo.reasons import Reasons, explain
from attnrl.algo.samples import Drop, with_signal
from attnrl.algo.statistics import forest_statistics, generation_statistics, group_statistics, sample_statistics
from attnrl.backend import Backend, generate_by, metrics_by, score_by, update_by
from attnrl.errors import TrainingError
from attnrl.progress import tell
from attnrl.types import (
    Attempt,
    Forest,
    Grade,
    Group,
    Ids,
    Prompt,
    Request,
    Rollout,
    Sample,
    Sampling,
    ScoreRequest,
    Scores,
    Scoring,
    State,
    Step,
    Trunk,
    Verdict,
)

GIVE_UP_EVERY = 0.1  # seconds; what is given up may just have handed over more


class Stream(Protocol):
    """An endless, resumable source of prompts."""

    def draw(self, position: dict[str, Any], n: int) -> tuple[list[Prompt], dict[str, Any]]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What an iteration is made of; `attnrl.launch` puts it together from a config."""

    backend: Backend
    stream: Stream
    decode: Callable[[Ids], str]  # response -> text
    segment: Callable[[Ids], tuple[Step, ...]]  # response -> steps
    grade: Grade  # attempts -> verdicts
    graded: Callable[[], dict[str, float]]  # metrics of the rewards since last asked
    give_up: Callable[[], None]  # from another thread: what is being graded ends soon, whatever its verdicts
    rule: Rule  # where to branch, Eq. 7
    filter: Filter  # which prompts, Eq. 8
    budget: Budget  # trees per prompt, Eq. 9
    estimator: Estimator  # advantages, Eq. 2-3
    sampling: Sampling
    max_response_tokens: int
    scoring: Scoring | None  # None: no part reads what a scoring forward gives
    credit: Credit | None  # weights on the advantages of tokens; None: all 1
    prompts: int  # first and target batch, in prompts
    group: int
    width: int
    target_samples: int | None  # B' of Eq. 10: the samples a full batch has; None: every batch has `prompts`
    history: float
    max_prompts: int
    drop: Drop


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What an iteration leaves behind: the next state, its metrics, and its forests for the record."""

    state: State
    metrics: dict[str, float]
    forests: list[Forest]
    samples: list[Sample]
    dropped: list[Forest]  # prompts the filter dropped, their trunks as single leaves
    reasons: list[Reasons]  # of the forests, then of the dropped ones


@dataclass(slots=True)
class Clock:
    """Seconds per phase of an iteration, which begins with it, and verdicts that are errors by their kind."""

    begun: float = field(default_factory=lambda: time.perf_counter())
    seconds: dict[str, float] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        tell(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """`seconds/PHASE`, what lay between the phases (`other`) and all of it so far; errors by kind and in all."""
        whole = time.perf_counter() - self.begun
        named = {f"seconds/{name}": spent for name, spent in self.seconds.items()}
        rest = {"seconds/other": whole - sum(named.values()), "seconds/iteration": whole}
        errors = {f"verify/{kind}": float(count) for kind, count in self.errors.items()}
        return {**errors, "verify/errors": float(self.errors.total()), **named, **rest}


class Grading(AbstractContextManager["Grading"]):
    """Grades while the engine works: in one thread, one batch at a time, in the order in which they were begun.

    The thread ends with the block. Where that is left by an error, what is not yet graded is given up; an error that
    grading has met by then, and nobody has waited for, is told in a note of the other.
    """

    def __init__(self, parts: Parts, clock: Clock) -> None:
        self.parts, self.clock = parts, clock
        self.thread = ThreadPoolExecutor(1, "attnrl-grading")
        self.begun: list[Future[list[Verdict]]] = []
        self.busy = threading.Lock()
        self.over = False

    def begin(
        self, responses: Sequence[Ids], rollouts: Sequence[Rollout], prompts: Sequence[Prompt]
    ) -> Callable[[], list[Verdict]]:
        """At once, what waits for the verdicts of whole responses or raises what went wrong. Their texts are made
        here: a tokenizer is not for two threads at a time.
        """
        with self.clock.phase("verify"):
            rows = zip(prompts, responses, rollouts, strict=True)
            attempts = [Attempt.of(prompt, ids, rollout.finish, self.parts.decode) for prompt, ids, rollout in rows]
            batch = self.thread.submit(copy_context().run, self._grade, attempts, tuple(self.begun))
        self.begun.append(batch)

        def verdicts() -> list[Verdict]:
            with self.clock.phase("verify"):
                found = batch.result()
            self.clock.errors.update(v.error.partition(":")[0] for v in found if v.error is not None)
            return found

        return verdicts

    def _grade(self, attempts: Sequence[Attempt], before: Sequence[Future[list[Verdict]]]) -> list[Verdict]:
        with self.busy:
            for batch in before:
                batch.result()  # after one that failed, no other is begun
            return [] if self.over else self.parts.grade(attempts)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            failed = next((e for batch in self.begun if batch.done() and (e := batch.exception())), error)
            if failed is not error:
                error.add_note(f"Grading had failed too: {type(failed).__name__}: {failed}")
            self.over = True  # also for a batch that a signal keeps out of `begun`
            while not self.busy.acquire(timeout=GIVE_UP_EVERY):
                self.parts.give_up()
            self.busy.release()
        self.thread.shutdown()


def first_state(parts: Parts, seed: int) -> State:
    """The state before the first iteration."""
    return State(batch_size=float(parts.prompts), rng=dict(np.random.default_rng(seed).bit_generator.state))


def restore(state: dict[str, Any]) -> np.random.Generator:
    """The run's random generator, where the last iteration left it."""
    rng = np.random.default_rng(0)
    rng.bit_generator.state = state
    return rng


def prime(state: State, parts: Parts, rng: np.random.Generator, clock: Clock) -> tuple[State, list[Rollout]]:
    """The state with a batch's trunks waiting, and what was drawn for it: before the first iteration, when none wait
    yet, the one extra generation call of a run. Trunks that wait are of this policy or of the one before it.
    """
    if state.waiting:
        check_age(state.waiting, parts.backend.version)
        return state, []
    prompts, stream = parts.stream.draw(state.stream, round(state.batch_size))
    waiting, rollouts = draw_groups(prompts, parts, rng, clock)
    drawn = state.generated_tokens + sum(len(r.ids) for r in rollouts)
    return replace(state, waiting=tuple(waiting), stream=stream, generated_tokens=drawn), rollouts


def check_age(waiting: Sequence[Group], version: int) -> None:
    """Raise where a trunk is more than one update old: its branches would not be one step off-policy."""
    for group in waiting:
        for trunk in group.trunks:
            if trunk.rollout.version not in (version, version - 1):
                raise TrainingError(
                    f"trunks of prompt {group.prompt.uid} wait that policy {trunk.rollout.version} drew, where the "
                    f"policy is {version}: they may be one update old"
                )


def draw_groups(
    prompts: Sequence[Prompt], parts: Parts, rng: np.random.Generator, clock: Clock
) -> tuple[list[Group], list[Rollout]]:
    """The trunks of some prompts by a generation call of their own, graded while they are scored; and as drawn."""
    with clock.phase("generate"):
        rollouts = generate_by(parts.backend, request_trunks(prompts, parts, rng), parts.sampling)
    with Grading(parts, clock) as grading:
        verdicts = grade_trunks(prompts, rollouts, parts, grading)
        with clock.phase("score"):
            scored = score_trunks(prompts, rollouts, parts)
        return group_trunks(prompts, rollouts, verdicts(), scored, parts), rollouts


def plan_branches(
    groups: Sequence[Group], memory: dict[str, Any], parts: Parts, rng: np.random.Generator
) -> tuple[list[Plan], list[Forest], dict[str, Any]]:
    """Where the prompts that the filter keeps branch (Eq. 7-9), what it dropped and why, and what it remembers."""
    kept = kept_by(parts.filter, groups, memory)
    plans, dropped = [], []
    for group, keep, reason in zip(groups, kept.mask, kept.reasons, strict=True):
        if keep:
            plans.append(plan(group, rule=parts.rule, budget=parts.budget, trunks=parts.group, rng=rng))
        else:
            dropped.append(untrained(group, reason))
    return plans, dropped, kept.memory


def request_trunks(prompts: Sequence[Prompt], parts: Parts, rng: np.random.Generator) -> list[Request]:
    limit = parts.max_response_tokens
    return [r for p in prompts for r in trunk_requests(p, group=parts.group, max_tokens=limit, rng=rng)]


def request_branches(plans: Sequence[Plan], parts: Parts, rng: np.random.Generator) -> list[Request]:
    limit = parts.max_response_tokens
    return [r for p in plans for r in branch_requests(p, width=parts.width, max_tokens=limit, rng=rng)]


def grade_trunks(
    prompts: Sequence[Prompt], rollouts: Sequence[Rollout], parts: Parts, grading: Grading
) -> Callable[[], list[Verdict]]:
    """At once, what waits for the verdicts of the trunks of these prompts."""
    owners = [p for p in prompts for _ in range(parts.group)]
    return grading.begin([r.ids for r in rollouts], rollouts, owners)


def grow(
    plans: Sequence[Plan], rollouts: Sequence[Rollout], parts: Parts, grading: Grading
) -> Callable[[], list[Forest]]:
    """At once, what waits for the forests that the plans and the branches drawn for them make; all branches are
    graded in one batch.
    """
    bounds = np.cumsum([0, *(len(p.spots) * parts.width for p in plans)]).tolist()
    spans = [slice(a, b) for a, b in pairwise(bounds)]
    responses = [r for p, s in zip(plans, spans, strict=True) for r in whole_responses(p, rollouts[s], parts.width)]
    owners = [p.group.prompt for p, s in zip(plans, spans, strict=True) for _ in rollouts[s]]
    graded = grading.begin(responses, rollouts, owners)

    def forests() -> list[Forest]:
        verdicts = graded()
        return [plant(p, rollouts[s], verdicts[s], parts.width) for p, s in zip(plans, spans, strict=True)]

    return forests


def score_trunks(
    prompts: Sequence[Prompt], rollouts: Sequence[Rollout], parts: Parts
) -> list[tuple[tuple[Step, ...], Scores]]:
    """Of each trunk of these prompts its steps and scores."""
    owners = [p for p in prompts for _ in range(parts.group)]
    steps = [parts.segment(r.ids) for r in rollouts]
    if parts.scoring is not None:
        asked = [ScoreRequest(p.ids, r.ids, s) for p, r, s in zip(owners, rollouts, steps, strict=True)]
        scores = score_by(parts.backend, asked, parts.scoring)
    else:
        scores = [unscored(r, s) for r, s in zip(rollouts, steps, strict=True)]
    return list(zip(steps, scores, strict=True))


def group_trunks(
    prompts: Sequence[Prompt],
    rollouts: Sequence[Rollout],
    verdicts: Sequence[Verdict],
    scored: Sequence[tuple[tuple[Step, ...], Scores]],
    parts: Parts,
) -> list[Group]:
    """The groups of these prompts. A trunk whose verdict is an error is left out: an error is no evidence; a prompt
    that loses all of its trunks so is left out as well.
    """
    trunks = [Trunk(r, v, *both) for r, v, both in zip(rollouts, verdicts, scored, strict=True)]
    groups = []
    for i, prompt in enumerate(prompts):
        sound = [t for t in trunks[i * parts.group : (i + 1) * parts.group] if t.verdict.error is None]
        if sound:
            groups.append(Group(prompt, tuple(sound)))
    return groups


def update(forests: Sequence[Forest], parts: Parts, rng: np.random.Generator) -> tuple[list[Sample], dict[str, float]]:
    """The samples with signal, after the policy learned from them, and what the learner says of it."""
    every = [sample for forest in forests for sample in samples_by(parts.estimator, forest, rng)]
    samples = with_signal(every, parts.drop)
    if parts.credit is not None and samples:
        asked = [ScoreRequest(s.prompt, s.response, (Step(0, len(s.response)),)) for s in samples]
        scoring = replace(parts.scoring or Scoring(temperature=parts.sampling.temperature), fci=False)
        samples = weigh(samples, weights_by(parts.credit, samples, score_by(parts.backend, asked, scoring)))
    metrics = sample_statistics(every, samples)
    if any(sample.has_signal for sample in samples):
        metrics |= update_by(parts.backend, samples)
    return samples, metrics


def adapt(
    state: State,
    samples: Sequence[Sample],
    rollouts: Sequence[Rollout],
    parts: Parts,
    rng: np.random.Generator,
    **changes: Any,
) -> State:
    """The state of the next iteration, with its batch size. Paper: Eq. 10."""
    size = state.batch_size
    if parts.target_samples is not None:
        valid = sum(s.has_signal for s in samples)
        size = next_batch_size(
            size, target=parts.target_samples, valid=valid, history=parts.history, max_prompts=parts.max_prompts
        )
    return replace(
        state,
        iteration=state.iteration + 1,
        batch_size=size,
        rng=dict(rng.bit_generator.state),
        generated_tokens=state.generated_tokens + sum(len(r.ids) for r in rollouts),
        **changes,
    )


def give_reasons(
    plans: Sequence[Plan],
    forests: Sequence[Forest],
    samples: Sequence[Sample],
    dropped: Sequence[Forest],
    parts: Parts,
) -> list[Reasons]:
    """Why each prompt taught or not and each tree was branched or not, for the record."""
    taught = {s.uid for s in samples if s.has_signal}
    branching = most_points(parts.rule) != 0
    grown = [
        explain(f, planned=p.points, chosen=p.chosen, taught=f.prompt.uid in taught, branching=branching)
        for p, f in zip(plans, forests, strict=True)
    ]
    return grown + [explain(f, planned=None, taught=False, dropped=f.reason) for f in dropped]


def describe(
    state: State,
    groups: Sequence[Group],
    forests: Sequence[Forest],
    rollouts: Sequence[Rollout],
    parts: Parts,
) -> dict[str, float]:
    """The iteration's metrics, after the paper's figures, with those of rewards and engine."""
    most = most_points(parts.rule)
    return {
        "batch/prompts": float(len(groups)),
        "batch/size": state.batch_size,
        "batch/filtered_share": 1.0 - len(forests) / max(len(groups), 1),
        "policy/version": float(parts.backend.version),
        **({} if most is None else {"trees/most_points": float(most)}),
        **group_statistics(groups),
        **forest_statistics(forests),
        **generation_statistics(rollouts),
        **parts.graded(),
        **metrics_by(parts.backend),
    }
