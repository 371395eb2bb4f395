"""The outer loop: resume, iterate, evaluate, checkpoint, and stop when asked."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from attnrl.config import RunConfig
from attnrl.errors import ConfigError, Interrupted, listed, near
from attnrl.iteration import Parts, first_state
from attnrl.run import Run
from attnrl.schedules import Schedule, outcome_by
from attnrl.types import State

Observer = Callable[[dict[str, float]], None]
Evaluate = Callable[[int], dict[str, float]]


def train(
    parts: Parts,
    schedule: Schedule,
    run: Run,
    limits: RunConfig,
    *,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 0,
    observers: Sequence[Observer] = (),
    say: Callable[[str], None] = print,
) -> State:
    """The state after the last iteration. Continues from the run's newest checkpoint where it has one.

    Stops where `finished` says so. Observers see each iteration's metrics after they are on disk. SIGINT or SIGTERM
    ends it after the iteration that runs, with a checkpoint, by raising Interrupted; a second one ends it at once, with
    the last checkpoint as it is.
    """

    def record(metrics: dict[str, float]) -> None:
        run.log(metrics)
        for observer in observers:
            observer(metrics)

    unsaid = True  # that an iteration lacks the metric to choose the best by
    state = run.resume(parts.backend) or first_state(parts, limits.seed)
    with stop_on_signals(say) as stop:
        if state.iteration == 0 and evaluate is not None:
            first = evaluate(0)
            record({"iteration": 0.0, **first})
            check_best(limits.keep_best, first)
        while not finished(state, limits) and not stop.number:
            outcome = outcome_by(schedule, state, parts)
            state = outcome.state
            last = finished(state, limits)
            counts = {"iteration": float(state.iteration), "generate/total_tokens": float(state.generated_tokens)}
            metrics = {**outcome.metrics, **counts}
            if evaluate is not None and (last or (evaluate_every and state.iteration % evaluate_every == 0)):
                metrics |= evaluate(state.iteration)
            if limits.save_rollouts_every and state.iteration % limits.save_rollouts_every == 0:
                forests = [*outcome.forests, *outcome.dropped]
                run.save_forests(state.iteration, forests, parts.decode, outcome.reasons)
            record(metrics)
            if limits.keep_best is not None and limits.keep_best in metrics:
                run.keep_best(state, parts.backend, limits.keep_best, metrics[limits.keep_best])
            elif is_due(limits.keep_best, metrics) and (unsaid or (last and not (run.path / "best").exists())):
                unsaid, hint = False, near(str(limits.keep_best), metrics)
                say(f"run.keep_best: iteration {state.iteration} has no metric {limits.keep_best!r}{hint}; not kept")
            if last or stop.number or state.iteration % limits.checkpoint_every == 0:
                run.checkpoint(state, parts.backend, limits.keep_checkpoints)
    if stop.number and not finished(state, limits):
        done, then = f"after iteration {state.iteration}", "goes on from there"
        if not state.iteration:
            done, then = "before the first iteration", "begins it"
        raise Interrupted(f"stopped {done}; attnrl train --resume --run-dir {run.path} {then}", stop.number)
    return state


def finished(state: State, limits: RunConfig) -> bool:
    """Whether all iterations are done, or all tokens drawn."""
    by_tokens = limits.generated_tokens is not None and state.generated_tokens >= limits.generated_tokens
    return state.iteration >= limits.iterations or by_tokens


def check_best(metric: str | None, first: dict[str, float]) -> None:
    """Raise where the best is to be chosen by what the first evaluation does not give."""
    if metric is not None and metric.startswith("eval/") and metric not in first:
        hint = near(metric, first)
        raise ConfigError(f"run.keep_best: evaluation gives no {metric!r}{hint}; it gives: {listed(first)}")


def is_due(metric: str | None, metrics: dict[str, float]) -> bool:
    """Whether an iteration with these metrics should have the one to choose the best by.

    >>> is_due("trunks/accurcy", {"trunks/accuracy": 0.5}), is_due("eval/x/pass@1", {"trunks/accuracy": 0.5})
    (True, False)
    """
    return metric is not None and (not metric.startswith("eval/") or any(name.startswith("eval/") for name in metrics))


@dataclass(slots=True)
class Stop:
    """The signal that asked for the end, 0 while none has."""

    number: int = 0


@contextmanager
def stop_on_signals(say: Callable[[str], None]) -> Iterator[Stop]:
    """While open, the first SIGINT or SIGTERM is noted and the second raises Interrupted without a message; only in
    the main thread, where signals arrive.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def note(number: int, frame: FrameType | None) -> None:
        if stop.number:
            raise Interrupted("", number)
        stop.number = number
        say("stopping after this iteration, with a checkpoint; once more stops at once, the last checkpoint stays")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
