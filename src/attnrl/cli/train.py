"""attnrl train PRESET --run-dir DIR [--resume] [--section.key VALUE ...]

Trains a policy and writes a run directory: resolved config, metrics.jsonl,
forests in parquet, checkpoints in Hugging Face format.

PRESET       a name from `attnrl presets`, or the path of a TOML file
--run-dir    the run directory; it must be new, or --resume given
--resume     go on from the newest checkpoint of a run that was stopped or
             killed, exactly as if it had not been; a finished run is left
             alone, a new one started
--iterations N, --seed N      short for --run.iterations and --run.seed
--section.key VALUE           any key of the config: `attnrl config --help`

Examples:
  attnrl train demo --run-dir runs/a
  attnrl train demo --run-dir runs/a --resume --iterations 40
  attnrl train attnrl_1p5b --run-dir runs/b --data.train '["train.parquet"]' \\
    --algo.points 3 --run.trackers '["tensorboard"]'
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attnrl.cli.assemble import (
    build_evaluate,
    build_grade,
    build_parts,
    check_parts,
    decoder,
    evaluation_records,
    model_path,
    train_records,
)
from attnrl.cli.console import console_line
from attnrl.cli.flags import parse, show, wants_help
from attnrl.config import Config, load_config
from attnrl.errors import ConfigError
from attnrl.run import check_run, last_recorded, open_run
from attnrl.trackers import Observer, check_trackers, open_trackers
from attnrl.types import State

SHORT = {"iterations": "run.iterations", "seed": "run.seed"}


def main(argv: list[str]) -> int:
    if wants_help(argv):
        show(str(__doc__))
        return 0
    words, flags = parse(argv, plain=["run-dir"], switches=["resume"])
    if len(words) != 1:
        raise ConfigError("give one preset: attnrl train PRESET --run-dir D; `attnrl presets` lists them")
    if "run-dir" not in flags:
        raise ConfigError("say where the run is written: --run-dir DIRECTORY")
    run_dir, resume = Path(flags.pop("run-dir")), flags.pop("resume", False)
    config = load_config(words[0], {SHORT.get(name, name): value for name, value in flags.items()})
    run_training(config, run_dir, resume=resume)
    return 0


def run_training(config: Config, run_dir: Path, *, resume: bool) -> None:
    """Train as the config says. What can be wrong with config, data and directory is found before a model loads."""
    from attnrl.local.models import check_model_path

    check_parts(config)
    check_trackers(config.run.trackers)
    check_model_path(model_path(config.model.path))
    values = config.model_dump(mode="json")
    state = check_run(run_dir, values, resume=resume)
    if state is not None and (done := finished_note(state, config)):
        show(f"{run_dir} {done}")
        return
    records = train_records(config)
    held_out = evaluation_records(config) if config.evaluation.every else {}
    if config.sampling.top_p < 1 or config.sampling.top_k:
        show("note: with sampling.top_p or top_k, sampler and learner log-probs differ; see policy/behaviour_kl")
    run = open_run(run_dir, values, resume=resume)
    observers = [console_line(config.run.iterations), *_trackers(config, run_dir, state)]

    from attnrl.data.prompts import render_prompts
    from attnrl.data.stream import PromptStream
    from attnrl.data.texts import TokenTexts
    from attnrl.iteration import SCHEDULES
    from attnrl.local.backend import backend_from_config
    from attnrl.trainer import train
    from attnrl.verify import Verifier

    backend = backend_from_config(config, model=model_path(config.model.path))
    tokenizer = backend.tokenizer
    prompts, dropped = render_prompts(
        records, tokenizer, template=config.data.template, max_prompt_tokens=config.data.max_prompt_tokens
    )
    show(f"{len(prompts)} prompts" + (f"; left out: {dropped.report()}" if dropped.report() else ""))
    decode = decoder(tokenizer)
    with Verifier(**_verifier_options(config)) as verifier:
        parts = build_parts(
            config,
            backend=backend,
            stream=PromptStream(prompts, config.run.seed),
            texts=TokenTexts(tokenizer),
            grade=build_grade(verifier, decode),
        )
        train(
            parts,
            SCHEDULES[config.algo.schedule],
            run,
            iterations=config.run.iterations,
            seed=config.run.seed,
            decode=decode,
            evaluate=build_evaluate(config, held_out, backend, verifier) if held_out else None,
            evaluate_every=config.evaluation.every,
            generated_tokens=config.run.generated_tokens,
            checkpoint_every=config.run.checkpoint_every,
            keep_checkpoints=config.run.keep_checkpoints,
            save_rollouts_every=config.run.save_rollouts_every,
            observers=observers,
        )
    show(f"run directory: {run_dir}")


def finished_note(state: State, config: Config) -> str:
    """How a run ended and what continues it; empty where it has not ended."""
    from attnrl.trainer import finished

    limits = config.run
    if not finished(state, limits.iterations, limits.generated_tokens):
        return ""
    by_tokens = state.iteration < limits.iterations
    key, value = ("generated_tokens", state.generated_tokens) if by_tokens else ("iterations", state.iteration)
    return (
        f"is finished: {state.iteration} iterations, {state.generated_tokens:,} tokens generated.\n"
        f"To train on, give the same command with --run.{key} above {value}."
    )


def _trackers(config: Config, run_dir: Path, state: State | None) -> list[Observer]:
    """The trackers of a run that goes on from a state, and a word about where it goes on."""
    kept, recorded = -1 if state is None else state.iteration, last_recorded(run_dir)
    if recorded >= 0:
        show(f"{run_dir} goes on " + ("from the start: no checkpoint yet" if kept < 0 else f"after iteration {kept}"))
    values = config.model_dump(mode="json")
    return open_trackers(config.run.trackers, run_dir, values, kept=kept, recorded=recorded)


def _verifier_options(config: Config) -> dict[str, Any]:
    options = config.verify
    return {"workers": options.workers, "timeout": options.timeout_s, "memory_mb": options.memory_mb}
