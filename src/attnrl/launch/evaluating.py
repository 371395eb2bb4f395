"""Evaluation from Python: `attnrl.evaluate`; and the evaluation during training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnrl.config import Config, check_taken, check_used, load_config
from attnrl.launch.data import check_room, evaluation_prompts, evaluation_records, evaluation_samples
from attnrl.launch.models import (
    check_engine,
    check_model,
    decoder,
    find_engine,
    load_tokenizer,
    open_engine,
    open_rewards,
    pin_model,
    reward_keys,
    run_of,
)
from attnrl.progress import unwatched
from attnrl.run import check_no_run
from attnrl.types import Sampling

if TYPE_CHECKING:
    from attnrl.backend import Backend
    from attnrl.evaluation import Report
    from attnrl.iteration import Parts
    from attnrl.trainer import Evaluate
    from attnrl.types import Prompt

DRAWN = {  # what draws responses to benchmarks
    "model.dtype",
    "engine",
    *(f"data.{key}" for key in ("template", "system", "chat_options", "columns", "directory", "tasks")),
    *(f"evaluation.{key}" for key in ("benchmarks", "tasks", "samples", "temperature", "top_p")),
    *(f"evaluation.{key}" for key in ("max_response_tokens", "max_prompt_tokens")),
}


def evaluate(
    model: str | Path,
    *,
    config: Config | None = None,
    overrides: Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    seed: int = 0,
    chunk: int = 512,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """pass@1 and pass@k of a model with intervals; without a `config`, by the settings it was trained with, or the
    paper's, with dotted `overrides` on top.

    `model` is a directory, a hub name, "demo", or a run directory: its newest checkpoint, which is said and recorded.
    With `output` the responses are kept there as they come, and the same call goes on after an interruption.
    """
    from attnrl.evaluation import check_samples
    from attnrl.evaluation import evaluate as measure

    model = str(model)
    config = evaluation_settings(model, overrides)[1] if config is None else load_config(config, overrides)
    if output is not None:
        check_no_run(Path(output))
    model = pin_model(model, say, begun_with(output))
    engine, rewards, path = find_engine(config), open_rewards(config), check_model(model, config)
    check_taken(config, rewards.takes)
    check_samples(evaluation_samples(config), config.evaluation.ks)
    check_engine(engine, config, path, learn=False)
    records = evaluation_records(config)
    tokenizer = load_tokenizer(path)
    prompts = evaluation_prompts(config, records, tokenizer)
    check_room(config, path, prompts)
    say(what_is_drawn(config, prompts))
    with rewards, open_engine(engine, config, path, tokenizer, learn=False, verbs=("generate",)) as sampler:
        return measure(
            sampler,
            prompts,
            decode=decoder(tokenizer),
            grade=rewards.grade,
            **asked_for(config),
            seed=seed,
            out_dir=Path(output) if output is not None else None,
            settings={
                "model": "demo" if model == "demo" else path,
                "dtype": config.model.dtype,
                "reward": [r.model_dump() for r in config.reward],
                "grade_truncated": config.algo.grade_truncated,
            },
            chunk=chunk,
        )


def what_is_drawn(config: Config, prompts: Mapping[str, Sequence[Prompt]]) -> str:
    """One line: problems, responses, how long they may be, and how they are drawn."""
    samples, wanted = evaluation_samples(config), config.evaluation
    benchmarks = ", ".join(f"{name} {len(rows):,} problems x {samples[name]}" for name, rows in prompts.items())
    how = f"temperature {wanted.temperature:g}, top-p {wanted.top_p:g}"
    return f"{benchmarks}; responses of up to {wanted.max_response_tokens:,} tokens, {how}"


def begun_with(output: str | Path | None) -> str:
    """The model of the work that was begun in an output directory; empty where there is none."""
    file = Path(output or "") / "settings.json"
    begun: str = json.loads(file.read_text("utf-8")).get("model", "") if output and file.is_file() else ""
    return begun


def asked_for(config: Config) -> dict[str, Any]:
    """What [evaluation] asks of every benchmark."""
    wanted = config.evaluation
    sampling = Sampling(wanted.temperature, wanted.top_p)
    limits = {"max_tokens": wanted.max_response_tokens, "ks": wanted.ks}
    return {"samples": evaluation_samples(config), "sampling": sampling, **limits}


def evaluation_settings(model: str, overrides: Mapping[str, Any] | None = None) -> tuple[str, Config]:
    """`settings_of`; raises where an override is a key that an evaluation does not take."""
    where, config = settings_of(model, overrides)
    check_used(config, "an evaluation", DRAWN | reward_keys(config) | {"evaluation.ks"})
    return where, config


def settings_of(model: str, overrides: Mapping[str, Any] | None = None) -> tuple[str, Config]:
    """Where it is written how a model is evaluated, empty for the defaults; and that config with overrides on top.

    "demo" takes the preset of that name; a run directory, or a checkpoint in it (its best too), its run's config; a
    model of `attnrl warmup` its tasks; any other model the paper's settings.
    """
    if model == "demo":
        return "preset demo", load_config("demo", overrides)
    if (run := run_of(model)) is not None and (file := run / "config.json").is_file():
        return str(file), load_config(str(file), overrides)
    file = Path(model) / "warmup.json"
    made = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    if "task" in made:  # not warmed up on rows of one's own
        tasks = {f"data.tasks.{key}": value for key, value in made["task"].items()}
        known = {
            "data.template": "{problem}",
            "evaluation.benchmarks": ["tasks"],
            "evaluation.temperature": made["options"]["temperature"],
            "evaluation.top_p": 1.0,
            "evaluation.max_response_tokens": 1024,
        }
        return str(file), load_config("", overrides, known={**tasks, **known})
    return "", load_config("", overrides)


def build_evaluate(config: Config, prompts: Mapping[str, Sequence[Prompt]], backend: Backend, parts: Parts) -> Evaluate:
    """The held-out evaluation of a run: metrics `eval/<benchmark>/...`; the same seeds each time."""
    from attnrl.evaluation import evaluate as measure

    asked = asked_for(config)

    def after(iteration: int) -> dict[str, float]:
        with unwatched():  # it has a bar of its own
            report = measure(backend, prompts, decode=parts.decode, grade=parts.grade, **asked)
        backend.metrics()  # what the evaluation cost is not the next iteration's
        parts.graded()
        return report.metrics()

    return after
