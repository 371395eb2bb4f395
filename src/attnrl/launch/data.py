"""From the [data] and [evaluation] sections of a config to prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnrl.config import Config
from attnrl.errors import ConfigError, DataError, MissingFileError
from attnrl.types import counted

if TYPE_CHECKING:
    from attnrl.data.records import Record
    from attnrl.data.stream import PromptStream
    from attnrl.types import Prompt

Say = Callable[[str], None]


def train_records(config: Config, say: Say) -> list[Record]:
    """The training problems of a config: files, hub names and made-up tasks; without benchmark problems where
    `data.decontaminate` names benchmarks, without leaked, conflicting and repeated ones with `data.clean`.
    """
    from attnrl.data.audit import clean, decontaminate
    from attnrl.data.records import LARGEST, load_records
    from attnrl.data.tasks import as_records

    data = config.data
    if not data.train:
        raise ConfigError("data.train names no data set; give files, hub names or tasks")
    records: list[Record] = []
    for source in data.train:
        if source == "tasks":
            records += as_records(data.tasks, "train", data.train_tasks)
            continue
        found = load_records(source, strict=not data.drop_bad_rows, columns=data.columns)
        if not found.records:
            raise DataError(f"{source}: no row can be trained on; {found.report()}")
        if found.skipped:
            say(found.report())
        if found.unseen:
            say(
                f"{source}: rewards do not see {', '.join(found.unseen)} in every row: more than {LARGEST:,} "
                "characters, or no JSON"
            )
        records += found.records
    if data.decontaminate:
        benchmarks = [_known_benchmark(config, name, "data.decontaminate") for name in data.decontaminate]
        without = decontaminate(records, [record for rows in benchmarks for record in rows])
        say(without.report())
        records = list(without.records)
    if data.clean:
        cleaned = clean(records)
        say(cleaned.report())
        records = list(cleaned.records)
    return records


def wording(config: Config) -> dict[str, Any]:
    """What [data] says of the words around a problem."""
    return config.data.model_dump(include={"template", "system", "chat_options"})


def prompt_stream(config: Config, records: Sequence[Record], tokenizer: Any, say: Say) -> PromptStream:
    """The endless stream of training prompts; says how many there are and what was left out."""
    from attnrl.data.prompts import render_prompts, strange_to, unknown_words
    from attnrl.data.stream import PromptStream

    longest = config.data.max_prompt_tokens
    prompts, dropped = render_prompts(records, tokenizer, max_prompt_tokens=longest, **wording(config))
    say(counted(len(prompts), "prompt") + (f"; left out: {dropped.report()}" if dropped.report() else ""))
    if len(prompts) < config.algo.prompts:
        say(f"fewer than a batch takes (algo.prompts = {config.algo.prompts}): a batch has some of them several times")
    if said := unknown_words(prompts, tokenizer):
        if len(strange_to(tokenizer, prompts)) == len(prompts):
            raise ConfigError(f"data.train: {said}")
        say(said)
    return PromptStream(prompts, config.run.seed)


def evaluation_records(config: Config) -> dict[str, list[Record]]:
    """The held-out problems of a config, by benchmark: known ones, made-up tasks, reasoning-gym's, or files."""
    records: dict[str, list[Record]] = {}
    for name in config.evaluation.benchmarks:
        if (label := benchmark_label(name)) in records:
            raise ConfigError(f"evaluation.benchmarks: {label} occurs twice")
        records[label] = _benchmark(config, name)
    return records


def benchmark_label(name: str) -> str:
    """The name of a benchmark in tables: a file's without directory and suffix.

    >>> benchmark_label("data/test.jsonl.gz"), benchmark_label("aime24")
    ('test', 'aime24')
    """
    from attnrl.data.benchmarks import BENCHMARKS

    return name if name in BENCHMARKS or name.startswith("gym:") else Path(name).name.split(".")[0]


WITHOUT = {  # what to do where a benchmark that a key asks for cannot be had
    "data.decontaminate": "or train without looking for its problems in the data: --data.decontaminate none",
    "evaluation.benchmarks": "or name a file of your own in its place; training with --evaluation.every 0 needs none",
}


