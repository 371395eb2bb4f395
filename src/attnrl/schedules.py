"""The schedules: what an iteration does, and in which order.

A schedule is any function `(state, parts) -> Outcome`; those here are made of the functions of `attnrl.iteration` and
named in `SCHEDULES`: one step off-policy (AttnRL, Sec. 3.3), the same with the update running while trunks are drawn,
on-policy (GRPO, TreeRL), and on-policy with prompts drawn until the batch is full (DAPO).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from attnrl.algo.forest import Plan, untrained
from attnrl.algo.promises import asking, broken
from attnrl.algo.reasons import Reasons
from attnrl.backend import begin_by, generate_by
from attnrl.iteration import (
    Clock,
    Grading,
    Outcome,
    Parts,
    adapt,
    describe,
    draw_groups,
    give_reasons,
    grade_trunks,
    group_trunks,
    grow,
    plan_branches,
    prime,
    request_branches,
    request_trunks,
    restore,
    score_trunks,
    update,
)
from attnrl.types import Forest, Group, Rollout, State, as_metrics


def one_step_off_policy(state: State, parts: Parts) -> Outcome:
    """An iteration with one generation call: branches of batch m and trunks of batch m + 1, both by policy m.

    Paper: Sec. 3.3, Fig. 5.
    """
    clock, rng = Clock(), restore(state.rng)
    state, primed = prime(state, parts, rng, clock)
    # plan
    plans, dropped, memory = plan_branches(state.waiting, state.memory, parts, rng)
    prompts, stream = parts.stream.draw(state.stream, round(state.batch_size))
    # sample
    branches, trunks = request_branches(plans, parts, rng), request_trunks(prompts, parts, rng)
    with clock.phase("generate"):
        rollouts = generate_by(parts.backend, [*branches, *trunks], parts.sampling)
    fresh = rollouts[len(branches) :]
    with Grading(parts, clock) as grading:  # begins; verdicts are waited for where they are needed
        grown = grow(plans, rollouts[: len(branches)], parts, grading)
        verdicts = grade_trunks(prompts, fresh, parts, grading)
        # score
        with clock.phase("score"):
            scored = score_trunks(prompts, fresh, parts)
        # update
        forests = grown()
        with clock.phase("update"):
            samples, learned = update(forests, parts, rng)
        waiting = group_trunks(prompts, fresh, verdicts(), scored, parts)
    # adapt
    after = adapt(state, samples, rollouts, parts, rng, waiting=tuple(waiting), memory=memory, stream=stream)
    metrics = describe(state, state.waiting, forests, [*primed, *rollouts], parts) | learned | clock.metrics()
    return Outcome(after, metrics, forests, samples, dropped, give_reasons(plans, forests, samples, dropped, parts))


def overlapped(state: State, parts: Parts) -> Outcome:
    """An iteration whose update runs while the trunks of batch m + 1 are drawn: it waits for the branches of batch m
    alone. Policy m draws both, as in `one_step_off_policy`, whether or not the engine can do the two at once.

    Paper: Sec. 3.3, Fig. 5, with the same version of the policy on every rollout.
    Deviation: trunks are scored by policy m + 1, which draws their branches: policy m is gone when they are here.
    """
    clock, rng = Clock(), restore(state.rng)
    state, primed = prime(state, parts, rng, clock)
    # plan
    plans, dropped, memory = plan_branches(state.waiting, state.memory, parts, rng)
    prompts, stream = parts.stream.draw(state.stream, round(state.batch_size))
    # sample: both begin, the branches are waited for
    with clock.phase("generate"):
        branches = begin_by(parts.backend, request_branches(plans, parts, rng), parts.sampling)
        trunks = begin_by(parts.backend, request_trunks(prompts, parts, rng), parts.sampling)
        rollouts = branches()
    with Grading(parts, clock) as grading:
        forests = grow(plans, rollouts, parts, grading)()
        # update
        with clock.phase("update"):
            samples, learned = update(forests, parts, rng)
        # score, and grade meanwhile
        with clock.phase("generate"):
            fresh = trunks()
        verdicts = grade_trunks(prompts, fresh, parts, grading)
        with clock.phase("score"):
            scored = score_trunks(prompts, fresh, parts)
        waiting = group_trunks(prompts, fresh, verdicts(), scored, parts)
    # adapt
    rollouts = [*rollouts, *fresh]
    after = adapt(state, samples, rollouts, parts, rng, waiting=tuple(waiting), memory=memory, stream=stream)
    metrics = describe(state, state.waiting, forests, [*primed, *rollouts], parts) | learned | clock.metrics()
    return Outcome(after, metrics, forests, samples, dropped, give_reasons(plans, forests, samples, dropped, parts))


def on_policy(state: State, parts: Parts) -> Outcome:
    """An iteration with two generation calls, trunks and then branches, all by the policy that is updated."""
    return two_calls(state, parts, fill=False)


def dynamic(state: State, parts: Parts) -> Outcome:
    """The on-policy iteration with trunks drawn until the filter has kept `prompts` prompts, or `max_prompts` were
    drawn (DAPO's dynamic sampling, with the filter "has_spread").
    """
    return two_calls(state, parts, fill=True)


def two_calls(state: State, parts: Parts, *, fill: bool) -> Outcome:
    """Trunks, then branches, then update; with `fill`, more trunks while fewer than `prompts` prompts are kept."""
    clock, rng = Clock(), restore(state.rng)
    groups: list[Group] = []
    plans: list[Plan] = []
    dropped: list[Forest] = []
    first: list[Rollout] = []
    stream, memory, drawn = state.stream, state.memory, 0
    while not drawn or (fill and len(plans) < parts.prompts and drawn < parts.max_prompts):
        # sample, score
        prompts, stream = parts.stream.draw(stream, round(state.batch_size))
        fresh, rollouts = draw_groups(prompts, parts, rng, clock)
        # plan
        kept, left_out, memory = plan_branches(fresh, memory, parts, rng)
        groups, plans, dropped, first = groups + fresh, plans + kept, dropped + left_out, first + rollouts
        drawn += len(prompts)
    # branch
    if fill:
        surplus, plans = plans[parts.prompts :], plans[: parts.prompts]
        dropped += [untrained(p.group, "the batch was full") for p in surplus]
    branches = request_branches(plans, parts, rng)
    with clock.phase("generate"):
        second = generate_by(parts.backend, branches, parts.sampling)
    with Grading(parts, clock) as grading:
        forests = grow(plans, second, parts, grading)()
    # update
    with clock.phase("update"):
        samples, learned = update(forests, parts, rng)
    # adapt
    after = adapt(state, samples, [*first, *second], parts, rng, memory=memory, stream=stream)
    metrics = describe(state, groups, forests, [*first, *second], parts) | learned | clock.metrics()
    return Outcome(after, metrics, forests, samples, dropped, give_reasons(plans, forests, samples, dropped, parts))


# Whether a schedule draws more prompts until its batch is full; one that does not say may.
one_step_off_policy.fills = overlapped.fills = on_policy.fills = False  # type: ignore[attr-defined]

Schedule = Callable[[State, Parts], Outcome]

SCHEDULES: dict[str, Schedule] = {
    "one_step_off_policy": one_step_off_policy,
    "overlapped": overlapped,
    "on_policy": on_policy,
    "dynamic": dynamic,
}


def outcome_by(schedule: Schedule, state: State, parts: Parts) -> Outcome:
    """What a schedule makes of a state: an outcome, one iteration on, with a reason for every tree, and numbers."""
    with asking("schedule", schedule):
        outcome = schedule(state, parts)
    if not isinstance(outcome, Outcome) or outcome.state.iteration != state.iteration + 1:
        got = outcome.state.iteration if isinstance(outcome, Outcome) else type(outcome).__name__
        want = f"must return an attnrl.iteration.Outcome whose state has iteration {state.iteration + 1}"
        raise broken("schedule", schedule, f"{want}, not {got}")
    trees = [len(forest.trees) for forest in (*outcome.forests, *outcome.dropped)]
    if [len(r.trees) for r in outcome.reasons or () if isinstance(r, Reasons)] != trees:
        want = f"{len(trees)} attnrl.algo.reasons.Reasons, of the forests and then of the dropped, each with its trees'"
        raise broken("schedule", schedule, f"must return as reasons {want}")
    try:
        return replace(outcome, metrics=as_metrics(outcome.metrics))
    except TypeError as error:
        raise broken("schedule", schedule, f"must return as metrics {error}") from None
