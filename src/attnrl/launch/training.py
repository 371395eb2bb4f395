"""Training from Python: `attnrl.train`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from attnrl.algo.parts import find
from attnrl.algo.reasons import declared_by
from attnrl.config import Config, check_taken, load_config
from attnrl.console import console_line, live_line
from attnrl.errors import ConfigError, MissingFileError
from attnrl.launch.data import (
    Say,
    check_room,
    evaluation_prompts,
    evaluation_records,
    evaluation_samples,
    prompt_stream,
    train_records,
)
from attnrl.launch.evaluating import build_evaluate
from attnrl.launch.models import (
    check_engine,
    check_model,
    decoder,
    find_engine,
    load_tokenizer,
    newest_model,
    open_engine,
    open_rewards,
    pin_model,
)
from attnrl.launch.parts import build_parts, check_parts, segmenting, taken_by
from attnrl.run import Run, check_run, last_recorded, open_run, read_metrics
from attnrl.schedules import SCHEDULES
from attnrl.trackers import Observer, check_observers, check_trackers, open_trackers
from attnrl.trainer import finished
from attnrl.trainer import train as loop
from attnrl.types import State, counted

if TYPE_CHECKING:
    from attnrl.backend import Backend
    from attnrl.data.stream import PromptStream
    from attnrl.reward import Rewards
    from attnrl.types import Prompt

say_plainly = partial(print, flush=True)


@dataclass(frozen=True, slots=True)
class Trained:
    """A run directory after training."""

    run_dir: Path
    state: State = field(repr=False)

    @property
    def model(self) -> Path:
        """The newest checkpoint as a Hugging Face model directory."""
        return Path(newest_model(str(self.run_dir)))

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One dict an iteration."""
        return read_metrics(self.run_dir)


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """What a config names, found and fitting together; no model is loaded yet."""

    bound: dict[str, partial[Any]]  # the parts of [algo]
    engine: Callable[..., Backend]
    rewards: Rewards
    model: str


def train(
    config: Config | str | Path | None = None,
    run_dir: str | Path = "",
    *,
    resume: bool = False,
    overrides: Mapping[str, Any] | None = None,
    observers: Sequence[Observer] = (),
    say: Say = say_plainly,
) -> Trained:
    """Train as a config, a preset or a TOML file says, with dotted `overrides`; writes the run directory.

    With `resume` it goes on from the newest checkpoint, and `config` may be left out: the run's own is taken. What
    can be wrong with config, data and directory is found before a model loads. `observers` see each iteration's
    metrics. Ctrl-C ends it after the iteration that runs, with a checkpoint (`attnrl.errors.Interrupted`).
    """
    if not str(run_dir):
        raise ConfigError("say where the run is written: run_dir (--run-dir DIRECTORY)")
    run_dir = Path(run_dir)
    check_observers(observers)
    config = resolve(config, run_dir, resume=resume, overrides=overrides, say=say)
    ready = make_ready(config)
    values = config.model_dump(mode="json")
    state = check_run(run_dir, values, resume=resume)
    if state is not None and (done := finished_note(state, config)):
        say(f"{run_dir} {done}")
        return Trained(run_dir, state)
    if resume and not Run(run_dir).recorded:
        say(f"no run in {run_dir} yet: it begins")
    check_engine(ready.engine, config, ready.model, run_dir)
    tokenizer, stream, held_out = read_prompts(config, ready.model, say)
    console = Console()
    with (
        live_line(console),
        closing(open_run(run_dir, values, resume=resume, rule=declared_by(ready.bound["rule"]))) as run,
        ready.rewards as rewards,
        open_engine(ready.engine, config, ready.model, tokenizer, run_dir=run_dir) as backend,
    ):
        run.begin(values, declared_by(ready.bound["rule"]))
        watching = [console_line(config, console), *trackers_where_it_goes_on(config, run_dir, state, say), *observers]
        segment, decode = segmenting(ready.bound, tokenizer), decoder(tokenizer)
        give_up = partial(rewards.close, wait=False)
        parts = build_parts(
            config, ready.bound, backend, stream, segment, decode, rewards.grade, rewards.metrics, give_up
        )
        state = loop(
            parts,
            find(SCHEDULES, config.algo.schedule),
            run,
            config.run,
            evaluate=build_evaluate(config, held_out, backend, parts) if held_out else None,
            evaluate_every=config.evaluation.every,
            observers=watching,
            say=say,
        )
    say(f"run directory: {run_dir}")
    return Trained(run_dir, state)