def _known_benchmark(config: Config, name: str, key: str) -> list[Record]:
    """A benchmark of ours; where it cannot be had, the error names the key that asks for it."""
    from attnrl.data.benchmarks import load_benchmark

    try:
        return load_benchmark(name, config.data.directory)
    except MissingFileError as error:
        raise MissingFileError(f"{key}: {error}; {WITHOUT[key]}") from error


def without_missing(config: Config) -> tuple[Config, list[str]]:
    """The config without the benchmarks that cannot be had, and what is to be said of them."""
    said = []
    try:
        for name in config.data.decontaminate:
            _known_benchmark(config, name, "data.decontaminate")
    except MissingFileError as error:
        said.append(str(error))
        config = config.model_copy(update={"data": config.data.model_copy(update={"decontaminate": ()})})
    try:
        if config.evaluation.every:
            evaluation_records(config)
    except MissingFileError as error:
        said.append(str(error))
        config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"every": 0})})
    return config, said


def _benchmark(config: Config, name: str) -> list[Record]:
    from attnrl.data.benchmarks import BENCHMARKS
    from attnrl.data.gym import gym_records
    from attnrl.data.records import load_records
    from attnrl.data.tasks import as_records

    count, seed = config.evaluation.tasks, config.data.tasks.seed
    if name == "tasks":
        return as_records(config.data.tasks, "test", count)
    if name.startswith("gym:"):
        return gym_records(name.removeprefix("gym:"), "test", count, seed)
    if name in BENCHMARKS:
        return _known_benchmark(config, name, "evaluation.benchmarks")
    if not Path(name).exists():
        known = ", ".join(BENCHMARKS)
        raise MissingFileError(
            f"evaluation.benchmarks: no file {name}, and no benchmark of that name; known are {known}, tasks, gym:NAME"
        )
    return list(load_records(name, strict=True, columns=config.data.columns))


def evaluation_samples(config: Config) -> dict[str, int]:
    """Responses per problem of each benchmark: evaluation.samples, or the benchmark's own number, 4 for others."""
    from attnrl.data.benchmarks import BENCHMARKS

    asked = config.evaluation.samples
    own = {name: BENCHMARKS[name].samples if name in BENCHMARKS else 4 for name in config.evaluation.benchmarks}
    return {benchmark_label(name): asked or count for name, count in own.items()}


def evaluation_prompts(
    config: Config, records: Mapping[str, Sequence[Record]], tokenizer: Any
) -> dict[str, list[Prompt]]:
    """The prompts of each benchmark, all of them: leaving problems out would change the benchmark."""
    from attnrl.data.prompts import render_benchmark

    longest, words = config.evaluation.max_prompt_tokens, wording(config)
    return {
        name: render_benchmark(name, rows, tokenizer, max_prompt_tokens=longest, **words)
        for name, rows in records.items()
    }


def check_room(
    config: Config, model: str, held_out: Mapping[str, Sequence[Prompt]], trained: PromptStream | None = None
) -> None:
    """Raise where a model of ours has no positions for the longest prompt and a response after it: a run would end
    there, after hours perhaps.
    """
    from attnrl.attention.decoder import read_config
    from attnrl.launch.models import ENGINES

    if config.engine.name not in ENGINES:
        return
    most = getattr(read_config(model), "max_position_embeddings", None)
    asked = [
        (f"prompts of {name}", max(len(p.ids) for p in prompts), "evaluation", config.evaluation.max_response_tokens)
        for name, prompts in held_out.items()
    ]
    if trained is not None:
        asked.append(("training prompts", trained.longest, "sampling", config.sampling.max_response_tokens))
    for what, longest, section, tokens in asked:
        if most is not None and longest + tokens > most:
            shorter = " (attnrl eval: --max-tokens)" if section == "evaluation" else " or data.max_prompt_tokens"
            raise ConfigError(
                f"{section}.max_response_tokens = {tokens} after {what} of up to {longest} tokens is more than "
                f"the model's {most} positions (max_position_embeddings): lower it to {max(1, most - longest)}{shorter}"
            )
