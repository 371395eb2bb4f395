"""The outer loop: resume, iterate, evaluate, checkpoint, and stop when asked."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from attnrl.algo.parts import listed, near
from attnrl.errors import ConfigError, Interrupted
from attnrl.iteration import Parts, Schedule, first_state, outcome_by
from attnrl.run import Run
from attnrl.types import State

Observer = Callable[[dict[str, float]], None]
Evaluate = Callable[[int], dict[str, float]]


def train(
    parts: Parts,
    schedule: Schedule,
    run: Run,
    *,
    iterations: int,
    seed: int,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 0,
    generated_tokens: int | None = None,
    checkpoint_every: int = 10,
    keep_checkpoints: int = 2,
    keep_best: str | None = None,
    save_rollouts_every: int = 1,
    observers: Sequence[Observer] = (),
    say: Callable[[str], None] = print,
) -> State:
    """The state after the last iteration. Continues from the run's newest checkpoint where it has one.

    Stops after `iterations`, or once `generated_tokens` were drawn. Observers see each iteration's metrics after they
    are on disk. SIGINT or SIGTERM ends it after the iteration that runs, with a checkpoint, by raising Interrupted; a
    second one ends it at once, with the last checkpoint as it is.
    """

    def record(metrics: dict[str, float]) -> None:
        run.log(metrics)
        for observer in observers:
            observer(metrics)

    state = run.resume(parts.backend) or first_state(parts, seed)
    with stop_on_signals(say) as stop:
        if state.iteration == 0 and evaluate is not None:
            first = evaluate(0)
            record({"iteration": 0.0, **first})
            if keep_best is not None and keep_best.startswith("eval/") and keep_best not in first:
                hint = near(keep_best, first)
                raise ConfigError(f"run.keep_best: evaluation gives no {keep_best!r}{hint}; it gives: {listed(first)}")
        while not finished(state, iterations, generated_tokens) and not stop.number:
            outcome = outcome_by(schedule, state, parts)
            state = outcome.state
            last = finished(state, iterations, generated_tokens)
            metrics = {**outcome.metrics, "generate/total_tokens": float(state.generated_tokens)}
            if evaluate is not None and (last or (evaluate_every and state.iteration % evaluate_every == 0)):
                metrics |= evaluate(state.iteration)
            if save_rollouts_every and state.iteration % save_rollouts_every == 0:
                forests = [*outcome.forests, *outcome.dropped]
                run.save_forests(state.iteration, forests, parts.decode, outcome.reasons)
            record(metrics)
            if keep_best is not None and keep_best in metrics:
                run.keep_best(state, parts.backend, keep_best, metrics[keep_best])
            elif keep_best is not None and last and not (run.path / "best").exists():
                hint = near(keep_best, metrics)
                say(f"run.keep_best: no iteration had a metric {keep_best!r}{hint}; nothing was kept")
            if last or stop.number or state.iteration % checkpoint_every == 0:
                run.checkpoint(state, parts.backend, keep_checkpoints)
    if stop.number and not finished(state, iterations, generated_tokens):
        raise Interrupted(
            f"stopped after iteration {state.iteration}; attnrl train --resume --run-dir {run.path} goes on from there",
            stop.number,
        )
    return state


def finished(state: State, iterations: int, generated_tokens: int | None) -> bool:
    return state.iteration >= iterations or (
        generated_tokens is not None and state.generated_tokens >= generated_tokens
    )


@dataclass(slots=True)
class Stop:
    """The signal that asked for the end, 0 while none has."""

    number: int = 0


@contextmanager
def stop_on_signals(say: Callable[[str], None]) -> Iterator[Stop]:
    """While open, the first SIGINT or SIGTERM is noted and the second raises KeyboardInterrupt; only in the main
    thread, where signals arrive.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def note(number: int, frame: FrameType | None) -> None:
        if stop.number:
            raise KeyboardInterrupt
        stop.number = number
        say("stopping after this iteration, with a checkpoint; once more stops at once, the last checkpoint stays")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
