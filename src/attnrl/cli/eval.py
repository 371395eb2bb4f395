"""attnrl eval --model MODEL --output DIR [--benchmarks NAME,NAME]

pass@1 and pass@k on benchmarks, from a model or from stored responses, with
95 % intervals; and the paired difference of two evaluations.

With --model: draw, grade, report. The output directory gets responses.jsonl (as
they come), problems.parquet, results.json and results.md. The same command
goes on after an interruption.

A model that attnrl trained is evaluated as its run was: "demo", a run directory
(its newest checkpoint) or a checkpoint in it take benchmarks, task settings and
sampling from the run's config, and a model of `attnrl warmup` takes its tasks.
Flags overrule it. Any other model gets the paper's settings, shown below.

Examples:
  attnrl eval --model demo --output results/demo
  attnrl eval --model runs/demo/demo --output results/trained
  attnrl eval --compare results/demo,results/trained
  attnrl eval --model M --benchmarks aime24,math500 --output results/m
  attnrl eval --responses responses.jsonl --k 1,8
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field
from rich import box
from rich.console import Console
from rich.table import Table

from attnrl.checkpoint import write_json, write_whole
from attnrl.cli.flags import read_flags, show
from attnrl.config import Section, check_taken, check_used, load_config
from attnrl.errors import ConfigError, MissingFileError
from attnrl.run import check_no_run

if TYPE_CHECKING:
    from attnrl.evaluation import Report

DRAWN = {  # what a command takes that draws responses to benchmarks
    "benchmarks": "evaluation.benchmarks",
    "samples": "evaluation.samples",
    "temperature": "evaluation.temperature",
    "top_p": "evaluation.top_p",
    "max_tokens": "evaluation.max_response_tokens",
    "task_count": "evaluation.tasks",
    "template": "data.template",
    "data_dir": "data.directory",
    "rows": "engine.local.rows",
    "device": "engine.local.device",
    "dtype": "model.dtype",
}
SHORT = DRAWN | {
    "k": "evaluation.ks",
    "max_prompt_tokens": "evaluation.max_prompt_tokens",
    "grade_truncated": "algo.grade_truncated",
}


class EvalFlags(Section):
    """The flags of `attnrl eval`."""

    model: str | None = None
    """Directory or hub name of a Hugging Face model, a run directory, or "demo" (comes with attnrl)."""
    responses: Path | None = None
    """File of stored responses (jsonl, json, parquet) with response and gold, or benchmark and row."""
    compare: tuple[Path, Path] | None = None
    """Two output directories A,B; prints B - A per benchmark, paired by problem."""
    output: Path | None = None
    """Output directory; needed with --model."""
    seed: int = Field(0, ge=0)
    """Seed of sampling and of the bootstrap."""
    chunk: int = Field(512, ge=1)
    """Responses drawn between two writes to the output directory."""


def main(argv: list[str]) -> None:
    flags, overrides = read_flags(EvalFlags, argv, str(__doc__), short=SHORT)
    chosen = [name for name in ("model", "responses", "compare") if getattr(flags, name) is not None]
    if len(chosen) != 1:
        raise ConfigError(
            f"give exactly one of --model, --responses and --compare, not {' and '.join(chosen) or 'none'}"
        )
    if flags.model is None and "chunk" in flags.model_fields_set:
        raise ConfigError("--chunk is set, but without --model nothing takes it")
    if flags.output is not None:
        check_no_run(flags.output)
    run = {"model": evaluate_model, "responses": evaluate_stored, "compare": compare_two}[chosen[0]]
    run(flags, overrides)


def evaluate_model(flags: EvalFlags, overrides: Mapping[str, Any]) -> None:
    """Draw, grade and report. Everything that can be wrong with the flags is found before the model loads."""
    from attnrl.launch import evaluate
    from attnrl.launch.evaluating import evaluation_settings

    assert flags.model is not None
    if flags.output is None:
        raise ConfigError(
            "--output DIR is needed with --model: responses are kept there, so that a killed run continues"
        )
    where, config = evaluation_settings(flags.model, overrides)
    if where:
        show(f"settings from {where} where no flag says otherwise")
    report = evaluate(flags.model, config=config, output=flags.output, seed=flags.seed, chunk=flags.chunk, say=show)
    show_report(report, flags.output)


def evaluate_stored(flags: EvalFlags, overrides: Mapping[str, Any]) -> None:
    """Grade stored responses and report."""
    from attnrl.data.benchmarks import load_benchmark
    from attnrl.evaluation import Report, grade_stored
    from attnrl.launch.models import open_rewards, reward_keys

    assert flags.responses is not None
    if not flags.responses.is_file():
        raise MissingFileError(f"--responses {flags.responses}: no such file")
    config = load_config("", overrides)
    check_used(config, "grading stored responses", reward_keys(config) | {"evaluation.ks", "data.directory"})
    with open_rewards(config) as rewards:
        check_taken(config, rewards.takes)
        responses = grade_stored(
            flags.responses, rewards.grade, lambda name: load_benchmark(name, config.data.directory)
        )
    report = Report(responses, ks=config.evaluation.ks, settings={"responses": str(flags.responses)}, seed=flags.seed)
    if flags.output is not None:
        report.save(flags.output)
    show_report(report, flags.output)


def compare_two(flags: EvalFlags, overrides: Mapping[str, Any]) -> None:
    """Print the paired differences, and write them as JSON and Markdown where --output says."""
    from attnrl.evaluation.compare import compare, comparison_rows
    from attnrl.evaluation.results import markdown

    assert flags.compare is not None
    check_used(load_config("", overrides), "a comparison", frozenset())
    a, b = flags.compare
    comparisons = compare(a, b, seed=flags.seed)
    show_table(f"A = {a}   B = {b}", comparison_rows(comparisons))
    if flags.output is not None:
        rows = [asdict(c) | {"difference": c.difference} for c in comparisons]
        write_json(flags.output / "comparison.json", {"a": str(a), "b": str(b), "comparisons": rows})
        write_whole(flags.output / "comparison.md", markdown(comparison_rows(comparisons)))


def show_report(report: Report, output: Path | None) -> None:
    from attnrl.evaluation.results import table_rows

    show_table("percent [95 % interval, bootstrap over problems]", table_rows(report))
    if output is not None:
        Console().print(f"results in {output}", highlight=False)


def show_table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """A table on screen, intervals below their numbers where it is narrow; as wide as need be where there is none."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, name in enumerate(rows[0]):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=not name.startswith("pass@"))
    for row in rows[1:]:
        table.add_row(*row, end_section=False)
    console = Console()
    console = console if console.is_terminal else Console(width=200)
    console.print(table)
