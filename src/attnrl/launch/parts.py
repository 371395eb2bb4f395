"""From the names in a config to the parts of the algorithm, with their options bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from attnrl.algo.adaptive import BUDGETS, FILTERS, full_batch, most_points
from attnrl.algo.advantages import ESTIMATORS
from attnrl.algo.credit import CREDITS, no_credit
from attnrl.algo.parts import bind, check_call, find, read_by
from attnrl.algo.promises import steps_by
from attnrl.algo.rules import RULES
from attnrl.algo.steps import SEGMENTERS
from attnrl.config import Config, check_options
from attnrl.errors import ConfigError
from attnrl.iteration import Parts, Stream
from attnrl.schedules import SCHEDULES
from attnrl.types import Grade, Ids, Sampling, Scoring, Step

if TYPE_CHECKING:
    from attnrl.backend import Backend

KINDS: dict[str, Mapping[str, Callable[..., Any]]] = {  # the parts of [algo] that are called with options
    "segmenter": SEGMENTERS,
    "rule": RULES,
    "filter": FILTERS,
    "budget": BUDGETS,
    "estimator": ESTIMATORS,
    "credit": CREDITS,
}

FCI_KEYS = {"algo.delta", "algo.key_reduce"}  # taken wherever FCI is computed
BRANCH_KEYS = {"algo.width", "algo.budget", "algo.budget_options"}  # by any rule that branches

CALLED = {  # what the loop calls each with
    "segmenter": ("texts",),
    "rule": ("prompt", "trunk", "rng"),
    "filter": ("groups", "memory"),
    "budget": ("accuracy", "trees"),
    "estimator": ("forest", "rng"),
    "credit": ("samples", "scores"),
}


def check_parts(config: Config) -> dict[str, partial[Any]]:
    """The named parts of [algo] with their options bound; a wrong name or option raises ConfigError."""
    knobs = config.algo.model_dump()
    bound: dict[str, partial[Any]] = {}
    for kind, table in KINDS.items():
        try:
            bound[kind] = bind(table, knobs[kind], knobs[f"{kind}_options"], knobs)
            check_options(bound[kind].func, knobs[f"{kind}_options"])
            check_call(bound[kind], *CALLED[kind])
        except ValueError as error:
            raise ConfigError(f"algo.{kind}: {error}") from None
    try:
        check_call(find(SCHEDULES, config.algo.schedule), "state", "parts")
    except ValueError as error:
        raise ConfigError(f"algo.schedule: {error}") from None
    prompts, most = config.algo.prompts, config.algo.max_prompts
    if prompts > most and "algo.max_prompts" in taken_by(config, bound):
        raise ConfigError(f"algo.prompts = {prompts} is above algo.max_prompts = {most}; raise that too")
    if config.algo.adaptive_batch and target_samples(config, bound) is None:
        raise ConfigError(
            f"algo.adaptive_batch needs a rule that says how many points it gives: {config.algo.rule!r} must take "
            "`points` (algo.points) or `max_points` (algo.rule_options) and keep to it; or set adaptive_batch = false"
        )
    return bound


def taken_by(config: Config, bound: Mapping[str, partial[Any]]) -> set[str]:
    """The dotted keys of [algo] that its parts take, by their options, by what they read and by what they do."""
    algo, schedule = config.algo, find(SCHEDULES, config.algo.schedule)
    taken = {f"algo.{name}" for part in bound.values() for name in part.keywords}
    taken |= FCI_KEYS if "fci" in read_by(bound["rule"]) | read_by(bound["filter"]) else set()
    taken |= BRANCH_KEYS if most_points(bound["rule"]) != 0 else set()
    return taken | ({"algo.max_prompts"} if algo.adaptive_batch or getattr(schedule, "fills", True) else set())


def target_samples(config: Config, bound: Mapping[str, partial[Any]]) -> int | None:
    """B' of Eq. 10 for these parts; None where a rule does not say how many points it gives."""
    algo = config.algo
    return full_batch(bound["rule"], bound["estimator"], prompts=algo.prompts, group=algo.group, width=algo.width)


def scoring_of(config: Config, parts: Sequence[Callable[..., Any]]) -> Scoring | None:
    """What a scoring forward must give for what the parts read; None: nothing."""
    read = frozenset[str]().union(*map(read_by, parts))
    if not read:
        return None
    algo = config.algo
    return Scoring("fci" in read, algo.delta, algo.key_reduce, config.sampling.temperature)


def segmenting(bound: Mapping[str, partial[Any]], tokenizer: Any) -> Callable[[Ids], tuple[Step, ...]]:
    """Token ids of a response -> its steps."""
    from attnrl.data.texts import TokenTexts

    texts = TokenTexts(tokenizer)
    return lambda ids: steps_by(bound["segmenter"], texts(ids))


def build_parts(
    config: Config,
    bound: Mapping[str, partial[Any]],
    backend: Backend,
    stream: Stream,
    segment: Callable[[Ids], tuple[Step, ...]],
    decode: Callable[[Ids], str],
    grade: Grade,
    graded: Callable[[], dict[str, float]],
    give_up: Callable[[], None] = lambda: None,
) -> Parts:
    """The parts of an iteration over an engine, a stream of prompts, what is needed of a tokenizer, and rewards."""
    algo = config.algo
    return Parts(
        backend=backend,
        stream=stream,
        decode=decode,
        segment=segment,
        grade=grade,
        graded=graded,
        give_up=give_up,
        rule=bound["rule"],
        filter=bound["filter"],
        budget=bound["budget"],
        estimator=bound["estimator"],
        credit=None if bound["credit"].func is no_credit else bound["credit"],
        sampling=Sampling(config.sampling.temperature, config.sampling.top_p, config.sampling.top_k),
        scoring=scoring_of(config, [bound["rule"], bound["filter"]]),
        max_response_tokens=config.sampling.max_response_tokens,
        prompts=algo.prompts,
        group=algo.group,
        width=algo.width,
        target_samples=target_samples(config, bound) if algo.adaptive_batch else None,
        history=algo.history,
        max_prompts=algo.max_prompts,
        drop=algo.drop,
    )
