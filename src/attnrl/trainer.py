"""The outer loop: resume, iterate, evaluate, checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attnrl.iteration import Outcome, Parts, first_state
from attnrl.run import Run
from attnrl.types import Ids, State

Schedule = Callable[[State, Parts], Outcome]
Observer = Callable[[dict[str, float]], None]
Evaluate = Callable[[int], dict[str, float]]


def train(
    parts: Parts,
    schedule: Schedule,
    run: Run,
    *,
    iterations: int,
    seed: int,
    decode: Callable[[Ids], str],
    evaluate: Evaluate | None = None,
    evaluate_every: int = 0,
    generated_tokens: int | None = None,
    checkpoint_every: int = 10,
    keep_checkpoints: int = 2,
    save_rollouts_every: int = 1,
    observers: Sequence[Observer] = (),
) -> State:
    """The state after the last iteration. Continues from the run's newest checkpoint where it has one.

    Stops after `iterations`, or once `generated_tokens` were drawn. Observers see each iteration's metrics after they
    are on disk.
    """

    def record(metrics: dict[str, float]) -> None:
        run.log(metrics)
        for observer in observers:
            observer(metrics)

    state = run.resume(parts.backend) or first_state(parts, seed)
    if state.iteration == 0 and evaluate is not None:
        record({"iteration": 0.0, **evaluate(0)})
    while not finished(state, iterations, generated_tokens):
        outcome = schedule(state, parts)
        state = outcome.state
        last = finished(state, iterations, generated_tokens)
        metrics = {**outcome.metrics, "generate/total_tokens": float(state.generated_tokens)}
        if evaluate is not None and (last or (evaluate_every and state.iteration % evaluate_every == 0)):
            metrics |= evaluate(state.iteration)
        if save_rollouts_every and state.iteration % save_rollouts_every == 0:
            run.save_forests(state.iteration, outcome.forests, decode)
        record(metrics)
        if last or state.iteration % checkpoint_every == 0:
            run.checkpoint(state, parts.backend, keep_checkpoints)
    return state


def finished(state: State, iterations: int, generated_tokens: int | None) -> bool:
    return state.iteration >= iterations or (
        generated_tokens is not None and state.generated_tokens >= generated_tokens
    )