def read_prompts(config: Config, model: str, say: Say) -> tuple[Any, PromptStream, dict[str, list[Prompt]]]:
    """The tokenizer, the training prompts and those of each benchmark; raises where the model has no room for them."""
    records = train_records(config, say)
    benchmarks = evaluation_records(config) if config.evaluation.every else {}
    tokenizer = load_tokenizer(model)
    stream, held_out = prompt_stream(config, records, tokenizer, say), evaluation_prompts(config, benchmarks, tokenizer)
    check_room(config, model, held_out, stream)
    return tokenizer, stream, held_out


def trackers_where_it_goes_on(config: Config, run_dir: Path, state: State | None, say: Say) -> list[Observer]:
    """The run's trackers, opened after what is kept of it; says so of a run that goes on."""
    kept, recorded = -1 if state is None else state.iteration, last_recorded(run_dir)
    if recorded >= 0:
        say(f"{run_dir} goes on {'from the start: no checkpoint yet' if kept < 0 else f'after iteration {kept}'}")
    return open_trackers(config.run.trackers, run_dir, config.model_dump(mode="json"), kept=kept, recorded=recorded)


def resolve(
    config: Config | str | Path | None,
    run_dir: Path,
    *,
    resume: bool,
    overrides: Mapping[str, Any] | None = None,
    say: Say,
) -> Config:
    """The config of a run: a preset's, or the run's own where it goes on; a run directory as model.path stands for its
    newest checkpoint, written out so that a resumed run starts from the same one.
    """
    begun = run_dir / "config.json"
    if config is None:
        if not resume:
            raise ConfigError("give a preset, or --resume for a run that was begun; `attnrl presets` lists them")
        if not begun.is_file():
            raise MissingFileError(f"--run-dir {run_dir} holds no run to go on with; give a preset to begin one")
        config = begun
    config = load_config(config, overrides)
    before = json.loads(begun.read_text("utf-8"))["model"]["path"] if resume and begun.is_file() else ""
    path = pin_model(config.model.path, say, before)
    if path == config.model.path:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def make_ready(config: Config) -> Ready:
    """What a config names; raises where something is not there, does not fit, or is set and taken by nothing."""
    bound, rewards, _ = check_named(config)
    check_trackers(config.run.trackers)
    return Ready(bound, find_engine(config), rewards, check_model(config.model.path, config))


def check_named(config: Config) -> tuple[dict[str, partial[Any]], Rewards, set[str]]:
    """The parts of [algo], the rewards, and the dotted keys that these and the loss take; raises as `make_ready` does.
    No engine, tracker or model is looked for: another machine may have them.
    """
    from attnrl.policy.objective import objective  # torch: not before it is needed

    bound, loss, rewards = check_parts(config), objective(config.update).loss, open_rewards(config)
    check_evaluation(config)
    taken = {*taken_by(config, bound), *(f"update.{key}" for key in loss.keywords), *rewards.takes}
    check_taken(config, taken)
    return bound, rewards, taken


def check_evaluation(config: Config) -> None:
    """Raise where [evaluation] asks for what its samples cannot give, or the best is chosen by what is not measured."""
    from attnrl.evaluation import check_samples

    if config.evaluation.every:
        check_samples(evaluation_samples(config), config.evaluation.ks)
    elif (config.run.keep_best or "").startswith("eval/"):
        raise ConfigError(f"run.keep_best = {config.run.keep_best!r}, but nothing is evaluated; set evaluation.every")


def finished_note(state: State, config: Config) -> str:
    """How a run ended and what continues it; empty where it has not ended."""
    limits = config.run
    if not finished(state, limits):
        return ""
    by_tokens = state.iteration < limits.iterations
    key, value = ("generated_tokens", state.generated_tokens) if by_tokens else ("iterations", state.iteration)
    return (
        f"is finished: {counted(state.iteration, 'iteration')}, {state.generated_tokens:,} tokens generated.\n"
        f"To train on, give the same command with --run.{key} above {value}."
    )
